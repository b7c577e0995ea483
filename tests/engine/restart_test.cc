// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include "tests/engine/engines_for_test.h"

namespace ropeteam {
namespace {

class Restart : public ::testing::Test, protected Engines {
 protected:
  Restart() : Engines(2, 64, 0) {}

  // Both ranks' shards of the step are replicated and committed. Node 2 is killed before it hears of the
  // commit.
  void KillNode2BeforeItHearsOfTheCommit(Step step) {
    HoldMessages({Kind::kLeaderState});
    Save(1, step, first_);
    Save(2, step, second_);
    ASSERT_TRUE(Replicated(Id(step, 1)));
    ASSERT_FALSE(node(2).store->Find(Id(step, 1))->committed);
    ShowView(2, &node(2));
    held_.clear();
    HoldMessages({});
    ASSERT_TRUE(node(1).store->Find(Id(step, 0))->committed);
    node(2).Start();
    node(2).engine->OnLease(now_, UINT64_MAX);
  }
  Status Wait(NodeId id, Step step, Level level) {
    node(id).engine->OnWait(now_, kSession, ++request_, step, level, 1'000'000);
    Carry();
    const auto answer = answers_.find(request_);
    if (answer == answers_.end()) return Error(Code::kDeadlineExceeded, "no answer");
    return std::get<AnswerStatus>(answer->second.body).status;
  }

  const TestShard first_{2, 'a'};
  const TestShard second_{3, 'b'};
};

TEST_F(Restart, AnAnnouncementBeforeTheCopiesAreFoundAgainCounts) {
  KillNode2BeforeItHearsOfTheCommit(5);
  HoldMessages({Kind::kReplicaSealed});
  ShowView(3, nullptr);
  Open(&node(2));
  EXPECT_TRUE(node(2).store->Find(Id(5, 1))->committed) << "the leader has announced it";
  ASSERT_FALSE(held_.empty()) << "its copy is not found again yet";
  HoldMessages({});
  EXPECT_EQ(Wait(2, 5, Level::kCommitted).code(), Code::kOk);
}

}  // namespace
}  // namespace ropeteam
