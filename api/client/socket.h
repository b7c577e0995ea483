// SPDX-License-Identifier: Apache-2.0
//
// Unix stream sockets, with a deadline on all that can wait. No call raises SIGPIPE; all descriptors are
// close-on-exec.

#ifndef ROPETEAM_API_CLIENT_SOCKET_H_
#define ROPETEAM_API_CLIENT_SOCKET_H_

#include <cstddef>
#include <string>

#include "api/client/deadline.h"
#include "api/client/unique_fd.h"
#include "core/base/status.h"

namespace ropeteam::client {

// Bytes of a socket's path; sockaddr_un holds one more, the terminator.
inline constexpr size_t kSocketPathBytesMax = 107;

// Connects, non-blocking. kInvalidArgument: the path is empty, too long, or not a stream socket, or another user's
// process serves it (root's may). kUnavailable: no process listens there, or none accepts before the deadline. kIo: the
// operating system refused (permissions, limits).
Result<UniqueFd> ConnectUnix(const std::string& path, Deadline deadline);

// Sends as much as possible. Returns the bytes that the socket took; 0 if it would block. kUnavailable: the peer is
// gone. A non-negative descriptor is sent with the first byte; the caller keeps it.
Result<size_t> SendSome(int fd, const void* data, size_t length, int descriptor = -1);

// Receives at most `length` bytes; 0 if there are none yet. A received descriptor is put into `descriptor`; further
// ones are closed. kUnavailable: the peer has ended the connection.
Result<size_t> ReceiveSome(int fd, void* data, size_t length, UniqueFd* descriptor);

// Waits for `events` (POLLIN, POLLOUT) or the end of the connection. Returns false if the deadline passed first.
bool PollUntil(int fd, short events, Deadline deadline);

// False if the peer has closed its end, even if bytes are left to read. One system call, no wait.
bool PeerIsThere(int fd);

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_SOCKET_H_
