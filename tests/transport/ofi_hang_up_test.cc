// SPDX-License-Identifier: Apache-2.0
//
// Ends the connections to one peer below libfabric. The sockets are set up as libfabric's own: an epoll
// descriptor waits for them, and another one waits for that descriptor. Then tests of the transport, which
// must never close an endpoint while libfabric handles an answer.
#include "transport/ofi/hang_up.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <utility>

#include "tests/transport/rig.h"
#include "transport/ofi/ofi_transport.h"

// Delay of this thread's next epoll_wait(). libfabric begins each round of progress with it.
static thread_local useconds_t pause_us = 0;

extern "C" __attribute__((visibility("default"))) int epoll_wait(int epoll, epoll_event* events, int count,
                                                                 int timeout) {
  if (pause_us > 0) usleep(std::exchange(pause_us, 0));
  return epoll_pwait(epoll, events, count, timeout, nullptr);
}

namespace ropeteam::ofi {
namespace {

// Resets the connection from the other end. When this returns, the reset has arrived.
void Reset(int here, int there) {
  const sockaddr none{};  // AF_UNSPEC
  ASSERT_EQ(connect(there, &none, sizeof none), 0);
  sockaddr_storage other;
  for (socklen_t length = sizeof other; getpeername(here, reinterpret_cast<sockaddr*>(&other), &length) == 0;)
    length = sizeof other;
}

// A loopback connection with a listener of its own.
struct Connection {
  Connection() {
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    address.length = sizeof(sockaddr_in);
    auto* in = reinterpret_cast<sockaddr_in*>(&address.storage);
    in->sin_family = AF_INET;
    in->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(bind(listener, address.get(), address.length), 0);
    EXPECT_EQ(listen(listener, 1), 0);
    EXPECT_EQ(getsockname(listener, address.get(), &address.length), 0);
    here = socket(AF_INET, SOCK_STREAM, 0);
    EXPECT_EQ(connect(here, address.get(), address.length), 0);
    there = accept(listener, nullptr, nullptr);
    close(listener);
  }
  ~Connection() {
    if (here >= 0) close(here);
    close(there);
  }
  IpAddress address;  // of the other end, seen from `here`
  int here = -1, there = -1;
};

class OfiHangUp : public testing::Test {
 protected:
  OfiHangUp() {
    Watch(outer_, inner_);
    Watch(inner_, a_.here);
    Watch(inner_, b_.here);
  }
  ~OfiHangUp() override {
    close(inner_);
    close(outer_);
  }
  static void Watch(int epoll, int fd) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    EXPECT_EQ(epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event), 0);
  }

  Connection a_, b_;
  const int outer_ = epoll_create1(EPOLL_CLOEXEC), inner_ = epoll_create1(EPOLL_CLOEXEC);
};

TEST_F(OfiHangUp, EndsTheConnectionToThatPeerAndNoOther) {
  EXPECT_EQ(HangUp(outer_, a_.address), 1u);
  char byte = 0;
  EXPECT_EQ(recv(a_.here, &byte, 1, 0), 0) << "so libfabric finds the end without waiting";
  EXPECT_EQ(send(b_.there, "x", 1, 0), 1);
  EXPECT_EQ(recv(b_.here, &byte, 1, 0), 1);
}

// Bytes that are unsent when the socket is closed must not be sent later.
TEST_F(OfiHangUp, WhatWasNotSentIsDropped) {
  std::string much(64 << 20, 'x');
  ASSERT_GT(send(a_.here, much.data(), much.size(), MSG_DONTWAIT), 0);  // as much as the buffers take
  EXPECT_EQ(HangUp(outer_, a_.address), 1u);
  close(a_.here);
  a_.here = -1;
  ssize_t got = 0;
  while ((got = recv(a_.there, much.data(), much.size(), 0)) > 0) {
  }
  EXPECT_EQ(got, -1) << "it ended in good order, after everything had been delivered";
  EXPECT_EQ(errno, ECONNRESET);
}

// Unread bytes that have arrived are lost, and so are later ones. Other connections are not affected.
TEST_F(OfiHangUp, CutDiscardsWhatHasArrived) {
  ASSERT_EQ(send(a_.there, "late", 4, 0), 4);
  ASSERT_EQ(send(b_.there, "x", 1, 0), 1);
  char bytes[8];
  ASSERT_EQ(recv(a_.here, bytes, sizeof bytes, MSG_PEEK), 4);
  const std::string a = ToText(a_.address);
  EXPECT_EQ(Cut(outer_, [&](const std::string& peer) { return peer == a; }), 1u);
  EXPECT_LE(recv(a_.here, bytes, sizeof bytes, MSG_DONTWAIT), 0);
  (void)send(a_.there, "later", 5, MSG_NOSIGNAL);
  EXPECT_LE(recv(a_.here, bytes, sizeof bytes, MSG_DONTWAIT), 0);
  EXPECT_EQ(recv(b_.here, bytes, sizeof bytes, 0), 1);
}

// After a reset the kernel no longer knows the peer's address, but bytes that have arrived can still be read.
TEST_F(OfiHangUp, WhatWasResetCountsAndIsDiscarded) {
  ASSERT_EQ(send(a_.there, "late", 4, 0), 4);
  Reset(a_.here, a_.there);
  EXPECT_EQ(HangUp(outer_, a_.address), 1u);
  EXPECT_EQ(Cut(outer_, [](const std::string&) { return false; }), 1u);
  char byte = 0;
  EXPECT_LE(recv(a_.here, &byte, 1, MSG_DONTWAIT), 0);
  EXPECT_EQ(send(b_.there, "x", 1, 0), 1);
  EXPECT_EQ(recv(b_.here, &byte, 1, 0), 1);
}

TEST_F(OfiHangUp, TellsThisEndOfAConnection) {
  EXPECT_TRUE(CanFindConnections());
  IpAddress here;
  here.length = sizeof here.storage;
  ASSERT_EQ(getsockname(b_.here, here.get(), &here.length), 0);
  EXPECT_EQ(SourceTo(outer_, b_.address), ToText(here));
  Connection other;
  EXPECT_EQ(SourceTo(outer_, other.address), "");
}

TEST_F(OfiHangUp, FindsNothingWhereThereIsNothing) {
  const IpAddress none;
  EXPECT_EQ(HangUp(outer_, none), 0u);
  EXPECT_EQ(HangUp(-1, a_.address), 0u);
  EXPECT_EQ(HangUp(b_.there, a_.address), 0u) << "a socket waits for nothing";
  Connection other;
  EXPECT_EQ(HangUp(outer_, other.address), 0u);
}

// `a` has read the beginning of an answer. More has arrived, and the end is not sent yet.
class OfiAnswerOnTheWay : public testing::Test {
 protected:
  static constexpr uint64_t kBytes = 64 << 20;  // more than the kernel takes
  static constexpr const char *kA = "127.0.0.31", *kB = "127.0.0.41";

  explicit OfiAnswerOnTheWay(bool shared_endpoint = false)
      : a_(Make(kA, shared_endpoint), kBytes), b_(Make(kB, shared_endpoint), kBytes) {}
  static Result<std::unique_ptr<Transport>> Make(const char* address, bool shared_endpoint) {
    return CreateOfiTransport(
        {.listen_address = address, .operation_bytes = kBytes, .shared_endpoint = shared_endpoint});
  }
  void SetUp() override {
    a_.Meet(b_);
    ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 1, 0).ok());
    ASSERT_TRUE(Drive(1));
    done_.clear();
    ASSERT_TRUE(a_.transport->Get(a_.peer, a_.region, 0, a_.remote, 0, kBytes, 1).ok());
    for (int i = 0; i < 4; i++)
      for (const test::Endpoint* side : {&a_, &b_}) Poll(*side);
    Poll(b_);
    ASSERT_TRUE(done_.empty());
  }
  void Poll(const test::Endpoint& side) {
    Completion completion;
    ASSERT_EQ(side.transport->Poll(&completion, 1), 0u);
  }
  bool Drive(size_t count) {
    return test::PollUntil(nullptr, {a_.transport.get(), b_.transport.get()}, &done_,
                           [&] { return done_[a_.transport.get()].size() >= count; });
  }
  void ExpectGivenBack() {
    ASSERT_TRUE(Drive(2));
    const auto& done = done_[a_.transport.get()];
    ASSERT_EQ(done.size(), 2u);
    EXPECT_EQ(done[0].context, 1u);
    EXPECT_EQ(done[0].code, Code::kPeerGone);
    EXPECT_EQ(done[1].kind, OperationKind::kDisconnect);
  }
  // The socket at `own` of the connection that carries the answer.
  static int Socket(const char* own, const char* other) {
    for (int fd = 0; fd < 1024; fd++) {
      sockaddr_in here{}, there{};
      socklen_t length = sizeof here;
      if (getsockname(fd, reinterpret_cast<sockaddr*>(&here), &length) != 0) continue;
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&there), &length) != 0) continue;
      if (here.sin_addr.s_addr == inet_addr(own) && there.sin_addr.s_addr == inet_addr(other)) return fd;
    }
    return -1;
  }

  test::Endpoint a_, b_;
  test::Completions done_;
};

// As on a busy machine: the thread's whole waiting time passes before it has read anything.
TEST_F(OfiAnswerOnTheWay, AThreadThatDoesNotRunForLongClosesNothingTooEarly) {
  pause_us = 100'000;
  a_.transport->Disconnect(a_.peer);
  EXPECT_EQ(pause_us, 0u);
  ExpectGivenBack();
}

// As when the peer's process is killed: the kernel knows it, libfabric does not yet.
TEST_F(OfiAnswerOnTheWay, ThePeerResetsTheConnection) {
  Reset(Socket(kA, kB), Socket(kB, kA));
  a_.transport->Disconnect(a_.peer);
  ExpectGivenBack();
}

TEST_F(OfiAnswerOnTheWay, TheTransportEnds) {
  a_.transport.reset();
  Poll(b_);
}

class OfiAnswerOnTheWayShared : public OfiAnswerOnTheWay {
 protected:
  OfiAnswerOnTheWayShared() : OfiAnswerOnTheWay(/*shared_endpoint=*/true) {}
};

TEST_F(OfiAnswerOnTheWayShared, TheTransportEnds) {
  a_.transport.reset();
  Poll(b_);
}

}  // namespace
}  // namespace ropeteam::ofi
