// SPDX-License-Identifier: Apache-2.0
#include "tests/membership/tcp_relay.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>

namespace ropeteam {
namespace {

sockaddr_in AddressOf(const std::string& host, int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  inet_pton(AF_INET, host.c_str(), &address.sin_addr);
  return address;
}

}  // namespace

TcpRelay::TcpRelay(const std::string& host, const std::string& target) : target_(target) {
  sockaddr_in address = AddressOf(host, 0);
  socklen_t length = sizeof address;
  listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (bind(listener_, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener_, 16) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &length) != 0 ||
      pipe2(wake_, O_CLOEXEC) != 0)
    std::abort();
  address_ = host + ":" + std::to_string(ntohs(address.sin_port));
  thread_ = std::thread([this] { Run(); });
}

TcpRelay::~TcpRelay() {
  close(wake_[1]);  // Run() sees the end of the pipe
  thread_.join();
  close(wake_[0]);
  close(listener_);
  for (const Pair& pair : pairs_) {
    if (pair.near >= 0) close(pair.near);
    if (pair.far >= 0) close(pair.far);
  }
}

void TcpRelay::FreezeConnections() {
  {
    const std::lock_guard lock(mutex_);
    for (Pair& pair : pairs_) pair.frozen = true;
  }
  (void)!write(wake_[1], "x", 1);
}

bool TcpRelay::WaitForConnections(size_t count, int ms) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::milliseconds(ms), [&] { return pairs_.size() >= count; });
}

void TcpRelay::Accept() {
  Pair pair;
  pair.near = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
  if (pair.near < 0) return;
  const size_t colon = target_.rfind(':');
  const sockaddr_in to = AddressOf(target_.substr(0, colon), std::atoi(target_.c_str() + colon + 1));
  pair.far = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (connect(pair.far, reinterpret_cast<const sockaddr*>(&to), sizeof to) != 0) {
    close(pair.near);
    close(pair.far);
    return;
  }
  const std::lock_guard lock(mutex_);
  pairs_.push_back(pair);
  changed_.notify_all();
}

bool TcpRelay::Move(int from, int to) {
  char buffer[64 << 10];
  const ssize_t got = recv(from, buffer, sizeof buffer, 0);
  if (got <= 0) return false;
  for (ssize_t sent = 0; sent < got;) {
    const ssize_t n = send(to, buffer + sent, static_cast<size_t>(got - sent), MSG_NOSIGNAL);
    if (n <= 0) return false;
    sent += n;
  }
  return true;
}

void TcpRelay::Run() {
  for (;;) {
    std::vector<pollfd> polled = {{wake_[0], POLLIN, 0}, {listener_, POLLIN, 0}};
    std::vector<size_t> index;
    {
      const std::lock_guard lock(mutex_);
      for (size_t i = 0; i < pairs_.size(); ++i) {
        if (pairs_[i].frozen || pairs_[i].near < 0) continue;
        polled.push_back({pairs_[i].near, POLLIN, 0});
        polled.push_back({pairs_[i].far, POLLIN, 0});
        index.push_back(i);
      }
    }
    if (poll(polled.data(), polled.size(), -1) < 0) return;
    if (polled[0].revents != 0) {
      char byte = 0;
      if (read(wake_[0], &byte, 1) <= 0) return;
      continue;  // a connection was frozen: it must not move any more bytes
    }
    for (size_t i = 0; i < index.size(); ++i) {
      Pair& pair = pairs_[index[i]];  // only this thread adds pairs, and the others only set `frozen`
      const bool near = polled[2 + 2 * i].revents != 0;
      const bool far = polled[3 + 2 * i].revents != 0;
      if ((near && !Move(pair.near, pair.far)) || (far && !Move(pair.far, pair.near))) {
        close(pair.near);
        close(pair.far);
        const std::lock_guard lock(mutex_);
        pair.near = pair.far = -1;
      }
    }
    if (polled[1].revents != 0) Accept();
  }
}

}  // namespace ropeteam
