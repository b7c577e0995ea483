// SPDX-License-Identifier: Apache-2.0
//
// What the command line writes: tables whose columns fit what is in them, help, errors.

#ifndef ROPETEAM_API_CLI_TEXT_H_
#define ROPETEAM_API_CLI_TEXT_H_

#include <set>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::cli {

class Table {
 public:
  // Columns whose header begins with '<' are set to the left, all others to the right.
  explicit Table(std::vector<std::string> headers);
  void Add(std::vector<std::string> row);  // as many cells as headers
  std::string Render() const;              // lines ending in a newline; headers too when there is no row

 private:
  std::vector<bool> left_;
  std::vector<std::vector<std::string>> rows_;
};

// The names of options that take a value. A second value is refused, since one of the two would be lost.
class GivenOnce {
 public:
  Status Add(const std::string& option);  // "--job"

 private:
  std::set<std::string> given_;
};

// Prints the error of the arguments or, if `wants_help`, the help; true when that was all. Sets the exit code.
bool DoneWithOptions(const char* command, const Status& parsed, bool wants_help, const std::string& help,
                     int* code);
template <typename Options>
bool DoneWithOptions(const char* command, const Result<Options>& options, const std::string& help,
                     int* code) {
  return DoneWithOptions(command, options.status(), options.ok() && options->help, help, code);
}
// Prints "ropeteam COMMAND: …" in one line, and returns kExitFailed.
int Fail(const char* command, const Status& status);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_TEXT_H_
