// SPDX-License-Identifier: Apache-2.0
//
// Accepts connections and checks their hellos. Nothing else of a stranger is read.

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>

#include "core/base/log.h"
#include "transport/tcp/internal.h"

namespace ropeteam::tcp {
namespace {

constexpr size_t kAcceptsPerTurn = 64;
// The pause if no descriptor is left, not even to drop a connection.
constexpr TimeUs kDeafUs = 100'000;
// At most one line about refused connections in this time.
constexpr TimeUs kLogIntervalUs = 1'000'000;
// A connection to a host that has vanished ends after 2 + 3 × 1 s. If bytes are unacknowledged, the kernel repeats them
// instead, for about 15 minutes: the initiator looks for that (peers.cc), the target keeps a descriptor for so long.
constexpr int kKeepaliveIdleS = 2, kKeepaliveIntervalS = 1, kKeepaliveProbes = 3;

std::string HostOf(const IpAddress& address) {
  const std::string text = ToText(address);
  return text.substr(0, text.rfind(':'));
}

}  // namespace

void SetConnectionOptions(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, kKeepaliveIdleS);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, kKeepaliveIntervalS);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, kKeepaliveProbes);
}

void TcpTransport::Accept(Listener* listener) {
  for (size_t i = 0; i < kAcceptsPerTurn && listener->events != 0; i++) {
    IpAddress from;
    from.length = sizeof from.storage;
    Fd fd(accept4(listener->fd.get(), from.get(), &from.length, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd.open()) {
      auto inbound = std::make_unique<Inbound>(from);
      inbound->fd = std::move(fd);
      inbound->host = HostOf(from);
      inbound->deadline = Now() + kHelloTimeoutUs;
      MakeRoom(inbound->host);
      Watch(inbound.get(), EPOLLIN);
      strangers_.push_back(inbound.get());
      inbound_.emplace(inbound.get(), std::move(inbound));
      continue;
    }
    if (errno == EAGAIN) return;
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM)
      continue;  // that connection's error
    if (strangers_.empty())
      DropOne(listener->fd.get());
    else
      Expel(strangers_.front());
  }
}

// No descriptor is left. The reserve takes the connection, which is closed: otherwise the listener would stay readable
// and the loop would spin.
void TcpTransport::DropOne(int listener) {
  reserve_.Reset();
  Fd(accept4(listener, nullptr, nullptr, SOCK_CLOEXEC)).Reset();
  reserve_ = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  const TimeUs now = Now();
  if (now - refusal_logged_at_ > kLogIntervalUs) {
    refusal_logged_at_ = now;
    LOG_ERROR("transport tcp: no file descriptor is left (RLIMIT_NOFILE): connections of peers are dropped");
  }
  if (reserve_.open()) return;
  deaf_until_ = now + kDeafUs;
  Listen(false);
}

void TcpTransport::Listen(bool on) {
  for (const auto& listener : listeners_) Watch(listener.get(), on ? uint32_t{EPOLLIN} : 0);
  if (on) deaf_until_ = 0;
  if (on && !reserve_.open()) reserve_ = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
}

// For another stranger of this address.
void TcpTransport::MakeRoom(const std::string& host) {
  const auto same = [&host](const Inbound* each) { return each->host == host; };
  if (static_cast<size_t>(std::count_if(strangers_.begin(), strangers_.end(), same)) >=
      kStrangersOfAddressMax)
    Expel(*std::find_if(strangers_.begin(), strangers_.end(), same));
  else if (strangers_.size() >= kStrangersMax)
    Expel(strangers_.front());
}

// A hello that has arrived meanwhile is read first: a pause of this thread is not the stranger's.
void TcpTransport::Expel(Inbound* stranger) {
  ReadHello(stranger);
  if (stranger->instance == 0) Close(stranger);
}

void TcpTransport::ReadHello(Inbound* inbound) {
  const int fd = inbound->fd.get();
  ssize_t count = 1;
  if (inbound->received < sizeof(Hello)) {
    count = ReceiveGreeting(fd, &inbound->hello, &inbound->received, sizeof(Hello));
    const char* refusal = count > 0 ? admission_.Refusal(inbound->hello, &inbound->welcome) : nullptr;
    if (refusal != nullptr) {
      LogRefusal(*inbound, refusal);
      return Close(inbound);
    }
  }
  if (count > 0) count = ReceiveGreeting(fd, &inbound->hello, &inbound->received);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return;
  if (count <= 0) return Close(inbound);
  Admit(inbound);
}

void TcpTransport::Admit(Inbound* inbound) {
  const Hello& hello = inbound->hello;
  const auto of_instance = [&hello](const auto& each) { return each.first->instance == hello.initiator; };
  // The initiator has given up its earlier connection for this one. What that still holds must not arrive after this
  // one's welcome, because the initiator then reports its puts as failed.
  CloseAll([&hello](const Inbound& each) {
    return each.instance == hello.initiator && each.hello.channel == hello.channel &&
           each.hello.lane == hello.lane;
  });
  const bool many = static_cast<size_t>(std::count_if(inbound_.begin(), inbound_.end(), of_instance)) >=
                    kInboundOfInstanceMax;
  // It may have departed since its hello was judged.
  if (many || !admission_.Admits(hello.initiator)) {
    LogRefusal(*inbound, many ? "too many connections of this instance" : "not a member");
    return Close(inbound);
  }
  std::erase(strangers_, inbound);
  inbound->instance = hello.initiator;
  inbound->received = 0;
  const int fd = inbound->fd.get();
  SetConnectionOptions(fd);
  // A new connection has room for these bytes.
  if (send(fd, Padded(inbound->welcome).data(), kGreetingBytes, MSG_NOSIGNAL) != kGreetingBytes)
    Close(inbound);
}

void TcpTransport::LogRefusal(const Inbound& inbound, const char* reason) {
  const TimeUs now = Now();
  if (now - refusal_logged_at_ < kLogIntervalUs) {
    refusals_unlogged_++;
    return;
  }
  LOG_WARNING("transport tcp: refused a connection from %s: %s; %llu more were refused before",
              ToText(inbound.remote).c_str(), reason, static_cast<unsigned long long>(refusals_unlogged_));
  refusal_logged_at_ = now;
  refusals_unlogged_ = 0;
}

// In the order of their deadlines.
void TcpTransport::ExpireStrangers(TimeUs now) {
  while (!strangers_.empty() && strangers_.front()->deadline <= now) Expel(strangers_.front());
}

void TcpTransport::Close(Inbound* inbound) {
  const auto found = inbound_.find(inbound);
  if (found == inbound_.end()) return;
  if (inbound->instance == 0) std::erase(strangers_, inbound);
  Unwatch(inbound);
  closed_.push_back(std::move(found->second));
  inbound_.erase(found);
}

void TcpTransport::SetPeers(const std::vector<std::string>& addresses) {
  std::unordered_set<uint64_t> instances;
  for (const std::string& bytes : addresses)  // one that cannot be decoded belongs to no peer
    if (EndpointAddress address; Decode(bytes, &address).ok()) instances.insert(address.instance);
  admission_.SetPeers(std::move(instances));
  CloseAll([this](const Inbound& each) { return !admission_.Admits(each.instance); });
}

}  // namespace ropeteam::tcp
