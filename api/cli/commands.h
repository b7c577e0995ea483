// SPDX-License-Identifier: Apache-2.0
//
// The subcommands of `ropeteam`. Each takes its arguments without the program's and its own name and returns
// the exit code: 0 done; 1 it could not be done, or `verify` found something bad; 2 a wrong argument.

#ifndef ROPETEAM_API_CLI_COMMANDS_H_
#define ROPETEAM_API_CLI_COMMANDS_H_

#include <string>
#include <vector>

namespace ropeteam::cli {

inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;

int RunCommand(const std::vector<std::string>& arguments);         // run
int StatusCommand(const std::vector<std::string>& arguments);      // status
int ListCommand(const std::vector<std::string>& arguments);        // ls
int VerifyCommand(const std::vector<std::string>& arguments);      // verify
int TraceCommand(const std::vector<std::string>& arguments);       // trace
int RejoinCommand(const std::vector<std::string>& arguments);      // rejoin
int QuarantineCommand(const std::vector<std::string>& arguments);  // quarantine
int DropCommand(const std::vector<std::string>& arguments);        // drop
int ForgetCommand(const std::vector<std::string>& arguments);      // forget
int DrainCommand(const std::vector<std::string>& arguments);       // drain; 5 and 6: node/drain.h
int CleanCommand(const std::vector<std::string>& arguments);       // clean
int DevicesCommand(const std::vector<std::string>& arguments);     // devices
int PlanCommand(const std::vector<std::string>& arguments);        // plan
int BenchCommand(const std::vector<std::string>& arguments);       // bench: becomes ropeteam-bench

// On storage; the last two also with a daemon.
int StorageListCommand(const std::vector<std::string>& arguments);    // ls --storage
int StorageVerifyCommand(const std::vector<std::string>& arguments);  // verify URL
int StoragePruneCommand(const std::vector<std::string>& arguments);   // prune
int StorageExportCommand(const std::vector<std::string>& arguments);  // export
int StorageImportCommand(const std::vector<std::string>& arguments);  // import

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_COMMANDS_H_
