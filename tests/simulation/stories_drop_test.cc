// SPDX-License-Identifier: Apache-2.0
//
// Stories of ranks and operators that drop a step: it is released on every node, and what a restart needs
// stays, also if nodes are lost or away in between.
#include <gmock/gmock.h>

#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

using ::testing::HasSubstr;

class DropStory : public Story {
 protected:
  // A rank on each of these nodes; steps 1 to 3 are committed, and all are kept.
  void StartWithThreeSteps(uint32_t nodes = 3) {
    options_.keep_steps = 3;
    StartNodes(nodes);
    StartWorld(1);
    for (const Step step : {1, 2, 3}) SaveEverywhere(1, step);
  }
  Status Drop(Rank rank, Step step, TimeUs timeout = 5 * kSecond) {
    return Sync([&](Client::StatusDone done) { RankOf(1, rank).Drop(step, timeout, std::move(done)); });
  }
  size_t Holders(Step step) {
    size_t holders = 0;
    for (size_t host = 0; host < cluster_->host_count(); ++host) {
      if (!cluster_->host(host).daemon_runs()) continue;
      for (const auto& [id, shard] : cluster_->host(host).store->shards()) holders += id.step == step ? 1 : 0;
    }
    return holders;
  }
  void AwaitNewLeader(size_t former) {
    ASSERT_TRUE(Until([&] { return LeaderHost() != SIZE_MAX && LeaderHost() != former; })) << Trouble();
  }
};

TEST_F(DropStory, AtOkNoNodeHasACopyAndTheOlderStepsStay) {
  StartWithThreeSteps();
  const uint64_t free = FreeChunks(0);
  ASSERT_EQ(Holders(2), 6u);
  ASSERT_TRUE(Drop(1, 2).ok());
  EXPECT_EQ(Holders(2), 0u);
  EXPECT_GT(FreeChunks(0), free);
  EXPECT_TRUE(Drop(0, 2).ok()) << "again";
  EXPECT_EQ(Drop(0, 7).code(), Code::kNotFound);
  EXPECT_EQ(Read(1, 0, 2, 0).code(), Code::kNotFound);
  SaveEverywhere(1, 4);
  cluster_->RunFor(kSecond);
  EXPECT_EQ(Holders(1), 6u) << "a dropped step counts for none of the three that are kept";
  SaveEverywhere(1, 5);
  ASSERT_TRUE(Until([&] { return Holders(1) == 0; })) << Trouble();
  StopWorld(1);
  StartWorld(2);
  RestoreEverywhere(2, 5);
}

TEST_F(DropStory, TheNewestCommittedStepIsRefusedAlsoToTwoRanksAtOnce) {
  StartWithThreeSteps();
  std::map<std::pair<Rank, Step>, Status> ended;
  for (const Rank rank : {0, 1, 2})
    for (const Step step : {3, 2, 1})
      RankOf(1, rank).Drop(step, 5 * kSecond, [&ended, key = std::pair(rank, step)](const Status& status) {
        ended.emplace(key, status);
      });
  ASSERT_TRUE(Until([&] { return ended.size() == 9; })) << Trouble();
  for (const auto& [key, status] : ended)
    EXPECT_EQ(status.code(), key.second == 3 ? Code::kInvalidArgument : Code::kOk) << status.ToString();
  EXPECT_EQ(Holders(1) + Holders(2), 0u);
  StopWorld(1);
  StartWorld(2);
  RestoreEverywhere(2, 3);
}

TEST_F(DropStory, AnUncommittedStepIsNeverCommittedAndItsRanksAreTold) {
  StartWithThreeSteps();
  for (const Rank rank : {0, 1}) ASSERT_TRUE(Save(1, 4, rank).ok());
  // At once: the leader may not know the step yet.
  ASSERT_TRUE(Drop(1, 4).ok());
  EXPECT_EQ(Holders(4), 0u);
  // The last rank was still saving it.
  ASSERT_TRUE(Save(1, 4, 2).ok());
  for (const Rank rank : {0, 1, 2}) {
    const Status status = Wait(1, 4, rank, Level::kCommitted);
    EXPECT_EQ(status.code(), Code::kAborted) << rank;
    EXPECT_THAT(status.message(), HasSubstr("was dropped by rank 1")) << rank;
  }
  ASSERT_TRUE(Until([&] { return Holders(4) == 0; })) << Trouble();
  EXPECT_EQ(LatestStep(1, 0), 3u);
  SaveEverywhere(1, 5);
  StopWorld(1);
  StartWorld(2);
  RestoreEverywhere(2, 5);
}

TEST_F(DropStory, AnOperatorDropsForARunningWorldAndAfterItsEnd) {
  StartWithThreeSteps();
  const auto drop = [&](Step step) {
    return Sync(
        [&](Client::StatusDone done) { Person().DropAsOperator(step, 5 * kSecond, std::move(done)); });
  };
  ASSERT_TRUE(Save(1, 4, 0).ok());
  ASSERT_TRUE(Until([&] { return Holders(4) == 2; })) << Trouble();
  ASSERT_TRUE(drop(4).ok());
  EXPECT_EQ(Holders(4), 0u);
  const Status status = Wait(1, 4, 0, Level::kCommitted);
  EXPECT_EQ(status.code(), Code::kAborted);
  EXPECT_THAT(status.message(), HasSubstr("was dropped by an operator"));
  StopWorld(1);
  EXPECT_EQ(drop(3).code(), Code::kInvalidArgument);
  ASSERT_TRUE(drop(2).ok());
  EXPECT_EQ(Holders(2), 0u);
  EXPECT_EQ(drop(7).code(), Code::kNotFound);
  StartWorld(2);
  // The incarnation restores step 3, and has no step of its own yet.
  RestoreEverywhere(2, 3);
  EXPECT_EQ(drop(3).code(), Code::kInvalidArgument);
}

TEST_F(DropStory, AnOpenViewStaysReadable) {
  StartWithThreeSteps();
  std::optional<Status> read;
  RankOf(1, 0).Read(2, 1, 5 * kSecond, kSecond,
                    [&](const Status& status, const ShardMeta&) { read = status; });
  cluster_->RunFor(200 * kMs);
  ASSERT_TRUE(Drop(1, 2).ok());
  EXPECT_FALSE(read.has_value());
  ASSERT_TRUE(Until([&] { return read.has_value(); }));
  EXPECT_TRUE(read->ok()) << read->ToString();
}

TEST_F(DropStory, TheLeaderDiesRightAfterTheAnswer) {
  StartWithThreeSteps(4);
  const size_t leader = LeaderHost();
  ASSERT_TRUE(Drop(leader == 0 ? 1 : 0, 2).ok());
  LoseHost(leader);
  AwaitNewLeader(leader);
  cluster_->StartHost(leader);
  AwaitOneView();
  EXPECT_EQ(Holders(2), 0u);
  StopWorld(1);
  StartWorld(2);
  RestoreEverywhere(2, 3);
}

// The question goes again to the next leader, which does not know of the drop.
TEST_F(DropStory, TheLeaderDiesBeforeTheAnswer) {
  StartWithThreeSteps(4);
  const size_t leader = LeaderHost();
  const Rank rank = leader == 0 ? 1 : 0;
  std::optional<Status> dropped;
  RankOf(1, rank).Drop(2, 20 * kSecond, [&](const Status& status) { dropped = status; });
  // Some node has released its copies.
  ASSERT_TRUE(Until([&] { return Holders(2) < 8; }, kSecond)) << Trouble();
  ASSERT_FALSE(dropped.has_value());
  CloseClientsOn(leader);
  cluster_->CrashDaemon(leader);
  AwaitNewLeader(leader);
  cluster_->StartDaemon(leader);
  ASSERT_TRUE(Until([&] { return dropped.has_value(); })) << Trouble();
  EXPECT_TRUE(dropped->ok() || dropped->code() == Code::kNotFound) << dropped->ToString();
  AwaitOneView();
  ASSERT_TRUE(Until([&] { return Holders(2) == 0; })) << Trouble();
}

// Its copies are marked as committed. The leader that answered is gone. For the next one step 3 is still the
// newest step.
TEST_F(DropStory, AMemberThatWasAwayComesBackToAnotherLeader) {
  StartWithThreeSteps(4);
  const size_t leader = LeaderHost();
  const size_t away = leader == 3 ? 2 : 3;
  CloseClientsOn(away);
  cluster_->StopHost(away, true);
  const Rank rank = leader == 0 ? 1 : 0;
  ASSERT_TRUE(Drop(rank, 2, 20 * kSecond).ok()) << Trouble();
  CloseClientsOn(leader);
  cluster_->CrashDaemon(leader);
  AwaitNewLeader(leader);
  cluster_->StartDaemon(leader);
  cluster_->StartHost(away);
  AwaitOneView();
  EXPECT_GT(Holders(2), 0u);
  StopWorld(1);
  StartWorld(2);
  RestoreEverywhere(2, 3);
  for (const Step step : {4, 5, 6}) SaveEverywhere(2, step);
  ASSERT_TRUE(Until([&] { return Holders(2) == 0; })) << Trouble();
}

// The same, but the leader that answered is still there.
TEST_F(DropStory, AMemberThatWasAwayReleasesItsCopiesWhenItIsBack) {
  StartWithThreeSteps(4);
  const size_t away = LeaderHost() == 3 ? 2 : 3;
  CloseClientsOn(away);
  cluster_->StopHost(away, true);
  ASSERT_TRUE(Drop(0, 2, 20 * kSecond).ok()) << Trouble();
  cluster_->StartHost(away);
  AwaitOneView();
  EXPECT_TRUE(Until([&] { return Holders(2) == 0; })) << Trouble();
}

// More than R nodes are away, and only the step before the newest can be restored.
TEST_F(DropStory, WhileTheNewestStepCannotBeProducedTheOneBeforeIsNotDropped) {
  options_.keep_steps = 2;
  StartNodes(4);
  StartWorld(1, {0, 1});
  SaveEverywhere(1, 1);
  StopWorld(1);
  // Step 2 is saved where step 1 has no copy.
  StartWorld(2, {2, 3});
  for (const Rank rank : {0, 1}) ASSERT_EQ(LatestStep(2, rank), 1u);
  SaveEverywhere(2, 2);
  StopWorld(2);
  StartWorld(3, {0, 1});
  for (const size_t host : {2, 3}) cluster_->StopHost(host, true);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 2; })) << Trouble();
  const Status status =
      Sync([&](Client::StatusDone done) { RankOf(3, 0).Drop(1, 3 * kSecond, std::move(done)); });
  EXPECT_EQ(status.code(), Code::kInvalidArgument) << status.ToString();
  EXPECT_GT(Holders(1), 0u);
  for (const size_t host : {2, 3}) cluster_->StartHost(host);
  AwaitOneView();
  RestoreEverywhere(3, 2);
}

// A step that is being written to storage stays until it is on storage.
TEST_F(DropStory, AStepThatIsBeingPersistedIsReleasedBehindIt) {
  options_.storage.used = true;
  options_.storage.persist_every = 0;
  options_.keep_steps = 3;
  StartNodes(3);
  StartWorld(1);
  cluster_->RunFor(kSecond);  // storage is listed
  for (const size_t host : {0, 1, 2}) cluster_->storage().Hang(host);
  for (const Step step : {1, 2}) SaveEverywhere(1, step);
  ASSERT_TRUE(
      Sync([&](Client::StatusDone done) { RankOf(1, 0).Persist(1, 5 * kSecond, std::move(done)); }).ok());
  EXPECT_EQ(Drop(0, 1, kSecond).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(Holders(1), 6u);
  for (const size_t host : {0, 1, 2}) cluster_->storage().GoOn(host);
  ASSERT_TRUE(Drop(0, 1, 60 * kSecond).ok()) << Trouble();
  EXPECT_EQ(Holders(1), 0u);
  EXPECT_TRUE(cluster_->storage().Has(StepIn(1, 1)));
}

}  // namespace
}  // namespace ropeteam::simulation
