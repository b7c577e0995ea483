// SPDX-License-Identifier: Apache-2.0
//
// Which member leads: the coordinator alone, with what members report of each other.
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "membership/coordinator.h"
#include "tests/membership/simulated_cluster.h"

namespace ropeteam {
namespace {

constexpr TimeUs kHeartbeatUs = 100'000;  // often enough for the coordinator's clock
constexpr TimeUs kLeaseUs = LeaseMs(kDeadAfterMsDefault) * TimeUs{1000};

// Nodes 1 to `nodes` on connections of the same numbers. Each beat of Run() every node sends a heartbeat.
class CoordinatorLeaderTest : public ::testing::Test {
 protected:
  void Start(uint32_t nodes) {
    MembershipConfig config = DefaultConfig();
    config.coordinator_listen = kFirstAddress;
    config.nodes_expected = nodes;
    coordinator_ = std::make_unique<Coordinator>(config, now_, 1);
    for (NodeId id = 1; id <= nodes; ++id) {
      Registration registration;
      registration.job = config.job;
      registration.protocol_version = config.protocol_version;
      registration.chunk_bytes = config.chunk_bytes;
      registration.data_transport = config.data_transport;
      registration.member.id = id;
      registration.member.name = "node-" + std::to_string(id);
      registration.member.ordinal = static_cast<uint32_t>(id);
      registration.attempt = 1;
      nodes_[id];
      Take(coordinator_->Received(now_, id, registration));
    }
    Run(10);
    ASSERT_EQ(Leader(), 1u);
  }
  // One heartbeat of every node. A node tries the members that it was asked about, and answers in the next one.
  void Run(int beats) {
    for (int i = 0; i < beats; ++i) {
      now_ += kHeartbeatUs;
      for (auto& [id, node] : nodes_)
        if (!node.silent) Beat(id);
      Take(coordinator_->Tick(now_));
    }
  }
  void Beat(NodeId id) {
    Node& node = nodes_.at(id);
    Heartbeat heartbeat{node.seen, ++node.beat};
    for (const NodeId other : node.lost) heartbeat.unreached.push_back(other);
    for (const NodeId other : node.check)
      if (!node.lost.contains(other) && !lost_when_tried_.contains({id, other})) heartbeat.reached.push_back(other);
    for (const NodeId other : node.check)
      if (lost_when_tried_.contains({id, other})) node.lost.insert(other);
    Take(coordinator_->Received(now_, id, heartbeat));
  }
  void Take(const Coordinator::Outputs& outputs) {
    for (const auto& output : outputs) {
      const auto* send = std::get_if<Coordinator::Send>(&output);
      if (send == nullptr) continue;
      Node& node = nodes_.at(send->connection);
      if (const auto* answer = std::get_if<HeartbeatAnswer>(&send->message)) {
        node.check = answer->check;
        if (answer->lease_us != 0) node.lease_until = now_ + answer->lease_us;
        continue;
      }
      const auto* view = std::get_if<ViewStatePtr>(&send->message);
      const auto* delta = std::get_if<ViewDeltaPtr>(&send->message);
      if ((view == nullptr && delta == nullptr) || node.deaf) continue;
      node.seen = coordinator_->view()->view.epoch;
    }
  }
  NodeId Leader() const { return coordinator_->view()->view.leader; }
  const View& Now() const { return coordinator_->view()->view; }
  void Lose(NodeId one, NodeId other) { nodes_.at(one).lost.insert(other); }

  struct Node {
    Epoch seen = 0;
    uint64_t beat = 0;
    std::set<NodeId> lost;
    std::vector<NodeId> check;
    TimeUs lease_until = 0;
    bool deaf = false;    // it gets no view
    bool silent = false;  // nothing of it arrives
  };
  TimeUs now_ = 5'000'000;
  std::unique_ptr<Coordinator> coordinator_;
  std::map<NodeId, Node> nodes_;
  std::set<std::pair<NodeId, NodeId>> lost_when_tried_;
};

TEST_F(CoordinatorLeaderTest, TheLeadMovesToTheEldestThatReachesEverybody) {
  Start(4);
  Lose(3, 1);
  Run(5);
  EXPECT_EQ(Leader(), 2u);
  EXPECT_EQ(Now().members.size(), 4u);
  EXPECT_EQ(Now().led_since, Now().epoch);
  const Epoch epoch = Now().epoch;
  nodes_.at(3).lost.clear();
  Run(200);
  EXPECT_EQ(Now().epoch, epoch) << "a link that works again moves nothing";
}

TEST_F(CoordinatorLeaderTest, ACandidateThatDoesNotReachTheMemberEitherIsPassedOver) {
  Start(5);
  lost_when_tried_ = {{2, 5}, {3, 5}};
  Lose(1, 5);
  Run(10);
  EXPECT_EQ(Leader(), 4u);
}

TEST_F(CoordinatorLeaderTest, AMemberThatNobodyReachesMovesNothing) {
  Start(5);
  const Epoch epoch = Now().epoch;
  lost_when_tried_ = {{2, 5}, {3, 5}, {4, 5}};
  Lose(1, 5);
  Run(300);
  EXPECT_EQ(Now().epoch, epoch);
}

TEST_F(CoordinatorLeaderTest, OfTwoNeitherGivesWay) {
  Start(2);
  const Epoch epoch = Now().epoch;
  Lose(1, 2);
  Lose(2, 1);
  Run(300);
  EXPECT_EQ(Now().epoch, epoch);
}

TEST_F(CoordinatorLeaderTest, NothingMovesForAMemberThatTheCoordinatorDoesNotHear) {
  Start(3);
  nodes_.at(3).silent = true;
  Run(6);
  Lose(1, 3);
  Run(20);
  EXPECT_EQ(Leader(), 1u);
  EXPECT_EQ(Now().members.size(), 2u);
}

TEST_F(CoordinatorLeaderTest, TheLeadStaysForSomeTimeAfterAMove) {
  Start(5);
  Lose(1, 5);
  Run(10);
  ASSERT_EQ(Leader(), 2u);
  const TimeUs moved_at = now_;
  Lose(2, 4);
  while (Leader() == 2u && now_ < moved_at + 4 * kLeaderStaysUs) Run(1);
  EXPECT_EQ(Leader(), 3u);
  EXPECT_GE(now_, moved_at + kLeaderStaysUs - 10 * kHeartbeatUs);
}

// The former leader is heard and has not received the view that takes the lead from it: it may act.
TEST_F(CoordinatorLeaderTest, AFormerLeaderGetsNoLeaseBeforeItHasTheViewAndItsSuccessorWaitsForTheLastOne) {
  Start(3);
  nodes_.at(1).deaf = true;
  Lose(3, 1);
  while (Leader() == 1u) Run(1);
  ASSERT_LE(nodes_.at(1).lease_until, now_ + kLeaseUs);
  EXPECT_GE(now_ + Now().settle_us, nodes_.at(1).lease_until);
  const TimeUs lease_until = nodes_.at(1).lease_until;
  Run(20);
  EXPECT_EQ(nodes_.at(1).lease_until, lease_until) << "it has not seen the view";
  EXPECT_GT(nodes_.at(2).lease_until, now_);
  nodes_.at(1).deaf = false;
  Run(5);
  EXPECT_GT(nodes_.at(1).lease_until, now_);
}

// Its successor dies before the former leader has seen a view of it. The former leader leads again, and the view says
// that this lead is new.
TEST_F(CoordinatorLeaderTest, AFormerLeaderThatLeadsAgainLeadsSinceThen) {
  Start(3);
  nodes_.at(1).deaf = true;
  Lose(3, 1);
  while (Leader() == 1u) Run(1);
  const Epoch unseen = Now().epoch;
  nodes_.at(2).silent = nodes_.at(3).silent = true;
  while (Leader() == 2u) Run(1);
  EXPECT_EQ(Leader(), 1u);
  EXPECT_GT(Now().led_since, unseen);
}

}  // namespace
}  // namespace ropeteam
