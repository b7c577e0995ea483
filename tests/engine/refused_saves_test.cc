// SPDX-License-Identifier: Apache-2.0
//
// Saves that can never succeed are refused at their begin: steps that are not newer than the rank's newest one in this
// incarnation, and shards that are larger than the arena.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/engines_for_test.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;

class Refused : public ::testing::Test, protected Engines {
 protected:
  Refused() : Engines(1, 64, 0) {}

  Status Begin(Step step, uint64_t bytes = 100) {
    node(1).engine->OnSaveBegin(now_, kSession, ++request_, step, bytes);
    Carry();
    const auto* status = std::get_if<AnswerStatus>(&answers_.at(request_).body);
    return status == nullptr ? OkStatus() : status->status;
  }
  void Save(Step step) {
    const TestShard shard(1, 'a');
    CommitSave(1, BeginSave(1, step, shard), shard);
  }
};

TEST_F(Refused, AnOlderStepWithBothNumbers) {
  Save(99);
  const Status refused = Begin(3);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("step 3 is not newer than 99: use one counter across epochs"));
  EXPECT_TRUE(Begin(100).ok());
}

TEST_F(Refused, TheSameStepInTheSameWords) {
  Save(99);
  const Status refused = Begin(99);
  EXPECT_EQ(refused.code(), Code::kAlreadyExists);
  EXPECT_THAT(refused.message(), HasSubstr("step 99 is not newer than 99: use one counter across epochs"));
}

// A number that was used in an earlier epoch is an older step, not a step that is there already.
TEST_F(Refused, ANumberOfAnEarlierEpoch) {
  for (Step step = 0; step < 3; ++step) Save(step);
  EXPECT_EQ(Begin(0).code(), Code::kInvalidArgument);
}

// Saves that overlap may end in any order. What was not committed is no limit.
TEST_F(Refused, OnlyWhatWasSavedIsALimit) {
  const TestShard shard(1, 'a');
  const SaveId five = BeginSave(1, 5, shard);
  const SaveId six = BeginSave(1, 6, shard);
  CommitSave(1, six, shard);
  CommitSave(1, five, shard);
  EXPECT_NE(node(1).store->Find(Id(5, 0)), nullptr);
  ASSERT_TRUE(Begin(99).ok());  // never committed
  EXPECT_TRUE(Begin(7).ok());
}

// A program that goes back opens again: its next incarnation restores an older step and counts from there.
TEST_F(Refused, TheNextIncarnationMayGoBack) {
  Save(99);
  node(1).engine->OnSessionClosed(now_, kSession);
  Carry();
  Open(&node(1), 1);
  EXPECT_TRUE(Begin(51).ok());
}

TEST_F(Refused, AShardThatIsLargerThanTheArenaWithTheMemoryThatItNeeds) {
  EXPECT_EQ(Begin(1, 64 * kTestChunk).code(), Code::kOk);
  const Status refused = Begin(2, 65 * kTestChunk);
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.message(), HasSubstr("a shard of 260.0 KiB is larger than the arena of 256.0 KiB"));
  EXPECT_THAT(refused.message(), HasSubstr("needs --memory 1M (3 steps x 1 copies x 1 ranks x 260.0 KiB)"));
  EXPECT_EQ(Begin(2).code(), Code::kNoSpace);  // it fits later
}

}  // namespace
}  // namespace ropeteam
