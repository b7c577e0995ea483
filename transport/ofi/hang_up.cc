// SPDX-License-Identifier: Apache-2.0

#include "transport/ofi/hang_up.h"

#include <sys/socket.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace ropeteam::ofi {
namespace {

constexpr int kDepthMax = 4;  // ofi_rxm's queue waits for tcp's, which waits for the sockets

// What an epoll descriptor waits for, as the kernel tells; empty for any other descriptor.
std::vector<int> WaitedFor(int epoll) {
  std::vector<int> fds;
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(epoll));
  for (std::string word; info >> word;) {
    int fd = -1;
    if (word == "tfd:" && info >> fd) fds.push_back(fd);
  }
  return fds;
}

bool LeadsTo(int fd, const IpAddress& peer) {
  sockaddr_storage other{};
  socklen_t length = sizeof other;
  return getpeername(fd, reinterpret_cast<sockaddr*>(&other), &length) == 0 && length == peer.length &&
         ToText({other, length}) == ToText(peer);
}

bool HangUpOne(int fd) {
  // When libfabric closes it, what it has not sent is dropped: else the kernel would go on trying for minutes,
  // and a network that comes back would deliver a put that has long been given back as failed.
  const linger drop{1, 0};
  (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &drop, sizeof drop);
  return shutdown(fd, SHUT_RDWR) == 0;
}

size_t HangUpBelow(int epoll, const IpAddress& peer, int depth) {
  size_t count = 0;
  for (const int fd : WaitedFor(epoll)) {
    if (LeadsTo(fd, peer)) count += HangUpOne(fd) ? 1 : 0;
    if (depth < kDepthMax) count += HangUpBelow(fd, peer, depth + 1);
  }
  return count;
}

}  // namespace

size_t HangUp(int epoll, const IpAddress& peer) { return peer.length == 0 ? 0 : HangUpBelow(epoll, peer, 1); }

}  // namespace ropeteam::ofi
