// SPDX-License-Identifier: Apache-2.0
//
// Stories of nodes that are drained, and of nodes that join.
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

class Leaving : public Story {
 protected:
  void Start(uint32_t nodes, uint32_t replicas = 1, uint64_t chunks = 128) {
    StartNodes(nodes, replicas, chunks);
    cluster_->on_drained = [this](size_t host, const DrainReport& report) {
      left_[host] = report;
      cluster_->scheduler().After(5 * kMs, [this, host] { cluster_->CrashDaemon(host); });
    };
  }
  bool HasLeft(size_t host) const { return left_.contains(host) && !cluster_->host(host).daemon_runs(); }
  // Drains these hosts at once, and waits until they are gone.
  void Drain(const std::vector<size_t>& hosts, TimeUs within = 30 * kSecond) {
    for (const size_t host : hosts) cluster_->Drain(host, within);
    for (const size_t host : hosts)
      ASSERT_TRUE(Until([&] { return HasLeft(host); }, within + kSecond)) << Trouble();
  }
  void ExpectAllElsewhere(size_t host) {
    EXPECT_TRUE(left_[host].done && left_[host].latest_safe) << Trouble();
    EXPECT_EQ(left_[host].shards_left + left_[host].shards_short, 0u) << Trouble();
  }
  void Replace(const std::vector<size_t>& hosts) {
    for (const size_t host : hosts) LoseHost(host);
    for (const size_t host : hosts) cluster_->StartHost(host);
    AwaitOneView();
  }
  std::map<size_t, DrainReport> left_;
};

// Its own shard, and the one that it holds for its neighbour, get a second copy on nodes that stay. So its
// memory and that of another node may be lost.
TEST_F(Leaving, EverythingIsRedundantBeforeANodeLeaves) {
  Start(4);
  StartWorld(1);
  SaveEverywhere(1, 10);
  SaveEverywhere(1, 20);
  const TimeUs before = cluster_->now();
  Drain({1});
  EXPECT_LT(cluster_->now() - before, 2 * kSecond);
  ExpectAllElsewhere(1);
  for (const Step step : {10, 20})
    for (Rank rank = 0; rank < 4; ++rank)
      EXPECT_GE(HoldersBeside(1, ShardOf(1, step, rank)).size(), 2u) << step << " rank " << rank;
  Replace({1, 0});
  StartWorld(2);
  RestoreEverywhere(2, 20);
}

TEST_F(Leaving, NoSaveBeginsOnItAndTheOthersGoOn) {
  Start(4);
  StartWorld(1, {0, 1, 3});  // host 2 has no rank
  SaveEverywhere(1, 10);
  cluster_->Drain(2, 30 * kSecond);
  cluster_->RunFor(1 * kMs);
  SaveEverywhere(1, 20);
  ASSERT_TRUE(Until([&] { return HasLeft(2); })) << Trouble();
  ExpectAllElsewhere(2);
  for (Rank rank = 0; rank < 3; ++rank)
    EXPECT_EQ(HoldersBeside(2, ShardOf(1, 20, rank)).size(), 2u) << "rank " << rank;
  SaveEverywhere(1, 30);
  // Drains a node that has a rank.
  cluster_->Drain(0, 30 * kSecond);
  cluster_->RunFor(1 * kMs);
  const Status refused = Save(1, 40, 0);
  EXPECT_EQ(refused.code(), Code::kUnavailable) << refused.ToString();
  EXPECT_NE(refused.message().find("node0 leaves the job"), std::string::npos) << refused.ToString();
  ASSERT_TRUE(Until([&] { return HasLeft(0); })) << Trouble();
}

// An open save continues, and its step is committed before the node leaves.
TEST_F(Leaving, AnOpenSaveIsFinished) {
  Start(4);
  StartWorld(1);
  SaveEverywhere(1, 10);
  SaveScript slow;
  slow.pause_after_chunks = 0;
  slow.pause_us = 300 * kMs;
  for (Rank rank = 0; rank < 4; ++rank) SaveInBackground(1, 20, rank, slow);
  cluster_->RunFor(50 * kMs);
  ASSERT_TRUE(cluster_->host(1).engine->saving());
  Drain({1});
  ExpectAllElsewhere(1);
  EXPECT_TRUE(cluster_->checker().newest_committed() == StepIn(1, 20)) << Trouble();
  Replace({1});
  StartWorld(2);
  RestoreEverywhere(2, 20);
}

// A rank elsewhere never finishes its save. The node does not wait for the step.
TEST_F(Leaving, AStepThatIsNeverCommittedHoldsNobody) {
  Start(4);
  StartWorld(1);
  SaveEverywhere(1, 10);
  for (const Rank rank : {0, 1, 2}) ASSERT_TRUE(Save(1, 20, rank).ok());
  const TimeUs before = cluster_->now();
  Drain({1});
  EXPECT_LT(cluster_->now() - before, 6 * kSecond);
  ExpectAllElsewhere(1);
  Replace({1});
  StartWorld(2);
  RestoreEverywhere(2, 10);
}

// Two nodes that hold each other's shards leave. Copies on one of them do not count for the other.
TEST_F(Leaving, AGroupLeavesAtOnce) {
  Start(4);
  StartWorld(1);
  SaveEverywhere(1, 10);
  Drain({0, 1});
  ExpectAllElsewhere(0);
  ExpectAllElsewhere(1);
  Replace({0, 1});
  StartWorld(2);
  RestoreEverywhere(2, 10);
}

// One node of each of two groups leaves. By the usual order the copies of one would go to the other.
TEST_F(Leaving, TwoNeighboursLeaveAtOnce) {
  Start(5);
  StartWorld(1);
  SaveEverywhere(1, 10);
  const TimeUs before = cluster_->now();
  Drain({1, 2});
  EXPECT_LT(cluster_->now() - before, 2 * kSecond);
  ExpectAllElsewhere(1);
  ExpectAllElsewhere(2);
}

// There is no other node for a second copy, so waiting for one would not help.
TEST_F(Leaving, TooFewOthersAreLeft) {
  Start(2);
  StartWorld(1);
  SaveEverywhere(1, 10);
  const TimeUs before = cluster_->now();
  Drain({1});
  EXPECT_LT(cluster_->now() - before, 2 * kSecond);
  EXPECT_TRUE(left_[1].done && left_[1].latest_safe);
  EXPECT_EQ(left_[1].shards_short, 2u);
  EXPECT_EQ(left_[1].shards_left, 0u);
  Replace({1});
  StartWorld(2);
  RestoreEverywhere(2, 10);
}

TEST_F(Leaving, AllLeaveAtOnce) {
  Start(3);
  StartWorld(1);
  SaveEverywhere(1, 10);
  Drain({0, 1, 2}, 10 * kSecond);
  for (const size_t host : {0, 1, 2}) EXPECT_FALSE(left_[host].latest_safe);
}

// Without replicas a shard is on one node only, and moves.
TEST_F(Leaving, TheOnlyCopyMoves) {
  Start(3, 0);
  StartWorld(1);
  SaveEverywhere(1, 10);
  Drain({1});
  ExpectAllElsewhere(1);
  EXPECT_EQ(HoldersBeside(1, ShardOf(1, 10, 1)).size(), 1u);
}

TEST_F(Leaving, TheLeaderLeavesAndTheNextOneLeads) {
  Start(4);
  StartWorld(1);
  SaveEverywhere(1, 10);
  const size_t leader = LeaderHost();
  ASSERT_NE(leader, SIZE_MAX);
  Drain({leader});
  ExpectAllElsewhere(leader);
  ASSERT_TRUE(Until([&] { return LeaderHost() != SIZE_MAX && LeaderHost() != leader; })) << Trouble();
  Replace({leader});
  StartWorld(2);
  RestoreEverywhere(2, 10);
}

// The next leader learns from the inventory that the node leaves.
TEST_F(Leaving, TheLeaderDiesMeanwhile) {
  Start(5);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1);
  SaveEverywhere(1, 10);
  bool died = false;
  cluster_->on_transfer = [&](const Transfer& transfer) {  // the first byte of the first copy
    if (transfer.get || died || !cluster_->host(3).engine->drain().begun) return;
    died = true;
    cluster_->scheduler().After(0, [this] { LoseHost(0); });
  };
  Drain({3});
  EXPECT_TRUE(died);
  ExpectAllElsewhere(3);
  Replace({0, 3});
  StartWorld(2);
  RestoreEverywhere(2, 10);
}

// The daemon is killed during the drain and started again under its name. The new instance stays.
TEST_F(Leaving, ARestartTakesItBack) {
  Start(4);
  StartWorld(1);
  SaveEverywhere(1, 10);
  bool died = false;
  cluster_->on_transfer = [&](const Transfer&) {
    if (died || !cluster_->host(1).engine->drain().begun) return;
    died = true;
    cluster_->scheduler().After(0, [this] {
      CloseClientsOn(1);
      cluster_->CrashDaemon(1);
    });
  };
  cluster_->Drain(1, 30 * kSecond);
  ASSERT_TRUE(Until([&] { return died; }));
  cluster_->RunFor(100 * kMs);
  cluster_->StartDaemon(1);
  AwaitOneView();
  cluster_->RunFor(5 * kSecond);
  EXPECT_TRUE(left_.empty());
  EXPECT_FALSE(cluster_->host(1).engine->Report().leaving);
  StopWorld(1);
  StartWorld(2);
  RestoreEverywhere(2, 10);
  SaveEverywhere(2, 20);
  EXPECT_EQ(HoldersBeside(4, ShardOf(2, 20, 0)).size(), 2u);
}

// It comes back under its name with its copies. Copies beyond 1 + R become caches, which are evicted: the
// arenas have no more memory than promise 8 requires.
TEST_F(Leaving, ItComesBackUnderItsName) {
  lengths_ = {4096};
  Start(4, 1, 16);
  StartWorld(1);
  SaveEverywhere(1, 10);
  SaveEverywhere(1, 20);
  Drain({2});
  ExpectAllElsewhere(2);
  CloseClientsOn(2);
  StopWorld(1);
  cluster_->StartDaemon(2);
  AwaitOneView();
  StartWorld(2);
  RestoreEverywhere(2, 20);
  for (Step step = 30; step <= 60; step += 10) SaveEverywhere(2, step);
}

// The others have no room. The node leaves at the end of its time, and reports what is missing.
TEST_F(Leaving, TheOthersAreFull) {
  lengths_ = {4096};
  Start(3, 1, 8);
  StartWorld(1);
  SaveEverywhere(1, 10);
  SaveEverywhere(1, 20);
  const TimeUs before = cluster_->now();
  Drain({1}, 4 * kSecond);
  EXPECT_GE(cluster_->now() - before, 4 * kSecond) << Trouble();
  EXPECT_FALSE(left_[1].done);
  EXPECT_TRUE(left_[1].heard);
  EXPECT_GT(left_[1].shards_left, 0u);
  EXPECT_GT(left_[1].bytes_left, 0u);
}

// The node gets no answer: the coordinator is away, and leases have expired. It leaves when its time is up.
TEST_F(Leaving, NobodyAnswers) {
  Start(3);
  StartWorld(1);
  SaveEverywhere(1, 10);
  cluster_->membership().StopCoordinator();
  cluster_->RunFor(2 * kSecond);
  Drain({1}, 2 * kSecond);
  EXPECT_FALSE(left_[1].done || left_[1].heard);
}

// Steps that are due are on storage before the node leaves, even if redundancy was complete long before.
TEST_F(Leaving, WhatIsDueIsPersistedFirst) {
  options_.storage.used = true;
  options_.storage.persist_every = 1;
  Start(4);
  StartWorld(1);
  cluster_->RunFor(kSecond);  // storage is listed
  for (size_t host = 0; host < 4; ++host) cluster_->storage().HangUntil(host, cluster_->now() + 3 * kSecond);
  const TimeUs before = cluster_->now();
  SaveEverywhere(1, 10);
  Drain({1});
  EXPECT_GE(cluster_->now() - before, 3 * kSecond);
  ExpectAllElsewhere(1);
  EXPECT_EQ(left_[1].steps_left, 0u);
  EXPECT_FALSE(left_[1].persist_failed);
  EXPECT_TRUE(cluster_->storage().Has(StepIn(1, 10))) << Trouble();
}

// While the node waits for storage, the others continue to save, and choose other holders.
TEST_F(Leaving, ItTakesNothingMore) {
  options_.storage.used = true;
  options_.storage.persist_every = 1;
  Start(4);
  StartWorld(1, {0, 1, 3});
  cluster_->RunFor(kSecond);  // storage is listed
  for (size_t host = 0; host < 4; ++host) cluster_->storage().HangUntil(host, cluster_->now() + 3 * kSecond);
  SaveEverywhere(1, 10);
  cluster_->Drain(2, 30 * kSecond);
  cluster_->RunFor(kSecond);
  SaveEverywhere(1, 20);
  EXPECT_FALSE(left_.contains(2));
  for (Rank rank = 0; rank < 3; ++rank) {
    EXPECT_FALSE(Holds(2, ShardOf(1, 20, rank))) << "rank " << rank;
    EXPECT_EQ(HoldersBeside(2, ShardOf(1, 20, rank)).size(), 2u) << "rank " << rank;
  }
  ASSERT_TRUE(Until([&] { return HasLeft(2); })) << Trouble();
  ExpectAllElsewhere(2);
}

// ---- nodes that join

// While spares join, every step is committed as quickly as before, and no save is refused. Then a spare
// replaces a lost node.
TEST_F(Leaving, SparesJoinAndDisturbNobody) {
  Start(4);
  StartWorld(1);
  const auto commit_us = [&](Step step) {
    const TimeUs before = cluster_->now();
    SaveEverywhere(1, step);
    return cluster_->now() - before;
  };
  TimeUs calm = 0;
  for (Step step = 1; step <= 20; ++step) calm = std::max(calm, commit_us(step));
  TimeUs joining = 0;
  for (Step step = 21; step <= 40; ++step) {
    // In the middle of a save.
    if (step % 5 == 0)
      cluster_->scheduler().After(calm / 4, [this] { cluster_->StartHost(cluster_->AddHost()); });
    joining = std::max(joining, commit_us(step));
  }
  EXPECT_EQ(cluster_->host_count(), 8u);
  EXPECT_TRUE(cluster_->AllInOneView());
  // Inventories are sent to the leader again in the new epoch, so there are some more messages.
  EXPECT_LT(joining, calm + 50 * kMs);
  LoseHost(2);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 7; })) << Trouble();
  StopWorld(1);
  StartWorld(2, {0, 1, 5, 3});
  RestoreEverywhere(2, 40);
  SaveEverywhere(2, 50);
}

// A node without ranks is a holder like any other: it gets the copies of a lost node without being asked to.
TEST_F(Leaving, ASpareHoldsTheCopiesOfALostNode) {
  Start(2);
  StartWorld(1);
  SaveEverywhere(1, 10);
  const size_t spare = cluster_->AddHost();
  cluster_->StartHost(spare);
  AwaitOneView();
  LoseHost(1);
  ASSERT_TRUE(Until([&] { return Holds(spare, ShardOf(1, 10, 0)) && Holds(spare, ShardOf(1, 10, 1)); }))
      << Trouble();
  StopWorld(1);
  StartWorld(2, {0, spare});
  RestoreEverywhere(2, 10);
  SaveEverywhere(2, 20);
}

}  // namespace
}  // namespace ropeteam::simulation
