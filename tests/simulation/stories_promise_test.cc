// SPDX-License-Identifier: Apache-2.0
//
// Schedules that once broke the promise that a committed step survives the loss of any R nodes. The comment
// before each one says what went wrong. The Checker finds everything else.
#include "core/store/format.h"
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

// In the middle of a long save a node loses the coordinator, but not its peers. Its holder disconnects it,
// frees the quarantined chunks and seals another shard in them. On a fabric that does not fence, the node's
// next puts wrote into that shard.
TEST_F(Story, ANodeThatWasDeclaredDeadWritesNothingAnyMore) {
  lengths_ = {8 * 4096};
  StartNodes(3, 1, 64);
  StartWorld(1);
  const size_t zombie = LeaderHost() == 2 ? 1 : 2;
  size_t holder = SIZE_MAX;
  uint64_t reused = 0;  // remote offset of the zombie's first put
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (transfer.get || transfer.initiator != zombie || holder != SIZE_MAX) return;
    holder = transfer.target;
    reused = transfer.remote_offset;
  };
  SaveScript slow;
  slow.pause_after_chunks = 4;
  slow.pause_us = 10 * kSecond;
  SaveInBackground(1, 1, static_cast<Rank>(zombie), slow);
  ASSERT_TRUE(Until([&] { return holder != SIZE_MAX; }));
  cluster_->RunFor(50 * kMs);
  cluster_->network().Cut(zombie, kCoordinatorHost, cluster_->now() + 20 * kSecond);
  cluster_->network().Cut(kCoordinatorHost, zombie, cluster_->now() + 20 * kSecond);
  const NodeId zombie_id = cluster_->host(zombie).id;
  ASSERT_TRUE(Until([&] { return !cluster_->host(holder).view.Contains(zombie_id); }));
  cluster_->RunFor(options_.quarantine_us + kSecond);
  ASSERT_TRUE(Save(1, 1, static_cast<Rank>(holder)).ok());
  const SealedShard* sealed = cluster_->host(holder).store->Find(ShardOf(1, 1, static_cast<Rank>(holder)));
  ASSERT_NE(sealed, nullptr);
  const uint32_t chunk = static_cast<uint32_t>((reused - cluster_->host(holder).chunks_begin) / 4096);
  EXPECT_TRUE(std::any_of(sealed->extents.begin(), sealed->extents.end(), [&](const Extent& extent) {
    return chunk >= extent.first && chunk < extent.first + extent.count;
  })) << "the zombie's chunks were not reused: the story strikes nothing";
  cluster_->RunFor(8 * kSecond);  // the save goes on, and ends
  EXPECT_FALSE(cluster_->checker().failed()) << Trouble();
}

// R = 1, K = 1. The links between two nodes, each the other's holder, are slow. Another rank reads both
// shards. The step was committed because of the copies that were fetched for reading, and the step before was
// released. Then a fetched copy was evicted and its owner's host was lost. Both steps were gone.
TEST_F(Story, ACacheIsNotCountedTowardsTheCommit) {
  lengths_ = {4096};
  options_.keep_steps = 1;
  StartNodes(4, 1, 48);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_EQ(LeaderHost(), 0u);
  ASSERT_EQ(HoldersBeside(2, ShardOf(1, 1, 2)), std::vector<size_t>{3});
  cluster_->network().Clog(2, 3, cluster_->now() + 60 * kSecond);
  cluster_->network().Clog(3, 2, cluster_->now() + 60 * kSecond);
  for (Rank rank = 0; rank < 4; ++rank) ASSERT_TRUE(Save(1, 2, rank).ok());
  ASSERT_TRUE(Read(1, 1, 2, 2).ok());
  ASSERT_TRUE(Read(1, 1, 2, 3).ok());
  const bool committed = Wait(1, 2, 1, Level::kCommitted, 2 * kSecond).ok();
  lengths_ = {FreeChunks(1) * 4096};
  SaveInBackground(1, 3, 1);
  cluster_->RunFor(100 * kMs);
  LoseHost(2);
  StopWorld(1);
  cluster_->network().HealLinks();
  cluster_->StartHost(2);
  AwaitOneView();
  lengths_ = {4096};
  StartWorld(2);
  RestoreEverywhere(2, committed ? 2 : 1);
}

// While a replica arrives slowly, its node reads the same shard from another holder and seals it as a cache.
// The replica then found that copy, was acknowledged and counted, but remained a cache that may be evicted.
TEST_F(Story, AReplicaThatFindsACacheMakesItAReplica) {
  lengths_ = {4 * 4096};
  StartNodes(3, 2, 128);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const size_t leader = LeaderHost();
  const size_t owner = (leader + 1) % 3;
  const size_t slow = (leader + 2) % 3;
  bool clogged = false;
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (clogged || transfer.get || transfer.initiator != owner || transfer.target != slow) return;
    clogged = true;
    cluster_->network().Clog(owner, slow, cluster_->now() + 2 * kSecond);
  };
  const Rank rank = static_cast<Rank>(owner);
  ASSERT_TRUE(Save(1, 2, rank).ok());
  ASSERT_TRUE(Until([&] { return Holds(leader, ShardOf(1, 2, rank)); }));
  ASSERT_TRUE(Read(1, static_cast<Rank>(slow), 2, rank).ok());
  ASSERT_TRUE(Holds(slow, ShardOf(1, 2, rank)));
  EXPECT_TRUE(Wait(1, 2, rank, Level::kReplicated, 10 * kSecond).ok());
  EXPECT_NE(cluster_->host(slow).store->Find(ShardOf(1, 2, rank))->role, Role::kCache);
  for (Rank other = 0; other < 3; ++other)
    if (other != rank) {
      ASSERT_TRUE(Save(1, 2, other).ok());
    }
  EXPECT_TRUE(Wait(1, 2, rank, Level::kCommitted).ok());
}

// A leader and another node, which have all ranks, are cut off from the coordinator and the rest. The leader
// continued to announce commits, while the other side began an incarnation that did not know of them.
TEST_F(Story, ALeaderThatIsCutOffCommitsNothing) {
  StartNodes(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {0, 1});
  SaveEverywhere(1, 1);
  Isolate({0, 1}, false, 60 * kSecond);
  ASSERT_TRUE(Until([&] { return cluster_->host(2).view.members.size() == 2; }));
  for (Rank rank = 0; rank < 2; ++rank)
    ASSERT_TRUE(Save(1, 2, rank).ok()) << "a save is local without a lease";
  EXPECT_EQ(Wait(1, 2, 0, Level::kCommitted, kSecond).code(), Code::kDeadlineExceeded);
  StartWorld(2, {2, 3});
  // The coordinator's side must not restore what it has, either: the other two may know of a commit.
  const Status latest = AskLatest(2, 0, kSecond);
  EXPECT_EQ(latest.code(), Code::kDeadlineExceeded) << latest.ToString();
  EXPECT_NE(latest.message().find("missing node0, node1: "), std::string::npos) << latest.message();
  cluster_->network().HealLinks();
  AwaitOneView();
  StopWorld(1);
  StopWorld(2);
  StartWorld(3, {0, 1});
  RestoreEverywhere(3, 2);  // not committed, but complete
}

// Node 0 and its coordinator are only unreachable when another coordinator is started for the other half.
// Each half has leases, a leader and ranks. The first half commits. The other must not restore an older step,
// whichever of the two coordinators stays.
TEST_F(Story, OfTwoCoordinatorsOneSideWaits) {
  StartNodes(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {0, 1});
  SaveEverywhere(1, 1);
  SplitInTwo();
  SaveEverywhere(1, 2);
  StartWorld(2, {2, 3});
  const Status latest = AskLatest(2, 0, kSecond);
  EXPECT_EQ(latest.code(), Code::kDeadlineExceeded) << latest.ToString();
  EXPECT_NE(latest.message().find("missing node0, node1: "), std::string::npos) << latest.message();
  StopWorld(1);
  StopWorld(2);
  cluster_->membership().StopCoordinator();
  cluster_->network().HealLinks();
  AwaitOneView();
  StartWorld(3, {0, 1});
  RestoreEverywhere(3, 2);
}

// An incarnation restores step 1 while the node with the missing shard of step 2 is away. The next
// incarnation begins, and its leader is lost before a rank asks for `latest`. The next leader did not know of
// the choice, and committed step 2 when that node was back.
TEST_F(Story, WhatTheWorldHasLeftBehindIsNotCommittedUnderTheNextIncarnation) {
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1);
  SaveEverywhere(1, 1);
  for (const size_t other : {0, 1}) cluster_->network().CutPath(2, other, kForever);
  for (Rank rank = 0; rank < 3; ++rank) ASSERT_TRUE(Save(1, 2, rank).ok());
  StopWorld(1);
  cluster_->CrashDaemon(2);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 2; }));
  StartWorld(2, {0, 1});
  ASSERT_EQ(Latest(2, 0), StepIn(1, 1));
  StopWorld(2);
  AddRank(3, 0, 2, 0);
  ASSERT_TRUE(Hello(3, 0).ok());
  cluster_->RunFor(100 * kMs);  // node 1 knows of it
  cluster_->CrashDaemon(0);
  ASSERT_TRUE(Until([&] { return LeaderHost() == 1; }));
  cluster_->network().HealLinks();
  cluster_->StartDaemon(0);
  cluster_->StartDaemon(2);
  AwaitOneView();
  ASSERT_EQ(LeaderHost(), 1u);
  const auto copies = [&](Rank rank) { return HoldersBeside(SIZE_MAX, ShardOf(1, 2, rank)).size(); };
  ASSERT_TRUE(Until([&] { return copies(0) >= 2 && copies(1) >= 2 && copies(2) >= 2; })) << Trouble();
  cluster_->RunFor(1 * kSecond);  // the Checker fails if step 2 is committed
}

// The ranks restart while a node has died but is still in the view. It alone had a shard of the newest step.
// That step was chosen, was told to no rank, and the choice was never repeated. So no rank was ever told what
// to restore.
TEST_F(Story, AStepThatNobodyWasToldIsChosenAgain) {
  StartNodes(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {1, 2, 3});
  EXPECT_EQ(LatestStep(1, 0), 0u);  // this choice is only for this incarnation
  SaveEverywhere(1, 1);
  cluster_->network().Clog(3, 2, cluster_->now() + 60 * kSecond);
  for (Rank rank = 0; rank < 3; ++rank) ASSERT_TRUE(Save(1, 2, rank).ok());
  cluster_->RunFor(100 * kMs);
  ASSERT_EQ(HoldersBeside(3, ShardOf(1, 2, 2)).size(), 0u);
  LoseHost(3);
  StopWorld(1);
  ASSERT_EQ(cluster_->host(0).view.members.size(), 4u);
  StartWorld(2, {0, 1, 2});
  RestoreEverywhere(2, 1);
}

// A daemon is started with other settings than the job's. It joined, and its shards counted as replicated
// without any copy. Now settings of the user are refused with an error that names both values. Defaults are
// replaced by the job's.
TEST_F(Story, ANodeWithOtherSettingsIsRefused) {
  StartNodes(3);
  cluster_->CrashDaemon(2);
  const JobSettings without_copies{0, options_.keep_steps, 3};
  cluster_->SetOwnSettings(2, {without_copies, true});
  cluster_->StartDaemon(2);
  ASSERT_TRUE(Until([&] { return !cluster_->host(2).refused.ok(); }));
  const std::string why = cluster_->host(2).refused.ToString();
  for (const char* word : {"node2", "--replicas 0", "--replicas 1"})
    EXPECT_NE(why.find(word), std::string::npos) << word << " is not in: " << why;
  EXPECT_FALSE(cluster_->host(2).daemon_runs());
  cluster_->SetOwnSettings(2, {without_copies, false});
  cluster_->StartDaemon(2);
  AwaitOneView();
  EXPECT_EQ(cluster_->host(2).view.settings.replicas, 1u);
  StartWorld(1);
  ASSERT_TRUE(Save(1, 1, 2).ok());
  ASSERT_TRUE(Wait(1, 1, 2, Level::kReplicated).ok());
  EXPECT_EQ(HoldersBeside(2, ShardOf(1, 1, 2)).size(), 1u);
}

// A rank of an incarnation with a token comes back on another node, and saves other bytes under the same name.
// The two shards were counted as copies of each other, and the step was committed with one copy of each.
TEST_F(Story, OtherBytesUnderTheSameNameAreNoCopy) {
  lengths_ = {3 * 4096};
  StartNodes(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {2, 1});
  // Neither node can make the other its holder for a while.
  cluster_->network().Clog(2, 3, cluster_->now() + 4 * kSecond);
  cluster_->network().Clog(3, 2, cluster_->now() + 4 * kSecond);
  ASSERT_TRUE(Save(1, 1, 0).ok());
  ASSERT_TRUE(Save(1, 1, 1).ok());
  const Incarnation incarnation = IncarnationOf(1);
  RankOf(1, 0).Close();
  cluster_->RunFor(100 * kMs);
  AddRank(1, 0, 2, 3);
  RankOf(1, 0).SetIncarnation(incarnation);
  ASSERT_TRUE(Hello(1, 0).ok());
  ContentShape shape = options_.job.content;
  shape.chunk_bytes = options_.chunk_bytes;
  const Content other = MakeContent(shape, 99, 1, 0, lengths_);
  ASSERT_TRUE(Sync([&](Client::StatusDone done) { RankOf(1, 0).Save(1, other, {}, std::move(done)); }).ok());
  EXPECT_EQ(Wait(1, 1, 0, Level::kCommitted, kSecond).code(), Code::kDeadlineExceeded);
  // The owner's bytes are kept and get their copies, also on the node that had the other bytes.
  EXPECT_TRUE(Wait(1, 1, 0, Level::kCommitted, 10 * kSecond).ok());
  EXPECT_TRUE(Read(1, 1, 1, 0).ok());
  EXPECT_EQ(BadIn(Verify(1)), 0u);
}

// The same, but the step is committed while the other bytes are being saved. Their node learns of the commit
// before the leader learns of the bytes. The other bytes were marked, and the rank was told COMMITTED.
TEST_F(Story, OtherBytesThatTheLeaderHasNotComparedAreNotMarked) {
  lengths_ = {3 * 4096};
  StartNodes(5);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {2, 1});
  ASSERT_TRUE(Save(1, 1, 0).ok());
  ASSERT_TRUE(Wait(1, 1, 0, Level::kReplicated).ok());
  const std::vector<size_t> holders = HoldersBeside(2, ShardOf(1, 1, 0));
  const size_t elsewhere = std::find(holders.begin(), holders.end(), 3) == holders.end() ? 3 : 4;
  const Incarnation incarnation = IncarnationOf(1);
  RankOf(1, 0).Close();
  cluster_->RunFor(100 * kMs);
  AddRank(1, 0, 2, elsewhere);
  RankOf(1, 0).SetIncarnation(incarnation);
  ASSERT_TRUE(Hello(1, 0).ok());
  // Messages of that host to the leader are delayed for a while. Messages of the leader arrive.
  cluster_->network().Clog(elsewhere, 0, cluster_->now() + 500 * kMs);
  ContentShape shape = options_.job.content;
  shape.chunk_bytes = options_.chunk_bytes;
  const Content other = MakeContent(shape, 99, 1, 0, lengths_);
  ASSERT_TRUE(Sync([&](Client::StatusDone done) { RankOf(1, 0).Save(1, other, {}, std::move(done)); }).ok());
  ASSERT_TRUE(Save(1, 1, 1).ok());
  EXPECT_TRUE(Wait(1, 1, 1, Level::kCommitted, 10 * kSecond).ok());
  EXPECT_EQ(Wait(1, 1, 0, Level::kCommitted, 10 * kSecond).code(), Code::kAborted);
  EXPECT_TRUE(Read(1, 1, 1, 0).ok());
  EXPECT_EQ(BadIn(Verify(1)), 0u);
  // A save that begins after the commit is refused.
  EXPECT_EQ(Sync([&](Client::StatusDone done) { RankOf(1, 0).Save(1, other, {}, std::move(done)); }).code(),
            Code::kAlreadyExists);
}

// Bits flip in free slots of the arena's table. The next seal in such a slot ended the daemon.
TEST_F(Story, FlippedBitsInFreeSlotsEndNoDaemon) {
  lengths_ = {2 * 4096};
  invariants_ppm_ = 0;  // the table differs from the daemon's copy until it is rewritten
  StartNodes(2, 1, 32);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const Host& host = cluster_->host(0);
  const auto* superblock = reinterpret_cast<const arena::Superblock*>(host.memory.get());
  size_t flipped = 0;
  for (uint64_t i = 0; i < superblock->chunk_count; ++i) {
    std::byte* slot = host.memory.get() + superblock->slots_begin + i * sizeof(arena::Slot);
    uint64_t state = 0;
    std::memcpy(&state, slot, sizeof(state));
    if (state != arena::kSlotFree) continue;
    slot[i % sizeof(state)] ^= std::byte{4};
    ++flipped;
  }
  ASSERT_GT(flipped, 16u);
  const NodeId daemon = host.id;
  for (Step step = 2; step < 8; ++step) SaveEverywhere(1, step);
  EXPECT_EQ(host.id, daemon);
  EXPECT_EQ(LatestStep(1, 0), 7u);
}

// The coordinator and its node return, and only that node reaches it within the first second. All other nodes were
// declared dead, became new instances, and verified their arenas.
TEST_F(Story, ACoordinatorThatReturnsAloneStartsNobodyOver) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  std::vector<NodeId> before;
  for (size_t host = 1; host < 4; ++host) before.push_back(cluster_->host(host).id);
  cluster_->membership().StopCoordinator();
  cluster_->CrashDaemon(0);
  cluster_->RunFor(500 * kMs);
  for (size_t host = 1; host < 4; ++host) {
    cluster_->network().Cut(host, kCoordinatorHost, cluster_->now() + 2500 * kMs);
    cluster_->network().Cut(kCoordinatorHost, host, cluster_->now() + 2500 * kMs);
  }
  cluster_->membership().StartCoordinator();
  cluster_->StartDaemon(0);
  cluster_->RunFor(3 * kSecond);
  AwaitOneView();
  for (size_t host = 1; host < 4; ++host)
    EXPECT_EQ(cluster_->host(host).id, before[host - 1]) << "host " << host;
  ASSERT_TRUE(Hello(1, 0).ok());
  SaveEverywhere(1, 2);
}

// Two members lost their link, and it was never re-established. Nothing was replicated between them for the
// rest of the job.
TEST_F(Story, TwoNodesThatLostEachOtherMeetAgain) {
  options_.network.link_lost_ppm = kMillion;
  StartNodes(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1);
  SaveEverywhere(1, 1);
  size_t owner = 0, holder = 0;
  for (Rank rank = 1; rank < 4 && holder == 0; ++rank) {
    owner = RankOf(1, rank).identity().host;
    holder = HoldersBeside(owner, ShardOf(1, 1, rank)).front();
  }
  ASSERT_NE(owner, 0u);
  ASSERT_NE(holder, 0u);
  const TimeUs healed = cluster_->now() + 10 * kSecond;
  cluster_->network().CutPath(owner, holder, healed);
  SaveEverywhere(1, 2);  // its copies are placed elsewhere
  EXPECT_LT(cluster_->now(), healed);
  const std::vector<LostLinkReport> lost = cluster_->host(owner).engine->Report().lost_links;
  ASSERT_EQ(lost.size(), 1u);
  EXPECT_EQ(lost[0].peer, cluster_->host(holder).id);
  cluster_->RunFor(healed + 2 * kSecond - cluster_->now());
  EXPECT_TRUE(cluster_->host(owner).engine->Report().lost_links.empty());
  SaveEverywhere(1, 3);
  bool again = false;
  for (Rank rank = 0; rank < 4; ++rank)
    again = again || (RankOf(1, rank).identity().host == owner && Holds(holder, ShardOf(1, 3, rank)));
  EXPECT_TRUE(again) << "the holder is the same as before the cut";
}

}  // namespace
}  // namespace ropeteam::simulation
