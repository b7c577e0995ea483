// SPDX-License-Identifier: Apache-2.0
//
// Which steps the leader commits, keeps, releases and announces.

#include "tests/engine/leader_fixture.h"

namespace ropeteam {
namespace {

using ::testing::Contains;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAreArray;

TEST_F(LeaderTest, WhatAllRanksHaveCopiesOfIsCommittedAndKept) {
  const StepId step{kCurrent, 7};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(step, 0), Replica(step, 1)});
  EXPECT_FALSE(announced_.contains(kFirst)) << "announced before every member has spoken";
  Tell(kSecond, {Own(step, 1), Replica(step, 0)});
  EXPECT_THAT(Told(kFirst).listed, ElementsAre(step));
  EXPECT_THAT(Told(kSecond).keep, ElementsAre(step));
}

// The next incarnation has a higher number than any known one, and no number is higher than the highest.
TEST_F(LeaderTest, AnIncarnationThatCannotBeIsNotCountedOnFrom) {
  const StepId step{kCurrent, 7};
  Members({kFirst, kSecond});
  const StepId damaged{UINT64_MAX, 9};
  Tell(kFirst, {Own(step, 0), Own(step, 1), Own(damaged, 0), Own(damaged, 1)});
  Tell(kSecond, {Replica(step, 0), Replica(step, 1), Replica(damaged, 0), Replica(damaged, 1)});
  EXPECT_EQ(Told(kFirst).incarnation.number, kCurrent);
  EXPECT_THAT(Told(kFirst).listed, ElementsAre(step));
}

// Members may evict a step as soon as the leader announces it evictable. A copy reported afterwards must not
// commit that step: some member may have evicted its own copy meanwhile.
TEST_F(LeaderTest, AFormerStepThatMayGoIsCommittedByNoCopyThatComesLate) {
  const StepId restored{kCurrent - 1, 7};
  const StepId newer{kCurrent - 1, 8};
  incarnation_.pinned_by = incarnation_.number;
  incarnation_.pin = restored;
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(restored, 0), Own(newer, 0)});
  Tell(kSecond, {Own(restored, 1), Replica(newer, 0)});
  ASSERT_TRUE(MayGo(Told(kFirst), newer));
  Tell(kFirst, {Own(restored, 0), Own(newer, 0), Own(newer, 1)});
  Tell(kSecond, {Own(restored, 1), Replica(newer, 0), Replica(newer, 1)});
  EXPECT_THAT(Told(kFirst).listed, IsEmpty());
  // Unless a copy is marked: a former leader, which knew more, may have told a rank.
  Tell(kFirst, {Own(restored, 0), Marked(Own(newer, 0)), Own(newer, 1)});
  EXPECT_THAT(Told(kFirst).listed, ElementsAre(newer));
  EXPECT_FALSE(MayGo(Told(kFirst), newer));
}

// Copies reported all at once do not commit it either. The ranks train on from the older step, and a restart
// from the newer one would undo that work.
TEST_F(LeaderTest, AFormerStepNewerThanTheRestoredOneIsNotCommitted) {
  const StepId older{kCurrent - 1, 6};
  const StepId restored{kCurrent - 1, 7};
  const StepId newer{kCurrent - 1, 8};
  incarnation_.pinned_by = incarnation_.number;
  incarnation_.pin = restored;
  Members({kFirst, kSecond});
  std::vector<CopyReport> first, second;
  for (const StepId& step : {older, restored, newer}) {
    first.insert(first.end(), {Own(step, 0), Replica(step, 1)});
    second.insert(second.end(), {Own(step, 1), Replica(step, 0)});
  }
  Tell(kFirst, first);
  Tell(kSecond, second);
  EXPECT_THAT(Told(kFirst).listed, ElementsAre(older, restored));
}

// Ranks are told of a commit, and older steps are released, only when every member has marked it. Then the
// surviving members always know of the commit.
TEST_F(LeaderTest, ACommitIsToldAndReleasesOlderStepsWhenEveryMemberHasMarkedIt) {
  settings_.keep_steps = 1;
  const StepId older{kCurrent, 7};
  const StepId newer{kCurrent, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Replica(older, 1), Own(newer, 0), Replica(newer, 1)});
  Tell(kSecond, {Own(older, 1), Replica(older, 0), Own(newer, 1), Replica(newer, 0)});
  EXPECT_THAT(Told(kFirst).listed, ElementsAre(older, newer));
  EXPECT_THAT(Told(kFirst).told, IsEmpty());
  EXPECT_EQ(Told(kFirst).release_before, StepId());
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  EXPECT_THAT(Told(kFirst).told, IsEmpty());
  Send(kSecond, LeaderStateAck{Told(kSecond).sequence});
  EXPECT_THAT(Told(kFirst).told, ElementsAre(older, newer));
  EXPECT_EQ(Told(kSecond).release_before, newer);
}

// The leader that had the copies marked died before every member had done so. No rank was told, and by now
// the ranks have gone on from an older step.
TEST_F(LeaderTest, AMarkedStepThatTheWorldHasLeftBehindIsKnownAndNotTold) {
  const StepId restored{kCurrent - 1, 3};
  const StepId left_behind{kCurrent - 1, 4};
  incarnation_.pinned_by = kCurrent;
  incarnation_.pin = restored;
  Members({kFirst, kSecond});
  std::vector<CopyReport> first, second;
  for (const StepId& step : {restored, left_behind}) {
    first.insert(first.end(), {Marked(Own(step, 0)), Marked(Replica(step, 1))});
    second.insert(second.end(), {Marked(Own(step, 1)), Marked(Replica(step, 0))});
  }
  Tell(kFirst, first);
  Tell(kSecond, second);
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  EXPECT_THAT(Told(kFirst).listed, ElementsAre(restored, left_behind));
  EXPECT_THAT(Told(kFirst).told, ElementsAre(restored));
}

// More steps become committed at once than one announcement lists, after one step that was just listed.
TEST_F(LeaderTest, ACommitThatRanksAreNotToldOfReleasesNothing) {
  settings_.keep_steps = 1;
  std::vector<CopyReport> first, second;
  const auto save = [&](Step step) {
    const StepId id{kCurrent, step};
    first.insert(first.end(), {Own(id, 0), Replica(id, 1)});
    second.insert(second.end(), {Replica(id, 0), Own(id, 1)});
  };
  const auto acknowledge = [&] {
    for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  };
  Members({kFirst, kSecond});
  save(1);
  Tell(kFirst, first);
  Tell(kSecond, second);
  acknowledge();
  ASSERT_THAT(Told(kFirst).told, ElementsAre(StepId{kCurrent, 1}));
  save(2);
  Tell(kFirst, first);
  Tell(kSecond, second);
  const uint64_t lists_the_second = Told(kFirst).sequence;
  for (Step step = 3; step <= 40; ++step) save(step);
  Tell(kFirst, first);
  Tell(kSecond, second);
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{lists_the_second});
  EXPECT_FALSE(MayGo(Told(kFirst), {kCurrent, 1}));
  acknowledge();
  EXPECT_THAT(Told(kFirst).told, Contains(StepId{kCurrent, 40}));
  EXPECT_TRUE(MayGo(Told(kFirst), {kCurrent, 1}));
}

// Constant changes do not prevent it: one rank may save step after step while the others have no room.
TEST_F(LeaderTest, OlderStepsAreReleasedForWantOfMemoryAlsoWhileInventoriesKeepComing) {
  const StepId older{kCurrent, 7};
  const StepId newer{kCurrent, 8};
  short_of_memory_ = true;
  Members({kFirst, kSecond});
  Tell(kSecond, {Own(older, 1), Own(newer, 1)});
  for (Step step = 100; step < 300; ++step) {
    Tell(kFirst, {Own(older, 0), Own(newer, 0), Own({kCurrent, step}, 0)});
    PassTime(60'000);
  }
  EXPECT_THAT(Told(kFirst).dead, ElementsAre(older));
}

// The time counts from the shortage. Before it nothing was saved, and so nothing replicated, for a longer
// time.
TEST_F(LeaderTest, OlderStepsAreReleasedOnlyWhenMemoryHasBeenShortForLong) {
  const StepId older{kCurrent, 7};
  const StepId newer{kCurrent, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {});
  Tell(kSecond, {});
  PassTime(60'000'000);
  Tell(kFirst, {Own(older, 0), Own(newer, 0)});
  short_of_memory_ = true;
  Tell(kSecond, {Own(older, 1), Own(newer, 1)});
  PassTime(9'000'000);
  EXPECT_THAT(Told(kFirst).dead, IsEmpty());
  PassTime(2'000'000);
  EXPECT_THAT(Told(kFirst).dead, ElementsAre(older));
}

// A member reports the shortage for a second after each refusal, and refusals may be further apart.
TEST_F(LeaderTest, AShortageWithGapsIsOne) {
  const StepId older{kCurrent, 7};
  const StepId newer{kCurrent, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Own(newer, 0)});
  for (int second = 0; second < 12; ++second) {
    short_of_memory_ = second % 2 == 0;
    Tell(kSecond, {Own(older, 1), Own(newer, 1)});
    PassTime(1'000'000);
  }
  EXPECT_THAT(Told(kFirst).dead, ElementsAre(older));
}

// A refused order ends at its timeout, and its target gets no other order for as long again. So refusals are
// that far apart.
TEST_F(LeaderTest, RefusalsOfRepeatedOrdersAreOneShortage) {
  const StepId older{kCurrent, 7};
  const StepId newer{kCurrent, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Own(newer, 0)});
  for (int second = 0; second <= 41; ++second) {
    short_of_memory_ = second % 20 == 0;
    Tell(kSecond, {Own(older, 1), Own(newer, 1)});
    PassTime(1'000'000);
  }
  EXPECT_THAT(Told(kFirst).dead, ElementsAre(older));
}

// The node that is away may have what the rank saved before its daemon restarted.
TEST_F(LeaderTest, AStepThatARankMayHaveSavedInAnEarlierSessionIsHopelessOnlyWhenAllNodesAreHere) {
  const StepId before{kCurrent, 7};
  const StepId refused{kCurrent, 9};
  SessionReport rank = Open(0);
  rank.has_ended = true;
  rank.oldest_ended = 8;
  rank.newest_ended = 10;
  settings_.nodes = 4;
  Members({kFirst, kSecond});
  Tell(kFirst, {}, {rank});
  Tell(kSecond, {Own(before, 1), Own(refused, 1)});
  EXPECT_THAT(Told(kSecond).dead, ElementsAre(refused));
  settings_.nodes = 3;
  Members({kFirst, kSecond});
  Tell(kFirst, {}, {rank});
  Tell(kSecond, {Own(before, 1), Own(refused, 1)});
  EXPECT_THAT(Told(kSecond).dead, ElementsAre(before, refused));
}

// The uncommitted step cannot be completed and takes the room of a committed step's copy. If a node is away,
// it may still be completed.
TEST_F(LeaderTest, WhatNobodyCanCompleteIsReleasedForTheCopiesOfACommittedStepWhenEveryCommitIsKnown) {
  const StepId committed{kCurrent, 7};
  const StepId incomplete{kCurrent, 8};
  short_of_memory_ = true;
  for (const uint32_t nodes : {5, 3}) {
    settings_.nodes = nodes;
    Members({kFirst, kSecond});
    Tell(kFirst, {Marked(Own(committed, 0)), Marked(Own(committed, 1))});
    Tell(kSecond, {Marked(Replica(committed, 0)), Own(incomplete, 1)});
    PassTime(11'000'000);
    EXPECT_EQ(Told(kFirst).dead.size(), nodes == 3 ? 1u : 0u);
  }
}

// After a partition, a side that did not know the choice has begun the newer incarnation.
TEST_F(LeaderTest, TheNewestChoiceBarsAlsoUnderAnIncarnationThatWasBegunWithoutIt) {
  const StepId restored{kCurrent - 2, 7};
  const StepId left_behind{kCurrent - 2, 8};
  for (const bool choice_first : {true, false}) {
    Members({kFirst, kSecond});
    const auto tell_choice = [&] {
      incarnation_.number = incarnation_.pinned_by = kCurrent - 1;
      incarnation_.pin = restored;
      Tell(kFirst, {Own(restored, 0), Own(left_behind, 0), Replica(left_behind, 1)});
    };
    const auto tell_newer = [&] {
      incarnation_.number = kCurrent;
      incarnation_.pinned_by = kCurrent - 3;
      incarnation_.pin = {};
      Tell(kSecond, {Own(restored, 1), Own(left_behind, 1), Replica(left_behind, 0)});
    };
    if (choice_first) tell_choice();
    tell_newer();
    if (!choice_first) tell_choice();
    EXPECT_EQ(Told(kFirst).incarnation.number, kCurrent);
    EXPECT_EQ(Told(kFirst).incarnation.pin, restored);
    EXPECT_THAT(Told(kFirst).listed, IsEmpty());
  }
}

// The forgotten incarnation's choice is unknown, so no uncommitted step from before it is committed under the
// next one.
TEST_F(LeaderTest, UnderTheIncarnationAfterAForgottenOneNoStepFromBeforeIsCommitted) {
  const StepId before{kCurrent - 1, 7};
  incarnation_.forgotten = true;
  incarnation_.token.clear();
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(before, 0)});
  Tell(kSecond, {Own(before, 1)});
  ASSERT_EQ(Join(kFirst, 0, "next"), Code::kOk);
  Tell(kFirst, {Own(before, 0), Replica(before, 1)});
  Tell(kSecond, {Own(before, 1), Replica(before, 0)});
  EXPECT_GT(Told(kFirst).incarnation.number, kCurrent);
  EXPECT_EQ(Told(kFirst).incarnation.pinned_by, kCurrent);
  EXPECT_THAT(Told(kFirst).listed, IsEmpty());
}

TEST_F(LeaderTest, AnIncarnationThatCannotBeIsIgnored) {
  Members({kFirst, kSecond});
  Tell(kFirst, {});
  incarnation_.number = kCurrent + 1;
  incarnation_.pinned_by = kCurrent;
  incarnation_.pin = {kCurrent, 3};
  Tell(kSecond, {});
  EXPECT_EQ(Told(kFirst).incarnation.number, kCurrent);
  incarnation_.pinned_by = kCurrent + 2;
  Tell(kSecond, {});
  EXPECT_EQ(Told(kFirst).incarnation.number, kCurrent);
  // After these, no higher incarnation number is left.
  for (const Incarnation beyond : {kIncarnationMax, ~Incarnation{0}}) {
    incarnation_ = IncarnationState();
    incarnation_.number = beyond;
    Tell(kSecond, {Own({beyond, 1}, 0)}, {});
    EXPECT_EQ(Told(kFirst).incarnation.number, kCurrent);
  }
  ASSERT_EQ(Join(kFirst, 0, "next"), Code::kOk);
  EXPECT_EQ(Told(kFirst).incarnation.number, NextIncarnation(kCurrent, epoch_));
}

// The leader that counted the restores is gone. Of two notes about a step, the one with the higher revision
// is newer.
TEST_F(LeaderTest, WhatAMemberKnowsOfRestoresIsToldToAll) {
  Members({kFirst, kSecond});
  const StepId step{kCurrent - 1, 7};
  const RestoreNote newer{step, 3, 2, kCurrent, true, true};
  const auto tell = [&](NodeId from, const RestoreNote& note) {
    Inventory inventory;
    inventory.sequence = ++sequence_;
    inventory.report.id = from;
    inventory.incarnation = incarnation_;
    inventory.restores = {note};
    Send(from, inventory);
  };
  tell(kFirst, newer);
  tell(kSecond, {step, 2, 1, kCurrent - 1, false, false});
  for (const NodeId node : {kFirst, kSecond}) EXPECT_THAT(Told(node).restores, ElementsAre(newer));
  tell(kSecond, {{kIncarnationMax, 1}, 9, 1, kCurrent, true, true});
  EXPECT_THAT(Told(kFirst).restores, ElementsAre(newer)) << "it cannot be";
}

// The order of the reports does not matter. Of the newest incarnation's values, those that keep and persist
// the most count.
TEST_F(LeaderTest, WhatMembersKnowOfThePolicyIsPutTogether) {
  Members({kFirst, kSecond});
  const auto tell = [&](NodeId from, const RankPolicy& policy) {
    Inventory inventory;
    inventory.sequence = ++sequence_;
    inventory.report.id = from;
    inventory.incarnation = incarnation_;
    inventory.policy = policy;
    Send(from, inventory);
  };
  tell(kFirst, {kCurrent, 500, 1, 5, 1});
  EXPECT_THAT(announced_, IsEmpty()) << "the other one has not told";
  tell(kSecond, {kCurrent - 1, 100, 0, 9, 0});
  EXPECT_EQ(Told(kFirst).policy, (RankPolicy{kCurrent, 500, 1, 5, 1}));
  tell(kSecond, {kCurrent, 100, 0, 3, 0});
  EXPECT_EQ(Told(kFirst).policy, (RankPolicy{kCurrent, 100, 0, 5, 1}));
  tell(kSecond, {kIncarnationMax, 1, 0, 1, 0});
  EXPECT_EQ(Told(kFirst).policy, (RankPolicy{kCurrent, 100, 0, 5, 1})) << "it cannot be";
}

TEST_F(LeaderTest, DecidesNothingWithoutALease) {
  const StepId step{kCurrent, 7};
  engine_->OnLease(now_, now_);
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(step, 0), Replica(step, 1)});
  Tell(kSecond, {Own(step, 1), Replica(step, 0)});
  PassTime(2'000'000);
  EXPECT_THAT(announced_, IsEmpty());
  EXPECT_EQ(Join(kFirst, 0, "run6"), Code::kUnavailable);
  engine_->OnLease(now_, now_ + 1'000'000);
  Carry();
  EXPECT_THAT(Told(kFirst).listed, ElementsAre(step));
  EXPECT_EQ(Join(kFirst, 0, "run6"), Code::kOk);
}

// The former leader may go on until its lease has expired.
TEST_F(LeaderTest, ANewLeaderDecidesNothingBeforeTheFormerOnesLeaseHasRunOut) {
  const StepId step{kCurrent, 7};
  settle_us_ = 500'000;
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(step, 0), Replica(step, 1)});
  Tell(kSecond, {Own(step, 1), Replica(step, 0)});
  EXPECT_EQ(Join(kFirst, 0, "run6"), Code::kUnavailable);
  PassTime(499'999);
  EXPECT_THAT(announced_, IsEmpty());
  PassTime(1);
  EXPECT_THAT(Told(kFirst).listed, ElementsAre(step));
}

// It led, has missed the view in which another member led, and leads again. That one may have decided something.
TEST_F(LeaderTest, ALeaderThatHasMissedTheLeadOfAnotherOneBeginsFromNothing) {
  Members({kFirst, kSecond});
  Tell(kFirst, {});
  Tell(kSecond, {});
  ASSERT_EQ(Join(kFirst, 0, "run6"), Code::kOk);
  settle_us_ = 500'000;
  Members({kFirst, kSecond});
  Tell(kFirst, {});
  Tell(kSecond, {});
  EXPECT_EQ(Join(kFirst, 0, "run7"), Code::kOk) << "its lead goes on";
  led_since_ = ++epoch_;
  Members({kFirst, kSecond});
  Tell(kFirst, {});
  Tell(kSecond, {});
  EXPECT_EQ(Join(kFirst, 0, "run8"), Code::kUnavailable);
  PassTime(500'000);
  EXPECT_EQ(Join(kFirst, 0, "run8"), Code::kOk);
}

// While the nodes with rank 0's committed shard were away, rank 0 was opened on another node and saved other
// bytes as the same shard. These must not be marked: a marked copy is never dropped.
TEST_F(LeaderTest, AStepWithAnotherShardOfItsNameIsMarkedWhenThatHasGone) {
  const StepId step{kCurrent, 7};
  const std::vector<CopyReport> committed = {Marked(With(Own(step, 0), 1)), Marked(Replica(step, 1))};
  Members({kFirst, kSecond});
  Tell(kFirst, committed);
  CopyReport other = With(Own(step, 0), 2);
  other.seated = true;
  Tell(kSecond, {other, Own(step, 1)});
  EXPECT_THAT(Told(kSecond).listed, IsEmpty());
  const size_t ordered = drops_[kSecond];
  EXPECT_GT(ordered, 0u);
  // The orders are lost.
  PassTime(1'000'000);
  EXPECT_GT(drops_[kSecond], ordered);
  EXPECT_EQ(drops_[kFirst], 0u);
  Tell(kSecond, {Own(step, 1)});
  EXPECT_THAT(Told(kSecond).listed, ElementsAre(step));
}

// The first announcement that listed the step did not reach the second member, and then the step is not
// listed for a while. An acknowledgement of an announcement in between says nothing about the mark.
TEST_F(LeaderTest, AStepThatIsListedAgainIsToldWhenThatListIsAcknowledged) {
  const StepId step{kCurrent, 7};
  const std::vector<CopyReport> first = {With(Own(step, 0), 1), Replica(step, 1)};
  const std::vector<CopyReport> second = {Own(step, 1), With(Replica(step, 0), 1)};
  Members({kFirst, kSecond});
  Tell(kFirst, first);
  Tell(kSecond, second);
  ASSERT_THAT(Told(kFirst).listed, ElementsAre(step));
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  Tell(kSecond, {Own(step, 1), With(Replica(step, 0), 2)});
  ASSERT_THAT(Told(kSecond).listed, IsEmpty());
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  Tell(kSecond, second);
  ASSERT_THAT(Told(kSecond).listed, ElementsAre(step));
  EXPECT_THAT(Told(kFirst).told, IsEmpty());
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  EXPECT_THAT(Told(kFirst).told, ElementsAre(step));
}

// A member marks only copies that the leader has compared. A copy sealed after that is marked when the leader
// has heard of it.
TEST_F(LeaderTest, AMemberIsToldWhichOfItsCopiesWereJudged) {
  const StepId step{kCurrent, 7};
  const std::vector<CopyReport> own = {Own(step, 0), Replica(step, 1)};
  Members({kFirst, kSecond});
  Tell(kFirst, own);
  const uint64_t of_first = sequence_;
  Tell(kSecond, {Own(step, 1), Replica(step, 0)});
  EXPECT_EQ(Told(kFirst).judged, of_first);
  EXPECT_EQ(Told(kSecond).judged, sequence_);
  const uint64_t told = Told(kFirst).sequence;
  Tell(kFirst, {Marked(Own(step, 0)), Marked(Replica(step, 1))});
  EXPECT_EQ(Told(kFirst).sequence, told) << "nothing was left to mark";
  Tell(kSecond, {Marked(Own(step, 1)), Replica(step, 0)});
  EXPECT_GT(Told(kSecond).sequence, told);
  EXPECT_EQ(Told(kSecond).judged, sequence_);
}

// With the change of view a member may have lost copies that it had in the epoch before.
TEST_F(LeaderTest, InANewEpochNothingIsAnnouncedBeforeEveryMemberHasAnsweredInIt) {
  const StepId step{kCurrent, 7};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(step, 0), Replica(step, 1)});
  Tell(kSecond, {Own(step, 1), Replica(step, 0)});
  ASSERT_TRUE(announced_.contains(kFirst));
  announced_.clear();
  Members({kFirst, kSecond});
  PassTime(1'000'000);
  Tell(kFirst, {Own(step, 0), Replica(step, 1)});
  PassTime(1'000'000);
  EXPECT_THAT(announced_, IsEmpty());
  Tell(kSecond, {Own(step, 1), Replica(step, 0)});
  EXPECT_TRUE(announced_.contains(kFirst) && announced_.contains(kSecond));
}

// With 16,384 members, an announcement is sent only if it changes something.
TEST_F(LeaderTest, WhatDecidesNothingIsNotAnnounced) {
  const StepId step{kCurrent, 7};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(step, 0)});
  Tell(kSecond, {});
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  announced_.clear();
  Tell(kFirst, {Own(step, 0)}, {Open(0)});
  Tell(kFirst, {Own(step, 0), Own({kCurrent, 8}, 0)}, {Open(0)});
  PassTime(2'000'000);
  EXPECT_THAT(announced_, IsEmpty());
}

// The owner and the holder report in separate messages, so either report may come first.
TEST_F(LeaderTest, AHoldersCopyThatIsReportedFirstIsNoOrphan) {
  const StepId step{kCurrent, 7};
  Members({kFirst, kSecond, kSecond + 1});
  Tell(kFirst, {Replica(step, 1)}, {Open(0)});
  Tell(kSecond + 1, {});
  Tell(kSecond, {Own(step, 0)}, {Open(1)});
  PassTime(100'000);
  EXPECT_TRUE(orders_.empty());
  Tell(kSecond, {Own(step, 0), Own(step, 1)}, {Open(1)});
  PassTime(1'000'000);
  EXPECT_TRUE(orders_.empty());
  // An own copy that is not reported is lost.
  Tell(kSecond, {Own(step, 0)}, {Open(1)});
  PassTime(1'000'000);
  EXPECT_FALSE(orders_.empty());
}

// The target of the first orders has no room, but does not tell the leader. The source carries out two orders
// at a time. They must not be the same two for ever.
TEST_F(LeaderTest, OrdersThatComeToNothingMakeWayForOthersAndGoElsewhere) {
  const StepId older{kCurrent, 7};
  const StepId newer{kCurrent, 8};
  Members({kFirst, kSecond, kSecond + 1, kSecond + 2});
  for (const NodeId node : {kFirst, kSecond + 1, kSecond + 2}) Tell(node, {});
  Tell(kSecond, {Marked(Own(older, 0)), Marked(Own(older, 1)), Marked(Own(newer, 0)), Marked(Own(newer, 1))});
  PassTime(1'000'000);
  ASSERT_EQ(orders_.size(), 2u);
  EXPECT_EQ(StepOf(orders_[0].shard), newer);
  const NodeId full = orders_[0].target;
  ASSERT_NE(full, kLeader) << "no link that the leader finds broken may be the reason to go elsewhere";
  ASSERT_EQ(orders_[1].target, full);
  PassTime(10'000'000);
  ASSERT_EQ(orders_.size(), 4u);
  for (const size_t later : {2, 3}) {
    EXPECT_EQ(StepOf(orders_[later].shard), older);
    EXPECT_NE(orders_[later].target, full);
  }
}

// The first nodes in the order of placement are full for good.
TEST_F(LeaderTest, EveryNodeIsAskedForACopyBeforeOneIsAskedAgain) {
  const StepId step{kCurrent, 8};
  const std::vector<NodeId> others = {kFirst, kSecond + 1, kSecond + 2, kSecond + 3};
  Members({kFirst, kSecond, kSecond + 1, kSecond + 2, kSecond + 3});
  for (const NodeId node : others) Tell(node, {});
  Tell(kSecond, {Marked(Own(step, 0)), Marked(Own(step, 1))});
  PassTime(1'000'000);
  std::set<NodeId> targets;
  for (size_t asked = 0; asked < others.size(); ++asked) {
    ASSERT_EQ(orders_.size(), 2 * (asked + 1)) << "both shards go to one node";
    targets.insert(orders_.back().target);
    PassTime(10'500'000);
  }
  EXPECT_THAT(targets, UnorderedElementsAreArray(others));
}

// The owner of the shard has lost its links to the nodes that lack a copy. One of them reports its link, the other
// end reports the other. The holder reaches both.
TEST_F(LeaderTest, ACopyIsOrderedFromANodeThatReachesItsTarget) {
  const StepId step{kCurrent, 7};
  settings_.replicas = 3;
  Members({kFirst, kSecond, kSecond + 1});
  std::vector<CopyReport> copies = {Marked(Own(step, 0)), Marked(Own(step, 1))};
  for (CopyReport& copy : copies) copy.replicas = 3;
  cannot_reach_ = {kLeader};
  Tell(kFirst, copies);
  for (CopyReport& copy : copies) copy.role = Role::kReplica;
  Tell(kSecond, copies);
  cannot_reach_ = {kFirst};
  Tell(kSecond + 1, {});
  PassTime(1'000'000);
  ASSERT_FALSE(orders_.empty());
  EXPECT_THAT(ordered_, Each(kSecond));
  std::set<NodeId> targets;
  for (const CopyOrder& order : orders_) targets.insert(order.target);
  EXPECT_THAT(targets, ElementsAre(kLeader, kSecond + 1));
}

// Its answer was not durable yet. The asker repeats it after another node has left, which the operator has not given up.
TEST_F(LeaderTest, AForgetThatIsAskedAgainDoesNotMeanNodesThatHaveLeftSince) {
  const StepId step{kCurrent, 7};
  const NodeId third = kSecond + 1;
  const std::vector<CopyReport> first = {Marked(Own(step, 0))};
  const std::vector<CopyReport> second = {Marked(Replica(step, 0)), Marked(Replica(step, 1))};
  Members({kFirst, kSecond, third});
  Tell(kFirst, first);
  Tell(kSecond, second);
  Tell(third, {Marked(Own(step, 1))});
  for (const NodeId node : {kFirst, kSecond, third}) Send(node, LeaderStateAck{Told(node).sequence});
  ASSERT_EQ(Told(kFirst).roster.nodes, 4u);
  Members({kFirst, kSecond});
  Tell(kFirst, first);
  Tell(kSecond, second);
  const Question question{++question_, Question::Topic::kForget, Encode(ForgetQuestion{""})};
  Send(kFirst, question);
  ASSERT_EQ(Told(kFirst).roster.nodes, 3u);
  Members({kFirst});
  Tell(kFirst, first);
  Send(kFirst, question);
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  Send(kFirst, question);
  EXPECT_TRUE(replies_.contains(question_));
  EXPECT_EQ(Told(kFirst).roster.nodes, 3u) << "the second node is still missed";
}

// Its answer was lost. Meanwhile a newer incarnation has committed a step of the same number.
TEST_F(LeaderTest, AQuarantineThatIsAskedForAgainMeansTheSameStep) {
  const StepId older{kCurrent - 1, 7};
  const StepId newer{kCurrent, 7};
  const auto hold = [this](const std::vector<StepId>& steps) {
    std::vector<CopyReport> first;
    std::vector<CopyReport> second;
    for (const StepId& step : steps) {
      first.insert(first.end(), {Marked(Own(step, 0)), Marked(Replica(step, 1))});
      second.insert(second.end(), {Marked(Replica(step, 0)), Marked(Own(step, 1))});
    }
    Tell(kFirst, first);
    Tell(kSecond, second);
    for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  };
  Members({kFirst, kSecond});
  hold({older});
  const Question question{++question_, Question::Topic::kQuarantine, Encode(QuarantineQuestion{7, false})};
  Send(kFirst, question);
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  hold({newer, older});
  Send(kFirst, question);
  ASSERT_TRUE(replies_.contains(question_));
  std::vector<StepId> quarantined;
  for (const RestoreNote& note : Told(kFirst).restores) quarantined.push_back(note.step);
  EXPECT_THAT(quarantined, ElementsAre(older));
}

}  // namespace
}  // namespace ropeteam
