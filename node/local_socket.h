// SPDX-License-Identifier: Apache-2.0
//
// The unix socket for ranks: its path and its access control. Its mode is 0600. Ropeteam creates its directory with mode
// 0700. Only connections of the daemon's own user are accepted; all other users are refused, root included.

#ifndef ROPETEAM_NODE_LOCAL_SOCKET_H_
#define ROPETEAM_NODE_LOCAL_SOCKET_H_

#include <sys/types.h>

#include <string>

#include "core/base/status.h"
#include "node/unique_fd.h"

namespace ropeteam {

// JOB-NODE.sock in the RuntimeDirectory() (node/user_directory.h). Names that would make
// the path too long are cut and end with a checksum.
std::string DefaultSocketPath(const std::string& job, const std::string& node);

// Listens at `path`, and creates its directory (0700) if it is missing. A stale socket is replaced. kAlreadyExists:
// another process listens there. kInvalidArgument: the path is a file that is not a socket, or another user's, or others
// have access to the default directory. kIo.
Result<UniqueFd> ListenLocal(const std::string& path);

// The next connection, non-blocking; an invalid descriptor if none is waiting. `pid` is 0 if it is in another pid
// namespace. Connections of other users are refused here, logged, and skipped.
Result<UniqueFd> AcceptLocal(int listener, pid_t* pid);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_LOCAL_SOCKET_H_
