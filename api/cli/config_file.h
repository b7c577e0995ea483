// SPDX-License-Identifier: Apache-2.0
//
// The little that `ropeteam run` has to know of a file which is ropeteamd's to read and to judge.

#ifndef ROPETEAM_API_CLI_CONFIG_FILE_H_
#define ROPETEAM_API_CLI_CONFIG_FILE_H_

#include <istream>
#include <map>
#include <string>

namespace ropeteam::cli {

// The `name = value` lines, comments and quotes taken off; the last of a name counts. What is not of this
// form is passed over: ropeteamd refuses it, in words.
std::map<std::string, std::string> ReadConfigLines(std::istream& file);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_CONFIG_FILE_H_
