// SPDX-License-Identifier: Apache-2.0
//
// Stories of steps that end every incarnation that restores them: what counts, when an older step is offered,
// and that this survives the loss of leaders and memory.
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

class QuarantineStory : public Story {
 protected:
  QuarantineStory() { options_.restores_max = 3; }

  // Three nodes. The first launch has committed steps 1 and 2, and has ended.
  void StartWithTwoSteps(bool storage = false) {
    options_.storage.used = storage;
    options_.storage.persist_every = storage ? 1 : 0;
    StartNodes(3);
    StartWorld(1);
    for (const Step step : {1, 2}) {
      SaveEverywhere(1, step);
      if (!storage) continue;
      ASSERT_TRUE(Until([&] { return cluster_->storage().Has(StepIn(1, step)); }, 60 * kSecond)) << Trouble();
    }
    StopWorld(1);
  }
  // All ranks restore this step, and end.
  void RestoreAndEnd(uint64_t launch, Step step) {
    StartWorld(launch);
    RestoreEverywhere(launch, step);
    StopWorld(launch);
  }
  void ExpectPassedOver(Step step) { cluster_->checker().SetQuarantined(StepIn(1, step), true); }
  // The step that the launch is offered, and the step that was passed over.
  std::pair<Step, Step> Offered(uint64_t launch) {
    AnswerLatest offered;
    const Status status = Sync([&](Client::StatusDone done) {
      RankOf(launch, 0).Latest(5 * kSecond, [&](const Status& answered, const AnswerLatest& latest) {
        offered = latest;
        done(answered);
      });
    });
    EXPECT_TRUE(status.ok()) << status.ToString();
    return {offered.step.step, offered.passed_over.step};
  }
  StepReport Reported(Step step) {
    StepReport found;
    const Status status = Sync([&](Client::StatusDone done) {
      Person().Report(5 * kSecond, [&found, step, done](const Status& answered, const ClusterReport& report) {
        for (const StepReport& each : report.steps)
          if (each.step == step) found = each;
        done(answered);
      });
    });
    EXPECT_TRUE(status.ok()) << status.ToString();
    return found;
  }
  void LoseTheLeader() {
    const size_t leader = LeaderHost();
    LoseHost(leader);
    ASSERT_TRUE(Until([&] { return LeaderHost() != SIZE_MAX && LeaderHost() != leader; }));
    cluster_->StartHost(leader);
    AwaitOneView();
    // Until the copies are made again: then the node is in the roster.
    ASSERT_TRUE(Until([&] {
      const Host& host = cluster_->host(leader);
      return host.store->facts().roster_epoch == host.view.epoch;
    })) << Trouble();
  }
  void LoseAll() {
    for (size_t host = 0; host < cluster_->host_count(); ++host) LoseHost(host);
    cluster_->RunFor(20 * kSecond);  // the holder of storage is known to be dead
    for (size_t host = 0; host < cluster_->host_count(); ++host) cluster_->StartHost(host);
    AwaitOneView();
  }
};

TEST_F(QuarantineStory, AStepThatHasEndedThreeWorldsIsNotOfferedToTheNext) {
  StartWithTwoSteps();
  for (const uint64_t launch : {2, 3, 4}) RestoreAndEnd(launch, 2);
  ExpectPassedOver(2);
  StartWorld(5);
  EXPECT_EQ(Offered(5), std::pair(Step{1}, Step{2}));
  RestoreEverywhere(5, 1);
  EXPECT_TRUE(Reported(2).quarantined);
  EXPECT_EQ(Reported(2).restores, 3u);
  EXPECT_TRUE(Read(5, 0, 2, 0).ok()) << "by its number it can be read";
  // The ranks continue from the older step, which stays until K newer ones are committed.
  SaveEverywhere(5, 3);
  cluster_->RunFor(kSecond);
  EXPECT_TRUE(Holds(0, ShardOf(1, 1, 0)));
  EXPECT_FALSE(Holds(0, ShardOf(1, 2, 0))) << "the arena is planned for K steps";
  StopWorld(5);
  RestoreAndEnd(6, 3);
}

TEST_F(QuarantineStory, ANewerCommitBeginsTheCountAgain) {
  StartWithTwoSteps();
  for (const uint64_t launch : {2, 3}) RestoreAndEnd(launch, 2);
  StartWorld(4);
  RestoreEverywhere(4, 2);
  EXPECT_EQ(Reported(2).restores, 3u);
  SaveEverywhere(4, 3);
  EXPECT_EQ(Reported(2).restores, 0u);
  EXPECT_FALSE(Reported(2).quarantined);
  StopWorld(4);
  for (const uint64_t launch : {5, 6, 7}) RestoreAndEnd(launch, 3);
  cluster_->checker().SetQuarantined(StepIn(4, 3), true);
  StartWorld(8);
  EXPECT_EQ(Offered(8), std::pair(Step{2}, Step{3}));
}

// These do not count: `latest`, reads of an older step, reads by number, and an operator's verify.
TEST_F(QuarantineStory, WhatIsNoRestoreDoesNotCount) {
  StartWithTwoSteps();
  for (uint64_t launch = 2; launch < 7; ++launch) {
    StartWorld(launch);
    // An evaluation reads it by its number, before any rank has asked for `latest`.
    EXPECT_TRUE(Read(launch, 0, 2, 1).ok());
    EXPECT_EQ(LatestStep(launch, 0), 2u);
    EXPECT_TRUE(Read(launch, 0, 1, 0).ok());
    StopWorld(launch);
    EXPECT_EQ(BadIn(Verify(2)), 0u);
  }
  EXPECT_EQ(Reported(2).restores, 0u);
  RestoreAndEnd(7, 2);
  EXPECT_EQ(Reported(2).restores, 1u) << "once a world, whatever the number of its ranks";
}

TEST_F(QuarantineStory, TheCountOutlivesTheLeader) {
  StartWithTwoSteps();
  for (const uint64_t launch : {2, 3, 4}) {
    RestoreAndEnd(launch, 2);
    LoseTheLeader();
  }
  ExpectPassedOver(2);
  StartWorld(5);
  EXPECT_EQ(Offered(5), std::pair(Step{1}, Step{2}));
}

TEST_F(QuarantineStory, TheOnlyStepIsOfferedAllTheSame) {
  StartNodes(3);
  StartWorld(1);
  SaveEverywhere(1, 1);
  StopWorld(1);
  for (const uint64_t launch : {2, 3, 4, 5, 6}) RestoreAndEnd(launch, 1);
  EXPECT_TRUE(Reported(1).quarantined);
}

TEST_F(QuarantineStory, ByHandAndUndone) {
  options_.restores_max = 0;
  StartWithTwoSteps();
  EXPECT_EQ(Quarantine(7).code(), Code::kNotFound);
  ASSERT_TRUE(Quarantine(2).ok());
  LoseTheLeader();
  ExpectPassedOver(2);
  StartWorld(2);
  EXPECT_EQ(Offered(2), std::pair(Step{1}, Step{2}));
  StopWorld(2);
  cluster_->checker().SetQuarantined(StepIn(1, 2), false);
  ASSERT_TRUE(Quarantine(2, true).ok());
  StartWorld(3);
  EXPECT_EQ(Offered(3), std::pair(Step{2}, Step{0}));
}

TEST_F(QuarantineStory, AStepThatIsBeingSavedUnderTheSameNumberIsNotMeant) {
  options_.restores_max = 0;
  StartWithTwoSteps();
  StartWorld(2);
  ASSERT_TRUE(Save(2, 2, 0).ok());
  ExpectPassedOver(2);
  ASSERT_TRUE(Quarantine(2).ok());
  for (const Rank rank : {1, 2}) ASSERT_TRUE(Save(2, 2, rank).ok());
  ASSERT_TRUE(Wait(2, 2, 0, Level::kCommitted).ok()) << Trouble();
  StopWorld(2);
  StartWorld(3);
  EXPECT_EQ(Offered(3), std::pair(Step{2}, Step{0}));
}

TEST_F(QuarantineStory, AnUndoMeansTheStepThatIsQuarantined) {
  options_.restores_max = 0;
  StartWithTwoSteps();
  ASSERT_TRUE(Quarantine(2).ok());
  StartWorld(2);
  ASSERT_TRUE(Save(2, 2, 0).ok());
  ASSERT_TRUE(Quarantine(2, true).ok());
  StopWorld(2);
  StartWorld(3);
  EXPECT_EQ(Offered(3), std::pair(Step{2}, Step{0}));
}

TEST_F(QuarantineStory, OnStorageTheCountOutlivesAllMemory) {
  StartWithTwoSteps(true);
  for (const uint64_t launch : {2, 3, 4}) {
    RestoreAndEnd(launch, 2);
    ASSERT_TRUE(Until([&] { return cluster_->storage().Restored(StepIn(1, 2)).restores == launch - 1; },
                      60 * kSecond))
        << Trouble();
    LoseAll();
  }
  ExpectPassedOver(2);
  StartWorld(5);
  EXPECT_EQ(Offered(5), std::pair(Step{1}, Step{2}));
  ASSERT_TRUE(Until([&] { return cluster_->storage().Restored(StepIn(1, 2)).quarantined; }, 60 * kSecond));
}

// The daemons were restarted over their arenas, and only storage knows of the quarantine.
TEST_F(QuarantineStory, WhatStorageSaysCountsForAStepThatIsInMemoryToo) {
  StartWithTwoSteps(true);
  ASSERT_TRUE(Quarantine(2).ok());
  ASSERT_TRUE(Until([&] { return cluster_->storage().Restored(StepIn(1, 2)).quarantined; }, 60 * kSecond));
  for (size_t host = 0; host < 3; ++host) {
    CloseClientsOn(host);
    cluster_->StopHost(host, true);
  }
  person_.reset();
  cluster_->RunFor(20 * kSecond);
  for (size_t host = 0; host < 3; ++host) cluster_->StartHost(host);
  AwaitOneView();
  ExpectPassedOver(2);
  StartWorld(2);
  EXPECT_EQ(Offered(2), std::pair(Step{1}, Step{2}));
}

}  // namespace
}  // namespace ropeteam::simulation
