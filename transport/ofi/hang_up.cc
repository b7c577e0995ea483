// SPDX-License-Identifier: Apache-2.0

#include "transport/ofi/hang_up.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace ropeteam::ofi {
namespace {

constexpr int kDepthMax = 4;  // ofi_rxm's queue waits for tcp's queue, and that for the sockets

// The descriptors that an epoll descriptor waits for; empty for any other descriptor.
std::vector<int> WaitedFor(int epoll) {
  std::vector<int> fds;
  std::ifstream info("/proc/self/fdinfo/" + std::to_string(epoll));
  for (std::string word; info >> word;) {
    int fd = -1;
    if (word == "tfd:" && info >> fd) fds.push_back(fd);
  }
  return fds;
}

// The other end of a TCP connection; length 0: `fd` is not a connected TCP socket.
IpAddress PeerOf(int fd) {
  IpAddress other;
  socklen_t length = sizeof other.storage;
  if (getpeername(fd, other.get(), &length) != 0) return other;
  const sa_family_t family = other.storage.ss_family;
  if (family == AF_INET || family == AF_INET6) other.length = length;
  return other;
}

// Whether `fd` is a connection that the other end has reset. Bytes that arrived before can still be read.
bool WasReset(int fd) {
  tcp_info info{};
  socklen_t length = sizeof info;
  return getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &length) == 0 && info.tcpi_state == TCP_CLOSE;
}

// Calls `visit(fd, other end)` for every connection. After a reset, the kernel no longer reports the other
// end, and its length is 0.
template <typename Visit>
void ForEachConnection(int epoll, Visit visit, int depth = 1) {
  for (const int fd : WaitedFor(epoll)) {
    if (const IpAddress peer = PeerOf(fd); peer.length != 0 || WasReset(fd))
      visit(fd, peer);
    else if (depth < kDepthMax)
      ForEachConnection(fd, visit, depth + 1);
  }
}

bool Same(const IpAddress& a, const IpAddress& b) { return a.length == b.length && ToText(a) == ToText(b); }

void HangUpOne(int fd) {
  // With this option, closing the socket drops bytes that were not sent. Otherwise the kernel would retry for
  // minutes. When the network comes back, it would deliver a put that was reported as failed long ago.
  const linger drop{1, 0};
  (void)setsockopt(fd, SOL_SOCKET, SO_LINGER, &drop, sizeof drop);
  (void)shutdown(fd, SHUT_RDWR);  // fails after a reset
}

}  // namespace

size_t HangUp(int epoll, const IpAddress& peer) {
  size_t count = 0;
  if (peer.length == 0) return 0;
  ForEachConnection(epoll, [&](int fd, const IpAddress& other) {
    if (other.length != 0 && !Same(other, peer)) return;
    count++;
    HangUpOne(fd);
  });
  return count;
}

size_t Cut(int epoll, const std::function<bool(const std::string& peer)>& chosen) {
  size_t count = 0;
  ForEachConnection(epoll, [&](int fd, const IpAddress& other) {
    if (other.length != 0 && !chosen(ToText(other))) return;
    count++;
    HangUpOne(fd);
    // Discards bytes that have arrived. From now on the kernel answers every byte with a reset.
    char unused[64 << 10];
    while (recv(fd, unused, sizeof unused, MSG_DONTWAIT | MSG_TRUNC) > 0) {
    }
  });
  return count;
}

std::string SourceTo(int epoll, const IpAddress& peer) {
  std::string source;
  if (peer.length == 0) return source;
  ForEachConnection(epoll, [&](int fd, const IpAddress& other) {
    IpAddress here;
    here.length = sizeof here.storage;
    if (Same(other, peer) && getsockname(fd, here.get(), &here.length) == 0) source = ToText(here);
  });
  return source;
}

bool CanFindConnections() {
  const int epoll = epoll_create1(EPOLL_CLOEXEC), waited = eventfd(0, EFD_CLOEXEC);
  epoll_event event{};
  const bool watched = epoll_ctl(epoll, EPOLL_CTL_ADD, waited, &event) == 0;
  const bool found = watched && WaitedFor(epoll) == std::vector<int>{waited};
  close(epoll);
  close(waited);
  return found;
}

}  // namespace ropeteam::ofi
