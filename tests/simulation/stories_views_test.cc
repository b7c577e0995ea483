// SPDX-License-Identifier: Apache-2.0
//
// Failure stories of storage that the nodes see differently: not mounted on one, refused to some, or hanging.
#include "tests/simulation/storage_story.h"

namespace ropeteam::simulation {
namespace {

constexpr TimeUs kLong = 3600 * kSecond;

class ViewsStory : public StorageStory {
 protected:
  SimStorage& storage() { return cluster_->storage(); }
  TimeUs later() { return cluster_->now() + kLong; }
  // Three nodes have persisted steps 1 and 2. Then all memory is lost, and `trouble` is there when they come back.
  void LoseAllAfterTwoSteps(const std::function<void()>& trouble) {
    StartStored(3);
    StartWorld(1);
    SavePersisted(1, 1);
    SavePersisted(1, 2);
    trouble();
    LoseAll();
  }
};

// Every node may list storage, and no node may read there.
TEST_F(ViewsStory, StepsThatNobodyMayReadAreNotNothing) {
  LoseAllAfterTwoSteps([&] {
    for (const size_t host : {0, 1, 2}) storage().RefuseUntil(host, later(), true);
  });
  StartWorld(2);
  for (int i = 0; i < 40; ++i) {
    const Status status = AskLatest(2, 0, 5 * kSecond);
    ASSERT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
    ASSERT_NE(status.message().find("permission denied"), std::string::npos) << status.ToString();
  }
  storage().Heal();
  ASSERT_TRUE(Until([&] { return AskLatest(2, 0, 5 * kSecond).ok(); }, 60 * kSecond)) << Trouble();
  RestoreEverywhere(2, 2);
}

// One node has an empty directory in the place of storage. The ranks are started again and again.
class NotMounted : public ViewsStory, public ::testing::WithParamInterface<size_t> {};

TEST_P(NotMounted, EveryLaunchRestoresTheNewestStep) {
  const size_t host = GetParam();
  LoseAllAfterTwoSteps([&] { storage().Unmount(host, later()); });
  ASSERT_EQ(LeaderHost(), 0u);
  for (uint64_t launch = 2; launch < 6; ++launch) {
    StartWorld(launch);
    RestoreEverywhere(launch, 2);
    StopWorld(launch);
    LoseAll();
  }
}

// What the node without the mount is to write is written by another one, and PERSISTED is told when it is on storage: the
// checker compares the bytes.
TEST_P(NotMounted, PersistedIsToldOfWhatIsOnStorage) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  storage().Unmount(GetParam(), later());
  for (Step step = 2; step < 5; ++step) SavePersisted(1, step);
  LoseAll();
  StartWorld(2);
  RestoreEverywhere(2, 4);
}
INSTANTIATE_TEST_SUITE_P(Hosts, NotMounted, ::testing::Values(0, 1, 2));

// Two nodes have a directory each. None of them can tell that it has the store.
TEST_F(ViewsStory, WhatNoOtherNodeSeesIsNotPersisted) {
  StartStored(2);
  StartWorld(1);
  SavePersisted(1, 1);
  storage().Unmount(0, later());
  SaveEverywhere(1, 2);
  cluster_->RunFor(60 * kSecond);
  EXPECT_FALSE(storage().Has(StepIn(1, 2)));
  EXPECT_NE(PolicyTrouble().find("no other node sees the lock"), std::string::npos) << PolicyTrouble();
  storage().Heal();
  AwaitPersisted(1, 2);
}

// Files vanish between their writing and the manifest: the mount of the node that writes was lost meanwhile.
TEST_F(ViewsStory, FilesAreLookedForBeforeTheManifest) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  storage().LoseWrites(true);
  SaveEverywhere(1, 2);
  cluster_->RunFor(20 * kSecond);
  EXPECT_FALSE(storage().Has(StepIn(1, 2)));
  storage().LoseWrites(false);
  AwaitPersisted(1, 2);
}

// The storage of the leader hangs, and nothing else.
TEST_F(ViewsStory, TheLeaderLeadsOnWithoutStorage) {
  LoseAllAfterTwoSteps([&] { storage().StickUntil(0, later()); });
  ASSERT_EQ(LeaderHost(), 0u);
  const TimeUs begun = cluster_->now();
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 1), 2u);
  EXPECT_LT(cluster_->now() - begun, 10 * kSecond);
  for (const Rank rank : {1, 2}) EXPECT_TRUE(Read(2, rank, 2, rank).ok());
  SaveEverywhere(2, 3);
  cluster_->RunFor(60 * kSecond);  // until its work on its own copy is reported to hang
  AwaitPersisted(2, 3);
}

// Writing is refused to the leader: another node writes manifests.
TEST_F(ViewsStory, AnotherNodeWritesForTheLeader) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  storage().RefuseUntil(0, later(), true);
  SavePersisted(1, 2);
  EXPECT_EQ(LeaderHost(), 0u);
}

// Every step is damaged: the job does not begin from nothing until an operator says so.
TEST_F(ViewsStory, OnlyDamagedStepsAreNotNothing) {
  LoseAllAfterTwoSteps([&] {
    for (const Step step : {1, 2}) storage().Damage(StepIn(1, step), 0);
  });
  const std::vector<StepId> damaged = {StepIn(1, 1), StepIn(1, 2)};
  for (uint64_t launch = 2; launch < 4; ++launch) {
    StartWorld(launch);
    const Step step = LatestStep(launch, 0);
    EXPECT_EQ(step, 4 - launch);
    EXPECT_EQ(Read(launch, 0, step, 0).code(), Code::kCorrupt);
    StopWorld(launch);
  }
  StartWorld(4);
  const Status status = AskLatest(4, 0, 5 * kSecond);
  EXPECT_EQ(status.code(), Code::kCorrupt) << status.ToString();
  for (const StepId& id : damaged) ASSERT_TRUE(Quarantine(id.step).ok()) << Trouble();
  EXPECT_EQ(AskLatest(4, 0, 5 * kSecond).code(), Code::kNotFound);
}

// Of two nodes one is left, and its directory is not mounted.
TEST_F(ViewsStory, ANodeThatIsLeftAloneDoesNotPersistToWhereNobodyElseLooks) {
  StartStored(2, 0);
  StartWorld(1);
  SaveEverywhere(1, 1);
  storage().Unmount(0, later());
  LoseHost(1);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 1; }));
  ASSERT_TRUE(Persist(0, 1).ok());
  EXPECT_EQ(Wait(1, 1, 0, Level::kPersisted).code(), Code::kDeadlineExceeded);
  storage().Heal();
  cluster_->StartHost(1);
  ASSERT_TRUE(Until([&] { return storage().Has(StepIn(1, 1)); }, 60 * kSecond)) << Trouble();
  EXPECT_TRUE(Wait(1, 1, 0, Level::kPersisted).ok());
}

// The same after its daemon was restarted, in a job that --nodes lets begin with one node. Only the roster says that there
// was another one.
TEST_F(ViewsStory, ANodeThatIsRestartedAloneDoesNotPersistToWhereNobodyElseLooks) {
  options_.nodes_announced = 1;
  StartStored(2);
  for (const size_t host : {0, 1}) storage().Unmount(host, later());
  StartWorld(1);
  SaveEverywhere(1, 1);
  for (const size_t host : {1, 0}) {
    CloseClientsOn(host);
    cluster_->StopHost(host, /*keep_memory=*/true);
  }
  cluster_->RunFor(2 * kSecond);
  cluster_->StartHost(0);
  cluster_->RunFor(20 * kSecond);
  cluster_->StartHost(1);
  AwaitOneView();
  cluster_->RunFor(5 * kSecond);  // the checker fails if the other node is told PERSISTED
  storage().Heal();
  ASSERT_TRUE(Until([&] { return storage().Has(StepIn(1, 1)); }, 60 * kSecond)) << Trouble();
}

// It knows steps that it had read before its mount was lost.
TEST_F(ViewsStory, ANodeThatIsLeftAloneDoesNotBelieveAnOldList) {
  StartStored(2, 0);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_TRUE(Persist(0, 1).ok());
  AwaitPersisted(1, 1);
  SaveEverywhere(1, 2);
  storage().Unmount(0, later());
  LoseHost(1);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 1; }));
  ASSERT_TRUE(Persist(0, 2).ok());
  EXPECT_EQ(Wait(1, 2, 0, Level::kPersisted).code(), Code::kDeadlineExceeded);
  storage().Heal();
  ASSERT_TRUE(Until([&] { return storage().Has(StepIn(1, 2)); }, 60 * kSecond)) << Trouble();
}

// All its rules allow only the newest step, so it deletes the one that others had seen.
TEST_F(ViewsStory, ANodeThatIsLeftAlonePersistsOneStepAfterTheOther) {
  options_.storage.keep = 1;
  StartStored(2, 0);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_TRUE(Persist(0, 1).ok());
  AwaitPersisted(1, 1);
  for (const Step step : {2, 3}) SaveEverywhere(1, step);
  LoseHost(1);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 1; }));
  for (const Step step : {2, 3}) {
    ASSERT_TRUE(Persist(0, step).ok());
    ASSERT_TRUE(Until([&] { return storage().Has(StepIn(1, step)); }, 60 * kSecond)) << Trouble();
    cluster_->RunFor(10 * kSecond);
  }
}

// A manifest that nobody can read: an operator gives its step up.
TEST_F(ViewsStory, AStepThatCannotBeReadIsGivenUpByHand) {
  LoseAllAfterTwoSteps([&] { storage().FailReads(StepIn(1, 2)); });
  StartWorld(2);
  const Status waits = AskLatest(2, 0, 10 * kSecond);
  EXPECT_EQ(waits.code(), Code::kDeadlineExceeded);
  EXPECT_NE(waits.message().find("`ropeteam quarantine 2`"), std::string::npos) << waits.ToString();
  cluster_->checker().SetQuarantined(StepIn(1, 2), true);
  ASSERT_TRUE(Quarantine(2).ok());
  ASSERT_TRUE(Until([&] { return AskLatest(2, 0, 5 * kSecond).ok(); }, 60 * kSecond)) << Trouble();
  RestoreEverywhere(2, 1);
}

// The only mount is made again while the step to restore is being looked for.
TEST_F(ViewsStory, AMountThatIsMadeAgainIsWaitedFor) {
  LoseAllAfterTwoSteps([&] {
    for (const size_t host : {1, 2}) storage().Unmount(host, later());
  });
  StartWorld(2);  // the steps are listed now
  storage().Unmount(0, cluster_->now() + 2 * kSecond);
  ASSERT_TRUE(Until(
      [&] {
        const Status status = AskLatest(2, 0, 5 * kSecond);
        EXPECT_NE(status.code(), Code::kNotFound) << status.ToString();
        return status.ok();
      },
      60 * kSecond))
      << Trouble();
  EXPECT_EQ(LatestStep(2, 1), 2u);
}

// The keeper may write everything but the manifest.
TEST_F(ViewsStory, AManifestThatIsRefusedIsWrittenByAnotherNode) {
  StartStored(3);
  StartWorld(1);
  SavePersisted(1, 1);
  storage().RefuseManifests(0);
  SavePersisted(1, 2);
}

// The same, but it has seen the store before, and sees it now.
TEST_F(ViewsStory, ANodeThatIsLeftAlonePersistsToTheStoreThatItKnows) {
  StartStored(2, 0);
  StartWorld(1);
  for (const Step step : {1, 2}) {
    SaveEverywhere(1, step);
    if (step == 2) LoseHost(0);
    ASSERT_TRUE(Until([&] { return LeaderHost() == (step == 2 ? 1u : 0u); }));
    ASSERT_TRUE(Persist(1, step).ok());
    ASSERT_TRUE(Until([&] { return storage().Has(StepIn(1, step)); }, 60 * kSecond)) << Trouble();
    EXPECT_TRUE(Wait(1, step, 1, Level::kPersisted).ok());
  }
}

// The storage of all but the leader hangs, and it is empty: a job may begin after the wait for missing nodes.
TEST_F(ViewsStory, AnEmptyStoreIsBelievedAfterTheWait) {
  options_.storage.used = true;
  StartNodes(3);
  for (const size_t host : {1, 2}) storage().StickUntil(host, later());
  for (const size_t host : {0, 1, 2}) LoseHost(host);
  cluster_->RunFor(2 * kSecond);
  for (const size_t host : {0, 1, 2}) cluster_->StartHost(host);
  AwaitOneView();
  AddRank(2, 0, 1, 0);
  EXPECT_FALSE(Hello(2, 0).ok());
  ASSERT_TRUE(Until([&] { return Hello(2, 0).ok(); }, options_.wait_for_missing_us + 10 * kSecond))
      << Trouble();
}

}  // namespace
}  // namespace ropeteam::simulation
