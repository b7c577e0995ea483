// SPDX-License-Identifier: Apache-2.0
#include "membership/standalone/acceptor.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <thread>
#include <utility>

#include "core/base/log.h"
#include "tests/membership/standalone_cluster.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::chrono::seconds kGiveUp(20);

// A server that keeps each connection, and its clients.
class AcceptorTest : public ::testing::Test {
 protected:
  AcceptorTest() {
    SetLogSink(
        [this](LogLevel, std::string_view line) {
          const std::lock_guard lock(mutex_);
          log_ += std::string(line) + "\n";
        },
        LogLevel::kWarning);
  }
  ~AcceptorTest() override {
    acceptor_.reset();
    SetLogSink(nullptr, LogLevel::kWarning);
    for (const int fd : clients_) close(fd);
    for (const int fd : taken_)
      if (fd >= 0) close(fd);
  }
  void Listen(StrangerLimits limits, const std::string& host = OwnHost()) {
    Result<std::unique_ptr<Acceptor>> acceptor = Acceptor::Listen(host + ":0", limits);
    ASSERT_TRUE(acceptor.ok()) << acceptor.status().ToString();
    acceptor_ = std::move(*acceptor);
    acceptor_->Start([this](int connection) {
      const std::lock_guard lock(mutex_);
      taken_.push_back(connection);
      changed_.notify_all();
    });
  }
  // From `host`; returns the client's number.
  size_t Connect(const std::string& host = OwnHost()) {
    clients_.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ConnectAs(clients_.size() - 1, host);
    return clients_.size() - 1;
  }
  void ConnectAs(size_t client, const std::string& host = OwnHost()) {
    const sockaddr_in from = Address(host, 0), to = Address(OwnHost(), acceptor_->port());
    ASSERT_EQ(bind(clients_[client], reinterpret_cast<const sockaddr*>(&from), sizeof from), 0);
    ASSERT_EQ(connect(clients_[client], reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
  }
  // Connects, and waits until the server has the connection.
  size_t Enter(const std::string& host = OwnHost()) {
    const size_t before = taken();
    const size_t client = Connect(host);
    EXPECT_TRUE(WaitForTaken(before + 1));
    return client;
  }
  bool WaitForTaken(size_t count) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kGiveUp, [&] { return taken_.size() >= count; });
  }
  size_t taken() {
    const std::lock_guard lock(mutex_);
    return taken_.size();
  }
  std::string log() {
    const std::lock_guard lock(mutex_);
    return log_;
  }
  // The server closes it, as after a failed handshake.
  void CloseTaken(size_t client) {
    const std::lock_guard lock(mutex_);
    close(std::exchange(taken_[client], -1));
  }
  static bool Eventually(const std::function<bool()>& condition) {
    const auto until = std::chrono::steady_clock::now() + kGiveUp;
    while (!condition() && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return condition();
  }
  // The client's address as gRPC writes it.
  std::string PeerOf(size_t client) {
    sockaddr_in own = {};
    socklen_t length = sizeof own;
    getsockname(clients_[client], reinterpret_cast<sockaddr*>(&own), &length);
    char host[INET_ADDRSTRLEN] = "";
    inet_ntop(AF_INET, &own.sin_addr, host, sizeof host);
    return "ipv4:" + std::string(host) + ":" + std::to_string(ntohs(own.sin_port));
  }
  // Whether the other end has closed the connection. `wait`: it should do so soon.
  bool Closed(size_t client, bool wait) {
    pollfd polled{clients_[client], POLLIN, 0};
    char byte = 0;
    return poll(&polled, 1, wait ? 20'000 : 0) == 1 && recv(clients_[client], &byte, 1, MSG_DONTWAIT) <= 0;
  }

  static sockaddr_in Address(const std::string& host, uint16_t port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    inet_pton(AF_INET, host.c_str(), &address.sin_addr);
    return address;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<int> taken_;
  std::string log_;
  std::vector<int> clients_;
  std::unique_ptr<Acceptor> acceptor_;
};

TEST_F(AcceptorTest, TheOldestStrangerOfAnAddressMakesRoom) {
  Listen({.of_address = 2});
  const size_t other = Enter(OwnHost(2));
  const size_t a = Enter(), b = Enter();
  const size_t c = Enter();
  EXPECT_TRUE(Closed(a, true));
  for (const size_t open : {other, b, c}) EXPECT_FALSE(Closed(open, false));
  EXPECT_THAT(log(), HasSubstr("port " + acceptor_->address() + ": 2 connections of " + OwnHost() +
                               " have not authenticated, the oldest is closed"));
}

TEST_F(AcceptorTest, OneThatIsAdmittedDoesNotCount) {
  Listen({.of_address = 2});
  const size_t admitted = Enter();
  acceptor_->Admit(PeerOf(admitted));
  const size_t a = Enter(), b = Enter();
  EXPECT_FALSE(Closed(a, false));
  const size_t c = Enter();
  EXPECT_TRUE(Closed(a, true));
  for (const size_t open : {admitted, b, c}) EXPECT_FALSE(Closed(open, false));
}

TEST_F(AcceptorTest, AnAddressOfVersion6IsAdmittedAsGrpcWritesIt) {
  if (!CheckListen("[::1]:0").ok()) GTEST_SKIP() << "this machine has no ::1";
  Listen({.of_address = 1}, "[::1]");
  sockaddr_in6 to = {}, own = {};
  to.sin6_family = AF_INET6;
  to.sin6_addr = in6addr_loopback;
  to.sin6_port = htons(acceptor_->port());
  socklen_t length = sizeof own;
  for (size_t i = 0; i < 2; i++) {
    clients_.push_back(socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    ASSERT_EQ(connect(clients_[i], reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
    ASSERT_TRUE(WaitForTaken(i + 1));
    getsockname(clients_[i], reinterpret_cast<sockaddr*>(&own), &length);
    if (i == 0) acceptor_->Admit("ipv6:%5B::1%5D:" + std::to_string(ntohs(own.sin6_port)));
  }
  EXPECT_FALSE(Closed(0, false));
}

TEST_F(AcceptorTest, OneThatTheServerHasClosedDoesNotCount) {
  Listen({.of_address = 2});
  Enter();
  const size_t b = Enter();
  close(std::exchange(taken_[0], -1));
  Enter();
  EXPECT_FALSE(Closed(b, false));
}

TEST_F(AcceptorTest, TheOldestOfAllMakesRoomAtTheTotal) {
  Listen({.of_address = 8, .total = 2});
  const size_t a = Enter(OwnHost(2)), b = Enter(OwnHost(3)), c = Enter(OwnHost(4));
  EXPECT_TRUE(Closed(a, true));
  for (const size_t open : {b, c}) EXPECT_FALSE(Closed(open, false));
  EXPECT_THAT(log(), HasSubstr("2 connections in all have not authenticated, the oldest is closed"));
}

TEST_F(AcceptorTest, ADescriptorThatIsAnotherConnectionNowStaysOpen) {
  Listen({.of_address = 8, .total = 1});
  Enter(OwnHost(2));
  close(taken_[0]);
  int pair[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
  ASSERT_EQ(pair[0], taken_[0]) << "the lowest that is free";
  clients_.push_back(pair[1]);
  Enter();  // makes room for itself
  EXPECT_EQ(send(pair[0], "x", 1, MSG_NOSIGNAL), 1);
  EXPECT_FALSE(Closed(1, true));
  EXPECT_THAT(log(), Not(HasSubstr("the oldest is closed")));
}

TEST_F(AcceptorTest, ItHearsAgainAfterThereWasNoDescriptorLeft) {
  Listen({});
  const size_t before = Enter();
  for (int i = 0; i < 20; i++) clients_.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit low{256, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  std::vector<int> fill;
  for (int fd = 0; (fd = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0;) fill.push_back(fd);
  EXPECT_EQ(errno, EMFILE);
  for (size_t client = 1; client <= 20; client++) ConnectAs(client);
  for (size_t client = 1; client <= 20; client++) ASSERT_TRUE(Closed(client, true)) << client;
  EXPECT_TRUE(Closed(before, true)) << "a stranger is closed, too: then the server closes its descriptor";
  EXPECT_EQ(taken(), 1u);
  EXPECT_THAT(
      log(),
      HasSubstr(
          "no descriptor is left for a connection (accept: Too many open files (24); RLIMIT_NOFILE 256)"));
  for (const int fd : fill) close(fd);
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_FALSE(Closed(Enter(), false));
}

TEST_F(AcceptorTest, StrangersMayTakeAPartOfTheDescriptorsAtMost) {
  rlimit limit = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const rlimit low{64, limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  Listen({});
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  for (size_t i = 0; i < 64 / kStrangersPart; i++) Enter();
  EXPECT_FALSE(Closed(0, false));
  Enter();
  EXPECT_TRUE(Closed(0, true));
}

TEST_F(AcceptorTest, AConnectionThatIsClosedBeforeItIsAdmittedIsCountedAndLogged) {
  const uint64_t before = Acceptor::Unauthenticated();
  Listen({});
  const size_t admitted = Enter(), refused = Enter();
  acceptor_->Admit(PeerOf(admitted));
  CloseTaken(admitted);
  CloseTaken(refused);
  EXPECT_TRUE(Eventually([&] { return Acceptor::Unauthenticated() == before + 1; }));
  EXPECT_THAT(log(),
              HasSubstr("a connection of " + OwnHost() + " ended before it had authenticated, 1 so far"));
  // The next one is found without waiting, when a connection comes.
  CloseTaken(Enter());
  Enter();
  EXPECT_TRUE(Eventually([&] { return Acceptor::Unauthenticated() == before + 2; }));
}

TEST_F(AcceptorTest, StopClosesThePortAndTheStrangers) {
  Listen({});
  const size_t admitted = Enter(), stranger = Enter();
  acceptor_->Admit(PeerOf(admitted));
  acceptor_->Stop();
  acceptor_->Stop();
  EXPECT_TRUE(Closed(stranger, true));
  EXPECT_FALSE(Closed(admitted, false));
  const sockaddr_in to = Address(OwnHost(), acceptor_->port());
  clients_.push_back(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_NE(connect(clients_.back(), reinterpret_cast<const sockaddr*>(&to), sizeof to), 0);
}

TEST_F(AcceptorTest, SaysWhyItCannotListen) {
  Listen({});
  const auto why = [](const std::string& address) { return Acceptor::Listen(address).status().ToString(); };
  const std::string taken = OwnHost() + ":" + std::to_string(acceptor_->port());
  EXPECT_THAT(why(taken), HasSubstr("listen on " + taken + ": Address already in use"));
  EXPECT_THAT(why("192.0.2.1:0"), HasSubstr("listen on 192.0.2.1:0: Cannot assign requested address"));
  EXPECT_THAT(why("nowhere"), HasSubstr("address \"nowhere\" is not host:port"));
  EXPECT_TRUE(IsOwnAddress(taken));
  EXPECT_FALSE(IsOwnAddress("192.0.2.1:1"));
}

}  // namespace
}  // namespace ropeteam
