// SPDX-License-Identifier: Apache-2.0
//
// A rail of ofi fails while others work. Two nodes of this process have a rail on each of two loopback
// addresses. To simulate the death of a card, a test shuts down one node's sockets on one address:
// connections break, and nothing listens there any more.

#include <arpa/inet.h>
#include <dirent.h>
#include <gmock/gmock.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdlib>
#include <map>
#include <mutex>

#include "core/base/log.h"
#include "tests/transport/rig.h"
#include "transport/ofi/ofi_transport.h"

namespace ropeteam::test {
namespace {

using testing::AllOf;
using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

constexpr uint32_t kSource = 1, kTarget = 2;
constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kOperations = 12, kOperationBytes = 4 * kMiB;

enum class What { kAll, kConnections };

// Shuts down this process's sockets with the local address `address`; returns their number.
size_t Shut(const char* address, What what) {
  std::vector<int> fds;
  DIR* directory = opendir("/proc/self/fd");
  while (const dirent* entry = readdir(directory)) fds.push_back(atoi(entry->d_name));
  closedir(directory);
  size_t count = 0;
  for (const int fd : fds) {
    sockaddr_in own{};
    socklen_t length = sizeof own;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &length) != 0 || own.sin_family != AF_INET)
      continue;
    int listens = 0;
    length = sizeof listens;
    getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length);
    if (own.sin_addr.s_addr != inet_addr(address) || (what == What::kConnections && listens != 0)) continue;
    if (shutdown(fd, SHUT_RDWR) == 0) count++;
  }
  return count;
}

class OfiRailFailure : public testing::Test {
 protected:
  void SetUp() override {
    SetLogSink(
        [this](LogLevel, std::string_view message) {
          std::lock_guard lock(log_mutex_);
          log_.emplace_back(message);
        },
        LogLevel::kWarning);
    a_ = CreateOfiTransport({.listen_address = "127.0.0.11,127.0.0.12"}).value();
    b_ = CreateOfiTransport({.listen_address = "127.0.0.21,127.0.0.22"}).value();
    source_.Fill(kSource);
    target_.Fill(kTarget);
    region_ = a_->RegisterRegion(source_.data(), source_.length()).value();
    const RegionId served = b_->RegisterRegion(target_.data(), target_.length()).value();
    peer_ = a_->Connect(b_->LocalAddress()).value();
    remote_ = a_->ImportRegion(peer_, b_->ExportRegion(served)).value();
    // Both rails are connected.
    for (int i = 0; i < 4; i++)
      ASSERT_TRUE(a_->Put(peer_, region_, 0, remote_, 0, source_.length(), UINT64_MAX).ok());
    ASSERT_TRUE(Drive([&] { return done().size() == 4; }));
    ASSERT_THAT(done(), Each(testing::Field(&Completion::code, Code::kOk)));
    target_.Fill(kTarget);
    completions_.clear();
  }
  void TearDown() override {
    a_.reset();
    b_.reset();
    SetLogSink(nullptr, LogLevel::kWarning);
  }
  bool Drive(const std::function<bool()>& until) {
    return PollUntil(nullptr, {a_.get(), b_.get()}, &completions_, until);
  }
  std::vector<Completion>& done() { return completions_[a_.get()]; }
  // Starts puts and gets in alternation. The target makes no progress meanwhile, so all stay outstanding.
  void StartWork() {
    for (uint64_t i = 0; i < kOperations; i++) {
      const uint64_t at = i * kOperationBytes;
      const Status started = i % 2 == 0 ? a_->Put(peer_, region_, at, remote_, at, kOperationBytes, i)
                                        : a_->Get(peer_, region_, at, remote_, at, kOperationBytes, i);
      ASSERT_TRUE(started.ok()) << started.ToString();
    }
    Completion completion;
    for (int i = 0; i < 100; i++) ASSERT_EQ(a_->Poll(&completion, 1), 0u);
  }
  // Checks that each of StartWork()'s operations has completed once, with `code`.
  void ExpectEachOnce(Code code) {
    std::map<uint64_t, int> times;
    for (const Completion& completion : done()) {
      if (completion.kind == OperationKind::kDisconnect) continue;
      times[completion.context]++;
      EXPECT_EQ(completion.code, code) << CodeName(completion.code) << " of " << completion.context;
    }
    EXPECT_EQ(times.size(), kOperations);
    for (const auto& [context, count] : times) EXPECT_EQ(count, 1) << context;
  }
  // Checks that each has completed once: puts that had begun with kLinkFailed, all others with their bytes.
  void ExpectGetsDoneAndPutsInTheAirFailed() {
    std::map<uint64_t, int> times;
    int failed = 0;
    for (const Completion& completion : done()) {
      const uint64_t i = completion.context;
      const uint64_t at = i * kOperationBytes;
      times[i]++;
      if (i % 2 == 0 && completion.code == Code::kLinkFailed) {
        failed++;
        continue;
      }
      EXPECT_EQ(completion.code, Code::kOk) << CodeName(completion.code) << " of " << i;
      EXPECT_TRUE(i % 2 == 0 ? target_.Holds(kSource, at, kOperationBytes, at)
                             : source_.Holds(kTarget, at, kOperationBytes, at))
          << i;
    }
    EXPECT_EQ(times.size(), kOperations);
    for (const auto& [context, count] : times) EXPECT_EQ(count, 1) << context;
    EXPECT_GT(failed, 0);
    EXPECT_EQ(a_->counters().failures, static_cast<uint64_t>(failed));
  }
  std::vector<std::string> Logged() {
    std::lock_guard lock(log_mutex_);
    return log_;
  }

  std::mutex log_mutex_;
  std::vector<std::string> log_;
  Memory source_{kOperations * kOperationBytes}, target_{kOperations * kOperationBytes};
  std::unique_ptr<Transport> a_, b_;
  RegionId region_ = 0;
  PeerId peer_ = 0;
  RemoteRegionId remote_ = 0;
  Completions completions_;
};

// No put is repeated, because no peer can confirm that no more bytes of it will arrive.
TEST_F(OfiRailFailure, ItsGetsAreRedoneOnTheOthersItsPutsEndAndTheLogSaysWhichAndWhy) {
  StartWork();
  ASSERT_GT(Shut("127.0.0.22", What::kAll), 1u);
  ASSERT_TRUE(Drive([&] { return done().size() >= kOperations; }));
  ExpectGetsDoneAndPutsInTheAirFailed();
  EXPECT_THAT(Logged(), Contains(AllOf(HasSubstr("left out rail tcp;ofi_rxm on lo 127.0.0.12:"),
                                       HasSubstr("no answer"))));
  EXPECT_THAT(Logged(), Each(Not(HasSubstr("no rail reaches it"))));
  // The remaining rail works alone, and nothing completes a second time.
  ASSERT_TRUE(a_->Put(peer_, region_, 0, remote_, 0, 3 * kMiB, 99).ok());
  ASSERT_TRUE(Drive([&] { return done().back().context == 99; }));
  EXPECT_EQ(done().back().code, Code::kOk);
  EXPECT_EQ(done().size(), kOperations + 1);
}

TEST_F(OfiRailFailure, WithTheLastRailThePeerIsGone) {
  ASSERT_GT(Shut("127.0.0.22", What::kAll), 1u);
  ASSERT_TRUE(a_->Get(peer_, region_, 0, remote_, 0, 16 * kMiB, 99).ok());
  ASSERT_TRUE(Drive([&] { return !done().empty(); }));
  EXPECT_EQ(done()[0].code, Code::kOk);
  completions_.clear();
  StartWork();
  ASSERT_GT(Shut("127.0.0.21", What::kAll), 1u);
  ASSERT_TRUE(Drive([&] { return done().size() >= kOperations; }));
  ExpectEachOnce(Code::kPeerGone);
  EXPECT_THAT(Logged(), Contains(HasSubstr("gone: no rail reaches it")));
  completions_.clear();
  ASSERT_TRUE(a_->Put(peer_, region_, 0, remote_, 0, 1, 7).ok());
  a_->Disconnect(peer_);
  ASSERT_TRUE(Drive([&] { return done().size() == 2; }));
  EXPECT_EQ(done()[0].code, Code::kPeerGone);
  EXPECT_EQ(done()[1].kind, OperationKind::kDisconnect);
}

TEST_F(OfiRailFailure, WithBothAtOnceThePeerIsGoneAndNothingIsRedone) {
  StartWork();
  ASSERT_GT(Shut("127.0.0.21", What::kAll), 1u);
  ASSERT_GT(Shut("127.0.0.22", What::kAll), 1u);
  ASSERT_TRUE(Drive([&] { return done().size() >= kOperations; }));
  ExpectEachOnce(Code::kPeerGone);
}

// Only the connection is broken; the card works.
TEST_F(OfiRailFailure, ABrokenConnectionCostsNoGetAndNoRail) {
  StartWork();
  ASSERT_GT(Shut("127.0.0.22", What::kConnections), 0u);
  ASSERT_TRUE(Drive([&] { return done().size() >= kOperations; }));
  ExpectGetsDoneAndPutsInTheAirFailed();
  EXPECT_THAT(Logged(), Contains(HasSubstr("link failed and was re-established")));
  EXPECT_THAT(Logged(), Each(Not(HasSubstr("left out rail"))));
}

TEST_F(OfiRailFailure, DisconnectingMeanwhileGivesEverythingBackOnce) {
  StartWork();
  ASSERT_GT(Shut("127.0.0.22", What::kAll), 1u);
  Completion completion;
  for (int i = 0; i < 3; i++)
    ASSERT_EQ(a_->Poll(&completion, 1), 0u);  // it has noticed the failure and is checking the rail
  a_->Disconnect(peer_);
  ASSERT_TRUE(Drive([&] { return done().size() >= kOperations + 1; }));
  ExpectEachOnce(Code::kPeerGone);
  EXPECT_EQ(done().back().kind, OperationKind::kDisconnect);
}

}  // namespace
}  // namespace ropeteam::test
