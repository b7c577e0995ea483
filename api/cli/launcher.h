// SPDX-License-Identifier: Apache-2.0
//
// What `ropeteam run` knows about the job without being told: launchers say it in the environment. One line
// then fits all: a laptop, SkyPilot, Slurm, torchrun, and whoever sets MASTER_ADDR. docs/operations.md has
// the table.
//
// Precedence, for each setting alone: flag, ROPETEAM_* variable, SkyPilot, Slurm, what torchrun sets, what
// torchrun reads (PET_*, as Kubeflow sets them), other launchers, a single node's default.

#ifndef ROPETEAM_API_CLI_LAUNCHER_H_
#define ROPETEAM_API_CLI_LAUNCHER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::cli {

// Where the embedded coordinator listens when only its host is known; next to torchrun's 29400 and 29500.
inline constexpr uint16_t kCoordinatorPortDefault = 29600;

// Null for a variable that is not set; empty ones are taken as not set.
using Environment = std::function<const char*(const std::string& name)>;

// This machine's address on the way to `host`, numeric; empty when the name or the route is not known.
using LocalAddressFor = std::function<std::string(const std::string& host)>;
std::string FindLocalAddressFor(const std::string& host);

struct Setting {
  std::string value;
  std::string from;  // "--job", "SLURM_JOB_ID", "default"
};

// By ropeteamd's option names without the dashes: "job", "node", "ordinal", "nodes", "coordinator", "listen",
// and those of its other options for which there is a flag or a ROPETEAM_* variable.
using Settings = std::map<std::string, Setting>;

// `flags`: options of ropeteamd that were given, by name without the dashes. kInvalidArgument: a launcher's
// variable says something that makes no sense; it is named.
Result<Settings> ChooseSettings(const std::map<std::string, std::string>& flags,
                                const Environment& environment, const LocalAddressFor& local_address_for);

// The name of a job of one node that nobody has named: the program that COMMAND runs, and a sum over that program, its
// arguments and the directory. So another command line is another job, and the same one goes on. What comes before a
// script (torchrun and its options) does not count. "sweep-1a2b3c4d".
std::string JobOf(const std::vector<std::string>& command, const std::string& directory);

// The first host of Slurm's list: "gpu[003-010,12],x7" gives "gpu003". Empty for an empty or malformed list.
std::string FirstSlurmHost(const std::string& list);

// ropeteamd's options that take a value and have a variable: "--chunk-size" is ROPETEAM_CHUNK_SIZE.
const std::vector<std::string>& ValueOptions();
std::string VariableOf(const std::string& option);

// And those without a value: their variable says 1 or true, 0 or false.
const std::vector<std::string>& FlagOptions();

// `given` (names without the dashes) and what variables add; of two flags that exclude each other the variable
// of neither counts when one was given. kInvalidArgument: a variable says something else; it is named.
Result<std::vector<std::string>> ChooseFlags(const std::vector<std::string>& given,
                                             const Environment& environment);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_LAUNCHER_H_
