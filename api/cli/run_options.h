// SPDX-License-Identifier: Apache-2.0
//
// `ropeteam run [options] -- COMMAND…`: what it was told.

#ifndef ROPETEAM_API_CLI_RUN_OPTIONS_H_
#define ROPETEAM_API_CLI_RUN_OPTIONS_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::cli {

struct RunOptions {
  std::map<std::string, std::string>
      daemon_values;                      // ropeteamd's options with a value, by name without the dashes
  std::vector<std::string> daemon_flags;  // and those without one; names as above
  std::string config;                     // --config: ropeteamd reads it; launchers' defaults stay out
  std::string daemon;                     // --daemon PATH
  std::string start_etcd;                 // --start-etcd: its hosts, or "auto"
  std::string python_path;                // --python-path DIR, prepended to PYTHONPATH
  uint32_t ready_timeout_s = 600;         // pre-faulting a terabyte takes minutes
  uint32_t watchdog_s = 30;               // far above what a busy daemon keeps a rank waiting; 0: none
  bool required = false;                  // no COMMAND without a daemon that is a member of the job
  bool remove_arena_at_exit = false;
  bool quiet = false;
  bool help = false;
  std::vector<std::string> command;
};

// kInvalidArgument: an unknown option, one without its value, no command.
Result<RunOptions> ParseRunOptions(const std::vector<std::string>& arguments);

extern const char kRunHelp[];

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_RUN_OPTIONS_H_
