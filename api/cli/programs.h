// SPDX-License-Identifier: Apache-2.0
//
// Finds the files that belong to this one: in a build tree, in an installation, and on PATH.

#ifndef ROPETEAM_API_CLI_PROGRAMS_H_
#define ROPETEAM_API_CLI_PROGRAMS_H_

#include <string>

namespace ropeteam::cli {

// Path of a program of ours, from the variable if that is set, else beside this program or in the build tree
// around it, else on PATH. Empty when there is none.
std::string FindProgram(const std::string& name, const std::string& build_directory,
                        const std::string& variable);

// 0 where execvp() would find a program under this name; else what shells end with: 127 when there is none, 126 when
// it cannot be executed.
int CheckCommand(const std::string& name);

// libropeteam.so beside this program or in the build tree around it; empty when there is none.
std::string FindLibrary();

// The directory that holds the Python package of the installation this program is in (cmake/install.cmake);
// empty in a build tree.
std::string FindPythonPackage();

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_PROGRAMS_H_
