// SPDX-License-Identifier: Apache-2.0
//
// What `status`, `ls` and `verify` share: their common options, asking the daemon.

#ifndef ROPETEAM_API_CLI_ASK_H_
#define ROPETEAM_API_CLI_ASK_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "api/cli/sockets.h"
#include "api/client/admin_client.h"
#include "api/client/local_protocol.h"
#include "core/base/status.h"

namespace ropeteam::cli {

inline constexpr double kTimeoutSecondsDefault = 10;
inline constexpr double kTimeoutSecondsMax = 86400;

struct AskOptions {
  SocketChoice socket;
  double timeout_s = kTimeoutSecondsDefault;
  bool json = false;
  bool local = false;        // status: this node alone, without the leader
  double watch_s = 0;        // status: repeat; 0: once
  uint64_t watch_count = 0;  // status: stop after so many; 0: never
  std::string coordinator;   // rejoin
  bool force = false;        // rejoin
  bool undo = false;         // quarantine
  std::string name;          // forget
  bool all = false;          // forget
  bool has_step = false;     // ls, verify, trace, quarantine, drop
  Step step = 0;
  std::string output;   // trace
  double notice_s = 0;  // drain; 0: the daemon's own
  bool help = false;
};

enum class Takes { kStep, kWatch, kStepAndOutput, kCoordinator, kStepAndUndo, kStepAlone, kNotice, kName };

// kInvalidArgument: an unknown option, a bad value, a missing argument without --help.
Result<AskOptions> ParseAskOptions(const std::vector<std::string>& arguments, Takes takes);

// One connection, one question; the answer's text.
Result<std::string> Ask(const AskOptions& options, local::AdminCommand command);
// Tells the daemon that its coordinator is at options.coordinator. It looks there; that it is registered is not awaited.
Status AskToRejoin(const AskOptions& options);

// Has options.step quarantined, or not any more. At kOk every node knows.
Status AskToQuarantine(const AskOptions& options);

// A connection to the daemon that the options name.
Result<std::unique_ptr<AdminClient>> Connect(const AskOptions& options, int64_t* timeout_ms);

// Prints an answer as it is (--json) or as `render` has it, and returns the exit code that `judge` has for it. An error,
// of `judge` too, is printed in place of the answer.
int PrintAnswer(const char* name, const AskOptions& options, const Result<std::string>& answer,
                std::string (*render)(const nlohmann::json&), Result<int> (*judge)(const nlohmann::json&));

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_ASK_H_
