// SPDX-License-Identifier: Apache-2.0
//
// What ranks set for storage, as answered by a leader. The members exist only as the messages that a test
// sends.
#include "core/engine/policy.h"

#include "tests/engine/leader_fixture.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;

class PolicyTest : public LeaderTest {
 protected:
  PolicyTest() { settings_.storage = "somewhere"; }
  void TellFlags(NodeId from, uint32_t keep, const std::string& rules) {
    Inventory inventory;
    inventory.sequence = ++sequence_;
    inventory.report.id = from;
    inventory.report.keep_on_storage = keep;
    inventory.report.keep_rules = rules;
    inventory.incarnation = incarnation_;
    Send(from, inventory);
  }
  Code Say(const PolicyQuestion& policy) { return Ask(kFirst, Question::Topic::kPolicy, Encode(policy)); }
  const std::string& Why() { return replies_[question_].message; }
  // The leader acknowledges its own announcement itself.
  void Acknowledge() {
    for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  }
};

TEST_F(PolicyTest, ARankIsToldWhenEveryNodeKnows) {
  Members({kFirst, kSecond});
  for (const NodeId node : {kFirst, kSecond}) TellFlags(node, 0, "");
  Acknowledge();
  const PolicyQuestion policy{kCurrent, 1, 500, 5, false};
  EXPECT_EQ(Say(policy), Code::kDeadlineExceeded);
  EXPECT_EQ(Told(kSecond).policy, (RankPolicy{kCurrent, 500, 1, 5, 1}));
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  EXPECT_EQ(Say(policy), Code::kDeadlineExceeded);
  Send(kSecond, LeaderStateAck{Told(kSecond).sequence});
  EXPECT_EQ(Say(policy), Code::kOk);
}

TEST_F(PolicyTest, AnyDaemonsFlagIsTheJobs) {
  settings_.persist_every = 600;
  settings_.persist_every_seconds = true;
  Members({kFirst, kSecond});
  TellFlags(kFirst, 0, "");
  TellFlags(kSecond, 3, "--keep-on-storage 3");
  Acknowledge();
  EXPECT_EQ(Say({kCurrent, 0, 0, 5, false}), Code::kInvalidArgument);
  EXPECT_EQ(Why(),
            "keep_on_storage 5, this job's daemons were started with --keep-on-storage 3 (node node3)");
  EXPECT_EQ(Say({kCurrent, 0, 600, 0, false}), Code::kInvalidArgument);
  EXPECT_EQ(Why(), "persist_every 600, this job's daemons were started with --persist-every 600s");
  // The leading node would delete steps that the other node's flags keep.
  TellFlags(kSecond, 5, "--keep-on-storage 5 --keep-every 100");
  EXPECT_EQ(Say({kCurrent, 0, 0, 5, false}), Code::kInvalidArgument);
  EXPECT_THAT(Why(), HasSubstr("--keep-every 100"));
  TellFlags(kSecond, 5, "--keep-on-storage 5");
  EXPECT_NE(Say({kCurrent, 0, 0, 5, false}), Code::kInvalidArgument);
}

TEST_F(PolicyTest, OfAnotherIncarnation) {
  Members({kFirst, kSecond});
  for (const NodeId node : {kFirst, kSecond}) TellFlags(node, 0, "");
  EXPECT_EQ(Say({kCurrent - 1, 0, 0, 5, false}), Code::kStale);
  EXPECT_EQ(Say({kCurrent + 1, 0, 0, 5, false}), Code::kUnavailable);
  EXPECT_EQ(Told(kFirst).policy, RankPolicy());
}

// Every node had forgotten the policy, and another rank has set another value meanwhile.
TEST_F(PolicyTest, WhatARankWasToldIsTrueIsNotRefused) {
  Members({kFirst, kSecond});
  for (const NodeId node : {kFirst, kSecond}) TellFlags(node, 0, "");
  Say({kCurrent, 1, 10, 2, false});
  EXPECT_EQ(Say({kCurrent, 0, 20, 5, false}), Code::kInvalidArgument);
  Say({kCurrent, 0, 20, 5, true});
  EXPECT_EQ(Told(kFirst).policy, (RankPolicy{kCurrent, 10, 1, 5, 0}));
}

}  // namespace
}  // namespace ropeteam
