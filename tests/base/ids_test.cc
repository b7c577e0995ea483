// SPDX-License-Identifier: Apache-2.0
#include "core/base/ids.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "core/base/view.h"

namespace ropeteam {
namespace {

using testing::ElementsAre;

// Steps that an incarnation saved after the one that its successor restored are abandoned, whatever their
// numbers.
TEST(StepId, AStepOfALaterIncarnationIsNewerThanAnyOfAnEarlierOne) {
  EXPECT_LT((StepId{1, 1'000'000}), (StepId{2, 0}));
  EXPECT_LT((StepId{1, 4}), (StepId{1, 5}));
  EXPECT_EQ((StepId{3, 7}), (StepId{3, 7}));
  std::vector<StepId> steps = {{2, 10}, {1, 90}, {2, 9}, {3, 1}};
  std::sort(steps.begin(), steps.end());
  EXPECT_THAT(steps, ElementsAre(StepId{1, 90}, StepId{2, 9}, StepId{2, 10}, StepId{3, 1}));
}

TEST(ShardId, IsOrderedByIncarnationThenStepThenRankSoThatAStepsShardsLieTogether) {
  std::vector<ShardId> shards = {{2, 5, 0}, {1, 9, 1}, {1, 9, 0}, {1, 10, 0}};
  std::sort(shards.begin(), shards.end());
  EXPECT_THAT(shards, ElementsAre(ShardId{1, 9, 0}, ShardId{1, 9, 1}, ShardId{1, 10, 0}, ShardId{2, 5, 0}));
  EXPECT_NE((ShardId{1, 9, 0}), (ShardId{1, 9, 1}));
}

TEST(ShardId, BelongsToItsStep) { EXPECT_EQ(StepOf(ShardId{4, 12, 3}), (StepId{4, 12})); }

TEST(Ids, ArePrintedInWords) {
  EXPECT_EQ((ShardId{1, 12, 3}).ToString(), "step 12 rank 3 incarnation 1");
  EXPECT_EQ((StepId{2, 7}).ToString(), "step 7 incarnation 2");
}

TEST(Incarnation, IsCountedForPeopleAndGrowsWithTheEpochWhateverIsKnown) {
  const Incarnation first = NextIncarnation(0, 7);
  EXPECT_EQ(IncarnationNumber(first), 1u);
  const Incarnation second = NextIncarnation(first, 7);  // by the same leader
  EXPECT_GT(second, first);
  EXPECT_EQ(IncarnationNumber(second), 2u);
  const Incarnation later = NextIncarnation(second, 9);
  EXPECT_GT(later, second);
  EXPECT_EQ(IncarnationNumber(later), 3u);
  // A leader that knows no incarnation.
  EXPECT_GT(NextIncarnation(0, 8), second);
  EXPECT_EQ(IncarnationNumber(NextIncarnation(0, 8)), 1u);
  EXPECT_NE(NextIncarnation(0, 9), later);
  EXPECT_EQ((StepId{later, 12}).ToString(), "step 12 incarnation 3");
}

TEST(Incarnation, GoesOnFromNumbersWithoutAnEpochAndBeyondAMillionIncarnations) {
  EXPECT_EQ(IncarnationNumber(NextIncarnation(41, 3)), 42u);
  EXPECT_GT(NextIncarnation(41, 3), 41u);
  Incarnation last = NextIncarnation((uint64_t{1} << kIncarnationNumberBits) - 2, 5);
  EXPECT_EQ(IncarnationNumber(last), (uint64_t{1} << kIncarnationNumberBits) - 1);
  EXPECT_GT(NextIncarnation(last, 5), last);
  EXPECT_GT(NextIncarnation(UINT64_MAX - 1, 5), UINT64_MAX - 1);
}

TEST(View, FindsItsMembersAndNobodyElse) {
  View view;
  view.members.resize(2);
  view.members[0].id = 11;
  view.members[1].id = 22;
  view.members[1].name = "b";
  ASSERT_NE(view.Find(22), nullptr);
  EXPECT_EQ(view.Find(22)->name, "b");
  EXPECT_EQ(view.Find(33), nullptr);
  EXPECT_TRUE(view.Contains(11));
  EXPECT_FALSE(view.Contains(kNoNode));
}

}  // namespace
}  // namespace ropeteam
