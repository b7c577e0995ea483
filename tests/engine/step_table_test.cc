// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>

#include "core/engine/limits.h"
#include "core/engine/step_table.h"

namespace ropeteam::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr StepId kStep{1, 7};

CopyReport Copy(Rank rank, Role role = Role::kOwn, std::vector<uint32_t> bad = {}) {
  CopyReport copy;
  copy.id = {kStep.incarnation, kStep.step, rank};
  copy.world_size = 2;
  copy.replicas = 1;
  copy.stream_bytes = 100;
  copy.role = role;
  copy.bad = std::move(bad);
  return copy;
}

TEST(StepTable, AStepIsCommittedWhenTheLastRankHasItsCopies) {
  StepTable table;
  table.Replace(1, {}, {Copy(0), Copy(1, Role::kReplica)});
  EXPECT_THAT(table.Complete(), IsEmpty());
  EXPECT_TRUE(table.Find(kStep)->producible());  // one copy of each shard is enough to restore …
  EXPECT_FALSE(table.Find(kStep)->complete);     // … but not to survive a loss
  table.Replace(2, {}, {Copy(1)});
  EXPECT_THAT(table.Complete(), IsEmpty());
  table.Replace(3, {}, {Copy(0, Role::kReplica)});
  EXPECT_THAT(table.Complete(), ElementsAre(kStep));
  EXPECT_TRUE(table.Find(kStep)->complete);
}

// A cache copy may be dropped at any time.
TEST(StepTable, ACacheServesReadsAndCountsForNothing) {
  StepTable table;
  table.Replace(1, {}, {Copy(0), Copy(1)});
  table.Replace(2, {}, {Copy(0, Role::kCache), Copy(1, Role::kReplica)});
  EXPECT_THAT(table.Complete(), IsEmpty());
  EXPECT_EQ(table.Find(kStep)->ranks[0].good, 1u);
  table.Replace(1, {Copy(0), Copy(1)}, {});
  EXPECT_TRUE(table.Find(kStep)->producible());
  table.Replace(1, {}, {Copy(0), Copy(1)});
  table.Replace(2, {Copy(0, Role::kCache), Copy(1, Role::kReplica)},
                {Copy(0, Role::kReplica), Copy(1, Role::kReplica)});
  EXPECT_THAT(table.Complete(), ElementsAre(kStep));
}

CopyReport With(CopyReport copy, uint64_t content) {
  copy.content = content;
  return copy;
}

// Two shards with the same id and other bytes are not copies of each other.
TEST(StepTable, CopiesWithOtherBytesDoNotCountForEachOther) {
  StepTable table;
  table.Replace(1, {}, {With(Copy(0), 1), Copy(1)});
  table.Replace(2, {}, {With(Copy(0), 2), Copy(1, Role::kReplica)});
  EXPECT_THAT(table.Complete(), IsEmpty());
  EXPECT_THAT(table.contested(), ElementsAre(ShardId{kStep.incarnation, kStep.step, 0}));
  table.Replace(3, {}, {With(Copy(0, Role::kReplica), 1)});
  EXPECT_EQ(table.Find(kStep)->ranks[0].content, 1u);
  EXPECT_THAT(table.Complete(), ElementsAre(kStep));
}

TEST(StepTable, TheCopyWhereTheRankIsOpenCountsUntilTheCommit) {
  StepTable table;
  table.Replace(1, {}, {With(Copy(0), 1), Copy(1)});
  table.Replace(2, {}, {With(Copy(0, Role::kReplica), 1)});
  CopyReport seated = With(Copy(0), 2);
  seated.seated = true;
  table.Replace(3, {}, {seated, Copy(1, Role::kReplica)});
  EXPECT_EQ(table.Find(kStep)->ranks[0].content, 2u);
  table.Replace(3, {seated, Copy(1, Role::kReplica)}, {Copy(1, Role::kReplica)});
  EXPECT_EQ(table.Find(kStep)->ranks[0].content, 1u);
  EXPECT_THAT(table.Complete(), ElementsAre(kStep));
  table.Replace(3, {Copy(1, Role::kReplica)}, {seated, Copy(1, Role::kReplica)});
  EXPECT_EQ(table.Find(kStep)->ranks[0].content, 1u) << "a committed shard has changed";
}

// The nodes with the committed shard return after another shard with the same id was saved.
TEST(StepTable, ACopyMarkedAsCommittedCountsHoweverLateItComes) {
  StepTable table;
  CopyReport seated = With(Copy(0), 2);
  seated.seated = true;
  CopyReport marked = With(Copy(0), 1);
  marked.committed = true;
  table.Replace(3, {}, {seated});
  table.Replace(1, {}, {marked});
  EXPECT_EQ(table.Find(kStep)->ranks[0].content, 1u);
}

// The ranks have gone on from an older step. Committing this one would tell them of a step that no later
// incarnation restores.
TEST(StepTable, AFormerStepNewerThanWhatTheWorldRestoredIsNotCommitted) {
  StepTable table;
  table.Replace(1, {}, {Copy(0), Copy(1)});
  table.Replace(2, {}, {Copy(0, Role::kReplica), Copy(1, Role::kReplica)});
  table.Bar(kStep.incarnation + 1, {kStep.incarnation, kStep.step - 1});
  EXPECT_THAT(table.Complete(), IsEmpty());
  table.Bar(kStep.incarnation + 1, kStep);
  EXPECT_THAT(table.Complete(), ElementsAre(kStep));
}

TEST(StepTable, TwoCopiesOnOneNodeWouldNotCount) {
  StepTable table;
  table.Replace(1, {}, {Copy(0), Copy(1)});
  table.Replace(1, {Copy(0), Copy(1)}, {Copy(0), Copy(1)});
  EXPECT_THAT(table.Complete(), IsEmpty());
  EXPECT_EQ(table.Find(kStep)->ranks[0].good, 1u);
}

TEST(StepTable, WhateverOrderANodeListsItsCopiesInTheyAreCountedOnce) {
  StepTable table;
  table.Replace(1, {}, {Copy(1), Copy(0), Copy(1), Copy(0)});
  EXPECT_EQ(table.Find(kStep)->ranks[0].good, 1u);
  EXPECT_EQ(table.Find(kStep)->ranks[1].good, 1u);
  table.Replace(1, {Copy(1), Copy(0), Copy(1), Copy(0)}, {Copy(1), Copy(0, Role::kOwn, {2})});
  EXPECT_EQ(table.Find(kStep)->ranks[0].copies.size(), 1u);
  EXPECT_EQ(table.Find(kStep)->ranks[0].good, 0u);
  EXPECT_EQ(table.Find(kStep)->ranks[1].good, 1u);
  table.Replace(1, {Copy(1), Copy(0, Role::kOwn, {2})}, {});
  EXPECT_TRUE(table.steps().empty());
}

TEST(StepTable, ARankBeyondItsOwnWorldLeavesNoStepBehind) {
  StepTable table;
  table.Replace(1, {}, {Copy(2)});
  EXPECT_TRUE(table.steps().empty());
}

// One rank goes on alone, and says that it is one of very many.
TEST(StepTable, StepsThatOneRankOfALargeWorldSavesTakeLittleMemory) {
  const auto used = [] {
    const struct mallinfo2 info = mallinfo2();
    return info.uordblks + info.hblkhd;
  };
  StepTable table;
  std::vector<CopyReport> copies;
  for (Step step = 1; step <= 1200; ++step) {
    CopyReport copy = Copy(77'777);
    copy.id.step = step;
    copy.world_size = kWorldMax;
    copies.push_back(copy);
  }
  const size_t before = used();
  table.Replace(1, {}, copies);
  EXPECT_LT(used() - before, 1200 * size_t{100'000}) << "a sanitizer's allocator counts nothing";
  ASSERT_EQ(table.steps().size(), 1200u);
  const StepTable::StepState& step = *table.Find({kStep.incarnation, 600});
  EXPECT_EQ(step.ranks[77'777].good, 1u);
  EXPECT_TRUE(step.ranks[0].copies.empty());
  EXPECT_TRUE(step.lacking.contains(77'777));
  EXPECT_FALSE(step.surplus.contains(77'777));
  table.Replace(1, copies, {});
  EXPECT_TRUE(table.steps().empty());
}

TEST(StepTable, TheJudgementIsTheSameInWhateverOrderInventoriesCome) {
  StepTable one;
  one.Replace(1, {}, {Copy(0)});
  one.Replace(2, {}, {Copy(1), Copy(0, Role::kReplica)});
  one.Replace(1, {Copy(0)}, {Copy(0), Copy(1, Role::kReplica)});
  StepTable other;
  other.Replace(1, {}, {Copy(0), Copy(1, Role::kReplica)});
  other.Replace(2, {}, {Copy(1), Copy(0, Role::kReplica)});
  one.Complete();
  other.Complete();
  EXPECT_EQ(one.Find(kStep)->ranks_replicated, other.Find(kStep)->ranks_replicated);
  EXPECT_TRUE(one.Find(kStep)->complete);
  EXPECT_TRUE(other.Find(kStep)->complete);
}

TEST(StepTable, ACommittedStepStaysCommittedByItsMarksWhenCopiesAreLost) {
  StepTable table;
  CopyReport marked = Copy(0);
  marked.committed = true;
  table.Replace(1, {}, {marked});
  EXPECT_TRUE(table.Find(kStep)->complete);
  EXPECT_FALSE(table.Find(kStep)->producible());  // rank 1's shard is nowhere: not offered as latest
}

TEST(StepTable, AStepThatIsReleasedIsNotCommittedByLateCopiesOnlyByAMark) {
  StepTable table;
  table.Replace(1, {}, {Copy(0), Copy(1)});
  table.Release(kStep);
  table.Replace(2, {}, {Copy(0, Role::kReplica), Copy(1, Role::kReplica)});
  EXPECT_THAT(table.Complete(), IsEmpty());
  EXPECT_FALSE(table.Find(kStep)->complete);
  CopyReport marked = Copy(0, Role::kReplica);
  marked.committed = true;  // by a leader whose announcement has not arrived here
  table.Replace(3, {}, {marked});
  EXPECT_TRUE(table.Find(kStep)->complete);
  EXPECT_FALSE(table.Find(kStep)->released);
}

TEST(StepTable, AStepThatMayBeEvictedIsNotCommittedByLateCopiesAndIsStillOffered) {
  StepTable table;
  table.Replace(1, {}, {Copy(0), Copy(1)});
  table.AllowEviction(kStep);
  table.Replace(2, {}, {Copy(0, Role::kReplica), Copy(1, Role::kReplica)});
  EXPECT_THAT(table.Complete(), IsEmpty());
  EXPECT_FALSE(table.Find(kStep)->complete);
  EXPECT_TRUE(table.Find(kStep)->producible());
  EXPECT_FALSE(table.Find(kStep)->released);
}

TEST(StepTable, ShardsArePutTogetherFromTwoDamagedCopies) {
  StepTable table;
  table.Replace(1, {}, {Copy(0, Role::kOwn, {3}), Copy(1)});
  EXPECT_FALSE(table.Find(kStep)->producible());
  table.Replace(2, {}, {Copy(0, Role::kReplica, {5})});
  EXPECT_TRUE(table.Find(kStep)->producible());
  EXPECT_EQ(table.Find(kStep)->ranks[0].good, 0u);  // neither counts as a good copy
  table.Replace(2, {Copy(0, Role::kReplica, {5})}, {Copy(0, Role::kReplica, {3, 5})});
  EXPECT_FALSE(table.Find(kStep)->producible());
}

TEST(StepTable, AStepNobodyHoldsIsForgotten) {
  StepTable table;
  table.Replace(1, {}, {Copy(0)});
  table.Replace(1, {Copy(0)}, {});
  EXPECT_EQ(table.Find(kStep), nullptr);
  EXPECT_TRUE(table.steps().empty());
}

TEST(StepTable, AShardOfAnotherWorldSizeIsNotMixedIn) {
  StepTable table;
  table.Replace(1, {}, {Copy(0)});
  CopyReport other = Copy(1);
  other.world_size = 3;
  table.Replace(2, {}, {other});
  EXPECT_TRUE(table.Find(kStep)->ranks[1].copies.empty());
  CopyReport beyond = Copy(9);
  table.Replace(3, {}, {beyond});
  EXPECT_EQ(table.Find(kStep)->world_size, 2u);
}

TEST(StepTable, StepsOfALaterIncarnationAreNewerWhateverTheirNumber) {
  EXPECT_LT((StepId{1, 100}), (StepId{2, 3}));
}

}  // namespace
}  // namespace ropeteam::engine
