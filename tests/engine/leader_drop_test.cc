// SPDX-License-Identifier: Apache-2.0
//
// Which steps a leader lets a rank drop, and when it answers that they are released.

#include "tests/engine/leader_fixture.h"

namespace ropeteam {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr StepId Current(Step step) { return {kCurrent, step}; }

// Three nodes; the leader holds nothing. K = 3.
class DropTest : public LeaderTest {
 protected:
  DropTest() {
    settings_ = {1, 3, 3};
    Members({kFirst, kSecond});
  }
  // The members hold every rank's shard of these steps, in two copies.
  void Hold(const std::vector<StepId>& steps, const std::vector<CopyReport>& first_too = {}) {
    std::vector<CopyReport> first = first_too;
    std::vector<CopyReport> second;
    for (const StepId& step : steps) {
      first.insert(first.end(), {Own(step, 0), Replica(step, 1)});
      second.insert(second.end(), {Replica(step, 0), Own(step, 1)});
    }
    Tell(kFirst, first);
    Tell(kSecond, second);
  }
  void Acknowledge() {
    for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  }
  void Commit(const std::vector<StepId>& steps) {
    Hold(steps);
    Acknowledge();
    ASSERT_EQ(Told(kFirst).told.size(), steps.size());
    Acknowledge();
  }
  // kDeadlineExceeded: not answered yet.
  Code Drop(Step step, bool saved = false, Incarnation by = kCurrent) {
    return Ask(kFirst, Question::Topic::kDrop, Encode(DropQuestion{step, by, 1, saved}));
  }
  std::set<StepId> Kept() { return Told(kFirst).keep; }
};

TEST_F(DropTest, AnOlderCommittedStepIsReleasedAndTheAnswerWaitsForEveryMember) {
  Commit({Current(5), Current(6), Current(7)});
  ASSERT_THAT(Kept(), ElementsAre(Current(5), Current(6), Current(7)));
  EXPECT_EQ(Drop(6), Code::kDeadlineExceeded);
  EXPECT_THAT(Kept(), ElementsAre(Current(5), Current(7)));
  EXPECT_EQ(Told(kFirst).release_before, Current(7));
  ASSERT_EQ(Told(kFirst).dropped.size(), 1u);
  EXPECT_EQ(Told(kFirst).dropped[0].by, 1u);
  Acknowledge();
  EXPECT_EQ(Drop(6), Code::kDeadlineExceeded) << "members have copies";
  Hold({Current(5), Current(7)});
  EXPECT_EQ(Drop(6), Code::kOk);
  EXPECT_EQ(Drop(6), Code::kOk) << "again";
  // One more step is committed; the dropped step does not count towards K.
  Commit({Current(5), Current(7), Current(8)});
  EXPECT_THAT(Kept(), ElementsAre(Current(5), Current(7), Current(8)));
}

// A copy may have been sealed and not yet reported in an inventory.
TEST_F(DropTest, NoCopyInAnyInventoryIsNotEnough) {
  Commit({Current(5), Current(6)});
  EXPECT_EQ(Drop(5), Code::kDeadlineExceeded);
  Hold({Current(6)});
  EXPECT_EQ(Drop(5), Code::kDeadlineExceeded);
  Acknowledge();
  EXPECT_EQ(Drop(5), Code::kOk);
}

TEST_F(DropTest, WhatARestartNeedsIsNotDropped) {
  Hold({Current(5)});
  EXPECT_EQ(Drop(5), Code::kInvalidArgument) << "not marked yet, and the newest";
  Commit({Current(5), Current(6)});
  EXPECT_EQ(Drop(6), Code::kInvalidArgument);
  EXPECT_THAT(replies_[question_].message, HasSubstr("newest committed"));
  EXPECT_EQ(Drop(7), Code::kNotFound);
  EXPECT_EQ(Drop(5, false, kCurrent - 1), Code::kStale);
  EXPECT_THAT(Kept(), ElementsAre(Current(5), Current(6)));
}

TEST_F(DropTest, WhatTheIncarnationWasRestoredFromIsNotDroppedBeforeItHasAStepOfItsOwn) {
  const StepId before{kCurrent - 1, 2};
  const StepId pin{kCurrent - 1, 3};
  incarnation_.pinned_by = kCurrent;
  incarnation_.pin = pin;
  Commit({before, pin});
  EXPECT_EQ(Drop(3), Code::kInvalidArgument);
  EXPECT_THAT(replies_[question_].message, HasSubstr("was restored from it"));
  EXPECT_EQ(Drop(2), Code::kDeadlineExceeded);
  EXPECT_THAT(Kept(), ElementsAre(pin));
  Commit({pin, Current(4)});
  EXPECT_EQ(Drop(3), Code::kDeadlineExceeded);
  EXPECT_THAT(Kept(), ElementsAre(Current(4)));
}

TEST_F(DropTest, AnUncommittedStepThatWasDroppedIsNeverCommitted) {
  Commit({Current(5)});
  Hold({Current(5)}, {Own(Current(6), 0)});
  EXPECT_EQ(Drop(6), Code::kDeadlineExceeded);
  EXPECT_THAT(Told(kSecond).dead, ElementsAre(Current(6)));
  // The last copies are reported while the order to release is on its way.
  Hold({Current(5), Current(6)});
  EXPECT_THAT(Told(kSecond).listed, Not(Contains(Current(6))));
  Hold({Current(5)});
  Acknowledge();
  EXPECT_EQ(Drop(6), Code::kOk);
  EXPECT_THAT(Told(kSecond).dead, ElementsAre(Current(6))) << "a rank may still be saving it";
}

// The asking rank's node has just sealed the step, and the leader does not know it yet.
TEST_F(DropTest, AStepThatTheLeaderHasNotHeardOfIsDroppedIfTheRankHasSavedIt) {
  Commit({Current(5)});
  EXPECT_EQ(Drop(6), Code::kNotFound);
  EXPECT_EQ(Drop(6, true), Code::kDeadlineExceeded);
  EXPECT_THAT(Told(kFirst).dead, ElementsAre(Current(6)));
  Acknowledge();
  EXPECT_EQ(Drop(6, true), Code::kOk);
  Hold({Current(5), Current(6)});
  EXPECT_THAT(Told(kSecond).listed, Not(Contains(Current(6))));
}

TEST_F(DropTest, AnUncommittedStepIsDroppedOnlyWithAllNodesAndACommittedOne) {
  Tell(kFirst, {Own(Current(5), 0)});
  Tell(kSecond, {Own(Current(5), 1)});
  EXPECT_EQ(Drop(5), Code::kInvalidArgument) << "there is nothing else to restore";
  Commit({Current(5)});
  // The other node is away, and may be the only one that has marked step 6.
  Members({kFirst});
  Tell(kFirst, {Marked(Own(Current(5), 0)), Marked(Own(Current(5), 1)), Own(Current(6), 0)});
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  EXPECT_EQ(Drop(6), Code::kUnavailable);
  EXPECT_THAT(replies_[question_].message, HasSubstr("may know that it is committed"));
  EXPECT_THAT(Told(kFirst).dead, IsEmpty());
}

// It may have every shard of the step, and be heard by another leader first.
TEST_F(DropTest, ANodeThatLeavesAfterTheDecisionIsWaitedFor) {
  Commit({Current(5)});
  Hold({Current(5)}, {Own(Current(6), 0)});
  EXPECT_EQ(Drop(6), Code::kDeadlineExceeded);
  EXPECT_THAT(Told(kFirst).dead, ElementsAre(Current(6)));
  Members({kFirst});
  Tell(kFirst, {Marked(Own(Current(5), 0)), Marked(Replica(Current(5), 1))});
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  EXPECT_EQ(Drop(6), Code::kDeadlineExceeded);
  Members({kFirst, kSecond});
  Hold({Current(5)});
  Acknowledge();
  EXPECT_EQ(Drop(6), Code::kOk);
}

// An operator names no incarnation; a rank must name the current one.
TEST_F(DropTest, AnOperatorDropsWithoutAnIncarnation) {
  Commit({Current(5), Current(6)});
  const auto drop = [&](Step step) {
    return Ask(kFirst, Question::Topic::kDrop, Encode(DropQuestion{step, 0, DroppedStep::kOperator, false}));
  };
  EXPECT_EQ(drop(6), Code::kInvalidArgument);
  EXPECT_THAT(replies_[question_].message, HasSubstr("newest committed"));
  EXPECT_EQ(drop(7), Code::kNotFound);
  EXPECT_EQ(drop(5), Code::kDeadlineExceeded);
  EXPECT_THAT(Kept(), ElementsAre(Current(6)));
  Hold({Current(6)});
  Acknowledge();
  EXPECT_EQ(drop(5), Code::kOk);
}

// Two ranks drop two steps, then the newest step is lost: the newer of the dropped ones stays.
TEST_F(DropTest, WhereTheNewestCommittedStepIsLostADroppedOneStays) {
  Commit({Current(5), Current(6), Current(7)});
  EXPECT_EQ(Drop(6), Code::kDeadlineExceeded);
  EXPECT_EQ(Drop(5), Code::kDeadlineExceeded);
  const auto both = [](Step step, Rank rank) { return Marked(Own(Current(step), rank)); };
  Tell(kFirst, {both(5, 0), both(6, 0), both(7, 0)});
  Tell(kSecond, {both(5, 1), both(6, 1)});
  EXPECT_EQ(Told(kFirst).release_before, Current(6));
  EXPECT_THAT(Kept(), ElementsAre(Current(6), Current(7)));
  Acknowledge();
  EXPECT_EQ(Drop(6), Code::kDeadlineExceeded);
}

TEST_F(DropTest, ANewLeaderHasNothingToRemember) {
  Commit({Current(5), Current(6)});
  EXPECT_EQ(Drop(5), Code::kDeadlineExceeded);
  Hold({Current(6)});
  Acknowledge();
  EXPECT_EQ(Drop(5), Code::kOk);
  View view;
  view.epoch = ++epoch_;
  view.leader = kFirst;
  view.settings = settings_;
  view.members = {MemberOf(kLeader), MemberOf(kFirst), MemberOf(kSecond)};
  engine_->OnView(now_, view);
  Members({kFirst, kSecond});
  Hold({Current(6)});
  Acknowledge();
  EXPECT_EQ(Drop(5), Code::kNotFound);
  // A member that was away returns with the dropped step, which is older than the newest one.
  Tell(kFirst, {Marked(Own(Current(5), 0)), Own(Current(6), 0), Replica(Current(6), 1)});
  EXPECT_EQ(Told(kFirst).release_before, Current(6));
  EXPECT_EQ(Drop(5), Code::kDeadlineExceeded) << "it can be dropped again";
}

}  // namespace
}  // namespace ropeteam
