// SPDX-License-Identifier: Apache-2.0
#include "membership/standalone/acceptor.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "core/base/check.h"
#include "core/base/log.h"
#include "membership/standalone/loop.h"

namespace ropeteam {

namespace {

// The pause if another thread took the reserved descriptor.
constexpr int kDeafMs = 100;
// At most one line of the log in this time; it counts those that were left out.
constexpr TimeUs kLogIntervalUs = 1'000'000;
// Health checks of a TCP port would fill the log.
constexpr TimeUs kClosedLogIntervalUs = 60'000'000;
// How late a closed stranger is noticed.
constexpr int kReapMs = 500;

std::atomic<uint64_t> g_unauthenticated{0};

void Close(const std::vector<int>& fds) {
  for (const int fd : fds) close(fd);
}

uint16_t PortOf(int listener) {
  sockaddr_storage bound = {};
  socklen_t length = sizeof bound;
  (void)getsockname(listener, reinterpret_cast<sockaddr*>(&bound), &length);
  const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&bound);
  return ntohs(bound.ss_family == AF_INET6 ? v6->sin6_port
                                           : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
}

// Listening sockets on all addresses that the name resolves to and this machine has. `error`: the last failure's errno.
Result<std::vector<int>> OpenListeners(const std::string& address, int* error) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size())
    return Error(Code::kInvalidArgument, "address \"%s\" is not host:port", address.c_str());
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);

  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (const int failed = getaddrinfo(host.c_str(), address.c_str() + colon + 1, &hints, &found); failed != 0)
    return Error(Code::kInvalidArgument, "address %s: %s", address.c_str(), gai_strerror(failed));
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);

  Status status;
  std::vector<int> listeners;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    const int fd = socket(entry->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) {
      status = ErrnoError(errno, "socket for %s", address.c_str());
      continue;
    }
    // A name's addresses have one port, also if the system chose it. The port is at the same place in both families.
    if (!listeners.empty())
      reinterpret_cast<sockaddr_in*>(entry->ai_addr)->sin_port = htons(PortOf(listeners[0]));
    const int on = 1;
    // Connections of a coordinator that has just died must not block the port for its successor.
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // its connections inherit this
    if (bind(fd, entry->ai_addr, entry->ai_addrlen) == 0 && listen(fd, SOMAXCONN) == 0) {
      listeners.push_back(fd);
      continue;
    }
    *error = errno;
    close(fd);
    status = ErrnoError(*error, "listen on %s", address.c_str());
  }
  if (listeners.empty()) return status;
  return listeners;
}

uint64_t InodeOf(int fd) {
  struct stat about = {};
  return fstat(fd, &about) == 0 ? about.st_ino : 0;
}

// Shuts down the connection, if `fd` still is that connection: a duplicate stays what it is while the server's threads
// close and open descriptors. False: it was closed already.
bool ShutDown(int fd, uint64_t inode) {
  const int same = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  const bool is = same >= 0 && InodeOf(same) == inode;
  if (is) shutdown(same, SHUT_RDWR);
  if (same >= 0) close(same);
  return is;
}

// "[::1]:4711" of "ipv6:%5B::1%5D:4711".
std::string Plain(const std::string& peer) {
  std::string text;
  for (size_t i = peer.find(':') + 1; i < peer.size(); i++) {
    const bool escaped = peer[i] == '%' && i + 2 < peer.size();
    text += escaped ? static_cast<char>(std::strtol(peer.substr(i + 1, 2).c_str(), nullptr, 16)) : peer[i];
    if (escaped) i += 2;
  }
  return text;
}

}  // namespace

Result<std::unique_ptr<Acceptor>> Acceptor::Listen(const std::string& address, StrangerLimits limits) {
  int error = 0;
  Result<std::vector<int>> listeners = OpenListeners(address, &error);
  if (!listeners.ok()) return listeners.status();
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) == 0)
    limits.total = std::clamp<size_t>(files.rlim_cur / kStrangersPart, 1, limits.total);
  return std::unique_ptr<Acceptor>(new Acceptor(address, std::move(*listeners), limits));
}

Acceptor::Acceptor(const std::string& address, std::vector<int> listeners, StrangerLimits limits)
    : listeners_(std::move(listeners)),
      limits_(limits),
      port_(PortOf(listeners_.front())),
      address_(address.substr(0, address.rfind(':') + 1) + std::to_string(port_)) {}

Acceptor::~Acceptor() {
  Stop();
  Close(listeners_);
}

void Acceptor::Start(Take take) {
  thread_ = std::thread([this, take = std::move(take)] { Run(take); });
}

void Acceptor::Stop() {
  stopping_ = true;
  for (const int listener : listeners_) shutdown(listener, SHUT_RDWR);  // ends poll(), and refuses who comes
  if (thread_.joinable()) thread_.join();
  const std::lock_guard lock(mutex_);
  while (count_ > 0) (void)ExpelOldest();
}

void Acceptor::Run(const Take& take) {
  std::vector<pollfd> polled;
  for (const int listener : listeners_) polled.push_back({listener, POLLIN, 0});
  while (!stopping_) {
    if (reserve_ < 0) reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (reserve_ < 0) {
      (void)poll(nullptr, 0, kDeafMs);
      continue;
    }
    bool strangers = false;
    {
      const std::lock_guard lock(mutex_);
      strangers = count_ > 0;
    }
    const int ready = poll(polled.data(), polled.size(), strangers ? kReapMs : -1);
    if (ready == 0) ReapAll();
    if (ready <= 0) continue;
    for (const pollfd& each : polled)
      if (each.revents != 0) AcceptOne(each.fd, take);
  }
  if (reserve_ >= 0) close(reserve_);
}

void Acceptor::AcceptOne(int listener, const Take& take) {
  sockaddr_storage from = {};
  socklen_t length = sizeof from;
  const int fd = accept4(listener, reinterpret_cast<sockaddr*>(&from), &length, SOCK_CLOEXEC | SOCK_NONBLOCK);
  if (fd >= 0) {
    {
      const std::lock_guard lock(mutex_);
      Enter(from, length, fd);
    }
    return take(fd);
  }
  if (stopping_) return;
  ROPETEAM_CHECK(errno != EBADF && errno != EINVAL);  // nobody would reach this process any more
  if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM)
    return;  // that connection's error
  const std::string error = ErrnoError(errno, "accept").message();
  close(std::exchange(reserve_, -1));
  const int dropped = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  if (dropped >= 0) close(dropped);
  const std::lock_guard lock(mutex_);
  if (count_ > 0) (void)ExpelOldest();
  rlimit files = {};
  getrlimit(RLIMIT_NOFILE, &files);
  Log("no descriptor is left for a connection (" + error + "; RLIMIT_NOFILE " +
      std::to_string(files.rlim_cur) + ")");
}

void Acceptor::Enter(const sockaddr_storage& from, socklen_t length, int fd) {
  char host[NI_MAXHOST] = "", port[NI_MAXSERV] = "";
  (void)getnameinfo(reinterpret_cast<const sockaddr*>(&from), length, host, sizeof host, port, sizeof port,
                    NI_NUMERICHOST | NI_NUMERICSERV);
  const char* const why = " have not authenticated, the oldest is closed";
  Strangers& same = strangers_[host];
  Reap(host, &same);
  if (same.size() >= limits_.of_address && ExpelOldest(&same))
    Log(std::to_string(limits_.of_address) + " connections of " + host + why);
  same.push_back({fd, InodeOf(fd), port, ++entered_});
  if (++count_ > limits_.total && ExpelOldest())
    Log(std::to_string(limits_.total) + " connections in all" + why);
}

void Acceptor::Reap(const std::string& host, Strangers* of) {
  const size_t closed = of->remove_if([](const Stranger& each) { return InodeOf(each.fd) != each.inode; });
  count_ -= closed;
  if (closed == 0 || !limits_.authenticate) return;
  g_unauthenticated += closed;
  closed_ += closed;
  const TimeUs now = Loop::Now();
  if (closed_logged_at_ != 0 && now - closed_logged_at_ < kClosedLogIntervalUs) return;
  closed_logged_at_ = now;
  LOG_WARNING(
      "port %s: a connection of %s ended before it had authenticated, %llu so far: another job or job key, "
      "no TLS, or no ropeteamd",
      address_.c_str(), host.c_str(), static_cast<unsigned long long>(closed_));
}

void Acceptor::ReapAll() {
  const std::lock_guard lock(mutex_);
  for (auto at = strangers_.begin(); at != strangers_.end();) {
    Reap(at->first, &at->second);
    at = at->second.empty() ? strangers_.erase(at) : std::next(at);
  }
}

uint64_t Acceptor::Unauthenticated() { return g_unauthenticated.load(); }

bool Acceptor::ExpelOldest(Strangers* of) {
  const Stranger oldest = of->front();
  of->pop_front();
  count_--;
  return ShutDown(oldest.fd, oldest.inode);
}

bool Acceptor::ExpelOldest() {
  const auto of = std::min_element(strangers_.begin(), strangers_.end(), [](const auto& a, const auto& b) {
    return a.second.front().number < b.second.front().number;
  });
  const bool expelled = ExpelOldest(&of->second);
  if (of->second.empty()) strangers_.erase(of);
  return expelled;
}

void Acceptor::Log(const std::string& what) {
  const TimeUs now = Loop::Now();
  if (logged_at_ != 0 && now - logged_at_ < kLogIntervalUs) {
    unlogged_++;
    return;
  }
  LOG_WARNING("port %s: %s; %llu such lines were left out", address_.c_str(), what.c_str(),
              static_cast<unsigned long long>(unlogged_));
  logged_at_ = now;
  unlogged_ = 0;
}

void Acceptor::Admit(const std::string& peer) {
  const std::string plain = Plain(peer);
  const size_t colon = std::min(plain.rfind(':'), plain.size());
  std::string host = plain.substr(0, colon);
  if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
  const std::lock_guard lock(mutex_);
  const auto found = strangers_.find(host);
  if (found == strangers_.end()) return;
  const auto has_port = [port = plain.substr(std::min(colon + 1, plain.size()))](const Stranger& each) {
    return each.port == port;
  };
  count_ -= found->second.remove_if(has_port);
  if (found->second.empty()) strangers_.erase(found);
}

Status CheckListen(const std::string& address) {
  int error = 0;
  const Result<std::vector<int>> listeners = OpenListeners(address, &error);
  if (!listeners.ok()) return listeners.status();
  Close(*listeners);
  return OkStatus();
}

bool IsOwnAddress(const std::string& address) {
  int error = 0;
  const Result<std::vector<int>> listeners = OpenListeners(address, &error);
  if (listeners.ok()) Close(*listeners);
  return listeners.ok() || (error != 0 && error != EADDRNOTAVAIL);
}

}  // namespace ropeteam
