// SPDX-License-Identifier: Apache-2.0
#include "membership/standalone/address.h"

#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <memory>

namespace ropeteam {

namespace {

// `error`: from the last address that the name resolves to; 0: it resolves to none.
Status Listen(const std::string& address, int* error) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size())
    return Error(Code::kInvalidArgument, "coordinator address \"%s\" is not host:port", address.c_str());
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);

  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int failed = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found); failed != 0)
    return Error(Code::kInvalidArgument, "coordinator address %s: %s", address.c_str(), gai_strerror(failed));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);

  Status status;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    const int fd = socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) {
      status = ErrnoError(errno, "socket for %s", address.c_str());
      continue;
    }
    // As gRPC does: connections of a coordinator that has just died must not block the port for its successor.
    const int on = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    const bool listens = bind(fd, entry->ai_addr, entry->ai_addrlen) == 0 && listen(fd, 1) == 0;
    *error = errno;
    close(fd);
    if (listens) return OkStatus();
    status = ErrnoError(*error, "listen on %s", address.c_str());
  }
  return status;
}

}  // namespace

Status CheckListen(const std::string& address) {
  int error = 0;
  return Listen(address, &error);
}

bool IsOwnAddress(const std::string& address) {
  int error = 0;
  return Listen(address, &error).ok() || (error != 0 && error != EADDRNOTAVAIL);
}

}  // namespace ropeteam
