// SPDX-License-Identifier: Apache-2.0
#include "core/engine/retention.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace ropeteam::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr Incarnation kFormer = 1;
constexpr Incarnation kCurrent = 2;

// Two nodes, 1 and 2, with one rank each; R = 1.
class RetentionTest : public ::testing::Test {
 protected:
  RetentionTest() {
    incarnation_.number = kCurrent;
    incarnation_.pinned_by = incarnation_.number;
  }
  static CopyReport Copy(const StepId& step, Rank rank, Role role, bool committed) {
    CopyReport copy;
    copy.id = {step.incarnation, step.step, rank};
    copy.world_size = 2;
    copy.replicas = 1;
    copy.stream_bytes = 100;
    copy.role = role;
    copy.committed = committed;
    return copy;
  }
  void Whole(const StepId& step) {
    for (Rank rank = 0; rank < 2; ++rank) {
      held_[0].push_back(Copy(step, rank, rank == 0 ? Role::kOwn : Role::kReplica, false));
      held_[1].push_back(Copy(step, rank, rank == 1 ? Role::kOwn : Role::kReplica, false));
    }
    marked_.insert(step);
  }
  void OneCopyEach(const StepId& step) {
    held_[0].push_back(Copy(step, 0, Role::kOwn, false));
    held_[1].push_back(Copy(step, 1, Role::kOwn, false));
  }
  void OneRank(const StepId& step) { held_[0].push_back(Copy(step, 0, Role::kOwn, false)); }
  RetentionPlan Plan() {
    for (NodeId node = 1; node <= 2; ++node) table_.Replace(node, {}, held_[node - 1]);
    table_.Complete();
    return PlanRetention({table_, incarnation_, hopeless_, marked_, persisting_, settings_, may_choose_,
                          pin_told_, quarantined_, dropped_});
  }

  std::vector<CopyReport> held_[2];
  StepTable table_;
  IncarnationState incarnation_;
  std::set<StepId> hopeless_;
  std::set<StepId> marked_;
  std::set<StepId> persisting_;
  JobSettings settings_{1, 2, 2};
  bool may_choose_ = true;
  bool pin_told_ = true;
  std::set<StepId> quarantined_;
  std::set<StepId> dropped_;
};

TEST_F(RetentionTest, TheNewestCommittedStepsAreKeptAndOlderOnesReleased) {
  for (Step step = 1; step <= 4; ++step) Whole({kCurrent, step});
  const RetentionPlan plan = Plan();
  EXPECT_THAT(plan.keep, ElementsAre(StepId{kCurrent, 3}, StepId{kCurrent, 4}));
  EXPECT_EQ(plan.release_before, (StepId{kCurrent, 4}));
  EXPECT_THAT(plan.released, ElementsAre(StepId{kCurrent, 1}, StepId{kCurrent, 2}));
  EXPECT_THAT(plan.evictable, IsEmpty());
}

TEST_F(RetentionTest, AnUncommittedStepReleasesNothing) {
  Whole({kCurrent, 1});
  OneCopyEach({kCurrent, 2});
  const RetentionPlan plan = Plan();
  EXPECT_THAT(plan.keep, ElementsAre(StepId{kCurrent, 1}, StepId{kCurrent, 2}));
  EXPECT_THAT(plan.released, IsEmpty());
}

// The member that does not know of the commit may be the only one that survives.
TEST_F(RetentionTest, ACommitThatNotEveryMemberHasMarkedReleasesNothing) {
  settings_.keep_steps = 1;
  Whole({kCurrent, 1});
  Whole({kCurrent, 2});
  marked_.erase({kCurrent, 2});
  const RetentionPlan plan = Plan();
  EXPECT_THAT(plan.keep, ElementsAre(StepId{kCurrent, 1}, StepId{kCurrent, 2}));
  EXPECT_THAT(plan.released, IsEmpty());
}

// Its copies are being written to storage, even if newer steps are committed meanwhile.
TEST_F(RetentionTest, ACommittedStepThatIsBeingPersistedIsKept) {
  for (Step step = 1; step <= 4; ++step) Whole({kCurrent, step});
  persisting_ = {{kCurrent, 1}, {kCurrent, 9}};
  const RetentionPlan plan = Plan();
  EXPECT_THAT(plan.keep, ElementsAre(StepId{kCurrent, 1}, StepId{kCurrent, 3}, StepId{kCurrent, 4}));
  EXPECT_THAT(plan.released, ElementsAre(StepId{kCurrent, 2}));
}

TEST_F(RetentionTest, ThePinStaysUntilItsIncarnationHasCommitted) {
  settings_.keep_steps = 1;
  incarnation_.pin = {kFormer, 5};
  OneCopyEach({kFormer, 5});
  OneCopyEach({kCurrent, 6});
  EXPECT_TRUE(Plan().keep.contains({kFormer, 5}));
  Whole({kCurrent, 7});
  marked_.clear();
  EXPECT_TRUE(Plan().keep.contains({kFormer, 5})) << "not every member knows of the commit";
  marked_ = {{kCurrent, 7}};
  const RetentionPlan plan = Plan();
  EXPECT_FALSE(plan.keep.contains({kFormer, 5}));
  EXPECT_TRUE(plan.released.contains({kFormer, 5}));
}

// Ranks fall back to the newest step that can be produced, committed or not.
TEST_F(RetentionTest, AFormerStepIsEvictableOnceTheIncarnationHasChosenUnlessItIsTheNewestOrMarked) {
  OneCopyEach({kFormer, 4});
  OneCopyEach({kFormer, 5});
  OneCopyEach({kFormer, 6});
  held_[1].push_back(Copy({kFormer, 5}, 0, Role::kReplica, true));
  incarnation_.pinned_by = 0;
  EXPECT_THAT(Plan().evictable, IsEmpty());
  incarnation_.pinned_by = incarnation_.number;
  pin_told_ = false;
  EXPECT_THAT(PlanRetention(
                  {table_, incarnation_, hopeless_, marked_, persisting_, settings_, may_choose_, pin_told_})
                  .evictable,
              IsEmpty());
  pin_told_ = true;
  const RetentionPlan plan = PlanRetention(
      {table_, incarnation_, hopeless_, marked_, persisting_, settings_, may_choose_, pin_told_});
  EXPECT_THAT(plan.evictable, ElementsAre(StepId{kFormer, 4}));
  EXPECT_THAT(plan.keep, ElementsAre(StepId{kFormer, 5}, StepId{kFormer, 6}));
}

TEST_F(RetentionTest, NothingIsEvictableWhileTheMembersMayNotKnowOfEveryCommit) {
  OneRank({kFormer, 5});
  may_choose_ = false;
  EXPECT_THAT(Plan().evictable, IsEmpty());
  may_choose_ = true;
  EXPECT_THAT(Plan().evictable, ElementsAre(StepId{kFormer, 5}));
}

TEST_F(RetentionTest, AStepThatARankHasPassedIsDeadUnlessItIsCommitted) {
  OneRank({kCurrent, 5});
  hopeless_ = {{kCurrent, 5}};
  EXPECT_THAT(Plan().dead, ElementsAre(StepId{kCurrent, 5}));
  CopyReport marked = Copy({kCurrent, 5}, 1, Role::kReplica, true);
  table_.Replace(3, {}, {marked});
  EXPECT_THAT(PlanRetention(
                  {table_, incarnation_, hopeless_, marked_, persisting_, settings_, may_choose_, pin_told_})
                  .dead,
              IsEmpty());
}

// The step offered in its place is kept. When a newer step is committed, the quarantined one is released.
TEST_F(RetentionTest, AQuarantinedStepCountsForNoneOfTheK) {
  const std::vector<StepId> steps = {{kCurrent, 1}, {kCurrent, 2}, {kCurrent, 3}, {kCurrent, 4}};
  for (const StepId& step : {steps[0], steps[1], steps[2]}) Whole(step);
  quarantined_ = {steps[2]};
  EXPECT_EQ(Plan().keep, std::set<StepId>(steps.begin(), steps.begin() + 3));
  Whole(steps[3]);
  const RetentionPlan plan = Plan();
  EXPECT_EQ(plan.keep, (std::set<StepId>{steps[1], steps[3]}));
  EXPECT_TRUE(plan.released.contains(steps[2]));
}

TEST_F(RetentionTest, ADroppedStepIsReleasedWhereANewerOneIsCommitted) {
  const std::vector<StepId> steps = {{kCurrent, 1}, {kCurrent, 2}, {kCurrent, 3}};
  for (const StepId& step : steps) Whole(step);
  dropped_ = {steps[1]};
  const RetentionPlan plan = Plan();
  EXPECT_EQ(plan.keep, (std::set<StepId>{steps[0], steps[2]})) << "it counts for none of the two";
  EXPECT_THAT(plan.released, ElementsAre(steps[1]));
}

// The newest step has lost its copies, so the newest of the dropped steps is kept.
TEST_F(RetentionTest, OfTwoDroppedStepsOneStaysWhileNoNewerOneCanBeProduced) {
  const StepId lost{kCurrent, 3};
  for (const Step step : {1, 2}) Whole({kCurrent, step});
  held_[0].push_back(Copy(lost, 0, Role::kOwn, true));
  marked_.insert(lost);
  dropped_ = {{kCurrent, 1}, {kCurrent, 2}};
  const RetentionPlan plan = Plan();
  EXPECT_EQ(plan.keep, (std::set<StepId>{{kCurrent, 2}, lost}));
  EXPECT_EQ(plan.release_before, (StepId{kCurrent, 2}));
}

// One step is pinned, one is being persisted, and one is the newest.
TEST_F(RetentionTest, ADroppedStepStaysWhileItIsPersistedOrRestoredFrom) {
  const std::vector<StepId> steps = {{kFormer, 1}, {kFormer, 2}, {kFormer, 3}};
  for (const StepId& step : steps) Whole(step);
  dropped_ = {steps[0], steps[1]};
  incarnation_.pin = steps[0];
  persisting_ = {steps[1]};
  EXPECT_EQ(Plan().keep, std::set<StepId>(steps.begin(), steps.end()));
}

}  // namespace
}  // namespace ropeteam::engine
