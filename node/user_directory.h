// SPDX-License-Identifier: Apache-2.0
//
// The directories of this user on this machine. Another user may have made the one in /tmp first, to put something there
// later, so both are used only if they are this user's alone (mode 0700).
//
//     $XDG_RUNTIME_DIR/ropeteam   sockets and the local job key. Used if the variable names a directory of this user
//     /tmp/ropeteam-UID           the same elsewhere; and what may be large: logs, and the data of --start-etcd
//
// Safe from any thread.

#ifndef ROPETEAM_NODE_USER_DIRECTORY_H_
#define ROPETEAM_NODE_USER_DIRECTORY_H_

#include <string>
#include <vector>

#include "core/base/status.h"

namespace ropeteam {

// What lies at `path`, for error messages: "a directory of uid 1000 (mode 0755)".
std::string DescribePath(const std::string& path);
// kInvalidArgument: it is not a directory of this user alone; the message has its owner and mode.
Status CheckOwnDirectory(const std::string& path);

// For sockets and keys.
std::string RuntimeDirectory();
// Both, whether they are there or not; the runtime directory comes first.
std::vector<std::string> UserDirectories();
// Creates the directory, or checks it as CheckOwnDirectory() does; the message then says what to do. kIo.
Result<std::string> MakeRuntimeDirectory();
// For logs and data: /tmp/ropeteam-UID or, if another user has taken this name, the runtime directory.
Result<std::string> MakeDataDirectory();

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_USER_DIRECTORY_H_
