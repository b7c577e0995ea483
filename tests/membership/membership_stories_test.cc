// SPDX-License-Identifier: Apache-2.0
//
// The promises of membership, as stories of a few nodes. Every packet takes 1 ms; times are virtual.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/membership/simulated_cluster.h"

namespace ropeteam {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class MembershipStory : public ::testing::Test {
 protected:
  MembershipStory() : cluster_(1, Config()) {}
  static MembershipConfig Config() {
    MembershipConfig config = DefaultConfig();
    config.nodes_expected = 3;
    return config;
  }
  void StartThree() {
    cluster_.RestartCoordinator();
    a_ = cluster_.Add("a", 0);
    b_ = cluster_.Add("b", 1);
    c_ = cluster_.Add("c", 2);
    ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 100));
  }
  void TearDown() override { EXPECT_EQ(cluster_.broken(), ""); }
  // The coordinator's node a crashes and returns as a new instance, whose id is returned. The other members
  // of the previous view are cut off, so the new instance is alone in its first view.
  NodeId CoordinatorReturnsAlone() {
    cluster_.CrashCoordinator();
    cluster_.Crash(a_, true);  // the same process
    cluster_.Cut(b_, true);
    cluster_.Cut(c_, true);
    cluster_.RunFor(200);
    cluster_.RestartCoordinator();
    const NodeId a2 = cluster_.Add("a", 0);
    EXPECT_TRUE(cluster_.RunUntil([&] { return cluster_.Sees(a2, a2); }, 1200));
    EXPECT_EQ(cluster_.Names(a2).size(), 1u);
    return a2;
  }
  // Time in ms until the observer's view does not contain the node; 10 s: never.
  uint64_t MsUntilOut(NodeId node, NodeId observer) {
    const TimeUs begin = cluster_.now();
    cluster_.RunUntil([&] { return !cluster_.Sees(observer, node); }, 10'000);
    return (cluster_.now() - begin) / kMs;
  }

  SimulatedCluster cluster_;
  NodeId a_ = 0, b_ = 0, c_ = 0;
};

TEST_F(MembershipStory, ThreeNodesStartAndSeeOneFirstView) {
  StartThree();
  EXPECT_EQ(cluster_.EpochOf(a_), cluster_.EpochOf(c_));
  EXPECT_THAT(cluster_.Names(c_), ElementsAre("a", "b", "c"));
  EXPECT_EQ(cluster_.Views(a_).size(), 1u);
}

TEST_F(MembershipStory, WithOneNodeMissingTheFirstViewComesAfterDeadAfter) {
  cluster_.RestartCoordinator();
  a_ = cluster_.Add("a", 0);
  b_ = cluster_.Add("b", 1);
  cluster_.RunFor(900);
  EXPECT_EQ(cluster_.EpochOf(a_), 0u);
  EXPECT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 150));
}

TEST_F(MembershipStory, NodesThatStartBeforeTheCoordinatorFindItWhenItComes) {
  a_ = cluster_.Add("a", 0);
  b_ = cluster_.Add("b", 1);
  c_ = cluster_.Add("c", 2);
  cluster_.RunFor(5000);
  cluster_.RestartCoordinator();
  EXPECT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 300));
}

TEST_F(MembershipStory, NothingHappensWhileNothingHappens) {
  StartThree();
  cluster_.RunFor(60'000);
  EXPECT_EQ(cluster_.Views(a_).size(), 1u);
  EXPECT_EQ(cluster_.Views(c_).size(), 1u);
}

TEST_F(MembershipStory, SilenceIsDeathAfterDeadAfter) {
  StartThree();
  cluster_.RunFor(1234);
  cluster_.Crash(b_, /*reset=*/false);
  const uint64_t ms = MsUntilOut(b_, a_);
  EXPECT_GE(ms, 800u);  // its last heartbeat was up to 200 ms before
  EXPECT_LE(ms, 1005u);
  EXPECT_THAT(cluster_.Names(a_), ElementsAre("a", "c"));
  EXPECT_EQ(cluster_.EpochOf(a_), cluster_.Views(a_)[0].epoch + 1);
}

TEST_F(MembershipStory, AResetConnectionIsDeathAfterProbeMs) {
  StartThree();
  cluster_.Crash(b_, /*reset=*/true);
  const uint64_t ms = MsUntilOut(b_, a_);
  EXPECT_GE(ms, 250u);
  EXPECT_LE(ms, 255u);
}

TEST_F(MembershipStory, ABrokenConnectionThatComesBackInTimeIsNoNews) {
  StartThree();
  const uint64_t attempt = 1;
  cluster_.membership().Arrive(cluster_.now(), {b_, attempt, true, SimulatedPacket::Closed{}});
  cluster_.membership().Arrive(cluster_.now(), {b_, attempt, false, SimulatedPacket::Closed{}});
  cluster_.RunFor(3000);
  EXPECT_TRUE(cluster_.Sees(a_, b_));
  EXPECT_EQ(cluster_.Views(a_).size(), 1u);
  EXPECT_EQ(cluster_.Views(b_).size(), 1u);
}

TEST_F(MembershipStory, ASuspectWhoIsAliveStays) {
  StartThree();
  for (int i = 0; i < 20; ++i) {
    cluster_.Suspect(a_, b_);
    cluster_.Suspect(c_, b_);
    cluster_.RunFor(100);
  }
  EXPECT_EQ(cluster_.Views(a_).size(), 1u);
}

TEST_F(MembershipStory, ASuspectWhoIsDeadLeavesWithinProbeMs) {
  StartThree();
  cluster_.Crash(b_, /*reset=*/false);
  cluster_.Suspect(a_, b_);
  EXPECT_LE(MsUntilOut(b_, a_), 255u);
}

TEST_F(MembershipStory, ASuspicionRaisedWhileTheCoordinatorIsAwayIsToldWhenItReturns) {
  StartThree();
  cluster_.CrashCoordinator();
  cluster_.RunFor(50);
  cluster_.Suspect(a_, b_);
  cluster_.CutOutgoing(b_, true);  // no other node can hear it
  cluster_.RestartCoordinator();
  EXPECT_LE(MsUntilOut(b_, a_), 1300u);
}

TEST_F(MembershipStory, ANodeThatLeavesIsGoneAtOnce) {
  StartThree();
  cluster_.RunFor(100);
  cluster_.Leave(c_);
  EXPECT_LE(MsUntilOut(c_, a_), 5u);
}

TEST_F(MembershipStory, JoiningTakesNobodyOut) {
  StartThree();
  const NodeId d = cluster_.Add("d", 3);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 100));
  EXPECT_THAT(cluster_.Names(a_), ElementsAre("a", "b", "c", "d"));
  EXPECT_EQ(cluster_.Views(a_).size(), 2u);
  EXPECT_EQ(cluster_.Views(d).size(), 1u);
}

TEST_F(MembershipStory, OneOrdinalTwiceIsOrderedByName) {
  StartThree();
  cluster_.Add("B", 1);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 100));
  EXPECT_THAT(cluster_.Names(a_), ElementsAre("a", "B", "b", "c"));
}

TEST_F(MembershipStory, ARestartedNodeReplacesItsOldInstanceInOneView) {
  StartThree();
  cluster_.Crash(b_, /*reset=*/false);  // not noticed yet
  const NodeId b2 = cluster_.Add("b", 1);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 100));
  EXPECT_EQ(cluster_.Views(a_).size(), 2u);
  EXPECT_FALSE(cluster_.Sees(a_, b_));
  EXPECT_TRUE(cluster_.Sees(a_, b2));
}

TEST_F(MembershipStory, AZombieOfAReplacedInstanceIsToldSoAndStaysOut) {
  StartThree();
  cluster_.Cut(b_, true);
  const NodeId b2 = cluster_.Add("b", 1);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Sees(a_, b2); }, 100));
  cluster_.Cut(b_, false);
  cluster_.RunFor(3000);
  ASSERT_EQ(cluster_.Refusals(b_).size(), 1u);
  EXPECT_EQ(cluster_.Refusals(b_)[0].code(), Code::kAlreadyExists);
  EXPECT_EQ(cluster_.Views(a_).size(), 2u);
  EXPECT_TRUE(cluster_.Sees(a_, b2));
}

TEST_F(MembershipStory, AZombieStaysOutOverARestartOfTheCoordinator) {
  StartThree();
  cluster_.Cut(b_, true);
  const NodeId b2 = cluster_.Add("b", 1);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Sees(a_, b2) && cluster_.Sees(b2, b2); }, 100));
  cluster_.CrashCoordinator();
  cluster_.Cut(b_, false);
  cluster_.RestartCoordinator();
  cluster_.RunFor(3000);
  ASSERT_EQ(cluster_.Refusals(b_).size(), 1u);
  EXPECT_EQ(cluster_.Refusals(b_)[0].code(), Code::kAlreadyExists);
  EXPECT_TRUE(cluster_.Sees(a_, b2));
  EXPECT_EQ(cluster_.Views(a_).size(), 2u);
}

TEST_F(MembershipStory, ANodeDeclaredDeadWhileAliveLearnsItAndComesBackAsANewInstance) {
  StartThree();
  cluster_.Cut(b_, true);
  MsUntilOut(b_, a_);
  cluster_.Cut(b_, false);
  ASSERT_TRUE(cluster_.RunUntil([&] { return !cluster_.Refusals(b_).empty(); }, 1000));
  EXPECT_EQ(cluster_.Refusals(b_)[0].code(), Code::kStale);
  EXPECT_THAT(cluster_.Refusals(b_)[0].message(), HasSubstr("node b"));
  const NodeId b2 = cluster_.Rejoin(b_);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 100));
  EXPECT_TRUE(cluster_.Sees(a_, b2));
}

TEST_F(MembershipStory, TheLeaderIsTheOldestAndChangesOnlyWhenItLeaves) {
  StartThree();
  EXPECT_EQ(cluster_.LeaderOf(c_), a_);  // all three came in one view, so the first in order leads
  const NodeId d = cluster_.Add("0-sorts-first", 0);
  cluster_.RunFor(100);
  EXPECT_EQ(cluster_.LeaderOf(c_), a_);
  cluster_.Crash(a_, true);
  MsUntilOut(a_, c_);
  EXPECT_EQ(cluster_.LeaderOf(c_), b_);
  const NodeId a2 = cluster_.Add("a", 0);
  cluster_.RunFor(100);
  EXPECT_EQ(cluster_.LeaderOf(a2), b_);
  cluster_.Leave(b_);
  cluster_.RunFor(100);
  EXPECT_EQ(cluster_.LeaderOf(a2), c_);
  cluster_.Leave(c_);
  cluster_.RunFor(100);
  EXPECT_EQ(cluster_.LeaderOf(a2), d);
}

TEST_F(MembershipStory, ARestartedCoordinatorDisturbsNobody) {
  StartThree();
  cluster_.RunFor(777);
  cluster_.CrashCoordinator();
  cluster_.RunFor(4000);
  EXPECT_THAT(cluster_.Names(a_), ElementsAre("a", "b", "c"));
  cluster_.RestartCoordinator();
  cluster_.RunFor(3000);
  for (const NodeId node : {a_, b_, c_}) {
    EXPECT_EQ(cluster_.Views(node).size(), 1u);
    EXPECT_TRUE(cluster_.Refusals(node).empty());
  }
  // The next epoch is well above all earlier ones, and the leader is the same.
  cluster_.Crash(c_, true);
  MsUntilOut(c_, b_);
  EXPECT_GT(cluster_.EpochOf(b_), cluster_.Views(b_)[0].epoch + 100)
      << "the next ones may have been given out";
  EXPECT_EQ(cluster_.LeaderOf(b_), a_);
}

TEST_F(MembershipStory, TheLeaderStaysOverARestartThoughAnotherRegistersFirst) {
  StartThree();
  const NodeId d = cluster_.Add("d", 0);
  cluster_.RunFor(100);
  cluster_.Crash(a_, true);
  MsUntilOut(a_, d);
  ASSERT_EQ(cluster_.LeaderOf(d), b_);
  cluster_.CrashCoordinator();
  cluster_.Cut(b_, true);  // so it registers last
  cluster_.RestartCoordinator();
  cluster_.RunFor(600);
  cluster_.Cut(b_, false);
  const NodeId e = cluster_.Add("e", 0);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 1000));
  EXPECT_EQ(cluster_.LeaderOf(e), b_);
}

TEST_F(MembershipStory, TheCoordinatorsOwnNodeComesBackAndIsNeverAlone) {
  StartThree();
  cluster_.CrashCoordinator();
  cluster_.Crash(a_, true);  // the same process
  cluster_.RunFor(200);
  cluster_.RestartCoordinator();
  const NodeId a2 = cluster_.Add("a", 0);  // registers first and knows no view
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 400));
  ASSERT_EQ(cluster_.Views(a2).size(), 1u);
  EXPECT_THAT(cluster_.Names(a2), ElementsAre("a", "b", "c"));
  EXPECT_EQ(cluster_.Views(b_).size(), 2u);
  EXPECT_GT(cluster_.EpochOf(b_), cluster_.Views(b_)[0].epoch + 100)
      << "the next ones may have been given out";
  EXPECT_EQ(cluster_.LeaderOf(b_), b_);
}

TEST_F(MembershipStory, AMemberThatDiedDuringTheRestartLeavesAfterDeadAfter) {
  StartThree();
  cluster_.CrashCoordinator();
  cluster_.Crash(c_, false);
  cluster_.RestartCoordinator();
  cluster_.RunFor(900);
  EXPECT_TRUE(cluster_.Sees(a_, c_));
  EXPECT_LE(MsUntilOut(c_, a_), 150u);
  EXPECT_TRUE(cluster_.Refusals(a_).empty());
}

TEST_F(MembershipStory, AMemberThatMissesTheHoldComesBackAsANewInstance) {
  StartThree();
  cluster_.Cut(c_, true);
  cluster_.CrashCoordinator();
  cluster_.RestartCoordinator();
  MsUntilOut(c_, a_);
  cluster_.Cut(c_, false);
  ASSERT_TRUE(cluster_.RunUntil([&] { return !cluster_.Refusals(c_).empty(); }, 2000));
  EXPECT_EQ(cluster_.Refusals(c_)[0].code(), Code::kStale);
  cluster_.Rejoin(c_);
  EXPECT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 100));
}

TEST_F(MembershipStory, ACoordinatorThatNobodyFoundInTimeGoesOnAboveTheOldEpochs) {
  StartThree();
  cluster_.CrashCoordinator();
  for (const NodeId node : {a_, b_, c_}) cluster_.Cut(node, true);
  cluster_.RestartCoordinator();
  const NodeId d = cluster_.Add("d", 3);  // does not hear of an older view in time
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Sees(d, d); }, 1100));
  EXPECT_EQ(cluster_.Names(d).size(), 1u);
  const Epoch alone = cluster_.EpochOf(d);
  EXPECT_GT(alone, cluster_.EpochOf(a_));
  cluster_.HealAll();
  // d's view never contained them, so they are readmitted as the same instances.
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 3000));
  EXPECT_GT(cluster_.EpochOf(a_), alone);
  for (const NodeId node : {a_, b_, c_}) EXPECT_TRUE(cluster_.Refusals(node).empty());
}

TEST_F(MembershipStory, ANodeThatCannotHearIsKeptAndCatchesUp) {
  StartThree();
  cluster_.CutIncoming(b_, true);
  const NodeId d = cluster_.Add("d", 3);
  cluster_.RunFor(5000);
  EXPECT_TRUE(cluster_.Sees(a_, b_)) << "it is heard, so it lives";
  EXPECT_FALSE(cluster_.Sees(b_, d));
  cluster_.CutIncoming(b_, false);
  EXPECT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 1500));
}

TEST_F(MembershipStory, ANodeThatCannotBeHeardIsOutAndLearnsIt) {
  StartThree();
  cluster_.CutOutgoing(b_, true);
  EXPECT_LE(MsUntilOut(b_, a_), 1005u);
  cluster_.RunFor(3000);
  EXPECT_EQ(cluster_.Refusals(b_).size(), 0u);  // it has abandoned that connection long before
  cluster_.CutOutgoing(b_, false);
  ASSERT_TRUE(cluster_.RunUntil([&] { return !cluster_.Refusals(b_).empty(); }, 1500));
  EXPECT_EQ(cluster_.Refusals(b_)[0].code(), Code::kStale);
}

TEST_F(MembershipStory, ACoordinatorThatWasStoppedBlamesNobody) {
  StartThree();
  // Nothing runs for five seconds, as after SIGSTOP or on a starved host; then everything runs at once.
  for (int i = 0; i < 3; ++i) {
    cluster_.RunFor(333);
    cluster_.Pause(5000);
    cluster_.RunFor(2000);
  }
  EXPECT_EQ(cluster_.Views(a_).size(), 1u);
  for (const NodeId node : {a_, b_, c_}) EXPECT_TRUE(cluster_.Refusals(node).empty());
  EXPECT_TRUE(cluster_.Converged());
}

TEST_F(MembershipStory, ANodeThatIsNotHeardHasNoLeaseWhenTheOthersViewIsWithoutIt) {
  StartThree();
  cluster_.RunFor(1234);
  ASSERT_TRUE(cluster_.HasLease(b_));
  cluster_.CutOutgoing(b_, true);
  const TimeUs cut_at = cluster_.now();
  MsUntilOut(b_, a_);
  const TimeUs out_at = cluster_.now();
  EXPECT_LE(cluster_.LeaseUntil(b_), cut_at + 600 * kMs);
  EXPECT_LT(cluster_.LeaseUntil(b_) + 190 * kMs, out_at);
  EXPECT_EQ(cluster_.Views(a_).back().settle_us, 0u) << "it was silent for longer than a lease lasts";
  EXPECT_TRUE(cluster_.HasLease(a_));
}

TEST_F(MembershipStory, ANodeThatHearsNothingHasNoLease) {
  StartThree();
  cluster_.CutIncoming(b_, true);
  cluster_.RunFor(650);
  EXPECT_FALSE(cluster_.HasLease(b_));
  EXPECT_TRUE(cluster_.Sees(a_, b_));
  cluster_.CutIncoming(b_, false);
  EXPECT_TRUE(cluster_.RunUntil([&] { return cluster_.HasLease(b_); }, 1500));
}

TEST_F(MembershipStory, ALeaseIsRenewedLongBeforeItEnds) {
  StartThree();
  cluster_.RunUntil([&] { return cluster_.HasLease(a_) && cluster_.HasLease(b_) && cluster_.HasLease(c_); },
                    50);
  for (int i = 0; i < 1000; ++i) {
    cluster_.RunFor(7);
    for (const NodeId node : {a_, b_, c_}) ASSERT_GE(cluster_.LeaseUntil(node), cluster_.now() + 390 * kMs);
  }
}

TEST_F(MembershipStory, AReplacedInstanceMayHoldItsLeaseForAsLongAsTheViewSays) {
  StartThree();
  cluster_.RunFor(500);
  cluster_.Stop(b_);  // it is alive and will act when it continues
  const TimeUs until = cluster_.LeaseUntil(b_);
  const NodeId b2 = cluster_.Add("b", 1);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Sees(a_, b2); }, 100));
  EXPECT_GT(until, cluster_.now()) << "else this story shows nothing";
  EXPECT_GE(cluster_.now() + cluster_.Views(a_).back().settle_us, until);
  EXPECT_LE(cluster_.Views(a_).back().settle_us, 610 * kMs);
  cluster_.Continue(b_);
  cluster_.RunFor(700);
  EXPECT_FALSE(cluster_.HasLease(b_));
  cluster_.Leave(c_);
  ASSERT_TRUE(cluster_.RunUntil([&] { return !cluster_.Sees(a_, c_); }, 100));
  EXPECT_EQ(cluster_.Views(a_).back().settle_us, 0u);
}

TEST_F(MembershipStory, AViewAlsoSettlesForThoseWhoLeftInTheOneBefore) {
  StartThree();
  cluster_.RunFor(500);
  cluster_.Stop(b_);
  const NodeId b2 = cluster_.Add("b", 1);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Sees(a_, b2) && cluster_.Sees(b2, b2); }, 100));
  cluster_.Leave(c_);  // it returns its own lease
  ASSERT_TRUE(cluster_.RunUntil([&] { return !cluster_.Sees(b2, c_); }, 100));
  EXPECT_GE(cluster_.now() + cluster_.Views(b2).back().settle_us, cluster_.LeaseUntil(b_));
  EXPECT_GT(cluster_.Views(b2).back().settle_us, 0u);
}

TEST_F(MembershipStory, ALeaveMessageReturnsTheLease) {
  StartThree();
  cluster_.RunFor(100);
  cluster_.Leave(c_);
  EXPECT_EQ(cluster_.LeaseUntil(c_), 0u);
  cluster_.RunFor(5);
  ASSERT_FALSE(cluster_.Sees(a_, c_));
  EXPECT_EQ(cluster_.Views(a_).back().settle_us, 0u);
}

TEST_F(MembershipStory, AStoppedProcessWakesWithoutALease) {
  StartThree();
  cluster_.RunFor(500);
  cluster_.Stop(b_);
  cluster_.RunFor(1500);
  ASSERT_FALSE(cluster_.Sees(a_, b_));
  cluster_.Continue(b_);
  EXPECT_FALSE(cluster_.HasLease(b_));
  ASSERT_TRUE(cluster_.RunUntil([&] { return !cluster_.Refusals(b_).empty(); }, 1000));
  EXPECT_EQ(cluster_.LeaseUntil(b_), 0u);
  const NodeId b2 = cluster_.Rejoin(b_);
  EXPECT_TRUE(cluster_.RunUntil([&] { return cluster_.HasLease(b2); }, 700));
}

TEST_F(MembershipStory, AnswersThatAStoppedProcessFindsWhenItWakesCountFromWhenItAsked) {
  StartThree();
  cluster_.RunFor(500);
  cluster_.Stop(b_);
  const TimeUs stopped_at = cluster_.now();
  cluster_.RunFor(700);  // too short to be declared dead; answers to it wait in its socket
  cluster_.Continue(b_);
  EXPECT_LE(cluster_.LeaseUntil(b_), stopped_at + 600 * kMs);
  EXPECT_TRUE(cluster_.RunUntil([&] { return cluster_.HasLease(b_); }, 300));
  EXPECT_EQ(cluster_.Views(a_).size(), 1u);
}

TEST_F(MembershipStory, WhileTheCoordinatorIsStoppedNobodyHasALease) {
  StartThree();
  cluster_.RunFor(333);
  cluster_.Pause(5000);
  for (const NodeId node : {a_, b_, c_}) EXPECT_FALSE(cluster_.HasLease(node));
  cluster_.RunFor(1000);
  for (const NodeId node : {a_, b_, c_}) EXPECT_TRUE(cluster_.HasLease(node));
  EXPECT_EQ(cluster_.Views(a_).size(), 1u);
}

TEST_F(MembershipStory, ARestartedCoordinatorGrantsNoLeaseUntilItsPredecessorsHaveEnded) {
  StartThree();
  cluster_.RunFor(500);
  cluster_.CrashCoordinator();
  cluster_.RestartCoordinator();
  const TimeUs restarted_at = cluster_.now();
  TimeUs last = 0;
  for (const NodeId node : {a_, b_, c_}) last = std::max(last, cluster_.LeaseUntil(node));
  ASSERT_TRUE(cluster_.RunUntil(
      [&] {
        return cluster_.LeaseUntil(a_) > last || cluster_.LeaseUntil(b_) > last ||
               cluster_.LeaseUntil(c_) > last;
      },
      2000));
  EXPECT_GE(cluster_.now(), restarted_at + 600 * kMs);
  EXPECT_LE(cluster_.now(), restarted_at + 620 * kMs) << "all are back: it is not to wait for dead_after";
  EXPECT_EQ(cluster_.Views(a_).size(), 1u);
}

TEST_F(MembershipStory, NoLeaseIsGrantedToAMemberBeforeTheNewestViewIsKnown) {
  StartThree();
  cluster_.Cut(b_, true);
  MsUntilOut(b_, a_);
  // The coordinator forgets this. No node that knows it reaches the next coordinator during its hold.
  cluster_.CrashCoordinator();
  cluster_.Cut(b_, false);
  cluster_.Cut(a_, true);
  cluster_.Cut(c_, true);
  cluster_.RestartCoordinator();
  cluster_.RunFor(900);
  EXPECT_FALSE(cluster_.HasLease(b_)) << "a and c have seen it leave, which the coordinator cannot know";
}

TEST_F(MembershipStory, MembersThatFindAReturnedCoordinatorLateAreReadmitted) {
  StartThree();
  const Epoch before = cluster_.EpochOf(b_);
  const NodeId a2 = CoordinatorReturnsAlone();
  cluster_.RunFor(200);
  cluster_.Cut(b_, false);
  cluster_.RunFor(600);
  cluster_.Cut(c_, false);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 1200));
  for (const NodeId node : {b_, c_}) {
    EXPECT_TRUE(cluster_.Refusals(node).empty());
    EXPECT_EQ(cluster_.Views(node).size(), 2u) << "neither saw a view without the other";
    EXPECT_GT(cluster_.EpochOf(node), before);
  }
  EXPECT_EQ(cluster_.LeaderOf(b_), a2) << "the leader of the present view stays";
  EXPECT_TRUE(cluster_.RunUntil([&] { return cluster_.HasLease(b_) && cluster_.HasLease(c_); }, 700));
}

TEST_F(MembershipStory, AMemberThatDoesNotComeWithTheOthersIsOutForGood) {
  StartThree();
  const NodeId a2 = CoordinatorReturnsAlone();
  cluster_.Cut(b_, false);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Sees(a2, b_); }, 2500));
  EXPECT_FALSE(cluster_.Sees(b_, c_));
  cluster_.Cut(c_, false);
  ASSERT_TRUE(cluster_.RunUntil([&] { return !cluster_.Refusals(c_).empty(); }, 1500));
  EXPECT_EQ(cluster_.Refusals(c_)[0].code(), Code::kStale);
}

TEST_F(MembershipStory, AMemberThatHadLeftBeforeTheCoordinatorReturnedIsNotReadmitted) {
  StartThree();
  cluster_.Cut(c_, true);
  MsUntilOut(c_, b_);  // a and b have fenced it
  const NodeId a2 = CoordinatorReturnsAlone();
  cluster_.Cut(b_, false);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Sees(a2, b_); }, 2500));
  cluster_.Cut(c_, false);
  ASSERT_TRUE(cluster_.RunUntil([&] { return !cluster_.Refusals(c_).empty(); }, 1500));
  EXPECT_EQ(cluster_.Refusals(c_)[0].code(), Code::kStale);
  EXPECT_TRUE(cluster_.Refusals(b_).empty());
}

TEST_F(MembershipStory, AMemberIsNotReadmittedWhenANewInstanceHasItsName) {
  StartThree();
  cluster_.CrashCoordinator();
  cluster_.Crash(a_, true);
  cluster_.Cut(b_, true);
  cluster_.Cut(c_, true);
  cluster_.RestartCoordinator();
  const NodeId a2 = cluster_.Add("a", 0);
  const NodeId b2 = cluster_.Add("b", 1);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Sees(a2, b2); }, 1200));
  cluster_.HealAll();
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Sees(a2, c_); }, 2500));
  ASSERT_TRUE(cluster_.RunUntil([&] { return !cluster_.Refusals(b_).empty(); }, 1500));
  EXPECT_EQ(cluster_.Refusals(b_)[0].code(), Code::kAlreadyExists);
  EXPECT_TRUE(cluster_.Refusals(c_).empty());
}

TEST_F(MembershipStory, AThousandNodesStartInAFewViews) {
  MembershipConfig config = DefaultConfig();
  SimulatedCluster cluster(1, config);
  cluster.network().delay_max_us = 30 * kMs;
  cluster.RestartCoordinator();
  NodeId first = 0;
  for (uint32_t i = 0; i < 1000; ++i) {
    const NodeId node = cluster.Add(Numbered("n", i), i);
    if (i == 0) first = node;
  }
  ASSERT_TRUE(cluster.RunUntil([&] { return cluster.EpochOf(first) > 0; }, 1200));
  for (uint32_t i = 1000; i < 1200; ++i) cluster.Add(Numbered("n", i), i);
  ASSERT_TRUE(cluster.RunUntil([&] { return cluster.Names(first).size() == 1200; }, 500));
  EXPECT_LE(cluster.Views(first).size(), 4u);
  EXPECT_EQ(cluster.broken(), "");
}

}  // namespace
}  // namespace ropeteam
