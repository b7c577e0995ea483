// SPDX-License-Identifier: Apache-2.0
//
// The unix socket that ranks connect to: its path and its access control. Its mode is 0600, in a directory of mode
// 0700 if Ropeteam makes that. Every connection's user must be the daemon's own; all others, root included, are
// refused.

#ifndef ROPETEAM_NODE_LOCAL_SOCKET_H_
#define ROPETEAM_NODE_LOCAL_SOCKET_H_

#include <sys/types.h>

#include <string>

#include "core/base/status.h"
#include "node/unique_fd.h"

namespace ropeteam {

// $XDG_RUNTIME_DIR/ropeteam/JOB-NODE.sock, or /tmp/ropeteam-UID/… without that variable. Names that would
// make the path too long are cut and end in a checksum.
std::string DefaultSocketPath(const std::string& job, const std::string& node);

// The directory of the default sockets, made (0700) where there is none; this user's alone. kInvalidArgument: it is another
// user's, or others may look into it. kIo.
Result<std::string> MakeDefaultDirectory();

// Listens at `path`, making its directory (0700) when there is none. A stale socket there is replaced. kAlreadyExists:
// another process listens there. kInvalidArgument: a file that is not a socket is there, or the default
// directory is not this user's alone. kIo.
Result<UniqueFd> ListenLocal(const std::string& path);

// The next connection, non-blocking; an invalid descriptor when there is none waiting. `pid` is 0 when it is
// of another pid namespace. Connections of other users are refused here, logged, and skipped.
Result<UniqueFd> AcceptLocal(int listener, pid_t* pid);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_LOCAL_SOCKET_H_
