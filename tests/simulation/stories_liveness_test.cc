// SPDX-License-Identifier: Apache-2.0
//
// Failure stories about liveness: what must work again after the faults have ended.
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

class GoesOn : public Story {
 protected:
  // Whether a step that all ranks of the launch save is committed within this many attempts, one per second.
  bool CommitsAgain(uint64_t launch, Step step, int attempts = 40) {
    for (int attempt = 0; attempt < attempts; ++attempt, ++step) {
      bool saved = true;
      for (const Rank rank : RanksOf(launch)) {
        const Status status = Save(launch, step, rank);
        if (!status.ok()) {
          saved = false;
          last_ = status.ToString();
        }
      }
      if (!saved) {
        cluster_->RunFor(1 * kSecond);
        continue;
      }
      const Status waited = Wait(launch, step, 0, Level::kCommitted, 1 * kSecond);
      if (waited.ok()) return true;
      last_ = waited.ToString();
    }
    return false;
  }
  // Cuts these hosts off from the others and from both coordinators, in both directions.
  void CutOff(const std::vector<size_t>& hosts) {
    Isolate(hosts, false, 60 * kSecond);
    for (const size_t host : hosts) {
      cluster_->network().Cut(host, kSecondCoordinatorHost, cluster_->now() + 60 * kSecond);
      cluster_->network().Cut(kSecondCoordinatorHost, host, cluster_->now() + 60 * kSecond);
    }
  }
  // Tells all daemons the coordinator's new address until all are registered: a refused daemon starts again
  // and needs it again.
  void AllFollow() {
    for (int i = 0; i < 40 && !cluster_->AllInOneView(); ++i) {
      for (size_t host = 0; host < cluster_->host_count(); ++host)
        cluster_->membership().TellMoved(cluster_->host(host).id);
      cluster_->RunFor(250 * kMs);
    }
    AwaitOneView();
  }
  std::string Held() const {
    std::string text = last_;
    for (size_t host = 0; host < cluster_->host_count(); ++host) {
      if (!cluster_->host(host).daemon_runs()) continue;
      text += "\nhost " + std::to_string(host) + " free " + std::to_string(FreeChunks(host));
      for (const auto& [id, shard] : cluster_->host(host).store->shards())
        text += "\n   " + id.ToString() + " role " + std::to_string(static_cast<int>(shard->role)) +
                (shard->committed ? " committed" : "");
    }
    return text;
  }
  std::string last_;
};

// The arenas have the memory of promise 8. A daemon is away for so long that its copies are made again on
// other nodes, and comes back with its own.
TEST_F(GoesOn, ADaemonComesBackAfterItsCopiesWereMadeAgain) {
  lengths_ = {4096};
  StartNodes(3, 1, 12);
  StartWorld(1);
  for (Step step = 1; step <= 4; ++step) ASSERT_TRUE(CommitsAgain(1, 10 * step, 5)) << Held();
  cluster_->CrashDaemon(2);
  cluster_->RunFor(20 * kSecond);
  cluster_->StartDaemon(2);
  AwaitOneView();
  cluster_->RunFor(1 * kSecond);
  ASSERT_TRUE(Hello(1, 2).ok());
  EXPECT_TRUE(CommitsAgain(1, 100)) << Held();
}

// The same, and the launcher restarts all ranks.
TEST_F(GoesOn, ADaemonComesBackAndTheWorldIsRestarted) {
  lengths_ = {4096};
  StartNodes(3, 1, 12);
  StartWorld(1);
  for (Step step = 1; step <= 4; ++step) ASSERT_TRUE(CommitsAgain(1, 10 * step, 5)) << Held();
  StopWorld(1);
  cluster_->CrashDaemon(2);
  cluster_->RunFor(20 * kSecond);
  cluster_->StartDaemon(2);
  AwaitOneView();
  StartWorld(2);
  for (Rank rank = 0; rank < 3; ++rank) LatestStep(2, rank);
  EXPECT_TRUE(CommitsAgain(2, 100)) << Held();
}

// The ranks are restarted on other nodes, and each reads its shard there. The arenas are as docs/recovery.md
// advises: the 12 chunks of promise 8, and a third more.
TEST_F(GoesOn, RanksChangeNodesAndRestore) {
  lengths_ = {4096};
  StartNodes(4, 1, 16);
  StartWorld(1);
  for (Step step = 1; step <= 4; ++step) ASSERT_TRUE(CommitsAgain(1, 10 * step, 5)) << Held();
  const Step latest = LatestStep(1, 0);
  StopWorld(1);
  StartWorld(2, {2, 3, 1, 0});
  RestoreEverywhere(2, latest);
  EXPECT_TRUE(CommitsAgain(2, 100)) << Held();
  StopWorld(2);
  StartWorld(3, {1, 0, 3, 2});
  for (Rank rank = 0; rank < 4; ++rank) {
    const Step now = LatestStep(3, rank);
    EXPECT_TRUE(Read(3, rank, now, rank).ok()) << Held();
  }
  EXPECT_TRUE(CommitsAgain(3, 200)) << Held();
}

// A node gets a copy of a rank whose incarnation it does not know, and the nodes that know it are lost. A
// rank of the previous incarnation asks for `latest`. It is told that its incarnation is over.
TEST_F(GoesOn, AHolderThatHasNotHeardOfAnIncarnationHasAStepOfIt) {
  StartNodes(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {3});
  const TimeUs long_after = cluster_->now() + 60 * kSecond;
  for (const size_t other : {size_t{1}, size_t{3}}) cluster_->network().Cut(0, other, long_after);
  AddRank(2, 0, 1, 2);
  ASSERT_TRUE(Hello(2, 0).ok()) << Trouble();
  ASSERT_TRUE(Save(2, 1, 0).ok()) << Trouble();
  ASSERT_TRUE(Until([&] { return Holds(3, ShardOf(2, 1, 0)); })) << Trouble();
  LoseHost(0);
  LoseHost(2);
  cluster_->network().HealLinks();
  cluster_->RunFor(5 * kSecond);
  const Status asked = AskLatest(1, 0, 5 * kSecond);
  EXPECT_EQ(asked.code(), Code::kStale) << asked.ToString();
  cluster_->StartHost(0);
  cluster_->StartHost(2);
}

// The coordinator moves while half of the hosts are cut off. The others find it. The cut ones come later, are
// refused, and join again with their copies.
TEST_F(GoesOn, TheCoordinatorMovesWhileMembersAreCutOff) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 10);
  CutOff({2, 3});
  cluster_->membership().MoveCoordinator();
  for (const size_t host : {0, 1}) cluster_->membership().TellMoved(cluster_->host(host).id);
  ASSERT_TRUE(Until([&] {
    return cluster_->host(0).view.members.size() == 2 && cluster_->host(1).view.members.size() == 2;
  })) << Trouble();
  StopWorld(1);
  cluster_->network().HealLinks();
  cluster_->RunFor(2 * kSecond);
  AllFollow();
  StartWorld(2);
  RestoreEverywhere(2, 10);
  EXPECT_TRUE(CommitsAgain(2, 20)) << Held();
}

// A holder leaves while its source repairs a chunk. The copy that it took with it is made again when the chunk is
// repaired.
TEST_F(Story, ACopyThatIsLostDuringARepairIsMadeAgain) {
  lengths_ = {2 * 4096};
  StartNodes(5, 2);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {1, 4});
  ASSERT_TRUE(Save(1, 1, 0).ok());
  ASSERT_TRUE(Wait(1, 1, 0, Level::kReplicated).ok());
  const std::vector<size_t> holders = HoldersBeside(1, ShardOf(1, 1, 0));
  ASSERT_EQ(holders, (std::vector<size_t>{2, 3}));
  ASSERT_TRUE(cluster_->FlipBit(1, ShardOf(1, 1, 0), 0));
  for (const size_t holder : holders) cluster_->network().Clog(holder, 1, cluster_->now() + 60 * kSecond);
  RankOf(1, 0).Read(1, 0, 20 * kSecond, 0, [](const Status&, const ShardMeta&) {});
  ASSERT_TRUE(Until([&] { return !cluster_->host(1).store->Find(ShardOf(1, 1, 0))->bad.empty(); }));
  LoseHost(2);
  ASSERT_TRUE(Until([&] { return cluster_->host(1).view.members.size() == 4; })) << Trouble();
  cluster_->network().HealLinks();
  ASSERT_TRUE(Save(1, 1, 1).ok());
  for (const Rank rank : {0u, 1u}) EXPECT_TRUE(Wait(1, 1, rank, Level::kCommitted).ok()) << Trouble();
}

}  // namespace
}  // namespace ropeteam::simulation
