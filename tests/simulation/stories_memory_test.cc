// SPDX-License-Identifier: Apache-2.0
//
// Failure stories of memory: where copies are, how many chunks they need, and when chunks are free again. The
// comment before each story says what it is about. The Checker finds everything else that goes wrong (bytes,
// copies, chunks with two users, unanswered calls).
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

// The arena is full. Before a byte is copied, save_begin reports how much is needed, how much is free, and
// the limit. Training continues, `latest` stays, and a save that fits succeeds.
TEST_F(Story, ArenaIsFull) {
  lengths_ = {4 * 4096};
  StartNodes(2, 1, 32);  // three steps of two shards of five chunks, and two chunks
  StartWorld(1);
  SaveEverywhere(1, 1);
  const uint64_t free_before = FreeChunks(0);
  lengths_ = {30 * 4096};
  const Status refused = Save(1, 2, 0);
  EXPECT_EQ(refused.code(), Code::kNoSpace);
  for (const std::string& word : {std::string("31"), std::string("32"), std::to_string(free_before)})
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

// A fetched copy is evicted for a save, but not for one that would be refused nevertheless.
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
  lengths_ = {62 * 4096};
  EXPECT_EQ(Save(1, 2, 0).code(), Code::kNoSpace);
  EXPECT_TRUE(Holds(0, fetched));
  EXPECT_EQ(FreeChunks(0), free_before);
  lengths_ = {free_before * 4096};  // and a manifest
  EXPECT_TRUE(Save(1, 3, 0).ok());
  EXPECT_FALSE(Holds(0, fetched));
}

// The leader remembers every step that anybody has saved. One rank goes on alone. Once the other ranks save again, so can
// it.
TEST_F(Story, ARankThatGoesOnAloneIsStoppedBeforeItFillsTheLeadersMemory) {
  constexpr Step kLimit = 256;
  lengths_ = {4096};
  StartNodes(2, 1, 1200);
  StartWorld(1);
  for (Step step = 1; step <= kLimit; ++step) ASSERT_TRUE(Save(1, step, 0).ok()) << step;
  const Status refused = Save(1, kLimit + 1, 0);
  EXPECT_EQ(refused.code(), Code::kNoSpace);
  EXPECT_NE(refused.message().find("256"), std::string::npos) << refused.message();
  ASSERT_TRUE(Save(1, kLimit, 1).ok());
  ASSERT_TRUE(Wait(1, kLimit, 0, Level::kCommitted).ok());
  EXPECT_TRUE(Save(1, kLimit + 2, 0).ok());
  EXPECT_EQ(LatestStep(1, 1), kLimit);
}

// Ranks save alternate steps until no arena has room for another shard. None of those steps can ever be
// complete. Nevertheless a step that all ranks save must find room.
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

// The network between two nodes is cut while training continues. Nothing is replicated, and both arenas fill
// with steps that wait for replication. After that there is no room for a single replica. Nevertheless the
// newest steps must be replicated.
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

// A node's copies are made again on the others while it is away. When it returns with its memory, every shard has a copy
// more than it needs. An arena that is planned for two steps must still have room for the next one.
TEST_F(Story, CopiesOfANodeThatReturnsLeaveRoomForTheNextStep) {
  lengths_ = {4 * 4096};
  StartNodes(3, 1, 22);  // two steps of two shards of five chunks, and two chunks
  StartWorld(1);
  SaveEverywhere(1, 1);
  cluster_->CrashDaemon(2);
  const auto copies_elsewhere = [&] {
    return Holds(0, ShardOf(1, 1, 2)) && Holds(1, ShardOf(1, 1, 2)) &&
           HoldersBeside(0, ShardOf(1, 1, 0)).size() == 1 && HoldersBeside(1, ShardOf(1, 1, 1)).size() == 1;
  };
  ASSERT_TRUE(Until(copies_elsewhere)) << Trouble();
  StopWorld(1);
  cluster_->StartDaemon(2);
  AwaitOneView();
  StartWorld(2);
  SaveEverywhere(2, 2);
}

// A rank's daemon dies before the rank saves a step, while another node is away. Its arena still has the step
// before, so nothing was lost there. So the step can never be complete, and does not fill the other arenas. Three nodes
// cannot hold four copies, so the one that is away stays in the roster.
TEST_F(Story, AStepThatADaemonsEndHasBrokenOffGoesWhileAnotherNodeIsAway) {
  StartNodes(4, 3);
  StartWorld(1, {0, 1, 2});
  SaveEverywhere(1, 1);
  LoseHost(3);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 3; }));
  cluster_->CrashDaemon(0);
  for (const Rank rank : {1, 2}) ASSERT_TRUE(Save(1, 2, rank).ok());
  cluster_->StartDaemon(0);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 3; }));
  ASSERT_TRUE(Holds(1, ShardOf(1, 2, 1)));
  ASSERT_TRUE(Hello(1, 0).ok());
  ASSERT_TRUE(Save(1, 3, 0).ok());
  EXPECT_TRUE(Until([&] { return !Holds(1, ShardOf(1, 2, 1)) && !Holds(2, ShardOf(1, 2, 2)); })) << Trouble();
}

// Node 0 is lost with its memory, and the others, which cannot reach each other, save until their arenas are
// full. Then all ranks end, and the empty node 0 fills with copies of those steps. None of them can be
// complete without rank 0, which cannot save its shard any more. They must not keep the committed step from
// getting its second copy.
TEST_F(Story, StepsThatNobodyCanCompleteMakeRoomForTheCommittedOne) {
  lengths_ = {2 * 4096};
  StartNodes(3, 1, 24);
  StartWorld(1);
  SaveEverywhere(1, 1);
  LoseHost(0);
  cluster_->network().Cut(1, 2, kForever);
  cluster_->network().Cut(2, 1, kForever);
  for (Step step = 2; step < 12; ++step)
    for (const Rank rank : {1, 2}) {
      const Status status = Save(1, step, rank);
      EXPECT_TRUE(status.ok() || status.code() == Code::kNoSpace) << status.ToString();
    }
  EXPECT_EQ(FreeChunks(1), 0u);
  EXPECT_EQ(FreeChunks(2), 0u);
  StopWorld(1);
  cluster_->network().HealLinks();
  cluster_->StartHost(0);
  AwaitOneView();
  EXPECT_TRUE(Until([&] { return FreeChunks(0) == 0; })) << Trouble();
  const auto copies = [&](Rank rank) {
    size_t count = 0;
    for (size_t host = 0; host < 3; ++host) count += Holds(host, ShardOf(1, 1, rank)) ? 1 : 0;
    return count;
  };
  EXPECT_LT(std::min({copies(0), copies(1), copies(2)}), 2u);
  EXPECT_TRUE(Until([&] { return copies(0) >= 2 && copies(1) >= 2 && copies(2) >= 2; }, 30 * kSecond))
      << Trouble();
}

// Ranks are on nodes that do not begin at 0. Five nodes in pairs have one group of three.
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

// N is not divisible by R + 1. The loss of any R nodes is survived.
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
    RestoreEverywhere(2, 1);
    clients_.clear();
  }
}

// Not all copies are in the failure domain of their saver if there is another domain.
TEST_F(Story, RackIsLost) {
  StartNodes(8, 1, 128, 2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  StopWorld(1);
  for (size_t host = 0; host < 8; host += 2) cluster_->StopHost(host, false);
  EXPECT_TRUE(cluster_->checker().Producible(StepIn(1, 1)));
}

// Shards with no object, with empty objects, of a byte, of exactly a chunk, of a chunk and a byte, of 3 MiB
// and a byte. Each takes the chunks that it needs and no more.
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

// A small shard takes few chunks, whatever the size of the others.
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

// A rank dies while puts of its chunks wait on a stuck link. The chunks are not granted to the next save
// while the fabric still reads them. Afterwards they are free.
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
  // The Checker looks for transfers on every chunk that is granted now.
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

// A view stays readable while newer steps retire its step. Its chunks are freed when it is closed.
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

// A restarted daemon does not allocate chunks of sealed shards: after many saves and restarts no two shards
// share bytes.
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

// Leftovers of an aborted save are not used for the next save of the same step.
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

// A second save of the same step is refused. Another number of ranks reads the shards of the former ranks.
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

// A put fails while some of its bytes are in flight, and the message about that is lost. A repeated grant
// tells the source that the holder still keeps the chunks. They are released, but not used before the bytes
// have landed.
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
    // From when all puts are in flight until the last of them has failed.
    cluster_->scheduler().After(1 * kMs, [&] { cluster_->network().Cut(1, 0, cluster_->now() + 4 * kMs); });
  };
  ASSERT_TRUE(Save(1, 2, 1).ok());
  cluster_->RunFor(10 * kMs);
  cluster_->network().SetOptions(calm);
  cluster_->RunFor(150 * kMs);
  for (Step step = 2; step < 8; ++step) EXPECT_TRUE(Save(1, step, 0).ok());
  cluster_->RunFor(2 * kSecond);
}

// A save in a GPU's memory is put from there. Its owner may use that memory again only when no put reads it
// any more, however long a put takes. The Checker checks that.
TEST_F(Story, DeviceMemoryIsGivenBackWhenNoPutReadsIt) {
  lengths_ = {6 * 4096};
  options_.network.device_refused_ppm = 0;
  StartNodes(2);
  StartWorld(1);
  size_t from_device = 0;
  TimeUs stuck_until = 0;
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (transfer.device == nullptr) return;
    ++from_device;
    if (stuck_until != 0) return;
    stuck_until = cluster_->now() + 300 * kMs;
    cluster_->network().Clog(0, 1, stuck_until);
  };
  SaveScript script;
  script.device = true;
  ASSERT_TRUE(Save(1, 1, 0, script).ok()) << Trouble();
  EXPECT_GT(from_device, 0u);
  EXPECT_GE(cluster_->now(), stuck_until);
  ASSERT_TRUE(Save(1, 1, 1).ok());
  ASSERT_TRUE(Wait(1, 1, 0, Level::kCommitted).ok()) << Trouble();
  EXPECT_EQ(BadIn(Verify(1)), 0u);
}

// If the card cannot read device memory, the save succeeds by way of the arena.
TEST_F(Story, DeviceMemoryThatNoCardCanReadIsSavedAllTheSame) {
  lengths_ = {6 * 4096};
  options_.network.device_refused_ppm = kMillion;
  StartNodes(2);
  StartWorld(1);
  SaveScript script;
  script.device = true;
  for (const Rank rank : {0u, 1u}) ASSERT_TRUE(Save(1, 1, rank, script).ok()) << Trouble();
  ASSERT_TRUE(Wait(1, 1, 0, Level::kCommitted).ok()) << Trouble();
  EXPECT_EQ(BadIn(Verify(1)), 0u);
}

}  // namespace
}  // namespace ropeteam::simulation
