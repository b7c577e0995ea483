// SPDX-License-Identifier: Apache-2.0
//
// The tcp transport over real sockets, with another end that is not the transport.
//
// tcp_target: bytes of a stranger, hellos, and requests of a member. They harm only their own connection, and touch only
// the exported region. tcp_initiator: what the target of this transport's operations answers, from the welcome on. Each
// operation ends once, and touches only its own range.

#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>

#include "core/base/check.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/values.h"
#include "transport/front/front.h"
#include "transport/tcp/codec.h"
#include "transport/tcp/tcp_transport.h"

namespace ropeteam::fuzz {
namespace {

using namespace tcp;  // NOLINT: all of its frames

constexpr uint64_t kRegion = 4096;  // in the middle of three times as many bytes
constexpr uint64_t kOther = 99;     // an instance that does nothing wrong
constexpr TimeUs kTurnsUs = 20'000'000;
constexpr size_t kMissingMax = 160;  // bytes at the end of a padded hello

// A socket of the other end, which never blocks.
class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ < 0) return;
    const linger reset{1, 0};  // no port is kept in TIME_WAIT
    (void)setsockopt(fd_, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
    close(fd_);
  }
  int fd() const { return fd_; }
  void Send(const void* bytes, size_t length) const {
    (void)send(fd_, bytes, length, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  void Send(const Request& request) const { Send(&request, sizeof(request)); }
  void Send(const Reply& reply) const { Send(&reply, sizeof(reply)); }
  // A hello or a welcome, without so many bytes at its end.
  template <typename T>
  void Greet(const T& greeting, size_t missing = 0) const {
    Send(Padded(greeting).data(), kGreetingBytes - missing);
  }
  // What has come so far, at most so many bytes.
  std::string Receive(size_t limit) const {
    std::string bytes(limit, '\0');
    const ssize_t count = recv(fd_, bytes.data(), bytes.size(), MSG_DONTWAIT);
    bytes.resize(count > 0 ? static_cast<size_t>(count) : 0);
    return bytes;
  }

 private:
  int fd_;
};

Socket NewSocket() { return Socket(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)); }

// From another loopback address each time, so that the ports of one do not run out.
Socket SocketOfAnotherAddress() {
  static uint32_t number = 0;
  Socket made = NewSocket();
  const int no_port = 1;
  (void)setsockopt(made.fd(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &no_port, sizeof(no_port));
  sockaddr_in from{};
  from.sin_family = AF_INET;
  from.sin_addr.s_addr = htonl((127u << 24) + (1u << 16) + ++number % 60000);
  ROPETEAM_CHECK(bind(made.fd(), reinterpret_cast<sockaddr*>(&from), sizeof(from)) == 0);
  return made;
}

class World {
 protected:
  World() {
    ROPETEAM_CHECK(Decode(transport_->LocalAddress(), &self_).ok());
    region_ = transport_->RegisterRegion(memory_.data() + kRegion, kRegion).value();
    RegionKey key;
    ROPETEAM_CHECK(Decode(transport_->ExportRegion(region_), &key).ok());
    key_ = key.key;
  }
  // Polls until `done`, which must become true.
  template <typename Done>
  void Until(Done done) {
    for (const TimeUs end = front::Now() + kTurnsUs; !done();) {
      ROPETEAM_CHECK(front::Now() < end);
      transport_->Wait(1000);
      Poll();
    }
  }
  void Poll() {
    Completion completion;
    while (transport_->Poll(&completion, 1) == 1) {
      if (completion.kind == OperationKind::kDisconnect) {
        disconnected_ = true;
      } else {
        ROPETEAM_CHECK(outstanding_.erase(completion.context) == 1);
      }
    }
  }
  bool Untouched(uint64_t begin, uint64_t end) const {
    return std::all_of(memory_.begin() + static_cast<ptrdiff_t>(begin),
                       memory_.begin() + static_cast<ptrdiff_t>(end), [](char byte) { return byte == 'm'; });
  }
  void CheckGuards() const { ROPETEAM_CHECK(Untouched(0, kRegion) && Untouched(2 * kRegion, 3 * kRegion)); }

  std::vector<char> memory_ = std::vector<char>(3 * kRegion, 'm');
  std::unique_ptr<Transport> transport_ = CreateTcpTransport({}).value();
  EndpointAddress self_;
  RegionId region_ = 0;
  uint64_t key_ = 0;
  std::map<uint64_t, uint64_t> outstanding_;  // contexts of operations
  bool disconnected_ = false;
};

class AsTarget : World {
 public:
  void Run(FromBytes* in) {
    for (Socket& socket : sockets_) socket = Connected();
    while (!in->done()) {
      Step(in);
      Poll();
      for (const Socket& socket : sockets_) (void)socket.Receive(65536);
    }
    CheckGuards();
    const Socket other = Connected();
    other.Greet(Valid(kOther, 0, 1));
    other.Send(Request{static_cast<uint32_t>(Op::kPut), 0, key_, kRegion - 1, 1, 5});
    other.Send("x", 1);
    std::string answer;
    Until([&] {
      answer += other.Receive(kGreetingBytes + sizeof(Reply) - answer.size());
      return answer.size() == kGreetingBytes + sizeof(Reply);
    });
    Reply reply;
    std::memcpy(&reply, answer.data() + kGreetingBytes, sizeof(reply));
    ROPETEAM_CHECK(reply.id == 5 && reply.code == 0 && memory_[2 * kRegion - 1] == 'x');
  }

 private:
  enum Kind : uint8_t { kHello, kRequest, kBytes, kAltered, kConnect, kKinds };

  Socket Connected() const {
    Socket made = SocketOfAnotherAddress();
    const IpAddress& to = self_.lanes[0].address;
    // libFuzzer's timer may interrupt it.
    while (connect(made.fd(), to.get(), to.length) != 0 && errno != EISCONN)
      ROPETEAM_CHECK(errno == EINTR || errno == EALREADY);
    return made;
  }
  Hello Valid(uint64_t initiator, uint32_t lane, uint64_t counter) const {
    Hello hello;
    hello.initiator = initiator;
    hello.target = self_.instance;
    hello.lane = lane;
    hello.counter = counter;
    hello.mac = MacOf(self_.secret, hello);
    return hello;
  }
  void Step(FromBytes* in) {
    const uint8_t kind = in->Byte() % kKinds;
    Socket& socket = sockets_[in->Byte() % std::size(sockets_)];
    if (kind == kHello || kind == kAltered) {
      Hello hello = Valid(1 + in->Number() % (kOther - 1), static_cast<uint32_t>(in->Number()), in->Number());
      if (kind == kAltered)
        reinterpret_cast<char*>(&hello)[in->Byte() % sizeof(hello)] ^= static_cast<char>(in->Byte());
      const size_t missing = in->Byte();
      if (missing < kMissingMax)
        socket.Greet(hello, missing);
      else
        socket.Send(&hello, sizeof(hello) - std::min(missing - kMissingMax, sizeof(hello)));
    } else if (kind == kRequest) {
      Request request;
      request.op = static_cast<uint32_t>(in->Number());
      request.flags = static_cast<uint32_t>(in->Number());
      request.key = in->Byte() == 0 ? key_ : in->Number();
      request.offset = in->Number();
      request.length = in->Number();
      request.id = in->Number();
      socket.Send(request);
      const std::string payload = in->Text();
      socket.Send(payload.data(), payload.size());
    } else if (kind == kBytes) {
      const std::string bytes = in->Text();
      socket.Send(bytes.data(), bytes.size());
    } else {
      socket = Connected();
    }
  }

  Socket sockets_[2];
};

class AsInitiator : World {
 public:
  void Run(FromBytes* in) {
    listener_ = NewSocket();
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EndpointAddress address{9, {1, 2}, kTcpOperationBytesDefault, {{}}};
    IpAddress& at = address.lanes[0].address;
    at.length = sizeof(any);
    ROPETEAM_CHECK(bind(listener_.fd(), reinterpret_cast<sockaddr*>(&any), sizeof(any)) == 0 &&
                   listen(listener_.fd(), 8) == 0 && getsockname(listener_.fd(), at.get(), &at.length) == 0);
    const PeerId peer = transport_->Connect(Encode(address)).value();
    const RemoteRegionId remote = transport_->ImportRegion(peer, Encode(RegionKey{9, 7, kRegion})).value();
    // The first half of the region is read into, the second half is sent.
    for (uint64_t context = 1; context <= 4; ++context) {
      const uint64_t at_byte = context * 256;
      outstanding_[context] = 0;
      const Status status =
          context % 2 == 0
              ? transport_->Put(peer, region_, kRegion / 2 + at_byte, remote, at_byte, 200, context)
              : transport_->Get(peer, region_, at_byte, remote, at_byte, 200, context);
      ROPETEAM_CHECK(status.ok());
    }
    while (!in->done()) {
      Poll();
      Answer(in, address.secret);
      Poll();
    }
    transport_->Disconnect(peer);
    Until([&] { return disconnected_; });
    ROPETEAM_CHECK(outstanding_.empty());
    CheckGuards();
    ROPETEAM_CHECK(Untouched(kRegion, kRegion + 256) && Untouched(kRegion + 456, kRegion + 768) &&
                   Untouched(kRegion + 968, 2 * kRegion));
  }

 private:
  enum Kind : uint8_t { kWelcome, kReply, kBytes, kClose, kKinds };

  void Answer(FromBytes* in, const Secret& secret) {
    if (socket_.fd() < 0) {
      pollfd coming{listener_.fd(), POLLIN, 0};
      if (poll(&coming, 1, 0) == 1)
        socket_ = Socket(accept4(listener_.fd(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      received_.clear();
      Poll();
    }
    received_ += socket_.Receive(2 * kGreetingBytes);
    const uint8_t kind = in->Byte() % kKinds;
    if (kind == kWelcome) {
      Hello hello;
      if (received_.size() >= sizeof(hello)) std::memcpy(&hello, received_.data(), sizeof(hello));
      Welcome welcome;
      welcome.target = 9;
      welcome.mac = MacOf(secret, hello, welcome);
      reinterpret_cast<char*>(&welcome)[in->Byte() % sizeof(welcome)] ^= static_cast<char>(in->Byte());
      socket_.Greet(welcome);
    } else if (kind == kReply) {
      // The id of the request with this number, or another one.
      const uint8_t which = in->Byte();
      Reply reply{in->Number(), static_cast<uint32_t>(in->Number()), static_cast<uint32_t>(in->Number())};
      reply.id += IdOf(which);
      socket_.Send(reply);
      const std::string payload = in->Text();
      socket_.Send(payload.data(), payload.size());
    } else if (kind == kBytes) {
      const std::string bytes = in->Text();
      socket_.Send(bytes.data(), bytes.size());
    } else {
      socket_ = Socket();
    }
  }

  // Of the request with this number; 0: it has not come.
  uint64_t IdOf(uint8_t number) const {
    size_t at = kGreetingBytes;
    for (Request request; at + sizeof(request) <= received_.size(); --number) {
      std::memcpy(&request, received_.data() + at, sizeof(request));
      if (number == 0) return request.id;
      at += sizeof(request) + (request.op == static_cast<uint32_t>(Op::kPut) ? request.length : 0);
    }
    return 0;
  }

  Socket listener_, socket_;
  std::string received_;  // of this connection, the first bytes
};

void RunTarget(std::string_view input) {
  FromBytes in(input);
  AsTarget().Run(&in);
}

void RunInitiator(std::string_view input) {
  FromBytes in(input);
  AsInitiator().Run(&in);
}

std::vector<std::string> TargetSeeds() {
  const auto hello = [](size_t socket, uint64_t initiator, size_t missing) {
    return ToBytes().Byte(0).Byte(socket).Put(initiator).Put(0u).Put(uint64_t{1}).Byte(missing).bytes();
  };
  const auto request = [](size_t socket, uint32_t op, uint64_t offset, uint64_t length,
                          const std::string& payload) {
    return ToBytes()
        .Byte(1)
        .Byte(socket)
        .Put(op)
        .Put(0u)
        .Byte(0)
        .Put(offset)
        .Put(length)
        .Put(uint64_t{3})
        .Put(payload)
        .bytes();
  };
  const auto bytes = [](size_t socket, const std::string& text) {
    return ToBytes().Byte(2).Byte(socket).Put(text).bytes();
  };
  return {
      "",
      bytes(0, std::string(100, 'x')),
      hello(0, 1, 0) + request(0, 1, 4, 5, "hello") + request(0, 2, 4, 5, ""),
      hello(0, 1, 0) + request(0, 1, kRegion - 2, 5, "hello") + request(0, 2, kRegion - 2, 5, "") +
          request(0, 3, 0, 1, ""),
      hello(0, 1, 0) + hello(1, 1, 0) + hello(1, 2, 40) + bytes(1, std::string(40, 'y')) +
          request(0, 1, 0, 100, "half"),
      ToBytes().Byte(3).Byte(0).Put(uint64_t{1}).Put(0u).Put(uint64_t{1}).Byte(60).Byte(1).Byte(0).bytes() +
          ToBytes().Byte(4).Byte(0).bytes() + hello(0, 1, 0),
  };
}

std::vector<std::string> InitiatorSeeds() {
  const auto reply = [](size_t which, uint32_t code, uint32_t length, const std::string& payload) {
    return ToBytes().Byte(1).Byte(which).Put(uint64_t{0}).Put(code).Put(length).Put(payload).bytes();
  };
  const std::string welcome = ToBytes().Byte(0).Byte(0).Byte(0).bytes();
  const std::string page(200, 'p');
  return {
      "",
      welcome + reply(0, 0, 200, page) + reply(1, 0, 0, "") + reply(2, 1, 0, "") + reply(3, 0, 0, ""),
      welcome + reply(0, 0, 200, "half") + ToBytes().Byte(3).bytes() + welcome,
      welcome + reply(0, 0, 201, page) + reply(9, 0, 0, ""),
      ToBytes().Byte(0).Byte(20).Byte(1).bytes() + ToBytes().Byte(2).Put(page).bytes(),
  };
}

const Target kTarget("tcp_target", RunTarget, TargetSeeds);
const Target kInitiator("tcp_initiator", RunInitiator, InitiatorSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
