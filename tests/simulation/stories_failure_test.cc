// SPDX-License-Identifier: Apache-2.0
//
// Failure stories of ranks, nodes, daemons, leaders and bits. The comment before each story says what it is
// about. The Checker finds all other errors (bytes, copies, chunks with two users, unanswered calls).
#include "tests/simulation/simulation.h"
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

// A rank dies in save_put. The others continue to save. The step is not committed, `latest` is the one
// before, and the chunks are freed.
TEST_F(Story, RankDiesWhileItFillsItsShard) {
  lengths_ = {3 * 4096};
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const uint64_t free_before = FreeChunks(2);
  SaveScript unfinished;
  unfinished.stop_after_chunks = 2;
  SaveInBackground(1, 2, 2, unfinished);
  cluster_->RunFor(50 * kMs);
  EXPECT_LT(FreeChunks(2), free_before);
  RankOf(1, 2).Close();
  for (const Rank rank : {0u, 1u, 3u}) EXPECT_TRUE(Save(1, 2, rank).ok());
  EXPECT_EQ(Wait(1, 2, 0, Level::kReplicated).code(), Code::kOk);
  EXPECT_EQ(Wait(1, 2, 0, Level::kCommitted, 500 * kMs).code(), Code::kDeadlineExceeded);
  StopWorld(1);
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  EXPECT_EQ(LatestStep(2, 2), 1u);
  const size_t buddy = HoldersBeside(2, ShardOf(1, 1, 2)).at(0);
  EXPECT_FALSE(Holds(buddy, ShardOf(1, 2, 2)));
  // The half-filled chunks are free again, here and at the replica.
  EXPECT_TRUE(
      Until([&] { return Checker::AtRest(cluster_->host(2)) && Checker::AtRest(cluster_->host(buddy)); }));
}

// A node is lost after its shard was REPLICATED, before the step is committed. All ranks' shards exist, so
// the step is `latest` for the next incarnation, which reads the lost node's shard from the replica.
TEST_F(Story, NodeDiesBetweenReplicateAndCommit) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const size_t victim = LeaderHost() == 3 ? 2 : 3;
  cluster_->on_event = [&](size_t host, const LevelEvent& event) {
    if (host == victim && event.level == Level::kReplicated && event.shard.step == 2)
      cluster_->scheduler().After(0, [this, victim] { LoseHost(victim); });
  };
  for (Rank rank = 0; rank < 4; ++rank)
    if (rank != victim) {
      ASSERT_TRUE(Save(1, 2, rank).ok());
    }
  ASSERT_TRUE(Save(1, 2, static_cast<Rank>(victim)).ok());
  ASSERT_TRUE(Until([&] { return !cluster_->host(victim).up; }));
  StopWorld(1);
  cluster_->StartHost(victim);
  AwaitOneView();
  StartWorld(2);
  RestoreEverywhere(2, 2);
}

// The leader commits a step, and is lost before any other node knows of it. The next incarnation restores it.
TEST_F(Story, LeaderDiesBetweenCommitAndAnnouncement) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const size_t leader = LeaderHost();
  ASSERT_NE(leader, SIZE_MAX);
  const TimeUs long_after = cluster_->now() + 60 * kSecond;
  size_t told = 0;
  cluster_->on_event = [&](size_t host, const LevelEvent& event) {
    if (event.level != Level::kCommitted || event.shard.step != 2) return;
    if (event.shard.rank == LevelEvent::kNoRank) ++told;
    if (host != leader) return;
    // Its messages of this input are lost, also the announcement.
    for (size_t other = 0; other < 4; ++other)
      if (other != leader) cluster_->network().Cut(leader, other, long_after);
    cluster_->scheduler().After(0, [this, leader] { LoseHost(leader); });
  };
  for (Rank rank = 0; rank < 4; ++rank) ASSERT_TRUE(Save(1, 2, rank).ok());
  ASSERT_TRUE(Until([&] { return !cluster_->host(leader).up; }));
  EXPECT_EQ(told, 1u);
  cluster_->on_event = nullptr;
  StopWorld(1);
  cluster_->network().HealLinks();
  cluster_->StartHost(leader);
  AwaitOneView();
  StartWorld(2);
  RestoreEverywhere(2, 2);
}

// A node fetches a shard of which it has no copy, and one of the holders is lost with its memory. The other
// holders serve the rest inside the same read.
TEST_F(Story, HolderDiesDuringAnothersRecovery) {
  lengths_ = {8 * 4096};
  StartNodes(6, 2, 256);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_EQ(HoldersBeside(0, ShardOf(1, 1, 0)).size(), 2u);
  StopWorld(1);
  size_t reader = 0;
  while (Holds(reader, ShardOf(1, 1, 0))) ++reader;
  size_t lost = SIZE_MAX;
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (!transfer.get || transfer.initiator != reader || lost != SIZE_MAX) return;
    lost = transfer.target;
    cluster_->scheduler().After(0, [this, &lost] { LoseHost(lost); });
  };
  // A replacement for rank 0, on a node of another group.
  std::vector<size_t> hosts;
  for (size_t host = 0; host < 6; ++host) hosts.push_back((reader + host) % 6);
  StartWorld(2, hosts);
  EXPECT_TRUE(Read(2, 0, 1, 0).ok());
  EXPECT_NE(lost, SIZE_MAX) << "nothing was fetched";
}

// kill -9 of the daemon after every single event of a save. The restarted one has every sealed shard (the
// Checker compares) and no other. The chunks of sealed shards are not free, and all other chunks are.
TEST_F(Story, DaemonIsKilledAtEveryPointOfASave) {
  lengths_ = {2 * 4096, 100};
  uint64_t points = 0;
  bool finished = false;
  for (uint64_t point = 0; !finished; ++point) {
    StartNodes(2);
    StartWorld(1);
    SaveEverywhere(1, 1);
    bool saved = false;
    RankOf(1, 0).Save(2, ContentOf(1, 2, 0), {}, [&](const Status& status) { saved = status.ok(); });
    for (uint64_t i = 0; i < point; ++i) cluster_->scheduler().RunOne(cluster_->now() + kSecond);
    finished = saved && Wait(1, 2, 0, Level::kReplicated, 0).ok();
    const bool sealed = Holds(0, ShardOf(1, 2, 0));
    EXPECT_TRUE(sealed || !saved);
    cluster_->CrashDaemon(0);
    cluster_->StartDaemon(0);
    ASSERT_FALSE(cluster_->checker().failed()) << Trouble();
    EXPECT_EQ(Holds(0, ShardOf(1, 2, 0)), sealed);
    EXPECT_TRUE(Holds(0, ShardOf(1, 1, 0)));
    EXPECT_TRUE(Checker::AtRest(cluster_->host(0)));
    AwaitOneView();
    // The rank's library connects to the new daemon and continues.
    cluster_->RunFor(10 * kMs);
    ASSERT_TRUE(Hello(1, 0).ok()) << Trouble();
    ASSERT_TRUE(Save(1, 3, 0).ok()) << Trouble();
    ASSERT_TRUE(Save(1, 3, 1).ok()) << Trouble();
    ASSERT_TRUE(Wait(1, 3, 0, Level::kCommitted).ok()) << Trouble();
    clients_.clear();
    ++points;
  }
  EXPECT_GT(points, 20u);
}

// The coordinator dies and returns. The view and `latest` stay the same, and a save in flight completes.
TEST_F(Story, CoordinatorDiesAndReturns) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const Epoch epoch = cluster_->host(0).view.epoch;
  for (const Rank rank : {0u, 1u}) ASSERT_TRUE(Save(1, 2, rank).ok());
  cluster_->membership().StopCoordinator();
  ASSERT_TRUE(Save(1, 2, 2).ok());
  cluster_->RunFor(3 * kSecond);
  cluster_->membership().StartCoordinator();
  cluster_->RunFor(200 * kMs);
  ASSERT_TRUE(Save(1, 2, 3).ok());
  for (Rank rank = 0; rank < 4; ++rank) EXPECT_TRUE(Wait(1, 2, rank, Level::kCommitted).ok());
  cluster_->RunFor(3 * kSecond);
  EXPECT_EQ(cluster_->host(0).view.epoch, epoch);
  EXPECT_EQ(LatestStep(1, 0), 2u);
}

// A bit flips in the local chunk. The read finds it and repairs the chunk from the replica, in place.
TEST_F(Story, BitFlipsInTheLocalChunk) {
  lengths_ = {2 * 4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const ShardId shard = ShardOf(1, 1, 0);
  ASSERT_TRUE(cluster_->FlipBit(0, shard, 1));
  EXPECT_TRUE(Read(1, 0, 1, 0).ok());
  EXPECT_EQ(cluster_->checker().CopiesMin(StepIn(1, 1)), 2u);
  EXPECT_EQ(BadIn(Verify(1)), 0u);
}

// A bit flips in the replica, which is not read until a verify. Then it is repaired from its saver.
TEST_F(Story, BitFlipsInTheReplica) {
  lengths_ = {2 * 4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_TRUE(cluster_->FlipBit(1, ShardOf(1, 1, 0), 0));
  EXPECT_EQ(BadIn(Verify(1)), 1u);
  EXPECT_TRUE(Until([&] { return cluster_->checker().CopiesMin(StepIn(1, 1)) == 2; }));
  EXPECT_EQ(BadIn(Verify(1)), 0u);
}

// A bit flips in the same chunk of both copies. The read fails and names the sources that it has tried. The
// next incarnation gets the older step, and can read it.
TEST_F(Story, BitFlipsInBothCopies) {
  lengths_ = {2 * 4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  for (const size_t host : {size_t{0}, size_t{1}}) ASSERT_TRUE(cluster_->FlipBit(host, ShardOf(1, 2, 0), 0));
  const Status status = Read(1, 0, 2, 0);
  EXPECT_EQ(status.code(), Code::kCorrupt) << status.ToString();
  for (const char* tried : {"this node", "node1"})
    EXPECT_NE(status.message().find(tried), std::string::npos) << status.message();
  StopWorld(1);
  StartWorld(2);
  std::string logged;
  SetLogSink([&](LogLevel, std::string_view line) { logged.append(line).push_back('\n'); },
             LogLevel::kWarning);
  RestoreEverywhere(2, 1);
  SetLogSink(nullptr, LogLevel::kOff);
  EXPECT_NE(
      logged.find(
          "committed step 2 incarnation 1 cannot be produced and is given up, offering step 1 incarnation 1"),
      std::string::npos)
      << logged;
}

// A local chunk is bad, and another chunk of the replica. Each is repaired from the other copy.
TEST_F(Story, DifferentChunksAreBadInBothCopies) {
  lengths_ = {3 * 4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_TRUE(cluster_->FlipBit(0, ShardOf(1, 1, 0), 0));
  ASSERT_TRUE(cluster_->FlipBit(1, ShardOf(1, 1, 0), 2));
  EXPECT_TRUE(Read(1, 0, 1, 0).ok());
  Verify(1);
  EXPECT_TRUE(Until([&] { return cluster_->checker().CopiesMin(StepIn(1, 1)) == 2; }));
}

// While one chunk is being repaired, a bit of another flips, and a verify finds it. It is repaired, too.
TEST_F(Story, ABitFlipsWhileAnotherChunkIsRepaired) {
  lengths_ = {3 * 4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const ShardId shard = ShardOf(1, 1, 0);
  bool repairing = false;
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (!transfer.get || transfer.initiator != 0 || repairing) return;
    repairing = true;
    cluster_->network().Clog(0, 1, cluster_->now() + 300 * kMs);
  };
  ASSERT_TRUE(cluster_->FlipBit(0, shard, 1));
  EXPECT_EQ(BadIn(Verify(1)), 1u);
  ASSERT_TRUE(Until([&] { return repairing; }));
  ASSERT_TRUE(cluster_->FlipBit(0, shard, 0));
  EXPECT_EQ(BadIn(Verify(1)), 2u);
  EXPECT_TRUE(Until([&] { return cluster_->checker().CopiesMin(StepIn(1, 1)) == 2; }));
}

// A node is lost and does not return. Its copies are made again on other nodes, while the ranks continue
// undisturbed.
TEST_F(Story, RedundancyComesBackWithoutARestart) {
  StartNodes(4);
  StartWorld(1, {0, 1, 2});
  SaveEverywhere(1, 1);
  const size_t holder = HoldersBeside(0, ShardOf(1, 1, 0)).at(0);
  const Incarnation incarnation = RankOf(1, 0).incarnation();
  cluster_->StopHost(holder, false);
  EXPECT_TRUE(Until([&] { return cluster_->checker().CopiesMin(StepIn(1, 1)) == 2; }));
  EXPECT_EQ(cluster_->host(0).engine->incarnation(), incarnation);
}

// Both nodes lose their memory, one after the other, and in between the committed steps are copied again. The
// new copies are marked as committed although the steps were announced before. So the next incarnation's
// first step does not retire the newest one.
TEST_F(Story, CopiesMadeAgainKnowThatTheyAreCommitted) {
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  StopWorld(1);
  for (const size_t lost : {size_t{1}, size_t{0}}) {
    LoseHost(lost);
    cluster_->StartHost(lost);
    AwaitOneView();
    for (Step step = 1; step <= 2; ++step)
      ASSERT_TRUE(Until([&] { return cluster_->checker().CopiesMin(StepIn(1, step)) == 2; })) << Trouble();
    for (Step step = 1; step <= 2; ++step)
      for (Rank rank = 0; rank < 2; ++rank)
        EXPECT_TRUE(cluster_->host(lost).store->Find(ShardOf(1, step, rank))->committed);
  }
  StartWorld(2);
  SaveEverywhere(2, 3);
  cluster_->RunFor(1 * kSecond);
  EXPECT_EQ(cluster_->checker().CopiesMin(StepIn(1, 2)), 2u);
}

// A copy counts only after the replica has checked it. While no acknowledgement arrives, nothing is
// REPLICATED.
TEST_F(Story, UnacknowledgedIsNotReplicated) {
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  cluster_->network().Cut(
      1, 0, cluster_->now() + 700 * kMs);  // bytes and messages to the replica pass, answers do not
  ASSERT_TRUE(Save(1, 2, 0).ok());
  EXPECT_EQ(Wait(1, 2, 0, Level::kReplicated, 400 * kMs).code(), Code::kDeadlineExceeded);
  EXPECT_TRUE(Wait(1, 2, 0, Level::kReplicated).ok());
}

// A holder loses its memory after the shard was REPLICATED and before the step is committed, and comes back
// while the ranks continue. The copy is made again without a request, and the step is committed.
TEST_F(Story, AHolderLosesItsMemoryBeforeTheCommit) {
  StartNodes(3);
  StartWorld(1, {0, 1});
  SaveEverywhere(1, 1);
  ASSERT_TRUE(Save(1, 2, 0).ok());
  ASSERT_TRUE(Wait(1, 2, 0, Level::kReplicated).ok());
  const size_t holder = HoldersBeside(0, ShardOf(1, 2, 0)).at(0);
  cluster_->StopHost(holder, false);
  cluster_->StartHost(holder);
  AwaitOneView();
  if (!RankOf(1, 1).connected()) {
    ASSERT_TRUE(Hello(1, 1).ok()) << Trouble();
  }
  ASSERT_TRUE(Save(1, 2, 1).ok());
  EXPECT_TRUE(Wait(1, 2, 0, Level::kCommitted).ok()) << Trouble();
}

// A put fails, and the holder is to be tried again a little later. The timer comes late, and other inputs
// come before it. The copy is made nevertheless.
TEST_F(Story, ALateTimerForgetsNoCopy) {
  options_.timer_late_max_us = 20 * kMs;
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_EQ(LeaderHost(), 0u);  // its timers never stop while a copy is missing
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (transfer.initiator != 1) return;
    cluster_->on_transfer = nullptr;
    cluster_->network().Cut(1, 0, cluster_->now() + 1 * kMs);
  };
  ASSERT_TRUE(Save(1, 2, 1).ok());
  Client::Identity identity;
  identity.host = 1;
  for (int asked = 0; asked < 600; ++asked) {
    Client person(cluster_.get(), identity);
    person.Report(1 * kSecond, [](const Status&, const ClusterReport&) {});
    cluster_->RunFor(2 * kMs);
    person.Close();
  }
  EXPECT_TRUE(Until([&] { return HoldersBeside(1, ShardOf(1, 2, 1)).size() == 1; })) << Trouble();
}

// A test of the Checker: it finds bytes that change unexpectedly.
TEST_F(Story, CheckerSeesBytesThatNobodyFlipped) {
  lengths_ = {4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const SealedShard* shard = cluster_->host(0).store->Find(ShardOf(1, 1, 0));
  cluster_->host(0).chunk(ChunkAt(shard->extents, 0))[7] ^= std::byte{1};
  cluster_->checker().CheckAllBytes();
  EXPECT_TRUE(cluster_->checker().failed());
  clients_.clear();
  cluster_.reset();  // or TearDown() would count it as this story's failure
}

// A seed always gives the same run, whether or not its trace is kept. Another seed gives another run.
TEST(Seeds, RunTheSameTwice) {
  SetLogLevel(LogLevel::kOff);
  const Outcome first = RunSimulation(DrawOptions(11, 4));
  EXPECT_EQ(first.failure, "");
  EXPECT_EQ(first.digest, RunSimulation(DrawOptions(11, 4), 10).digest);
  EXPECT_NE(first.digest, RunSimulation(DrawOptions(12, 4)).digest);
  SetLogLevel(LogLevel::kWarning);
}

}  // namespace
}  // namespace ropeteam::simulation
