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

// Connects, non-blocking. kInvalidArgument: path empty, over the limit, no socket or one of another kind.
// kUnavailable: nobody listens there, or does not accept until the deadline. kIo: the operating system
// refused (permissions, limits).
Result<UniqueFd> ConnectUnix(const std::string& path, Deadline deadline);

// Sends what is there to send. Returns the bytes the socket took, 0 when it would block. kUnavailable: the
// peer is gone. A descriptor that is not negative goes along with the first byte; it stays the caller's.
Result<size_t> SendSome(int fd, const void* data, size_t length, int descriptor = -1);

// Receives at most `length` bytes; 0 when there are none yet. A descriptor that comes along is put into
// `descriptor`; more than one is closed. kUnavailable: the peer has ended the connection.
Result<size_t> ReceiveSome(int fd, void* data, size_t length, UniqueFd* descriptor);

// Waits for `events` (POLLIN, POLLOUT) or the end of the connection. False when the deadline passed first.
bool PollUntil(int fd, short events, Deadline deadline);

// False when the peer has closed its end, though bytes may still be there to be read. One system call, no
// wait.
bool PeerIsThere(int fd);

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_SOCKET_H_
