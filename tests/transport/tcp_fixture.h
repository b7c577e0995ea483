// SPDX-License-Identifier: Apache-2.0
//
// A tcp transport with one region, and bare sockets as its peers.

#ifndef ROPETEAM_TESTS_TRANSPORT_TCP_FIXTURE_H_
#define ROPETEAM_TESTS_TRANSPORT_TCP_FIXTURE_H_

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <type_traits>
#include <vector>

#include "tests/transport/rig.h"
#include "transport/tcp/codec.h"
#include "transport/tcp/tcp_transport.h"

namespace ropeteam::tcp {

using test::Completions;
using test::Memory;
using test::PollUntil;

inline constexpr uint32_t kTarget = 2;
inline constexpr uint64_t kLength = 1 << 20;
inline constexpr uint64_t kInitiator = 77;

class TcpTest : public testing::Test {
 protected:
  // The other end of a connection of the transport, which makes progress while this waits.
  class Raw {
   public:
    explicit Raw(TcpTest* test) : Raw(test, Socket()) {
      const IpAddress& to = test->self_.lanes[0].address;
      EXPECT_EQ(connect(fd_, to.get(), to.length), 0);
    }
    Raw(TcpTest* test, int fd) : test_(test), fd_(fd) {}
    ~Raw() { close(fd_); }
    int fd() const { return fd_; }
    template <typename T>
    void Send(const T& value, size_t length = sizeof(T)) {
      if constexpr (std::is_same_v<T, Hello> || std::is_same_v<T, Welcome>)
        SendBytes(tcp::Padded(value).data(), length == sizeof(T) ? tcp::kGreetingBytes : length);
      else
        SendBytes(&value, length);
    }
    void SendBytes(const void* bytes, size_t length) { (void)send(fd_, bytes, length, MSG_NOSIGNAL); }
    // Whether the transport closes the connection without a byte.
    bool Closed(uint64_t limit_ms = 10'000) {
      ssize_t count = -1;
      char byte;
      const bool ended = test_->Drive(
          [&] {
            count = recv(fd_, &byte, 1, MSG_DONTWAIT);
            return count >= 0 || errno != EAGAIN;
          },
          limit_ms);
      return ended && count <= 0;
    }
    bool Open() {
      char byte;
      return recv(fd_, &byte, 1, MSG_DONTWAIT | MSG_PEEK) < 0 && errno == EAGAIN;
    }
    template <typename T>
    bool Read(T* value) {
      if constexpr (std::is_same_v<T, Hello> || std::is_same_v<T, Welcome>) {
        std::array<char, tcp::kGreetingBytes> bytes;
        const bool read = ReadBytes(bytes.data(), bytes.size());
        std::memcpy(static_cast<void*>(value), bytes.data(), sizeof(T));
        return read && bytes == tcp::Padded(*value);
      } else {
        return ReadBytes(value, sizeof(T));
      }
    }
    bool ReadBytes(void* bytes, size_t length) {
      size_t got = 0;
      return test_->Drive([&] {
        const ssize_t count = recv(fd_, static_cast<char*>(bytes) + got, length - got, MSG_DONTWAIT);
        if (count > 0) got += static_cast<size_t>(count);
        return got == length || count == 0;
      }) && got == length;
    }
    // Sends this hello and checks the answer.
    bool Enter(const Hello& hello) {
      Send(hello);
      return Welcomed(hello);
    }
    bool Welcomed(const Hello& hello) {
      Welcome welcome;
      return Read(&welcome) && Same(welcome.mac, MacOf(test_->self_.secret, hello, welcome));
    }
    Reply Answer() {
      Reply reply;
      EXPECT_TRUE(Read(&reply));
      return reply;
    }

   private:
    TcpTest* const test_;
    const int fd_;
  };

  explicit TcpTest(const TcpConfig& config = {}) : transport_(CreateTcpTransport(config).value()) {
    EXPECT_TRUE(Decode(transport_->LocalAddress(), &self_).ok());
    memory_.Fill(kTarget);
    region_ = transport_->RegisterRegion(memory_.data(), kLength).value();
    RegionKey key;
    EXPECT_TRUE(Decode(transport_->ExportRegion(region_), &key).ok());
    key_ = key.key;
  }
  bool Drive(const std::function<bool()>& done, uint64_t limit_ms = 20'000) {
    return PollUntil(nullptr, {transport_.get()}, &done_, done, limit_ms);
  }
  static int Socket(int flags = 0) { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | flags, 0); }
  Hello Valid(uint64_t initiator = kInitiator, uint32_t channel = 0) {
    Hello hello;
    hello.initiator = initiator;
    hello.channel = channel;
    hello.target = self_.instance;
    hello.counter = ++counter_;
    hello.mac = MacOf(self_.secret, hello);
    return hello;
  }
  Request Put(uint64_t offset, uint64_t length) {
    return {static_cast<uint32_t>(Op::kPut), 0, key_, offset, length, 5};
  }
  std::string AddressOf(uint64_t instance) {
    EndpointAddress address = self_;
    address.instance = instance;
    return Encode(address);
  }
  bool Untouched() { return memory_.HoldsOutside(kTarget, 0, 0); }

  Memory memory_{kLength};
  std::unique_ptr<Transport> transport_;
  EndpointAddress self_;
  RegionId region_ = 0;
  uint64_t key_ = 0;
  uint64_t counter_ = 0;
  Completions done_;
};

// Of a put of the whole region, the first half has arrived.
class TcpHalfPutTest : public TcpTest {
 protected:
  TcpHalfPutTest() {
    peer_ = transport_->Connect(AddressOf(kInitiator)).value();
    EXPECT_TRUE(raw_.Enter(Valid()));
    raw_.Send(Put(0, kLength));
    SendHalf();
    const uint8_t* last = memory_.data() + kLength / 2 - 1;
    EXPECT_TRUE(Drive([last] { return *last == 0; }));
    memory_.Fill(kTarget);
  }
  void SendHalf() {
    const std::vector<char> half(kLength / 2);
    for (size_t sent = 0; sent < half.size();) {
      constexpr size_t kPart = 32 << 10;
      raw_.SendBytes(half.data(), kPart);
      sent += kPart;
      int rounds = 0;
      Drive([&] { return ++rounds > 4; });
    }
  }
  PeerId peer_ = 0;
  Raw raw_{this};
};

}  // namespace ropeteam::tcp

#endif  // ROPETEAM_TESTS_TRANSPORT_TCP_FIXTURE_H_
