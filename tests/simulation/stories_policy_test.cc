// SPDX-License-Identifier: Apache-2.0
//
// Stories of a policy that ranks set: how often a step is persisted, how many are kept, also if a node dies.
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

class PolicyStory : public Story {
 protected:
  // Without flags of the daemons, except those that a test adds.
  void StartStored(uint32_t nodes) {
    options_.storage.used = true;
    options_.storage.persist_every = 0;
    StartNodes(nodes);
  }
  static PolicyInput Keep(uint32_t steps) { return {1, steps}; }
  Status Set(uint64_t launch, Rank rank, const PolicyInput& policy, TimeUs timeout = 5 * kSecond) {
    return Sync(
        [&](Client::StatusDone done) { RankOf(launch, rank).SetPolicy(policy, timeout, std::move(done)); });
  }
  // All ranks save these steps, each of which is persisted.
  void SavePersisted(uint64_t launch, Step first, Step last) {
    for (Step step = first; step <= last; ++step) {
      SaveEverywhere(launch, step);
      ASSERT_TRUE(Until([&] { return cluster_->storage().Has(StepIn(launch, step)); }, 60 * kSecond))
          << step << Trouble();
    }
  }
  bool BecomesStored(size_t steps) {
    return Until([&] { return cluster_->storage().steps() == steps; }, 30 * kSecond);
  }
  void AwaitNextLeader() {
    ASSERT_TRUE(Until([&] { return LeaderHost() != SIZE_MAX; })) << Trouble();
  }
  // Restarts every daemon over its memory. Then the ranks connect again.
  void RestartAllDaemons(uint64_t launch) {
    for (size_t host = 0; host < cluster_->host_count(); ++host) cluster_->CrashDaemon(host);
    cluster_->RunFor(3 * kSecond);
    for (size_t host = 0; host < cluster_->host_count(); ++host) cluster_->StartDaemon(host);
    AwaitOneView();
    for (const Rank rank : RanksOf(launch)) ASSERT_TRUE(Hello(launch, rank).ok()) << Trouble();
  }
};

TEST_F(PolicyStory, ARankSetsWhatIsDueAndWhatStays) {
  StartStored(3);
  StartWorld(1);
  SaveEverywhere(1, 1);
  cluster_->RunFor(kSecond);
  EXPECT_EQ(cluster_->storage().steps(), 0u) << "nobody has said that a step is due";
  ASSERT_TRUE(Set(1, 2, Keep(2)).ok());
  SavePersisted(1, 2, 5);
  EXPECT_TRUE(BecomesStored(2));
  EXPECT_TRUE(cluster_->storage().Has(StepIn(1, 4)));
}

TEST_F(PolicyStory, AnotherValueOfTheSameIncarnationIsRefusedAndBothAreNamed) {
  StartStored(3);
  StartWorld(1);
  ASSERT_TRUE(Set(1, 2, {0, 3}).ok());
  EXPECT_TRUE(Set(1, 0, {0, 3}).ok());
  const Status keep = Set(1, 1, {7, 2});
  EXPECT_EQ(keep.code(), Code::kInvalidArgument);
  EXPECT_EQ(keep.message(), "keep_on_storage 2 of rank 1, rank 2 has set 3 in this incarnation");
  ASSERT_TRUE(Set(1, 1, {9, 0}).ok()) << "the refused call has set nothing";
  EXPECT_EQ(Set(1, 0, {8, 0}).message(), "persist_every 8 of rank 0, rank 1 has set 9 in this incarnation");
  EXPECT_EQ(Set(1, 0, {}).code(), Code::kInvalidArgument);
  EXPECT_EQ(Set(1, 0, {0, kKeepOnStorageMax + 1}).code(), Code::kInvalidArgument);
}

TEST_F(PolicyStory, AFlagThatDiffersIsNamed) {
  options_.storage.keep = 3;
  StartStored(2);
  StartWorld(1);
  const Status refused = Set(1, 0, {0, 5});
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_NE(
      refused.message().find("keep_on_storage 5, this job's daemons were started with --keep-on-storage 3"),
      std::string::npos)
      << refused.message();
  EXPECT_TRUE(Set(1, 0, {0, 3}).ok());
}

TEST_F(PolicyStory, WithoutStorageItIsUnsupported) {
  StartNodes(2);
  StartWorld(1);
  EXPECT_EQ(Set(1, 0, Keep(2)).code(), Code::kUnsupported);
}

TEST_F(PolicyStory, TheNextLeaderKnowsIt) {
  StartStored(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {2, 3});
  ASSERT_TRUE(Set(1, 0, Keep(2)).ok());
  SavePersisted(1, 1, 3);
  LoseHost(0);
  AwaitNextLeader();
  SavePersisted(1, 4, 6);
  EXPECT_TRUE(BecomesStored(2)) << Trouble();
}

// The leader's announcements are lost, so the rank gets no answer. The question goes to the next leader.
TEST_F(PolicyStory, ALeaderDiesBetweenTheCallAndTheAcknowledgement) {
  StartStored(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {2, 3});
  for (const size_t host : {1, 3}) cluster_->network().Cut(0, host, cluster_->now() + 60 * kSecond);
  std::optional<Status> set;
  RankOf(1, 0).SetPolicy(Keep(2), 30 * kSecond, [&](const Status& status) { set = status; });
  cluster_->RunFor(100 * kMs);
  EXPECT_FALSE(set.has_value());
  LoseHost(0);
  AwaitNextLeader();
  ASSERT_TRUE(Until([&] { return set.has_value(); }));
  EXPECT_TRUE(set->ok()) << set->ToString();
  SavePersisted(1, 1, 3);
  EXPECT_TRUE(BecomesStored(2));
}

// Nothing is deleted because of the former incarnation's policy.
TEST_F(PolicyStory, ARankThatRestartsWithAnotherValue) {
  StartStored(3);
  StartWorld(1);
  ASSERT_TRUE(Set(1, 0, Keep(2)).ok());
  SavePersisted(1, 1, 3);
  ASSERT_TRUE(BecomesStored(2));
  StopWorld(1);
  StartWorld(2);
  ASSERT_TRUE(Set(2, 0, {1, 0}).ok());
  SavePersisted(2, 4, 8);
  EXPECT_TRUE(BecomesStored(7)) << "ranks of this incarnation have not said what stays";
  ASSERT_TRUE(Set(2, 0, {0, 4}).ok());
  SavePersisted(2, 9, 9);
  EXPECT_TRUE(BecomesStored(4));
}

TEST_F(PolicyStory, ARankOfAnOlderIncarnationSetsNothing) {
  StartStored(3);
  StartWorld(1);
  StartWorld(2);
  EXPECT_EQ(Set(1, 0, Keep(1)).code(), Code::kStale);
  ASSERT_TRUE(Set(2, 0, Keep(3)).ok());
  SavePersisted(2, 1, 4);
  EXPECT_TRUE(BecomesStored(3));
}

// A rank of the next incarnation must not be told that four steps stay while all but one are being deleted.
TEST_F(PolicyStory, DeletionsThatWereBegunByAnotherValueEndFirst) {
  StartStored(3);
  StartWorld(1, {1, 2});
  ASSERT_TRUE(Set(1, 0, Keep(1)).ok());
  cluster_->storage().HangPrunes(true);
  SavePersisted(1, 1, 3);
  cluster_->RunFor(kSecond);
  StopWorld(1);
  StartWorld(2, {1, 2});
  EXPECT_EQ(Set(2, 0, Keep(4), 2 * kSecond).code(), Code::kDeadlineExceeded);
  cluster_->storage().HangPrunes(false);
  EXPECT_TRUE(BecomesStored(1));
  ASSERT_TRUE(Set(2, 0, Keep(4)).ok());
  SavePersisted(2, 4, 8);
  EXPECT_TRUE(BecomesStored(4));
}

// No daemon remembers the policy. Nothing is deleted until the ranks, which remember it, are back.
TEST_F(PolicyStory, ARankSaysItAgainToDaemonsThatWereRestarted) {
  StartStored(3);
  StartWorld(1);
  ASSERT_TRUE(Set(1, 0, Keep(2)).ok());
  SavePersisted(1, 1, 2);
  RestartAllDaemons(1);
  cluster_->RunFor(kSecond);
  SavePersisted(1, 3, 5);
  EXPECT_TRUE(BecomesStored(2)) << Trouble();
}

TEST_F(PolicyStory, BesideAnOlderDaemonItIsUnsupportedAndWhatWasSetRests) {
  StartStored(3);
  StartWorld(1, {0, 1});
  ASSERT_TRUE(Set(1, 0, Keep(2)).ok());
  cluster_->StopHost(2, true);
  cluster_->RunFor(2 * kSecond);
  cluster_->SetProtocol(2, kProtocolOldest);
  cluster_->StartHost(2);
  AwaitOneView();
  EXPECT_EQ(Set(1, 0, Keep(2)).code(), Code::kUnsupported);
  for (Step step = 1; step <= 3; ++step) SaveEverywhere(1, step);
  cluster_->RunFor(kSecond);
  EXPECT_EQ(cluster_->storage().steps(), 0u);
  cluster_->StopHost(2, true);
  cluster_->RunFor(2 * kSecond);
  cluster_->SetProtocol(2, kProtocolVersion);
  cluster_->StartHost(2);
  AwaitOneView();
  SavePersisted(1, 4, 6);
  EXPECT_TRUE(BecomesStored(2));
}

}  // namespace
}  // namespace ropeteam::simulation
