// SPDX-License-Identifier: Apache-2.0
//
// Ending the connections to one peer from below libfabric, with sockets that lie as its own do: waited for by
// an epoll descriptor that another one waits for.
#include "transport/ofi/hang_up.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <string>

namespace ropeteam::ofi {
namespace {

// A connection over loopback to a listener of its own.
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
  IpAddress address;  // where it leads, seen from `here`
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

// What has not been sent when the socket is closed must not be sent later.
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

// What has arrived and was not read yet is lost, and so is what comes later; others are left alone.
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

}  // namespace
}  // namespace ropeteam::ofi
