// SPDX-License-Identifier: Apache-2.0
#include "api/client/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace ropeteam::client {
namespace {

static_assert(kSocketPathBytesMax == sizeof(sockaddr_un::sun_path) - 1);

// There is no event for a full backlog: connect() fails with EAGAIN and must be tried again.
constexpr int kBacklogRetryMs = 5;
// One is expected. If a peer sends more, they are closed instead of leaked or truncated.
constexpr size_t kDescriptorsPerMessageMax = 4;

Status ConnectError(int error, const std::string& path) {
  struct stat info {};
  const bool is_there = ::stat(path.c_str(), &info) == 0;
  if (is_there && !S_ISSOCK(info.st_mode)) {
    return Error(Code::kInvalidArgument, "%s is not a socket", path.c_str());
  }
  switch (error) {
    case ENOENT:
    case ENOTDIR:
    case ECONNREFUSED:
    case ECONNRESET:
      return Error(Code::kUnavailable, "no daemon at the socket %s: %s", path.c_str(), std::strerror(error));
    case EPROTOTYPE:
      return Error(Code::kInvalidArgument, "%s is a socket of another type, not a stream", path.c_str());
    default:
      return ErrnoError(error, "connect to the socket %s", path.c_str());
  }
}

// Another user may have made the socket first, in a directory that both can write. What an impostor sends would be taken
// for restored bytes.
Status CheckServer(int fd, const std::string& path) {
  ucred server{};
  socklen_t length = sizeof(server);
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &server, &length) != 0)
    return ErrnoError(errno, "who serves the socket %s", path.c_str());
  if (server.uid == geteuid() || server.uid == 0) return OkStatus();
  return Error(Code::kInvalidArgument,
               "the socket %s is served by uid %u: this process talks to uid %u or root", path.c_str(),
               server.uid, geteuid());
}

}  // namespace

Result<UniqueFd> ConnectUnix(const std::string& path, Deadline deadline) {
  if (path.empty()) return Error(Code::kInvalidArgument, "the socket's path is empty");
  if (path.size() > kSocketPathBytesMax) {
    return Error(Code::kInvalidArgument, "socket path of %zu bytes, limit %zu: %s", path.size(),
                 kSocketPathBytesMax, path.c_str());
  }
  UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!fd.valid()) return ErrnoError(errno, "create a unix socket");
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  for (;;) {
    if (::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      ROPETEAM_RETURN_IF_ERROR(CheckServer(fd.get(), path));
      return fd;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN) return ConnectError(errno, path);
    if (deadline.Passed()) {
      return Error(Code::kUnavailable, "the daemon at %s accepts no connection: its queue is full",
                   path.c_str());
    }
    ::poll(nullptr, 0, std::min(kBacklogRetryMs, deadline.PollMs()));
  }
}

Result<size_t> SendSome(int fd, const void* data, size_t length, int descriptor) {
  iovec io{const_cast<void*>(data), length};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  if (descriptor >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &descriptor, sizeof(int));
  }
  for (;;) {
    const ssize_t sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) return static_cast<size_t>(sent);
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return size_t{0};
    if (errno == EPIPE || errno == ECONNRESET) return Error(Code::kUnavailable, "the daemon is gone");
    return ErrnoError(errno, "send to the daemon");
  }
}

Result<size_t> ReceiveSome(int fd, void* data, size_t length, UniqueFd* descriptor) {
  alignas(cmsghdr) std::array<char, CMSG_SPACE(kDescriptorsPerMessageMax * sizeof(int))> control;
  iovec io{data, length};
  msghdr message{};
  message.msg_iov = &io;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = 0;
  do {
    got = ::recvmsg(fd, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return size_t{0};
    if (errno == ECONNRESET) return Error(Code::kUnavailable, "the daemon is gone");
    return ErrnoError(errno, "receive from the daemon");
  }
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int received = -1;
      std::memcpy(&received, CMSG_DATA(part) + i * sizeof(int), sizeof(int));
      *descriptor = UniqueFd(received);
    }
  }
  if (got == 0) return Error(Code::kUnavailable, "the daemon has ended the connection");
  return static_cast<size_t>(got);
}

bool PollUntil(int fd, short events, Deadline deadline) {
  for (;;) {
    pollfd entry{fd, events, 0};
    const int ready = ::poll(&entry, 1, deadline.PollMs());
    if (ready > 0) return true;
    if (ready == 0 && deadline.Passed()) return false;
    // EINTR, or a wait longer than poll() can express: poll again. Other errors (ENOMEM) appear at the next
    // call on fd.
    if (ready < 0 && errno != EINTR) return true;
  }
}

bool PeerIsThere(int fd) {
  pollfd entry{fd, POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) == 0;
}

}  // namespace ropeteam::client
