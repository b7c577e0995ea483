// SPDX-License-Identifier: Apache-2.0
#include "node/local_socket.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <cerrno>
#include <cstring>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "node/arena_list.h"
#include "node/user_directory.h"

namespace ropeteam {
namespace {

constexpr size_t kPathBytesMax = sizeof(sockaddr_un::sun_path) - 1;
constexpr int kBacklog = 256;  // all ranks of a node connect at once

std::string DirectoryOf(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

Status MakeDirectory(const std::string& directory) {
  if (directory == RuntimeDirectory()) return MakeRuntimeDirectory().status();
  if (mkdir(directory.c_str(), 0700) == 0) return OkStatus();
  if (errno == ENOENT) {
    ROPETEAM_RETURN_IF_ERROR(MakeDirectory(DirectoryOf(directory)));
    if (mkdir(directory.c_str(), 0700) == 0) return OkStatus();
  }
  // One that is there is the user's choice; the socket itself is 0600.
  return errno == EEXIST ? OkStatus() : ErrnoError(errno, "make directory %s", directory.c_str());
}

// Removes a socket that no one listens on.
Status RemoveStale(const std::string& path, const sockaddr_un& address) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0)
    return errno == ENOENT ? OkStatus() : ErrnoError(errno, "stat %s", path.c_str());
  if (!S_ISSOCK(info.st_mode))
    return Error(Code::kInvalidArgument, "socket %s is %s, not a socket: remove it, or give another --socket",
                 path.c_str(), DescribePath(path).c_str());
  if (info.st_uid != geteuid())
    return Error(
        Code::kInvalidArgument,
        "socket %s is taken: it is %s, this daemon is uid %u: have its owner or root remove it, or give "
        "another --socket",
        path.c_str(), DescribePath(path).c_str(), geteuid());
  const UniqueFd probe(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!probe.valid()) return ErrnoError(errno, "socket");
  const int result = connect(probe.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  if (result == 0 || errno == EAGAIN)  // EAGAIN: its backlog is full, so it is alive
    return Error(Code::kAlreadyExists, "socket %s: another process listens there", path.c_str());
  if (errno != ECONNREFUSED && errno != ENOENT)
    return ErrnoError(errno, "look whether anyone listens on %s", path.c_str());
  if (unlink(path.c_str()) != 0 && errno != ENOENT)
    return ErrnoError(errno, "remove stale socket %s", path.c_str());
  LOG_INFO("socket %s was stale, replaced", path.c_str());
  return OkStatus();
}

}  // namespace

std::string DefaultSocketPath(const std::string& job, const std::string& node) {
  const std::string directory = RuntimeDirectory();
  std::string name = EscapeForFileName(job) + "-" + EscapeForFileName(node);
  constexpr size_t kTail = 14;  // "-" and eight digits, ".sock"
  if (directory.size() + 1 + name.size() + 5 > kPathBytesMax &&
      directory.size() + 1 + kTail < kPathBytesMax) {
    char checksum[16];
    std::snprintf(checksum, sizeof(checksum), "-%08x", Crc32c(name.data(), name.size()));
    name.resize(kPathBytesMax - directory.size() - 1 - kTail);
    name += checksum;
  }
  return directory + "/" + name + ".sock";
}

Result<UniqueFd> ListenLocal(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.empty() || path.size() > kPathBytesMax)
    return Error(Code::kInvalidArgument, "socket path of %zu bytes, limit %zu", path.size(), kPathBytesMax);
  std::memcpy(address.sun_path, path.data(), path.size());
  ROPETEAM_RETURN_IF_ERROR(MakeDirectory(DirectoryOf(path)));
  ROPETEAM_RETURN_IF_ERROR(RemoveStale(path, address));
  UniqueFd listener(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener.valid()) return ErrnoError(errno, "socket");
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0)
    return ErrnoError(errno, "bind %s", path.c_str());
  // Before listen(): until then every connection is refused, so nobody can connect with a looser mode.
  if (chmod(path.c_str(), 0600) != 0) return ErrnoError(errno, "chmod %s", path.c_str());
  if (listen(listener.get(), kBacklog) != 0) return ErrnoError(errno, "listen %s", path.c_str());
  return listener;
}

Result<UniqueFd> AcceptLocal(int listener, pid_t* pid) {
  for (;;) {
    UniqueFd socket(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!socket.valid()) {
      if (errno == EAGAIN || errno == EWOULDBLOCK) return UniqueFd();
      if (errno == EINTR || errno == ECONNABORTED) continue;
      return ErrnoError(errno, "accept");
    }
    ucred peer{};
    socklen_t length = sizeof(peer);
    if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) continue;  // already closed
    if (peer.uid != geteuid()) {
      LOG_WARNING("session of uid %u pid %d refused, this daemon is uid %u's alone", peer.uid,
                  static_cast<int>(peer.pid), geteuid());
      continue;
    }
    *pid = peer.pid;
    return socket;
  }
}

}  // namespace ropeteam
