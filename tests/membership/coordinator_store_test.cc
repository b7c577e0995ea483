// SPDX-License-Identifier: Apache-2.0
//
// A coordinator with a store: it stores each view before it announces it, its leases end with its
// confirmation, and it continues where its predecessor stopped.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <optional>

#include "membership/coordinator.h"
#include "tests/membership/simulated_cluster.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;

class CoordinatorStoreTest : public ::testing::Test {
 protected:
  static constexpr TimeUs kStart = 5'000'000;
  static constexpr TimeUs kTerm = TermMs(kDeadAfterMsDefault) * kMs;
  static constexpr TimeUs kLease = LeaseMs(kDeadAfterMsDefault) * kMs;

  void Elect(Coordinator::Inheritance inheritance = {}, uint32_t expected = 2) {
    MembershipConfig config = DefaultConfig();
    config.nodes_expected = expected;
    inheritance.term_us = kTerm;
    if (inheritance.confirmed_until == 0) inheritance.confirmed_until = now_ + kTerm;
    coordinator_ = std::make_unique<Coordinator>(config, now_, 1, inheritance);
  }
  static Registration From(NodeId id, const ViewStatePtr& seen = nullptr) {
    const MembershipConfig config = DefaultConfig();
    Registration registration;
    registration.job = config.job;
    registration.protocol_version = config.protocol_version;
    registration.chunk_bytes = config.chunk_bytes;
    registration.data_transport = config.data_transport;
    registration.member.id = id;
    registration.member.name = Numbered("n", id);
    registration.member.ordinal = static_cast<uint32_t>(id) - 1;
    registration.attempt = 1;
    registration.beat = ++beats_;
    registration.seen = seen;
    return registration;
  }
  // The connection's number is the node's id.
  Coordinator::Outputs Register(const Registration& registration) {
    return Note(coordinator_->Received(now_, registration.member.id, registration));
  }
  Coordinator::Outputs Beat(NodeId id, Epoch seen = 0) {
    return Note(coordinator_->Received(now_, id, Heartbeat{seen, ++beats_, false}));
  }
  // Sends heartbeats of `nodes`, and confirmations if `confirmed`, for that time.
  void Pass(TimeUs us, bool confirmed, const std::vector<NodeId>& nodes = {1, 2}) {
    for (const TimeUs end = now_ + us; now_ < end;) {
      now_ += 50 * kMs;
      for (const NodeId id : nodes) Beat(id, coordinator_->view() ? coordinator_->view()->view.epoch : 0);
      if (confirmed) Note(coordinator_->Confirmed(now_, now_ + kTerm));
      Note(coordinator_->Tick(now_));
    }
  }
  Coordinator::Outputs Note(Coordinator::Outputs outputs) {
    for (const auto& output : outputs)
      if (const auto* store = std::get_if<Coordinator::Store>(&output)) stored_ = store->view;
    return outputs;
  }
  Coordinator::Outputs Stored() { return Note(coordinator_->Stored(now_, stored_->view.epoch)); }
  static TimeUs LeaseIn(const Coordinator::Outputs& outputs, NodeId to) {
    TimeUs lease = 0;
    for (const auto& output : outputs)
      if (const auto* send = std::get_if<Coordinator::Send>(&output);
          send != nullptr && send->connection == to)
        if (const auto* answer = std::get_if<HeartbeatAnswer>(&send->message)) lease = answer->lease_us;
    return lease;
  }
  static std::optional<Status> RefusalIn(const Coordinator::Outputs& outputs, NodeId to) {
    for (const auto& output : outputs)
      if (const auto* send = std::get_if<Coordinator::Send>(&output);
          send != nullptr && send->connection == to)
        if (const auto* refusal = std::get_if<Refusal>(&send->message)) return refusal->status;
    return std::nullopt;
  }
  static bool GivesOutView(const Coordinator::Outputs& outputs) {
    for (const auto& output : outputs)
      if (const auto* send = std::get_if<Coordinator::Send>(&output))
        if (std::holds_alternative<ViewStatePtr>(send->message) ||
            std::holds_alternative<ViewDeltaPtr>(send->message))
          return true;
    return false;
  }
  // As it comes from the store; with `names`, as a registering node reports it.
  static ViewStatePtr View(Epoch epoch, const std::vector<NodeId>& ids, bool names, uint32_t replicas = 1) {
    auto state = std::make_shared<ViewState>();
    state->view.epoch = epoch;
    state->view.leader = ids.empty() ? kNoNode : ids.front();
    state->view.settings.replicas = replicas;
    for (const NodeId id : ids) {
      Member member = From(id).member;
      if (!names) {
        member = Member();
        member.id = id;
      }
      state->view.members.push_back(member);
      state->joined.push_back(1);
    }
    return state;
  }
  // Two members with a view; they get leases after the term.
  void StartTwo() {
    Elect();
    Register(From(1));
    Register(From(2));
    ASSERT_NE(stored_, nullptr);
    Stored();
    Pass(kTerm + 200 * kMs, true);
  }

  static inline uint64_t beats_ = 0;
  TimeUs now_ = kStart;
  ViewStatePtr stored_;
  std::unique_ptr<Coordinator> coordinator_;
};

TEST_F(CoordinatorStoreTest, AViewIsGivenOutOnlyWhenItIsInTheStore) {
  Elect();
  Register(From(1));
  EXPECT_FALSE(GivesOutView(Register(From(2))));
  ASSERT_NE(stored_, nullptr) << "both are there: the first view goes to the store";
  EXPECT_EQ(coordinator_->view(), nullptr);
  EXPECT_FALSE(coordinator_->settled());
  now_ += 100 * kMs;
  EXPECT_FALSE(GivesOutView(Beat(1)));
  EXPECT_TRUE(Note(coordinator_->Stored(now_, stored_->view.epoch + 1)).empty()) << "another epoch's";
  EXPECT_TRUE(GivesOutView(Stored()));
  EXPECT_EQ(coordinator_->view(), stored_);

  // One view at a time: while a view is being stored, a change waits for the next one.
  Register(From(3));
  now_ += 100 * kMs;
  Note(coordinator_->Tick(now_));
  const ViewStatePtr third = stored_;
  EXPECT_TRUE(third->view.Contains(3));
  Register(From(4));
  now_ += 100 * kMs;
  Note(coordinator_->Tick(now_));
  EXPECT_EQ(stored_, third);
  Stored();
  now_ += 100 * kMs;
  Note(coordinator_->Tick(now_));
  EXPECT_TRUE(stored_->view.Contains(4));
  EXPECT_GT(stored_->view.epoch, third->view.epoch);
}

TEST_F(CoordinatorStoreTest, NoLeaseOutlastsTheConfirmation) {
  StartTwo();
  const Epoch epoch = coordinator_->view()->view.epoch;
  Note(coordinator_->Confirmed(now_, now_ + kTerm));
  EXPECT_EQ(LeaseIn(Beat(1, epoch), 1), kLease);
  now_ += kTerm - 300 * kMs;
  EXPECT_EQ(LeaseIn(Beat(1, epoch), 1), 300 * kMs);
  now_ += 200 * kMs;
  EXPECT_EQ(LeaseIn(Beat(1, epoch), 1), 0u) << "100 ms are not worth a lease";
  now_ += 200 * kMs;
  EXPECT_EQ(LeaseIn(Beat(1, epoch), 1), 0u);
  const auto outputs = Note(coordinator_->Confirmed(now_, now_ + kTerm));
  EXPECT_EQ(LeaseIn(outputs, 1), kLease) << "confirmed again: leases at once";
}

TEST_F(CoordinatorStoreTest, NobodyIsDeclaredDeadWithoutAConfirmation) {
  StartTwo();
  Pass(kTerm * 6 / 10, false);
  Pass(kTerm * 4 / 10, false, {1});  // the last confirmation expires at the end of this
  const ViewStatePtr before = stored_;
  Pass(60'000 * kMs, false, {1});
  EXPECT_EQ(stored_, before);
  EXPECT_EQ(coordinator_->registered(), 2u);
  // Silence counts again from the new confirmation. Node 1 was heard all the time; its later silence is
  // noticed as usual.
  Pass(kDeadAfterMsDefault * kMs / 2, true, {1});
  EXPECT_EQ(coordinator_->registered(), 2u);
  Pass(kDeadAfterMsDefault * kMs, true, {1});
  EXPECT_EQ(coordinator_->registered(), 1u);
  Pass((kDeadAfterMsDefault + 100) * kMs, true, {});
  EXPECT_EQ(coordinator_->registered(), 0u);
}

TEST_F(CoordinatorStoreTest, NoHoldEndsWithoutAConfirmation) {
  Elect({.confirmed_until = kStart + 1}, 0);
  Register(From(1));
  now_ += 10'000 * kMs;
  Note(coordinator_->Tick(now_));
  EXPECT_EQ(stored_, nullptr);
  Pass((kDeadAfterMsDefault + 300) * kMs, true, {1});
  EXPECT_NE(stored_, nullptr);
}

TEST_F(CoordinatorStoreTest, ASuccessorGrantsNoLeaseForATerm) {
  Elect({.newest = View(7, {1, 2}, false)});
  const ViewStatePtr seen = View(7, {1, 2}, true);
  Register(From(1, seen));
  Register(From(2, seen));
  ASSERT_NE(stored_, nullptr) << "all members of the inherited view are there";
  Stored();
  const Epoch epoch = coordinator_->view()->view.epoch;
  EXPECT_GT(epoch, 7u);
  EXPECT_GE(coordinator_->view()->view.settle_us, kTerm - 1);
  now_ = kStart + kTerm - 1;
  Note(coordinator_->Confirmed(now_, now_ + kTerm));
  EXPECT_EQ(LeaseIn(Beat(1, epoch), 1), 0u);
  now_ = kStart + WithDrift(kTerm);
  EXPECT_EQ(LeaseIn(Beat(1, epoch), 1), kLease);
}

TEST_F(CoordinatorStoreTest, TheInheritedViewGoesOnWithItsLeaderInANewEpoch) {
  auto stored = std::make_shared<ViewState>(*View(7, {1, 2}, false));
  stored->view.leader = 2;
  stored->joined = {3, 5};
  Elect({.newest = stored});
  Register(From(1, View(6, {1}, true)));
  Register(From(2, View(6, {1, 2}, true)));
  ASSERT_NE(stored_, nullptr);
  EXPECT_EQ(stored_->view.leader, 2u) << "although node 1 has been a member longer";
  EXPECT_GT(stored_->view.epoch, 7u);
}

TEST_F(CoordinatorStoreTest, AnInstanceThatIsMissingInTheInheritedViewStaysOut) {
  Elect({.newest = View(7, {1, 2}, false)});
  const ViewStatePtr older = View(6, {1, 2, 3}, true);
  Register(From(1, View(7, {1, 2}, true)));
  Register(From(3, older));
  const auto refused = RefusalIn(Register(From(2, older)), 3);
  ASSERT_TRUE(refused.has_value()) << "the hold ended with node 2";
  EXPECT_EQ(refused->code(), Code::kStale);
  EXPECT_FALSE(stored_->view.Contains(3));
  // The same is true after the hold.
  Elect({.newest = View(7, {1, 2}, false)});
  Register(From(1, View(7, {1, 2}, true)));
  Register(From(2, View(7, {1, 2}, true)));
  const auto late = RefusalIn(Register(From(3, older)), 3);
  ASSERT_TRUE(late.has_value());
  EXPECT_EQ(late->code(), Code::kStale);
}

TEST_F(CoordinatorStoreTest, AHolderThatWasDeposedByDoubtsIsAccountedForAfterAProbe) {
  for (const NodeId deposed : {NodeId{3}, kNoNode}) {
    stored_ = nullptr;
    now_ += 1000 * kMs;
    Elect({.newest = View(7, {1, 2, 3}, false), .deposed = deposed});
    const TimeUs elected = now_;
    Register(From(1, View(7, {1, 2, 3}, true)));
    Register(From(2, View(7, {1, 2, 3}, true)));
    while (stored_ == nullptr && now_ < elected + 3000 * kMs) {
      now_ = coordinator_->NextDeadline();
      for (const NodeId id : {1, 2}) Beat(id, 7);
      Note(coordinator_->Confirmed(now_, now_ + kTerm));
      Note(coordinator_->Tick(now_));
    }
    ASSERT_NE(stored_, nullptr);
    EXPECT_EQ(now_ - elected, (deposed == kNoNode ? kDeadAfterMsDefault : DefaultConfig().probe_ms) * kMs);
    EXPECT_FALSE(stored_->view.Contains(3));
  }
}

TEST_F(CoordinatorStoreTest, SettingsComeFromAReportedViewAndNotFromTheStore) {
  Elect({.newest = View(7, {1, 2}, false, 3)});
  Registration first = From(1, View(6, {1, 2}, true, 2));
  EXPECT_FALSE(RefusalIn(Register(first), 1).has_value());
  Register(From(2));
  Pass((kDeadAfterMsDefault + 300) * kMs, true);
  ASSERT_NE(stored_, nullptr);
  EXPECT_EQ(stored_->view.settings.replicas, 2u);
}

// All nodes of the previous run left in good order, and the last one stored a view without members.
TEST_F(CoordinatorStoreTest, AfterAnEmptyStoredViewTheFirstViewWaitsForAllNodes) {
  Elect({.newest = View(7, {}, false)});
  Note(coordinator_->Tick(now_));
  Register(From(1));
  Pass(500 * kMs, true, {1});
  EXPECT_EQ(stored_, nullptr);
  Register(From(2));
  ASSERT_NE(stored_, nullptr);
  EXPECT_EQ(IdsOf(stored_->view), (std::set<NodeId>{1, 2}));
  EXPECT_GT(stored_->view.epoch, 7u);
}

TEST_F(CoordinatorStoreTest, WhatAnyNodeWasGivenBeatsTheHoldersDefaults) {
  Elect({.newest = View(7, {8, 9}, false, 3)}, 3);  // of the previous run
  Registration wrong = From(3);                     // refused for another reason: settings ignored
  wrong.settings.replicas = 9;
  wrong.named.replicas = true;
  wrong.chunk_bytes += 1;
  EXPECT_TRUE(RefusalIn(Register(wrong), 3).has_value());
  Registration first = From(1);
  first.settings.replicas = 2;
  first.named.replicas = true;
  EXPECT_FALSE(RefusalIn(Register(first), 1).has_value());
  Registration second = From(2);
  second.settings.replicas = 4;
  second.named.replicas = true;
  second.settings.keep_steps = 9;
  second.named.keep_steps = true;
  const auto refused = RefusalIn(Register(second), 2);
  ASSERT_TRUE(refused.has_value());
  EXPECT_THAT(refused->message(), HasSubstr("the job runs with --replicas 2 (from node n1"));
  Pass((kDeadAfterMsDefault + 300) * kMs, true, {1});
  ASSERT_NE(stored_, nullptr);
  EXPECT_EQ(stored_->view.settings.replicas, 2u);
  EXPECT_NE(stored_->view.settings.keep_steps, 9u);
}

}  // namespace
}  // namespace ropeteam
