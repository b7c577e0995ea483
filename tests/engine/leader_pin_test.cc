// SPDX-License-Identifier: Apache-2.0
//
// Which step an incarnation restores, and which ranks are admitted to it.

#include "tests/engine/leader_fixture.h"

namespace ropeteam {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// A member that held the chosen step is lost before any rank was told the choice.
TEST_F(LeaderTest, APinThatNoRankHasBeenToldIsChosenAgain) {
  const StepId older{kCurrent - 1, 7};
  const StepId newer{kCurrent - 1, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Own(older, 1), Own(newer, 0)});
  Tell(kSecond, {Own(newer, 1)});
  const LatestQuestion question{kCurrent};
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(question)), Code::kDeadlineExceeded);
  ASSERT_EQ(Told(kFirst).incarnation.pin, newer);
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  incarnation_ = Told(kFirst).incarnation;
  settings_.nodes = 2;
  Members({kFirst});
  Tell(kFirst, {Own(older, 0), Own(older, 1), Own(newer, 0)});
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(question)), Code::kDeadlineExceeded);
  ASSERT_EQ(Told(kFirst).incarnation.pin, older);
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  LatestReply latest;
  ASSERT_TRUE(Decode(replies_[question_].payload, latest));
  EXPECT_EQ(latest.step, older);
}

// A node returns with a newer committed step before any rank was told the choice.
TEST_F(LeaderTest, ANewerCommittedStepThatReturnsBeforeARankIsToldIsChosenInstead) {
  const StepId older{kCurrent - 1, 7};
  const StepId newer{kCurrent - 1, 8};
  settings_ = {1, 2, 2};
  settings_.wait_for_missing_us = 0;
  Members({kFirst});
  Tell(kFirst, {Marked(Own(older, 0)), Marked(Own(older, 1)), Marked(Own(newer, 0))});
  const LatestQuestion question{kCurrent};
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(question)), Code::kDeadlineExceeded);
  ASSERT_EQ(Told(kFirst).incarnation.pin, older);
  incarnation_ = Told(kFirst).incarnation;
  Members({kFirst, kSecond});
  Tell(kFirst, {Marked(Own(older, 0)), Marked(Own(older, 1)), Marked(Own(newer, 0))});
  Tell(kSecond, {Marked(Own(newer, 1))});
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(question)), Code::kDeadlineExceeded);
  EXPECT_EQ(Told(kFirst).incarnation.pin, newer);
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  LatestReply latest;
  ASSERT_TRUE(Decode(replies_[question_].payload, latest));
  EXPECT_EQ(latest.step, newer);
}

// A returning node may hold copies that no member knew of. Until it has reported its inventory, however long
// that takes, the leader announces nothing to it: the previous state would make it release them.
TEST_F(LeaderTest, AReturningMemberIsToldNothingThatWasJudgedWithoutIt) {
  const StepId old{kCurrent, 7};
  const StepId lost{kCurrent, 9};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(old, 0), Replica(old, 1)});
  Tell(kSecond, {Own(old, 1), Replica(old, 0)});
  Members({kFirst});
  PassTime(1'000'000);
  announced_.clear();
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(old, 0), Replica(old, 1)});
  PassTime(1'000'000);
  EXPECT_THAT(announced_, IsEmpty());
  Tell(kSecond, {Own(old, 1), Replica(old, 0), Marked(Own(lost, 0)), Marked(Own(lost, 1))});
  EXPECT_THAT(Told(kSecond).keep, Contains(lost));
  EXPECT_THAT(Told(kSecond).listed, Contains(lost));
}

// An incarnation that has not chosen yet may have to restore the same step as its predecessor: what the
// predecessor saved may be lost before a step of it is committed.
TEST_F(LeaderTest, WhatAnIncarnationRestoredStaysWhileTheNextHasNotChosen) {
  const StepId restored{kCurrent - 1, 5};
  const StepId since{kCurrent, 6};
  incarnation_.pinned_by = incarnation_.number;
  incarnation_.pin = restored;
  const std::vector<CopyReport> first = {Own(restored, 0), Replica(restored, 1), Own(since, 0)};
  const std::vector<CopyReport> second = {Own(restored, 1), Own(since, 1)};
  Members({kFirst, kSecond});
  Tell(kFirst, first);
  Tell(kSecond, second);
  ASSERT_FALSE(MayGo(Told(kFirst), restored));
  ASSERT_EQ(Join(kFirst, 0, "run6"), Code::kOk);
  ASSERT_GT(Told(kFirst).incarnation.number, kCurrent);
  EXPECT_FALSE(MayGo(Told(kFirst), restored));
  EXPECT_FALSE(MayGo(Told(kFirst), since));
  // The same after an incarnation that chose nothing.
  ASSERT_EQ(Join(kFirst, 0, "run7"), Code::kOk);
  EXPECT_FALSE(MayGo(Told(kSecond), restored));
  // A newer step becomes committed, and is kept.
  incarnation_ = Told(kFirst).incarnation;
  Tell(kFirst, {Own(restored, 0), Replica(restored, 1), Own(since, 0), Replica(since, 1)});
  Tell(kSecond, {Own(restored, 1), Own(since, 1), Replica(since, 0)});
  EXPECT_THAT(Told(kFirst).listed, Contains(since));
  EXPECT_FALSE(MayGo(Told(kFirst), since));
}

// A notebook, or a script of another world size, must not end the incarnation of a training job. Restarted
// ranks get their incarnation as soon as the former ranks have left.
TEST_F(LeaderTest, AHandleWithoutATokenEndsNoOtherWorldThatIsOpen) {
  Members({kFirst, kSecond});
  Tell(kFirst, {}, {Open(0)});
  Tell(kSecond, {});
  EXPECT_EQ(Join(kSecond, 1, ""), Code::kUnavailable);
  EXPECT_THAT(replies_[question_].message, HasSubstr("token 'run5', 2 ranks) has 1 ranks open"));
  EXPECT_EQ(Told(kFirst).incarnation.number, kCurrent);
  Tell(kFirst, {});
  EXPECT_EQ(Join(kSecond, 1, ""), Code::kOk);
  EXPECT_GT(Told(kFirst).incarnation.number, kCurrent);
}

TEST_F(LeaderTest, AHandleOfAnotherWorldSizeEndsNoWorldWithoutANameThatIsOpen) {
  incarnation_.token.clear();
  Members({kFirst, kSecond});
  Tell(kFirst, {}, {Open(1)});
  Tell(kSecond, {});
  EXPECT_EQ(Join(kSecond, 0, "", 1), Code::kUnavailable);
  EXPECT_EQ(Told(kFirst).incarnation.number, kCurrent);
  EXPECT_EQ(Join(kSecond, 0, ""), Code::kOk);
  EXPECT_EQ(Told(kFirst).incarnation.number, kCurrent);
  Tell(kFirst, {});
  Tell(kSecond, {});
  EXPECT_EQ(Join(kSecond, 0, "", 1), Code::kOk);
  EXPECT_GT(Told(kFirst).incarnation.number, kCurrent);
}

// `asking_from` is the node's oldest open join question. Other open questions may be older.
TEST_F(LeaderTest, OfQuestionsThatComeLateOnlyThoseToJoinAreIgnored) {
  Members({kFirst});
  question_ = 9;
  Tell(kFirst, {});
  question_ = 0;
  EXPECT_EQ(Join(kFirst, 0, "run6"), Code::kDeadlineExceeded);
  EXPECT_EQ(Ask(kFirst, Question::Topic::kReport, ""), Code::kOk);
}

// Once the next incarnation has chosen another step, the step that the former one restored may be released.
TEST_F(LeaderTest, WhatAnIncarnationRestoredMayGoWhenTheNextHasChosenAnother) {
  const StepId restored{kCurrent - 1, 5};
  const StepId since{kCurrent, 6};
  incarnation_.pinned_by = incarnation_.number;
  incarnation_.pin = restored;
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(restored, 0), Replica(restored, 1), Own(since, 0)});
  Tell(kSecond, {Own(restored, 1), Own(since, 1)});
  ASSERT_EQ(Join(kFirst, 0, "run6"), Code::kOk);
  ASSERT_EQ(Join(kSecond, 1, "run6"), Code::kOk);
  Ask(kFirst, Question::Topic::kLatest, Encode(LatestQuestion{Told(kFirst).incarnation.number}));
  ASSERT_TRUE(Told(kFirst).incarnation.has_pin());
  EXPECT_EQ(Told(kFirst).incarnation.pin, since);
  EXPECT_FALSE(MayGo(Told(kFirst), since));
  EXPECT_FALSE(MayGo(Told(kFirst), restored)) << "no rank has been told: it may be chosen again";
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  EXPECT_TRUE(MayGo(Told(kFirst), restored));
}

// A node got copies of an incarnation that it has not heard of, and every node that knew it is lost.
TEST_F(LeaderTest, AStepOfAnIncarnationThatNobodyHeardOfIsNotOfferedToAnOlderOne) {
  const StepId newer{kCurrent + 1, 9};
  Members({kFirst, kSecond});
  Tell(kFirst, {Replica(newer, 0), Replica(newer, 1)});
  Tell(kSecond, {});
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(LatestQuestion{kCurrent})), Code::kStale);
}

// The former leader made the choice and was lost with the only copy of one of its shards. One member never
// heard of the choice, so no rank was told, and the incarnation need not wait for the lost shard.
TEST_F(LeaderTest, APinThatAMemberNeverHeardOfIsChosenAgainByTheNextLeader) {
  const StepId older{kCurrent - 1, 7};
  const StepId newer{kCurrent - 1, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Own(older, 1)});
  incarnation_.pinned_by = incarnation_.number;
  incarnation_.pin = newer;
  Tell(kSecond, {Own(newer, 1)});
  Ask(kFirst, Question::Topic::kLatest, Encode(LatestQuestion{kCurrent}));
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  EXPECT_EQ(Told(kFirst).incarnation.pin, older);
  LatestReply latest;
  ASSERT_TRUE(Decode(replies_[question_].payload, latest));
  EXPECT_EQ(latest.step, older);
}

// Every member heard of the choice, so a rank may have been told and may have gone on from it.
TEST_F(LeaderTest, APinThatEveryMemberHeardOfIsNotChosenAgainByTheNextLeader) {
  const StepId older{kCurrent - 1, 7};
  const StepId newer{kCurrent - 1, 8};
  incarnation_.pinned_by = incarnation_.number;
  incarnation_.pin = newer;
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Own(older, 1)});
  Tell(kSecond, {Own(newer, 1)});
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(LatestQuestion{kCurrent})), Code::kUnavailable);
  EXPECT_EQ(Told(kFirst).incarnation.pin, newer);
}

}  // namespace
}  // namespace ropeteam
