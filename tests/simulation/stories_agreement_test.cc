// SPDX-License-Identifier: Apache-2.0
//
// Stories of ranks that give a value with their saves: which steps are committed, and what the ranks are
// told, also if the leader or a daemon dies in between.
#include <gmock/gmock.h>

#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

using ::testing::HasSubstr;

class AgreementStory : public Story {
 protected:
  // Three nodes with a rank each; step 1 is committed.
  void StartWithOneStep() {
    StartNodes(3);
    StartWorld(1);
    SaveEverywhere(1, 1);
  }
  static SaveScript Script(uint64_t value) {
    SaveScript script;
    script.agreement = value;
    return script;
  }
  Status SaveWith(Rank rank, uint64_t value) { return Save(1, 2, rank, Script(value)); }
  void ExpectDisagreement(Rank rank, const std::vector<std::string>& words) {
    const Status status = Wait(1, 2, rank, Level::kCommitted);
    EXPECT_EQ(status.code(), Code::kAborted) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("the ranks do not agree on step 2")) << rank;
    for (const std::string& word : words) EXPECT_THAT(status.message(), HasSubstr(word)) << rank;
  }
  void ExpectReleased() {
    ASSERT_TRUE(Until(
        [&] {
          for (size_t host = 0; host < 3; ++host)
            for (Rank rank = 0; rank < 3; ++rank)
              if (Holds(host, ShardOf(1, 2, rank))) return false;
          return true;
        },
        10 * kSecond))
        << Trouble();
  }
};

TEST_F(AgreementStory, AStepOfOneValueIsCommitted) {
  StartWithOneStep();
  for (const Rank rank : {0, 1, 2}) ASSERT_TRUE(SaveWith(rank, 7).ok());
  for (const Rank rank : {0, 1, 2}) EXPECT_TRUE(Wait(1, 2, rank, Level::kCommitted).ok());
  EXPECT_EQ(LatestStep(1, 0), 2u);
}

TEST_F(AgreementStory, RanksThatDoNotAgreeAreToldAndTheStepIsReleased) {
  StartWithOneStep();
  ASSERT_TRUE(SaveWith(0, 7).ok());
  ASSERT_TRUE(SaveWith(1, 8).ok());
  // Told before the third has saved anything.
  for (const Rank rank : {0, 1})
    ExpectDisagreement(rank, {"rank 0 gave agreement 0x7", "rank 1 gave agreement 0x8"});
  ASSERT_TRUE(SaveWith(2, 7).ok());
  ExpectDisagreement(2, {"0x7", "0x8"});
  ExpectReleased();
  EXPECT_EQ(LatestStep(1, 0), 1u);
  // The ranks continue, and the next incarnation restores the newest step that was committed.
  SaveEverywhere(1, 3);
  StopWorld(1);
  StartWorld(2);
  RestoreEverywhere(2, 3);
}

TEST_F(AgreementStory, NoValueBesideAValueIsNoAgreement) {
  StartWithOneStep();
  for (const Rank rank : {0, 1, 2}) ASSERT_TRUE(SaveWith(rank, rank == 1 ? 0 : 9).ok());
  for (const Rank rank : {0, 1, 2})
    ExpectDisagreement(rank, {"rank 0 gave agreement 0x9", "rank 1 gave no agreement"});
  ExpectReleased();
}

// The first leader knows one value and dies. The next one learns that value from the copies.
TEST_F(AgreementStory, ALeaderThatDiesBetweenTheReportsChangesNothing) {
  StartWithOneStep();
  const size_t leader = LeaderHost();
  const Rank first = leader == 0 ? 1 : 0;
  const Rank second = leader == 2 ? 1 : 2;
  ASSERT_TRUE(SaveWith(first, 7).ok());
  ASSERT_TRUE(Wait(1, 2, first, Level::kReplicated).ok());
  cluster_->CrashDaemon(leader);
  ASSERT_TRUE(Until([&] { return LeaderHost() != SIZE_MAX && LeaderHost() != leader; }, 20 * kSecond))
      << Trouble();
  ASSERT_TRUE(SaveWith(second, 8).ok());
  for (const Rank rank : {first, second}) ExpectDisagreement(rank, {"0x7", "0x8"});
}

// All daemons die, and with them what the leader knew. The value is stored with the shard.
TEST_F(AgreementStory, TheValueOutlivesTheDaemons) {
  StartWithOneStep();
  for (const Rank rank : {0, 1, 2}) SaveInBackground(1, 2, rank, Script(rank == 2 ? 8 : 7));
  // Before a leader can have found the disagreement.
  ASSERT_TRUE(Until(
      [&] {
        for (Rank rank = 0; rank < 3; ++rank)
          if (!Holds(rank, ShardOf(1, 2, rank))) return false;
        return true;
      },
      kSecond))
      << Trouble();
  for (const size_t host : {0, 1, 2}) cluster_->CrashDaemon(host);
  StopWorld(1);
  for (const size_t host : {0, 1, 2}) cluster_->StartDaemon(host);
  AwaitOneView();
  StartWorld(2);
  RestoreEverywhere(2, 1);
}

}  // namespace
}  // namespace ropeteam::simulation
