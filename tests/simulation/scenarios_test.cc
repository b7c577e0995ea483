// SPDX-License-Identifier: Apache-2.0
//
// Failure stories, told one by one. What each is about stands in its first lines; that nothing else goes
// wrong meanwhile (bytes, copies, chunks with two users, unanswered calls) the Checker sees to.
#include <algorithm>

#include "tests/simulation/simulation.h"
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

// A rank dies in save_put. The others save on; the step is not committed, the one before is latest; chunks
// are freed.
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
  // The half-filled chunks are back, here and at the replica.
  EXPECT_TRUE(
      Until([&] { return Checker::AtRest(cluster_->host(2)) && Checker::AtRest(cluster_->host(buddy)); }));
}

// A node is lost after its shard was REPLICATED, before the step is committed: all ranks' shards are there,
// so the step is latest for the next life, and its shard is read from the replica.
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
  for (Rank rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(LatestStep(2, rank), 2u);
    EXPECT_TRUE(Read(2, rank, 2, rank).ok());
  }
}

// The leader judges a step committed and is lost before anybody hears of it. The step is what the next life
// restores.
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
    // Its messages of this very input, the announcement among them, are lost.
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
  for (Rank rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(LatestStep(2, rank), 2u);
    EXPECT_TRUE(Read(2, rank, 2, rank).ok());
  }
}

// While a node pulls a shard that it has no copy of, one that it pulls from is lost with its memory: the
// other holders serve, inside the same read.
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

// kill -9 of the daemon after every single event of a save. The restarted one has every shard that was sealed
// (the Checker compares), none that was not, and a free list without the chunks of the former and with those
// of the latter.
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
    // The rank's library reaches the new daemon and goes on.
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

// The coordinator dies and returns: the view stays, latest is what it was, a save in flight completes.
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

// A bit flips in the local chunk: the read finds it and repairs it from the replica, in place.
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

// A bit flips in the replica: nobody reads it there until a verify does, and it is repaired from its saver.
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

// A bit flips in the same chunk of both copies: the read fails and says where it looked; the next life is
// offered the older step, and can read it.
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
  for (Rank rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(LatestStep(2, rank), 1u);
    EXPECT_TRUE(Read(2, rank, 1, rank).ok());
  }
}

// A local chunk and a chunk of the replica are bad, but not the same: each is repaired from the other.
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

// While one chunk is being mended, a bit of another flips, and a verify finds it: that one is mended as well.
TEST_F(Story, ABitFlipsWhileAnotherChunkIsMended) {
  lengths_ = {3 * 4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const ShardId shard = ShardOf(1, 1, 0);
  bool mending = false;
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (!transfer.get || transfer.initiator != 0 || mending) return;
    mending = true;
    cluster_->network().Clog(0, 1, cluster_->now() + 300 * kMs);
  };
  ASSERT_TRUE(cluster_->FlipBit(0, shard, 1));
  EXPECT_EQ(BadIn(Verify(1)), 1u);
  ASSERT_TRUE(Until([&] { return mending; }));
  ASSERT_TRUE(cluster_->FlipBit(0, shard, 0));
  EXPECT_EQ(BadIn(Verify(1)), 2u);
  EXPECT_TRUE(Until([&] { return cluster_->checker().CopiesMin(StepIn(1, 1)) == 2; }));
}

// The arena is full: save_begin says what is needed, free and the limit, before a byte is copied; training
// goes on; latest is untouched; and a save that fits goes through.
TEST_F(Story, ArenaIsFull) {
  lengths_ = {4 * 4096};
  StartNodes(2, 1, 32);  // three steps of two shards of five chunks, and two chunks
  StartWorld(1);
  SaveEverywhere(1, 1);
  const uint64_t free_before = FreeChunks(0);
  lengths_ = {40 * 4096};
  const Status refused = Save(1, 2, 0);
  EXPECT_EQ(refused.code(), Code::kNoSpace);
  for (const std::string& word : {std::string("41"), std::string("32"), std::to_string(free_before)})
    EXPECT_NE(refused.message().find(word), std::string::npos) << word << " is not in: " << refused.message();
  EXPECT_EQ(FreeChunks(0), free_before);
  EXPECT_EQ(LatestStep(1, 0), 1u);
  EXPECT_EQ(LatestStep(1, 1), 1u);
  lengths_ = {4 * 4096};
  SaveEverywhere(1, 3);
  SaveEverywhere(1, 4);
  SaveEverywhere(1, 5);
  EXPECT_EQ(LatestStep(1, 0), 5u);
}

// What was fetched to be read makes room for a save, but not for one that would be refused all the same.
TEST_F(Story, ARefusedSaveEvictsNothing) {
  lengths_ = {4096};
  StartNodes(3, 1, 64);
  StartWorld(1);
  SaveEverywhere(1, 1);
  Rank rank = 0;
  while (Holds(0, ShardOf(1, 1, rank))) ++rank;
  const ShardId fetched = ShardOf(1, 1, rank);
  ASSERT_TRUE(Read(1, 0, 1, rank).ok());
  cluster_->RunFor(100 * kMs);
  ASSERT_TRUE(Holds(0, fetched));
  const uint64_t free_before = FreeChunks(0);
  lengths_ = {70 * 4096};
  EXPECT_EQ(Save(1, 2, 0).code(), Code::kNoSpace);
  EXPECT_TRUE(Holds(0, fetched));
  EXPECT_EQ(FreeChunks(0), free_before);
  lengths_ = {free_before * 4096};  // and a manifest
  EXPECT_TRUE(Save(1, 3, 0).ok());
  EXPECT_FALSE(Holds(0, fetched));
}

// Ranks are refused one step each, in turn, until no arena has room for another shard. None of those steps
// can ever be complete; a step that all of them save must find room nevertheless.
TEST_F(Story, StepsThatCannotBeCompleteDoNotFillTheArenaForEver) {
  lengths_ = {2 * 4096};
  StartNodes(2, 1, 24);
  StartWorld(1);
  SaveEverywhere(1, 1);
  for (Step step = 2; step < 12; ++step) {
    const Status status = Save(1, step, static_cast<Rank>(step % 2));
    EXPECT_TRUE(status.ok() || status.code() == Code::kNoSpace) << status.ToString();
  }
  Step step = 12;
  const auto saved_everywhere = [&] {
    ++step;
    const bool first = Save(1, step, 0).ok();
    const bool second = Save(1, step, 1).ok();
    return first && second;
  };
  bool saved = false;
  for (int attempt = 0; attempt < 20 && !saved; ++attempt) {
    saved = saved_everywhere();
    cluster_->RunFor(50 * kMs);
  }
  ASSERT_TRUE(saved) << Trouble();
  EXPECT_TRUE(Wait(1, step, 0, Level::kCommitted).ok());
}

// The path between two nodes is cut while training goes on: nothing is replicated, and both arenas fill with
// steps that wait for it. When the path is back there is no room for a single replica; the newest steps must
// get it nevertheless.
TEST_F(Story, ArenasFullOfWaitingStepsRecover) {
  lengths_ = {2 * 4096};
  StartNodes(2, 1, 40);
  StartWorld(1);
  SaveEverywhere(1, 1);
  for (const size_t from : {size_t{0}, size_t{1}}) cluster_->network().Cut(from, 1 - from, kForever);
  Step step = 2;
  for (; step < 30; ++step)
    for (Rank rank = 0; rank < 2; ++rank) {
      const Status status = Save(1, step, rank);
      EXPECT_TRUE(status.ok() || status.code() == Code::kNoSpace) << status.ToString();
    }
  cluster_->network().HealLinks();
  const uint64_t before = cluster_->checker().statistics().committed;
  EXPECT_TRUE(Until([&] { return cluster_->checker().statistics().committed > before; })) << Trouble();
  cluster_->RunFor(1 * kSecond);
  SaveEverywhere(1, step);
}

// The world restarts twice in quick succession, and ranks of the former lives are still there and saving:
// each is told that it is stale, nothing of theirs gets into a step of the third life.
TEST_F(Story, WorldRestartsTwiceWithZombies) {
  lengths_ = {2 * 4096};
  StartNodes(3);
  StartWorld(1);
  SaveEverywhere(1, 1);
  // In the middle of a save when the next life begins.
  SaveScript slow;
  slow.chunk_us = 200 * kMs;
  std::optional<Status> late;
  RankOf(1, 0).Save(2, ContentOf(1, 2, 0), slow, [&](const Status& status) { late = status; });
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  EXPECT_EQ(Save(1, 2, 1).code(), Code::kStale);
  ASSERT_TRUE(Save(2, 2, 0).ok());
  StartWorld(3);
  for (Rank rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(Save(1, 2, rank).code(), Code::kStale);
    EXPECT_EQ(Save(2, 2, rank).code(), Code::kStale);
    EXPECT_EQ(LatestStep(3, rank), 1u);
  }
  EXPECT_TRUE(Until([&] { return late.has_value(); }));
  EXPECT_EQ(late->code(), Code::kStale) << late->ToString();
  // A zombie that connects anew does not get in either.
  RankOf(1, 1).Close();
  EXPECT_EQ(Hello(1, 1).code(), Code::kStale);
  // Nor does a new process of a life that is over.
  RankOf(1, 2).Close();
  AddRank(1, 2, 3, 2);
  EXPECT_EQ(Hello(1, 2).code(), Code::kStale);
  SaveEverywhere(3, 2);
  for (Rank rank = 0; rank < 3; ++rank) EXPECT_TRUE(Read(3, rank, 2, rank).ok());
}

// Ranks on nodes that do not begin at 0, and five nodes in pairs: one group of three.
TEST_F(Story, GroupsThatDoNotStartAtNodeZero) {
  StartNodes(5);
  StartWorld(1, {2, 3, 4});
  SaveEverywhere(1, 1);
  for (Rank rank = 0; rank < 3; ++rank) {
    const std::vector<size_t> holders = HoldersBeside(rank + 2, ShardOf(1, 1, rank));
    EXPECT_GE(holders.size(), 1u);
  }
  StopWorld(1);
  cluster_->StopHost(3, false);
  cluster_->StartHost(3);
  AwaitOneView();
  StartWorld(2, {3, 4, 2});
  for (Rank rank = 0; rank < 3; ++rank) EXPECT_TRUE(Read(2, rank, 1, rank).ok());
}

// N not divisible by R + 1: every node's loss, and the loss of any R, is survived.
TEST_F(Story, NodesNotDivisibleByGroupSize) {
  for (size_t first = 0; first < 7; ++first) {
    const size_t second = (first + 1 + first % 5) % 7;
    if (second == first) continue;
    StartNodes(7, 2);
    StartWorld(1);
    SaveEverywhere(1, 1);
    StopWorld(1);
    cluster_->StopHost(first, false);
    cluster_->StopHost(second, false);
    EXPECT_TRUE(cluster_->checker().Producible(StepIn(1, 1)))
        << "without hosts " << first << " and " << second;
    cluster_->StartHost(first);
    cluster_->StartHost(second);
    AwaitOneView();
    StartWorld(2);
    for (Rank rank = 0; rank < 7; ++rank) {
      EXPECT_EQ(LatestStep(2, rank), 1u);
      EXPECT_TRUE(Read(2, rank, 1, rank).ok());
    }
    clients_.clear();
  }
}

// Copies do not all lie in the failure domain of their saver when there is another.
TEST_F(Story, RackIsLost) {
  StartNodes(8, 1, 128, 2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  StopWorld(1);
  for (size_t host = 0; host < 8; host += 2) cluster_->StopHost(host, false);
  EXPECT_TRUE(cluster_->checker().Producible(StepIn(1, 1)));
}

// Shards of no object, of empty objects, of a byte, of exactly a chunk, of a chunk and a byte, of 3 MiB and a
// byte; each costs the chunks it needs and no more.
TEST_F(Story, ShardsOfEverySize) {
  const std::vector<std::vector<uint64_t>> shapes = {{},     {0},    {0, 0, 0},          {1},
                                                     {4096}, {4097}, {0, 1, 63, 64, 65}, {(3ull << 20) + 1}};
  StartNodes(2, 1, 4096);
  StartWorld(1);
  Step step = 0;
  for (const auto& shape : shapes) {
    ++step;
    const uint64_t own_before = FreeChunks(0);
    ContentShape content_shape;
    lengths_ = shape;
    const Content content = MakeContent(content_shape, 1, step, 0, shape);
    ASSERT_TRUE(Save(1, step, 0).ok()) << "step " << step;
    EXPECT_EQ(ChunkCount(cluster_->host(0).store->Find(ShardOf(1, step, 0))->extents), content.crcs.size());
    EXPECT_LE(FreeChunks(0), own_before);
    ASSERT_TRUE(Save(1, step, 1).ok());
    ASSERT_TRUE(Wait(1, step, 0, Level::kCommitted).ok());
    EXPECT_TRUE(Read(1, 1, step, 0).ok());
  }
}

TEST_F(Story, TenThousandObjectsInAShard) {
  lengths_.assign(10'000, 3);
  StartNodes(2, 1, 2048);
  StartWorld(1);
  SaveEverywhere(1, 1);
  EXPECT_TRUE(Read(1, 1, 1, 0).ok());
}

// A rank that has little pays little, whatever the others have.
TEST_F(Story, UnevenShardsCostTheirOwnSize) {
  StartNodes(2, 1, 256);
  StartWorld(1);
  lengths_ = {64 * 4096};
  ASSERT_TRUE(Save(1, 1, 0).ok());
  lengths_ = {10};
  ASSERT_TRUE(Save(1, 1, 1).ok());
  ASSERT_TRUE(Wait(1, 1, 0, Level::kCommitted).ok());
  EXPECT_EQ(ChunkCount(cluster_->host(0).store->Find(ShardOf(1, 1, 1))->extents), 1u);
  EXPECT_EQ(ChunkCount(cluster_->host(1).store->Find(ShardOf(1, 1, 0))->extents), 65u);
}

// An incomplete step is never latest, and does not stand in the way of later ones of the same number.
TEST_F(Story, LatestIsDerivedFromWhatIsThere) {
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_TRUE(Save(1, 2, 0).ok());
  ASSERT_TRUE(Wait(1, 2, 0, Level::kReplicated).ok());
  StopWorld(1);
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  SaveEverywhere(2, 2);
  EXPECT_EQ(Latest(2, 1), StepIn(2, 2));
  EXPECT_TRUE(Read(2, 0, 2, 1).ok());
}

// One rank has asked for latest while the newest step could not be produced. Then the missing node returns
// with its memory: all ranks of this life are given the step that the first was given.
TEST_F(Story, AllRanksOfALifeRestoreTheSameStep) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  StopWorld(1);
  // A saver and its replica are both away.
  const size_t buddy = HoldersBeside(0, ShardOf(1, 2, 0)).at(0);
  cluster_->StopHost(0, true);
  cluster_->StopHost(buddy, true);
  std::vector<size_t> left;
  for (size_t host = 0; host < 4; ++host)
    if (host != 0 && host != buddy) left.push_back(host);
  ASSERT_TRUE(Until([&] { return cluster_->host(left[0]).view.members.size() == 2; }));
  cluster_->StartHost(0);
  cluster_->StartHost(buddy);
  AwaitOneView();
  StartWorld(2);
  const StepId first = Latest(2, 0).value();
  cluster_->StopHost(left[0], true);
  cluster_->StartHost(left[0]);
  AwaitOneView();
  for (Rank rank = 1; rank < 4; ++rank)
    if (rank != left[0]) {
      EXPECT_EQ(Latest(2, rank), first);
    }
}

// One rank of a life has been given a step to restore; then it turns out that nobody can produce it any more.
// The others of this life must not be given an older one in its place: the life would train on from two
// steps. They are told an error; the next life is given the older step.
TEST_F(Story, NoRankOfALifeFallsBackAlone) {
  lengths_ = {4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  StopWorld(1);
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 2u);
  EXPECT_TRUE(Read(2, 0, 2, 0).ok());
  for (const size_t host : {size_t{0}, size_t{1}}) ASSERT_TRUE(cluster_->FlipBit(host, ShardOf(1, 2, 1), 0));
  EXPECT_EQ(Read(2, 1, 2, 1).code(), Code::kCorrupt);
  std::optional<Code> told;
  RankOf(2, 1).Latest(5 * kSecond, [&](const Status& status, const AnswerLatest&) { told = status.code(); });
  ASSERT_TRUE(Until([&] { return told.has_value(); }));
  EXPECT_NE(*told, Code::kOk);
  EXPECT_NE(*told, Code::kNotFound);  // which a rank takes for: begin with nothing
  StopWorld(2);
  StartWorld(3);
  for (Rank rank = 0; rank < 2; ++rank) EXPECT_EQ(LatestStep(3, rank), 1u);
}

// The nodes that know of the first life are away while a fresh one leads alone and begins another. When they
// return, the lives' numbers are three, and nothing of one is taken for the other's.
TEST_F(Story, NoTwoLivesHaveOneNumber) {
  StartNodes(3);
  StartWorld(1, {0, 1});
  SaveEverywhere(1, 1);
  StopWorld(1);
  for (const size_t host : {size_t{0}, size_t{1}}) cluster_->StopHost(host, true);
  LoseHost(2);
  cluster_->StartHost(2);
  ASSERT_TRUE(Until([&] { return cluster_->host(2).view.members.size() == 1; })) << Trouble();
  StartWorld(2, {2, 2});
  EXPECT_GT(LifeOf(2), LifeOf(1));
  StopWorld(2);
  for (const size_t host : {size_t{0}, size_t{1}}) cluster_->StartHost(host);
  AwaitOneView();
  StartWorld(3, {0, 1});
  EXPECT_GT(LifeOf(3), LifeOf(2));
  for (Rank rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Latest(3, rank), StepIn(1, 1));
    EXPECT_TRUE(Read(3, rank, 1, rank).ok());
  }
}

// A node that died comes back under its name at once, as another instance, and is used again.
TEST_F(Story, NodeComesBackUnderItsName) {
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const NodeId before = cluster_->host(1).id;
  LoseHost(1);
  cluster_->StartHost(1);
  AwaitOneView();
  EXPECT_NE(cluster_->host(1).id, before);
  StopWorld(1);
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 1), 1u);
  EXPECT_TRUE(Read(2, 1, 1, 1).ok());
  SaveEverywhere(2, 2);
}

// A node is lost and does not return: what it held gets its copies back elsewhere while the others go on
// undisturbed.
TEST_F(Story, RedundancyComesBackWithoutARestart) {
  StartNodes(4);
  StartWorld(1, {0, 1, 2});
  SaveEverywhere(1, 1);
  const size_t holder = HoldersBeside(0, ShardOf(1, 1, 0)).at(0);
  const Incarnation life = RankOf(1, 0).incarnation();
  cluster_->StopHost(holder, false);
  EXPECT_TRUE(Until([&] { return cluster_->checker().CopiesMin(StepIn(1, 1)) == 2; }));
  EXPECT_EQ(cluster_->host(0).engine->incarnation(), life);
}

// Both nodes lose their memory, one after the other, and what was committed has been copied anew between: the
// copies know that it was, though it was announced before they were made, and the next life's first step does
// not retire it.
TEST_F(Story, CopiesMadeAnewKnowThatTheyAreCommitted) {
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

// A spare joins in the middle of a save: no rank notices.
TEST_F(Story, JoiningDisturbsNobody) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  for (const Rank rank : {0u, 1u}) ASSERT_TRUE(Save(1, 2, rank).ok());
  const Incarnation life = LifeOf(1);
  const size_t spare = cluster_->AddHost();
  cluster_->StartHost(spare);
  ASSERT_TRUE(Save(1, 2, 2).ok());
  AwaitOneView();
  ASSERT_TRUE(Save(1, 2, 3).ok());
  for (Rank rank = 0; rank < 4; ++rank) EXPECT_TRUE(Wait(1, 2, rank, Level::kCommitted).ok());
  SaveEverywhere(1, 3);
  EXPECT_EQ(RankOf(1, 0).incarnation(), life);
}

// A copy counts only when the replica has checked it: while nothing can be acknowledged, nothing is
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

// A rank dies with puts of its chunks under way over a link that is stuck. Its chunks are not given to the
// next save while the fabric still reads them; afterwards they are.
TEST_F(Story, BuffersComeBackOnlyWhenQuiescent) {
  lengths_ = {6 * 4096};
  StartNodes(2, 1, 32);
  StartWorld(1);
  SaveScript unfinished;
  unfinished.stop_after_chunks = 6;
  cluster_->network().Clog(0, 1, cluster_->now() + 300 * kMs);
  size_t puts = 0;
  cluster_->on_transfer = [&](const Transfer& transfer) {
    puts += transfer.initiator == 0 && !transfer.get ? 1 : 0;
  };
  // The reservation crosses the stuck link late; the puts begin then.
  SaveInBackground(1, 1, 0, unfinished);
  ASSERT_TRUE(Until([&] { return puts > 0; }));
  cluster_->network().Clog(0, 1, cluster_->now() + 500 * kMs);
  RankOf(1, 0).Close();
  cluster_->RunFor(1 * kMs);
  cluster_->on_transfer = nullptr;
  ASSERT_TRUE(Hello(1, 0).ok());
  // Whatever is granted now is checked for transfers on it.
  for (Step step = 2; step < 6; ++step) {
    const Status status = Save(1, step, 0);
    EXPECT_TRUE(status.ok() || status.code() == Code::kNoSpace) << status.ToString();
  }
  EXPECT_TRUE(Until([&] {
    uint64_t sealed = 0;
    for (const auto& [id, shard] : cluster_->host(0).store->shards()) sealed += ChunkCount(shard->extents);
    return FreeChunks(0) + sealed == 32;
  }));
}

// A view stays readable while newer steps retire its step; its chunks come back when it is closed.
TEST_F(Story, ReadersKeepWhatTheyRead) {
  lengths_ = {2 * 4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  std::optional<Status> read;
  RankOf(1, 0).Read(1, 0, 5 * kSecond, 3 * kSecond,
                    [&](const Status& status, const ShardMeta&) { read = status; });
  cluster_->RunFor(10 * kMs);
  for (Step step = 2; step < 8; ++step) SaveEverywhere(1, step);
  EXPECT_FALSE(Holds(0, ShardOf(1, 1, 0)));
  ASSERT_TRUE(Until([&] { return read.has_value(); }));
  EXPECT_TRUE(read->ok()) << read->ToString();
  EXPECT_TRUE(Until([&] { return Checker::AtRest(cluster_->host(0)); }));
}

// A restarted daemon allocates around what it has sealed: many saves and restarts, and no two shards share
// bytes.
TEST_F(Story, FreeListOfARestartedDaemonComesFromItsTable) {
  StartNodes(2, 1, 96);
  StartWorld(1);
  for (Step step = 1; step < 12; ++step) {
    SaveEverywhere(1, step);
    const size_t host = step % 2;
    cluster_->CrashDaemon(host);
    cluster_->RunFor(5 * kMs);
    cluster_->StartDaemon(host);
    AwaitOneView();
    ASSERT_TRUE(Hello(1, static_cast<Rank>(host)).ok()) << Trouble();
    cluster_->checker().CheckAllBytes();
    for (Rank rank = 0; rank < 2; ++rank) EXPECT_TRUE(Read(1, rank, step, rank).ok());
  }
}

// What an aborted save has left behind is not taken for the next one's of the same step.
TEST_F(Story, AbortedSaveLeavesNothingToTheNext) {
  lengths_ = {5 * 4096};
  StartNodes(2);
  StartWorld(1);
  const uint64_t free_before = FreeChunks(0);
  SaveScript abort;
  abort.abort = true;
  EXPECT_EQ(Save(1, 1, 0, abort).code(), Code::kAborted);
  EXPECT_TRUE(Until([&] { return FreeChunks(0) == free_before && FreeChunks(1) == free_before; }));
  EXPECT_EQ(Save(1, 1, 0, abort).code(), Code::kAborted);
  lengths_ = {3 * 4096};  // other bytes, under the same name
  SaveEverywhere(1, 1);
  EXPECT_TRUE(Read(1, 1, 1, 0).ok());
}

// The same step saved twice is refused; another number of ranks reads what the first world saved.
TEST_F(Story, ReshardingReadsEveryRanksShard) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  EXPECT_EQ(Save(1, 1, 0).code(), Code::kAlreadyExists);
  StopWorld(1);
  StartWorld(2, {1, 3});
  for (Rank reader = 0; reader < 2; ++reader)
    for (Rank rank = 0; rank < 4; ++rank) EXPECT_TRUE(Read(2, reader, 1, rank).ok());
}

// A holder loses its memory after the shard was REPLICATED and before the step is committed, and comes back
// while the world goes on: the copy is made anew without anybody asking, and the step is committed.
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

// A put fails, and the holder is to be tried again a little later. When it is time the timer comes late and
// other inputs come before it: the copy is made nevertheless.
TEST_F(Story, ALateTimerForgetsNoCopy) {
  options_.timer_late_max_us = 20 * kMs;
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_EQ(LeaderHost(), 0u);  // whose timers never rest while a copy is missing
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

// The leader judges a step committed and is cut off before it has told anybody; its node holds one of the
// copies that made it so. The others know the step for a complete one, not for a committed one: it is what
// they would restore until they have a newer one.
TEST_F(Story, ACommitThatOnlyACutOffLeaderKnows) {
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {1, 2});
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  ASSERT_EQ(HoldersBeside(2, ShardOf(1, 2, 1)), std::vector<size_t>{0});
  cluster_->on_event = [&](size_t host, const LevelEvent& event) {
    if (host != 0 || event.level != Level::kCommitted || event.shard.step != 3) return;
    for (const size_t other : {size_t{1}, size_t{2}, kCoordinatorHost}) {
      cluster_->network().Cut(0, other, kForever);
      cluster_->network().Cut(other, 0, kForever);
    }
  };
  // The copy that its owner makes in place of the lost one takes a while.
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (transfer.initiator != 2 || transfer.target != 1) return;
    cluster_->on_transfer = nullptr;
    cluster_->network().Cut(2, 1, cluster_->now() + 1 * kMs);
  };
  for (Rank rank = 0; rank < 2; ++rank) ASSERT_TRUE(Save(1, 3, rank).ok());
  ASSERT_TRUE(Until([&] { return cluster_->host(1).view.members.size() == 2 && !cluster_->on_transfer; }));
  EXPECT_EQ(cluster_->checker().newest_committed(), StepIn(1, 3));
  EXPECT_EQ(LatestStep(1, 0), 3u);
  for (Rank rank = 0; rank < 2; ++rank) ASSERT_TRUE(Save(1, 4, rank).ok());
  EXPECT_TRUE(Wait(1, 4, 0, Level::kCommitted).ok()) << Trouble();
  for (const Step step : {2u, 4u}) EXPECT_TRUE(Holds(1, ShardOf(1, step, 0))) << step;
  EXPECT_FALSE(Holds(1, ShardOf(1, 3, 0)));
}

// A put fails with bytes of it still on their way, and the word of that is lost. A repeated grant tells the
// source that the holder still keeps the chunks: they are given back, and not used before the bytes have
// come.
TEST_F(Story, ALateWriteOfAFailedPutHitsNobody) {
  lengths_ = {6 * 4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const NetworkOptions calm = cluster_->network().options();
  NetworkOptions failing = calm;
  failing.replay_ppm = failing.transfer_fail_ppm = failing.zombie_ppm = kMillion;
  failing.slow_max_us = 50 * kMs;
  cluster_->network().SetOptions(failing);
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (transfer.initiator != 1) return;
    cluster_->on_transfer = nullptr;
    // When all puts are under way, until the last of them has failed.
    cluster_->scheduler().After(1 * kMs, [&] { cluster_->network().Cut(1, 0, cluster_->now() + 4 * kMs); });
  };
  ASSERT_TRUE(Save(1, 2, 1).ok());
  cluster_->RunFor(10 * kMs);
  cluster_->network().SetOptions(calm);
  cluster_->RunFor(150 * kMs);
  for (Step step = 2; step < 8; ++step) EXPECT_TRUE(Save(1, step, 0).ok());
  cluster_->RunFor(2 * kSecond);
}

// The same when the leader, which holds no copy, is restarted, and the node that has marked its copy is away:
// all that is left is a copy on a node that has not heard.
TEST_F(Story, ACommitThatNobodyWhoIsLeftHasHeardOf) {
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {1});
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  ASSERT_EQ(HoldersBeside(1, ShardOf(1, 2, 0)), std::vector<size_t>{2});
  cluster_->on_event = [&](size_t host, const LevelEvent& event) {
    if (event.level != Level::kCommitted || event.shard.step != 3 || event.shard.rank != LevelEvent::kNoRank)
      return;
    if (host == 0) cluster_->network().Cut(0, 1, kForever);
    if (host == 2)
      cluster_->scheduler().After(0, [&] {
        cluster_->StopHost(2, true);
        cluster_->CrashDaemon(0);
        cluster_->StartDaemon(0);
        cluster_->network().HealLinks();
      });
  };
  // The copy that its owner makes in place of the one that is away takes a while.
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (transfer.initiator != 1 || transfer.target != 0) return;
    cluster_->on_transfer = nullptr;
    cluster_->network().Cut(1, 0, cluster_->now() + 1 * kMs);
  };
  ASSERT_TRUE(Save(1, 3, 0).ok());
  ASSERT_TRUE(Until([&] { return !cluster_->on_transfer; }));
  EXPECT_EQ(cluster_->checker().newest_committed(), StepIn(1, 3));
  cluster_->RunFor(10 * kMs);
  ASSERT_TRUE(Save(1, 4, 0).ok());
  EXPECT_TRUE(Wait(1, 4, 0, Level::kCommitted).ok()) << Trouble();
  for (const Step step : {2u, 4u}) EXPECT_TRUE(Holds(1, ShardOf(1, step, 0))) << step;
  EXPECT_FALSE(Holds(1, ShardOf(1, 3, 0)));
}

// A step gets its last copy when a newer one is committed already, and the order to release it is on its way.
// It must not be committed any more: an older one would be released for it, and it is being released itself.
TEST_F(Story, AStepThatIsBeingReleasedIsNotCommitted) {
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {1});
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  ASSERT_EQ(HoldersBeside(1, ShardOf(1, 2, 0)), std::vector<size_t>{2});
  NetworkOptions steady = cluster_->network().options();
  steady.delay_min_us = steady.delay_max_us = 2 * kMs;  // so that the leader's words come in order
  cluster_->network().SetOptions(steady);
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (transfer.initiator != 1) return;
    cluster_->on_transfer = nullptr;
    cluster_->network().Clog(1, 2, cluster_->now() + 15 * kMs);  // this put, and nothing else
    cluster_->scheduler().After(0, [&] {
      cluster_->network().HealLinks();
      for (const size_t member : {size_t{1}, size_t{2}})
        cluster_->network().Clog(0, member, cluster_->now() + 30 * kMs);
    });
  };
  ASSERT_TRUE(Save(1, 3, 0).ok());
  ASSERT_TRUE(Until([&] { return !cluster_->on_transfer; }));
  ASSERT_TRUE(Save(1, 4, 0).ok());
  EXPECT_TRUE(Wait(1, 4, 0, Level::kCommitted).ok()) << Trouble();
  cluster_->RunFor(1 * kSecond);
  for (const size_t host : {size_t{1}, size_t{2}}) {
    EXPECT_TRUE(Holds(host, ShardOf(1, 4, 0)));
    EXPECT_FALSE(Holds(host, ShardOf(1, 3, 0)));
    EXPECT_TRUE(Holds(host, ShardOf(1, 2, 0)));
  }
  EXPECT_EQ(Wait(1, 3, 0, Level::kCommitted).code(), Code::kAborted);
}

// Without names for lives: a hello crosses a stuck link and arrives when its process is long dead and the
// next launch has begun. It takes no seat for good, and ends nobody's life.
TEST_F(Story, ALateHelloOfTheDeadEndsNoLife) {
  named_lives_ = false;
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  cluster_->network().Clog(1, 0, cluster_->now() + 800 * kMs);
  AddRank(1, 1, 2, 1);
  RankOf(1, 1).Hello(5 * kSecond, [](const Status&) {});
  cluster_->RunFor(50 * kMs);
  RankOf(1, 1).Close();
  StartWorld(2, {0, 2});
  const Incarnation life = LifeOf(2);
  cluster_->RunFor(2 * kSecond);
  EXPECT_EQ(cluster_->host(0).engine->incarnation(), life);
  SaveEverywhere(2, 1);
}

// The same, and the seat is still free when the dead one's hello comes: the living rank gets it.
TEST_F(Story, ALateHelloOfTheDeadKeepsNobodyOut) {
  named_lives_ = false;
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  AddRank(2, 0, 2, 0);
  ASSERT_TRUE(Hello(2, 0).ok());
  const Incarnation life = LifeOf(2);
  cluster_->network().Clog(1, 0, cluster_->now() + 300 * kMs);
  AddRank(1, 1, 2, 1);
  RankOf(1, 1).Hello(5 * kSecond, [](const Status&) {});
  cluster_->RunFor(50 * kMs);
  RankOf(1, 1).Close();
  cluster_->RunFor(255 * kMs);
  AddRank(2, 1, 2, 2);
  ASSERT_TRUE(Hello(2, 1).ok()) << Trouble();
  EXPECT_EQ(RankOf(2, 1).incarnation(), life);
  SaveEverywhere(2, 1);
}

// The leader is lost with the only word of which step the life restores, just when the first rank has been
// told. The ranks that ask later are told the same step, or none.
TEST_F(Story, TheStepToRestoreOutlivesItsLeader) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  for (Rank rank = 0; rank < 4; ++rank) ASSERT_TRUE(Save(1, 2, rank).ok());
  StopWorld(1);
  const size_t leader = LeaderHost();
  ASSERT_EQ(leader, 0u);
  // Rank 1's shard of step 2 is away while the first rank asks.
  StartWorld(2, {1, 2, 3, 1});
  cluster_->network().Cut(0, 2, kForever);
  cluster_->network().Cut(0, 3, kForever);
  std::optional<StepId> first;
  RankOf(2, 0).Latest(3 * kSecond, [&](const Status& status, const AnswerLatest& answer) {
    if (status.ok()) first = answer.step;
  });
  cluster_->RunFor(500 * kMs);
  EXPECT_FALSE(first.has_value()) << "a step was given out that only two nodes know of";
  cluster_->network().HealLinks();
  EXPECT_TRUE(Until([&] { return first.has_value(); }));
  LoseHost(0);
  for (Rank rank = 1; rank < 4; ++rank) EXPECT_EQ(Latest(2, rank), first);
}

// The checks themselves: bytes that change behind everybody's back are seen.
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

// A seed is a run: twice the same, whether or not its trace is kept; another one is another run.
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
