// SPDX-License-Identifier: Apache-2.0
//
// Failure stories of storage: what is persisted, by whom, and what comes back.
#include "tests/simulation/storage_story.h"

namespace ropeteam::simulation {
namespace {

TEST_F(StorageStory, APersistedStepOutlivesAllMemory) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  SavePersisted(1, 2);
  LoseAll();
  StartWorld(2);
  RestoreEverywhere(2, 2);
}

// More than R nodes have lost what the incarnation saved. Then a rank asks for the first time for `latest`.
TEST_F(StorageStory, AnOwnStepOnStorageIsNoPin) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  LoseAndReplace({0, 1});
  EXPECT_EQ(Latest(1, 2), StepIn(1, 1));
}

// The same, but the incarnation has a pin.
TEST_F(StorageStory, AnOwnStepOnStorageIsNewerThanThePin) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  StopWorld(1);
  StartWorld(2);
  RestoreEverywhere(2, 1);
  SavePersisted(2, 2);
  LoseAndReplace({0, 1});
  EXPECT_EQ(Latest(2, 2), StepIn(2, 2));
}

// The leader dies while it holds storage.
TEST_F(StorageStory, TheNextLeaderTakesStorageOver) {
  StartStored(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {2, 3});
  SavePersisted(1, 1);
  EXPECT_EQ(cluster_->storage().holder(), cluster_->host(0).id);
  LoseHost(0);
  ASSERT_TRUE(Until([&] { return LeaderHost() != SIZE_MAX; }));
  SaveEverywhere(1, 2);
  cluster_->RunFor(10 * kSecond);
  EXPECT_FALSE(cluster_->storage().Has(StepIn(1, 2))) << "whether the holder is dead is not known yet";
  AwaitPersisted(1, 2);
  EXPECT_EQ(cluster_->storage().holder(), cluster_->host(LeaderHost()).id);
}

// The leader lives, and reaches storage but no other node. It releases storage when its lease has expired.
TEST_F(StorageStory, ALeaderThatIsCutOffLetsGoOfStorage) {
  StartStored(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {2, 3});
  SavePersisted(1, 1);
  cluster_->network().Cut(kCoordinatorHost, 0, cluster_->now() + 60 * kSecond);
  Isolate({0}, false, 60 * kSecond);
  ASSERT_TRUE(Until([&] { return cluster_->host(2).view.members.size() == 3; }));
  SaveEverywhere(1, 2);
  ASSERT_TRUE(Until([&] { return cluster_->storage().Has(StepIn(1, 2)); }, 10 * kSecond)) << Trouble();
  EXPECT_NE(cluster_->storage().holder(), cluster_->host(0).id);
}

// There are two coordinators, each with half of the nodes.
TEST_F(StorageStory, TheSecondOfTwoClustersIsRefusedInWords) {
  StartStored(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {0, 1});
  SavePersisted(1, 1);
  SplitInTwo();
  StartWorld(2, {2, 3});
  SaveEverywhere(2, 2);
  const Status refused = Wait(2, 2, 0, Level::kPersisted, 20 * kSecond);
  EXPECT_EQ(refused.code(), Code::kAborted) << refused.ToString();
  EXPECT_NE(refused.message().find("host 0 writes to this storage"), std::string::npos) << refused.ToString();
  EXPECT_FALSE(cluster_->storage().Has(StepIn(2, 2)));
  SavePersisted(1, 2);
  // Storage is free after the first cluster has ended.
  LoseHost(0);
  LoseHost(1);
  SaveEverywhere(2, 3);
  cluster_->RunFor(20 * kSecond);
  SavePersisted(2, 4);
}

// There are two leaders, and an operator gives storage to the second one. The first one is refused.
TEST_F(StorageStory, AnOperatorTakesStorageOver) {
  StartStored(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {0, 1});
  SavePersisted(1, 1);
  SplitInTwo();
  StartWorld(2, {2, 3});
  SaveEverywhere(2, 2);
  EXPECT_EQ(Wait(2, 2, 0, Level::kPersisted, 20 * kSecond).code(), Code::kAborted);
  cluster_->storage().TakeOver(cluster_->host(2));
  SaveEverywhere(1, 2);
  const Status refused = Wait(1, 2, 0, Level::kPersisted, 20 * kSecond);
  EXPECT_EQ(refused.code(), Code::kAborted) << refused.ToString();
  EXPECT_NE(refused.message().find("has taken storage over"), std::string::npos) << refused.ToString();
  EXPECT_FALSE(cluster_->storage().Has(StepIn(1, 2)));
  SavePersisted(2, 3);
}

// Memory has a newer step than storage. The question pins no step.
TEST_F(StorageStory, LatestByLevel) {
  StartStored(3, 2);
  StartWorld(1);
  EXPECT_EQ(LatestBy(1, Level::kPersisted).code(), Code::kNotFound);
  SaveEverywhere(1, 1);
  SavePersisted(1, 2);
  SaveEverywhere(1, 3);
  StepId persisted;
  ASSERT_TRUE(LatestBy(1, Level::kPersisted, &persisted).ok());
  EXPECT_EQ(persisted, StepIn(1, 2));
  StopWorld(1);
  StartWorld(2);
  ASSERT_TRUE(LatestBy(2, Level::kPersisted, &persisted).ok());
  EXPECT_EQ(persisted, StepIn(1, 2));
  StepId committed;
  ASSERT_TRUE(LatestBy(2, Level::kCommitted, &committed).ok());
  EXPECT_EQ(committed, StepIn(1, 3));
  EXPECT_EQ(LatestBy(2, Level::kLocal).code(), Code::kInvalidArgument);
}

// Two ranks of one node wait. Both must be answered.
TEST_F(StorageStory, EachRankOfANodeIsToldThatTheStepIsPersisted) {
  options_.storage.request_min_us = options_.storage.request_max_us = 100 * kMs;  // both wait meanwhile
  StartStored(2, 0);
  StartWorld(1, {0, 0});
  cluster_->RunFor(kSecond);  // storage is listed
  SaveEverywhere(1, 1);
  ASSERT_TRUE(Persist(0, 1).ok());
  std::vector<std::string> told;
  for (const Rank rank : {0, 1})
    RankOf(1, rank).Wait(1, Level::kPersisted, 30 * kSecond,
                         [&](const Status& status) { told.push_back(status.ToString()); });
  ASSERT_TRUE(Until([&] { return told.size() == 2; })) << Trouble();
  EXPECT_EQ(told, (std::vector<std::string>{"ok", "ok"}));
}

TEST_F(StorageStory, WithoutStorageNothingIsPersisted) {
  StartNodes(2);
  StartWorld(1);
  EXPECT_EQ(LatestBy(1, Level::kPersisted).code(), Code::kUnsupported);
}

// Storage has two steps of one number.
TEST_F(StorageStory, AReaderIsGivenTheStepThatItsIncarnationRestores) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  SavePersisted(1, 2);
  const StepId former = StepIn(1, 2);
  cluster_->storage().Hide(former);
  LoseAll();
  StartWorld(2);
  RestoreEverywhere(2, 1);
  SavePersisted(2, 2);
  const StepId newest = StepIn(2, 2);
  cluster_->storage().Show();
  LoseAll();
  StartWorld(3);
  for (Rank rank = 0; rank < 3; ++rank) EXPECT_EQ(Latest(3, rank), newest);
  EXPECT_EQ(Given(3, 0, 2, 0), newest.incarnation);
  cluster_->storage().Damage(newest, 1);
  EXPECT_EQ(Given(3, 1, 2, 1), 0u);  // CORRUPT
  cluster_->RunFor(100 * kMs);
  const Incarnation again = Given(3, 1, 2, 1);
  EXPECT_TRUE(again == 0 || again == newest.incarnation) << again << " former " << former.incarnation;
  const Incarnation other = Given(3, 2, 2, 2);
  EXPECT_TRUE(other == 0 || other == newest.incarnation) << other << " former " << former.incarnation;
}

// Each shard takes longer than a minute to write.
TEST_F(StorageStory, AStepThatIsWrittenSlowlyIsFinished) {
  options_.storage.request_min_us = options_.storage.request_max_us = kSecond;  // a chunk
  lengths_ = {70 * 4096};
  StartStored(2, 1, 4000);
  StartWorld(1);
  for (Step step = 1; step <= 40; ++step) {
    SaveEverywhere(1, step);
    cluster_->RunFor(20 * kSecond);
  }
  EXPECT_GT(cluster_->storage().steps(), 0u);
}

// One node's mount hangs. The others can write.
TEST_F(StorageStory, ANodeWhoseStorageHangsIsStoodInFor) {
  StartStored(4);
  StartWorld(1);
  cluster_->storage().Hang(2);
  SaveEverywhere(1, 1);
  cluster_->RunFor(50 * kSecond);
  EXPECT_EQ(cluster_->storage().steps(), 0u);
  EXPECT_TRUE(Until([&] { return cluster_->storage().steps() != 0; }, 20 * kSecond)) << "naming stalls";
  cluster_->storage().GoOn(2);
  SavePersisted(1, 2);
}

// No other node can write the shard. The work that was considered failed succeeds later.
TEST_F(StorageStory, AShardThatIsWrittenAfterAllCounts) {
  StartStored(2);
  StartWorld(1);
  cluster_->RunFor(kSecond);
  SaveEverywhere(1, 1);
  cluster_->RunFor(15 * kMs);  // held; its ranks are being named or written
  for (const size_t host : {0, 1}) cluster_->storage().Hang(host);
  cluster_->RunFor(100 * kSecond);
  EXPECT_EQ(cluster_->storage().steps(), 0u);
  for (const size_t host : {0, 1}) cluster_->storage().GoOn(host);
  EXPECT_TRUE(Until([&] { return cluster_->storage().steps() != 0; }, 10 * kSecond)) << Trouble();
}

// A read hangs on one node, and another one reads. The chunks into which the hanging read may still write are
// not reused before it ends.
TEST_F(StorageStory, AReadThatHangsIsDoneByAnotherNode) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  LoseAll();
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  cluster_->storage().Hang(1);
  EXPECT_FALSE(Read(2, 1, 1, 1).ok());
  cluster_->RunFor(60 * kSecond);
  const Status read = Read(2, 1, 1, 1);
  EXPECT_TRUE(read.ok()) << read.ToString() << Trouble();
  EXPECT_FALSE(Checker::AtRest(cluster_->host(1)));
  cluster_->storage().GoOn(1);
  cluster_->RunFor(kSecond);
  EXPECT_TRUE(Checker::AtRest(cluster_->host(1)));
}

// The read also hangs on the first node that replaces the reader.
TEST_F(StorageStory, AReadThatHangsTwiceIsDoneByAThirdNode) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  LoseAll();
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  for (const size_t host : {0, 1}) cluster_->storage().Hang(host);
  EXPECT_FALSE(Read(2, 1, 1, 1).ok());
  cluster_->RunFor(130 * kSecond);
  const Status read = Read(2, 1, 1, 1);
  EXPECT_TRUE(read.ok()) << read.ToString() << Trouble();
}

// A new incarnation has storage listed again, which is not a failure.
TEST_F(StorageStory, AListingThatIsUnderWayIsNoTrouble) {
  StartStored(3);
  StartWorld(1);
  for (const size_t host : {0, 1, 2}) cluster_->storage().Hang(host);
  AddRank(2, 0, 3, 0);
  ASSERT_TRUE(Hello(2, 0).ok());
  const Status latest = AskLatest(2, 0, 5 * kSecond);
  EXPECT_NE(latest.message().find("it is being listed"), std::string::npos) << latest.ToString();
  EXPECT_EQ(PolicyTrouble(), "");
}

TEST_F(StorageStory, AListingThatHangsIsNamedAndNotRepeated) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  for (const size_t host : {0, 1, 2}) LoseHost(host);
  cluster_->RunFor(2 * kSecond);
  for (const size_t host : {0, 1, 2}) cluster_->storage().Hang(host);
  const uint64_t listings = cluster_->storage().listings();
  for (const size_t host : {0, 1, 2}) cluster_->StartHost(host);
  AwaitOneView();
  cluster_->RunFor(61 * kSecond);
  AddRank(2, 0, 3, 0);
  const Status refused = Hello(2, 0);
  EXPECT_NE(refused.message().find("no progress for a minute"), std::string::npos) << refused.ToString();
  const std::string trouble = PolicyTrouble();
  EXPECT_NE(trouble.find("storage has not been listed: "), std::string::npos) << trouble;
  EXPECT_NE(trouble.find("no progress for a minute"), std::string::npos) << trouble;
  cluster_->CrashDaemon(2);  // another view
  cluster_->StartDaemon(2);
  AwaitOneView();
  cluster_->RunFor(20 * kSecond);
  EXPECT_EQ(cluster_->storage().listings(), listings + 4) << Trouble();  // by each daemon once
  for (const size_t host : {0, 1, 2}) cluster_->storage().GoOn(host);
  StartWorld(2);
  RestoreEverywhere(2, 1);
}

// Two ranks request two steps while a third is being written.
TEST_F(StorageStory, TwoStepsThatAreAskedForAtTheSameTime) {
  HangWhileTheFirstOfThreeIsWritten();
  std::optional<Status> first, second;
  RankOf(1, 0).Persist(2, 5 * kSecond, [&](const Status& status) { first = status; });
  RankOf(1, 1).Persist(3, 5 * kSecond, [&](const Status& status) { second = status; });
  ASSERT_TRUE(Until([&] { return first && second; }));
  EXPECT_NE(first->code(), Code::kDeadlineExceeded) << first->ToString();
  EXPECT_NE(second->code(), Code::kDeadlineExceeded) << second->ToString();
}

TEST_F(StorageStory, OneStepMayWaitForAnother) {
  HangWhileTheFirstOfThreeIsWritten();
  EXPECT_TRUE(Persist(0, 2).ok());
  EXPECT_NE(Persist(0, 3).code(), Code::kDeadlineExceeded);
}

// Storage has a step of an incarnation that began later, under another coordinator.
TEST_F(StorageStory, AStepOfALaterIncarnationIsNoPin) {
  StartStored(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {0, 1});  // has not asked yet what to restore
  SplitInTwo();
  StartWorld(2, {2, 3});
  SavePersisted(2, 1);
  EXPECT_LT(IncarnationOf(1), IncarnationOf(2));
  LoseTheOtherHalf();
  cluster_->CrashDaemon(0);  // the leader; the next one lists storage
  cluster_->StartDaemon(0);
  AwaitOneView();
  const Status status = AskLatest(1, 1, 5 * kSecond);
  EXPECT_EQ(status.code(), Code::kStale) << status.ToString();
  StopWorld(1);
  StartWorld(3, {0, 1});
  EXPECT_EQ(LatestStep(3, 0), 1u);
}

// A step that is only on storage was chosen. Then a newer step can be produced again.
TEST_F(StorageStory, WhatIsRestoredFromStorageStays) {
  options_.keep_steps = 1;
  options_.wait_for_missing_us = 0;  // otherwise latest waits for host 3 and its step 3
  StartStored(4, 2);                 // step 2 is persisted, step 3 is not
  StartWorld(1, {2, 3});
  cluster_->RunFor(kSecond);  // storage is listed
  for (Step step = 1; step <= 3; ++step) SaveEverywhere(1, step);
  AwaitPersisted(1, 2);
  StopWorld(1);
  cluster_->StopHost(2, false);
  cluster_->CrashDaemon(3);  // has all of step 3, and is away
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 2; }));
  cluster_->StartHost(2);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 3; }));
  StartWorld(2, {0, 1});
  EXPECT_EQ(LatestStep(2, 0), 2u);
  cluster_->StartDaemon(3);
  AwaitOneView();
  cluster_->RunFor(2 * kSecond);
  EXPECT_EQ(LatestStep(2, 1), 2u);
  const StepId pin{IncarnationOf(1), 2};
  for (Rank rank = 0; rank < 2; ++rank) EXPECT_TRUE(Read(2, rank, 2, rank).ok());
  cluster_->RunFor(2 * kSecond);
  EXPECT_TRUE(Holds(0, {pin.incarnation, 2, 0}));
}

TEST_F(StorageStory, ALoadThatFailsForAMomentIsTriedAgain) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  LoseAll();
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  cluster_->storage().TakeAway(cluster_->now() + kSecond);
  const Status read = Read(2, 0, 1, 0);
  EXPECT_TRUE(read.ok()) << read.ToString();
}

// A step is read from storage by its number, while newer ones are committed.
TEST_F(StorageStory, AnOldStepIsReadByItsNumber) {
  StartStored(3);
  StartWorld(1);
  for (Step step = 1; step <= 5; ++step) SavePersisted(1, step);
  for (Rank rank = 0; rank < 3; ++rank) EXPECT_NE(Given(1, 0, 1, rank), 0u);
  cluster_->RunFor(kSecond);
  EXPECT_EQ(Latest(1, 0), StepIn(1, 5));
  SavePersisted(1, 6);
}

// Another leader, under another coordinator, has persisted a step. Then its half is lost.
TEST_F(StorageStory, WhatAnotherLeaderHasPersistedIsOffered) {
  options_.wait_for_missing_us = 0;
  StartStored(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {2, 3});
  SavePersisted(1, 1);
  SplitInTwo();
  cluster_->storage().TakeOver(cluster_->host(2));
  SavePersisted(1, 2);
  const StepId persisted = StepIn(1, 2);
  LoseTheOtherHalf();
  EXPECT_EQ(LeaderHost(), 0u);
  StartWorld(2, {0, 1});
  EXPECT_EQ(Latest(2, 0), persisted);
}

// No node can read a manifest, for a long time.
TEST_F(StorageStory, AManifestThatCannotBeReadIsWaitedFor) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  SavePersisted(1, 2);
  cluster_->storage().FailReads(StepIn(1, 2));
  LoseAll();
  StartWorld(2);
  for (int i = 0; i < 60; ++i) {
    const Status status = AskLatest(2, 0, 5 * kSecond);
    ASSERT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
  }
  cluster_->storage().Mend();
  Status status;
  for (int i = 0; i < 10; ++i) status = AskLatest(2, 0, 5 * kSecond);
  EXPECT_TRUE(status.ok()) << status.ToString();
  EXPECT_EQ(LatestStep(2, 0), 2u);
}

// No node can read a file. The ranks are started again and again.
// Nor do the launches that could not read it count as restores of it.
TEST_F(StorageStory, AFileThatCannotBeReadIsWaitedFor) {
  options_.restores_max = 3;
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  SavePersisted(1, 2);
  cluster_->storage().FailLoads(StepIn(1, 2));
  LoseAll();
  for (uint64_t launch = 2; launch < 10; ++launch) {
    StartWorld(launch);
    EXPECT_EQ(LatestStep(launch, 0), 2u);
    EXPECT_FALSE(Read(launch, 0, 2, 0).ok());
    StopWorld(launch);
  }
  cluster_->storage().Mend();
  StartWorld(10);
  ASSERT_TRUE(Until([&] { return Read(10, 0, 2, 0).ok(); }, 60 * kSecond)) << Trouble();
  RestoreEverywhere(10, 2);
}

// A file is damaged. After it was read, all memory and all daemons are lost.
TEST_F(StorageStory, DamageIsRememberedByLaterClusters) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  SavePersisted(1, 2);
  const StepId damaged = StepIn(1, 2);
  cluster_->storage().Damage(damaged, 1);
  LoseAll();
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 1), 2u);
  EXPECT_EQ(Read(2, 1, 2, 1).code(), Code::kCorrupt);
  ASSERT_TRUE(Until([&] { return cluster_->storage().Marked(damaged); }, 40 * kSecond)) << Trouble();
  LoseAll();
  StartWorld(3);
  RestoreEverywhere(3, 1);
}

// There is only one node, so it does the second read itself.
TEST_F(StorageStory, DamageIsRememberedByALonelyNode) {
  options_.replicas = 0;
  options_.storage.used = true;
  StartNodes(1, 0);
  StartWorld(1);
  SavePersisted(1, 1);
  const StepId damaged = StepIn(1, 1);
  cluster_->storage().Damage(damaged, 0);
  LoseAll();
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  EXPECT_EQ(Read(2, 0, 1, 0).code(), Code::kCorrupt);
  EXPECT_TRUE(Until([&] { return cluster_->storage().Marked(damaged); }, 40 * kSecond)) << Trouble();
}

// The file is right, but the memory of one node is bad: it gets the shard from a node that can read it.
TEST_F(StorageStory, BadMemoryOfOneNodeCondemnsNothing) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  SavePersisted(1, 2);
  const StepId good = StepIn(1, 2);
  LoseAll();
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 1), 2u);
  cluster_->storage().Spoil(1);
  RestoreEverywhere(2, 2);
  cluster_->RunFor(60 * kSecond);
  EXPECT_FALSE(cluster_->storage().Marked(good));
  LoseAll();
  StartWorld(3);
  EXPECT_EQ(LatestStep(3, 0), 2u);
}

// One node finds the only step damaged, and the storage of the other one hangs. Nobody can confirm the damage, the reader
// is told what to do, and an operator does it.
TEST_F(StorageStory, DamageThatNobodyCanConfirmIsGivenUpByHand) {
  options_.storage.stalled_us = kSecond;
  StartStored(2);
  StartWorld(1);
  SavePersisted(1, 1);
  const StepId damaged = StepIn(1, 1);
  cluster_->storage().Damage(damaged, 0);
  LoseAll();
  cluster_->storage().Hang(0);
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  Status read;
  for (int i = 0; i < 10 && read.message().find("`ropeteam quarantine 1`") == std::string::npos; ++i)
    read = Read(2, 0, 1, 0);
  EXPECT_NE(read.message().find("node1 finds it damaged"), std::string::npos) << read.ToString();
  cluster_->RunFor(60 * kSecond);
  EXPECT_FALSE(cluster_->storage().Marked(damaged));
  StopWorld(2);
  cluster_->checker().SetQuarantined(damaged, true);
  ASSERT_TRUE(Quarantine(1).ok());
  StartWorld(3);
  EXPECT_EQ(Latest(3, 0), std::nullopt);
  SaveEverywhere(3, 1);
}

// A file of the newest step goes away after its manifest was read. No node proves that the step is bad, because each may see another directory. So the
// reader is told what to do.
TEST_F(StorageStory, AStepWhoseFileIsGoneIsGivenUpByHand) {
  StartStored(2);
  StartWorld(1);
  SavePersisted(1, 1);
  SavePersisted(1, 2);
  const StepId gone = StepIn(1, 2);
  LoseAll();
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 2u);
  cluster_->storage().LoseFile(gone, 0);
  Status read;
  for (int i = 0; i < 10 && read.message().find("`ropeteam quarantine 2`") == std::string::npos; ++i)
    read = Read(2, 0, 2, 0);
  EXPECT_NE(read.message().find("does not find it"), std::string::npos) << read.ToString();
  StopWorld(2);
  cluster_->checker().SetQuarantined(gone, true);
  ASSERT_TRUE(Quarantine(2).ok());
  StartWorld(3);
  EXPECT_EQ(LatestStep(3, 0), 1u);
}

// The job encrypts. Both copies in memory are ciphertext, and both are damaged.
TEST_F(StorageStory, CiphertextThatIsBadEverywhereIsReplacedFromStorage) {
  options_.encrypts = true;
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  const ShardId shard = ShardOf(1, 1, 1);
  LoseAndReplace({1});
  ASSERT_TRUE(Until([&] { return cluster_->checker().CopiesMin(StepIn(1, 1)) >= 2; })) << Trouble();
  const std::vector<size_t> holders = HoldersBeside(SIZE_MAX, shard);
  ASSERT_EQ(holders.size(), 2u);
  for (const size_t host : holders) {
    ASSERT_TRUE(cluster_->host(host).store->Find(shard)->encrypted());
    cluster_->FlipBit(host, shard, 0);
  }
  StopWorld(1);
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  for (const size_t host : holders) {
    const Status read = Read(2, static_cast<Rank>(host), 1, 1);
    EXPECT_TRUE(read.ok()) << read.ToString();
    EXPECT_EQ(cluster_->host(host).store->Find(shard)->bad.size(), 0u);
  }
}

// The leader dies while a node reads a shard from storage. Then another node needs the shard.
TEST_F(StorageStory, TheNextLeaderKnowsWhoReadsFromStorage) {
  options_.storage.request_min_us = options_.storage.request_max_us = kSecond;  // a chunk
  lengths_ = {24 * 4096};
  StartStored(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {1, 2});
  SaveEverywhere(1, 1);
  ASSERT_TRUE(Until([&] { return cluster_->storage().Has(StepIn(1, 1)); }, 90 * kSecond)) << Trouble();
  LoseAll();
  StartWorld(2, {1, 2});
  EXPECT_EQ(LatestStep(2, 0), 1u);
  const uint64_t loads = cluster_->storage().loads();
  size_t good = 0;
  const auto read = [&](Rank reader) {
    RankOf(2, reader).Read(1, 0, 60 * kSecond, 0,
                           [&good](const Status& status, const ShardMeta&) { good += status.ok() ? 1 : 0; });
  };
  read(0);
  ASSERT_TRUE(Until([&] { return cluster_->storage().loads() == loads + 1; }));
  cluster_->RunFor(kSecond);
  cluster_->CrashDaemon(0);
  ASSERT_TRUE(Until([&] { return cluster_->host(2).view.members.size() == 3; }));
  read(1);
  ASSERT_TRUE(Until([&] { return good == 2; }, 60 * kSecond)) << Trouble();
  EXPECT_EQ(cluster_->storage().loads(), loads + 1);
}

// A rank saves every few milliseconds while storage is away, and waits for the step that is being written.
TEST_F(StorageStory, AStepIsAskedForAfterThousandsOfNewerOnes) {
  StartStored(2, 10'000);
  StartWorld(1, {0});
  SaveEverywhere(1, 1);
  cluster_->RunFor(kSecond);  // storage is listed
  const TimeUs back = cluster_->now() + 300 * kSecond;
  cluster_->storage().TakeAway(back);
  ASSERT_EQ(Persist(0, 1).ToString(), "ok");
  for (Step step = 2; step < 4300; ++step) SaveEverywhere(1, step);
  EXPECT_EQ(Wait(1, 1, 0, Level::kPersisted).code(), Code::kDeadlineExceeded);
  cluster_->RunFor(back - cluster_->now());
  AwaitPersisted(1, 1);
  for (Step step = 4300; step < 8600; ++step) SaveEverywhere(1, step);
  EXPECT_EQ(Wait(1, 1, 0, Level::kPersisted).ToString(), "ok");
  EXPECT_EQ(Wait(1, 2, 0, Level::kCommitted).code(), Code::kNotFound);
}

// Storage is away for the first eight seconds of a leader.
TEST_F(StorageStory, StorageThatIsBackInTimeIsLookedAt) {
  StartStored(4);
  StartWorld(1, {0, 1});
  SavePersisted(1, 1);
  StopWorld(1);
  StartWorld(2, {2, 3});
  RestoreEverywhere(2, 1);
  SavePersisted(2, 2);
  const StepId persisted = StepIn(2, 2);
  StopWorld(2);
  cluster_->RunFor(10 * kSecond);
  LoseHost(2);
  LoseHost(3);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 2; }));
  cluster_->storage().TakeAway(cluster_->now() + 8 * kSecond);
  cluster_->CrashDaemon(0);
  cluster_->StartDaemon(0);
  for (const size_t host : {2, 3}) cluster_->StartHost(host);
  AwaitOneView();
  StartWorld(3, {0, 1});
  Status status = AskLatest(3, 0, 5 * kSecond);
  for (int i = 0; i < 6 && !status.ok(); ++i) status = AskLatest(3, 0, 5 * kSecond);
  EXPECT_EQ(Latest(3, 0), persisted) << status.ToString() << Trouble();
}

// An arena has the memory of promise 8, which includes one more step with storage.
TEST_F(StorageStory, TrainingGoesOnWhileStorageHangs) {
  options_.keep_steps = 1;
  lengths_ = {3 * 4096};                   // 4 chunks with the manifest
  StartStored(2, 2, (1 + 1 + 1) * 2 * 4);  // K, one in flight, one more that is being persisted
  StartWorld(1);
  cluster_->RunFor(kSecond);  // listed
  cluster_->storage().Hang(0);
  cluster_->storage().Hang(1);
  for (Step step = 1; step <= 8; ++step) {
    for (const Rank rank : RanksOf(1)) {
      const Status saved = Save(1, step, rank);
      EXPECT_TRUE(saved.ok()) << "step " << step << ": " << saved.ToString();
    }
    cluster_->RunFor(2 * kSecond);
  }
}

}  // namespace
}  // namespace ropeteam::simulation
