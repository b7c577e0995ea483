// SPDX-License-Identifier: Apache-2.0
//
// The coordinator alone: what it refuses, and how it handles garbage.
#include "membership/coordinator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ctime>
#include <map>
#include <memory>

#include "membership/agent.h"
#include "tests/membership/simulated_cluster.h"

namespace ropeteam {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class CoordinatorTest : public ::testing::Test {
 protected:
  CoordinatorTest() : coordinator_(std::make_unique<Coordinator>(Config(), kStart, 1)) {}
  static constexpr TimeUs kStart = 5'000'000;
  static MembershipConfig Config() {
    MembershipConfig config = DefaultConfig();
    config.coordinator_listen = kFirstAddress;
    config.nodes_expected = 1;
    return config;
  }
  static Registration From(const std::string& name, NodeId id) {
    Registration registration;
    registration.job = Config().job;
    registration.protocol_version = Config().protocol_version;
    registration.chunk_bytes = Config().chunk_bytes;
    registration.data_transport = Config().data_transport;
    registration.member.id = id;
    registration.member.name = name;
    registration.attempt = 1;
    return registration;
  }
  // The coordinator's outputs for a registration on a new connection.
  Coordinator::Outputs Register(const Registration& registration) {
    return coordinator_->Received(now_, ++connection_, registration);
  }
  // The refusal among the outputs, or OK. A refused connection is closed.
  Status RefusalIn(const Coordinator::Outputs& outputs) {
    Status status;
    bool closed = false;
    for (const auto& output : outputs) {
      if (const auto* close = std::get_if<Coordinator::Close>(&output))
        closed |= close->connection == connection_;
      const auto* send = std::get_if<Coordinator::Send>(&output);
      if (send == nullptr || send->connection != connection_) continue;
      if (const auto* refusal = std::get_if<Refusal>(&send->message)) status = refusal->status;
    }
    EXPECT_EQ(closed, !status.ok());
    return status;
  }
  Status Refused(const Registration& registration) { return RefusalIn(Register(registration)); }
  static std::vector<ConnectionId> RefusedIn(const Coordinator::Outputs& outputs) {
    std::vector<ConnectionId> refused;
    for (const auto& output : outputs)
      if (const auto* send = std::get_if<Coordinator::Send>(&output); send != nullptr)
        if (std::holds_alternative<Refusal>(send->message)) refused.push_back(send->connection);
    return refused;
  }
  // Another coordinator's view, as a registering node reports it.
  static ViewStatePtr Reported(Epoch epoch, const std::vector<Member>& members,
                               const std::vector<NodeId>& removed = {}) {
    auto state = std::make_shared<ViewState>();
    state->view.epoch = epoch;
    state->view.leader = members.front().id;
    state->view.members = members;
    state->joined.assign(members.size(), 1);
    state->removed = removed;
    return state;
  }
  void Publish() {
    now_ += 100'000;
    coordinator_->Tick(now_);
  }
  // Nodes a and b are members, as instances 1 and 2 on connections 1 and 2.
  void StartTwo() {
    ASSERT_TRUE(Refused(From("a", 1)).ok());
    ASSERT_TRUE(Refused(From("b", 2)).ok());
    Publish();
    ASSERT_TRUE(coordinator_->view()->view.Contains(2));
  }

  TimeUs now_ = kStart;
  ConnectionId connection_ = 0;
  std::unique_ptr<Coordinator> coordinator_;
};

TEST_F(CoordinatorTest, AnotherJobIsRefusedWithBothNames) {
  Registration registration = From("a", 1);
  registration.job = "run-8";
  const Status status = Refused(registration);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("run-8"), HasSubstr("run-7"), HasSubstr("node a")));
  EXPECT_EQ(coordinator_->registered(), 0u);
}

TEST_F(CoordinatorTest, AnotherProtocolVersionIsRefusedWithBothNumbers) {
  Registration registration = From("a", 1);
  registration.protocol_version = 4;
  const Status status = Refused(registration);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("protocol version 4"), HasSubstr("has 3")));
}

// In a rolling restart. The job speaks a version that all nodes have in common, so each new node must support
// it.
TEST_F(CoordinatorTest, NodesOfTwoProtocolVersionsMeetInWhatBothSpeak) {
  Registration newer = From("b", 2);
  newer.protocol_version = 4;
  newer.protocol_oldest = 3;
  ASSERT_TRUE(Refused(newer).ok());
  EXPECT_EQ(coordinator_->registered(), 1u);
  Registration newest = From("c", 3);
  newest.protocol_version = 5;
  newest.protocol_oldest = 4;
  const Status status = Refused(newest);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("protocol version 4 to 5"), HasSubstr("has 3")));
  Registration older = From("d", 4);
  older.protocol_version = 2;
  EXPECT_THAT(Refused(older).message(), AllOf(HasSubstr("protocol version 2"), HasSubstr("has 3")));
}

TEST_F(CoordinatorTest, AnotherChunkSizeIsRefusedWithBothSizes) {
  Registration registration = From("a", 1);
  registration.chunk_bytes = 1u << 20;
  const Status status = Refused(registration);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("1048576"), HasSubstr("4194304")));
}

TEST_F(CoordinatorTest, AnotherDataTransportIsRefusedWithBothNames) {
  Registration registration = From("a", 1);
  registration.data_transport = "ofi/tcp;ofi_rxm";
  const Status status = Refused(registration);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(),
              AllOf(HasSubstr("node a has --transport ofi/tcp;ofi_rxm"), HasSubstr("has verbs")));
  EXPECT_EQ(coordinator_->registered(), 0u);
}

TEST_F(CoordinatorTest, ANamedSettingThatDiffersIsRefusedWithBothNodesAndBothValues) {
  MembershipConfig config = Config();
  config.coordinator_node = "a";
  config.settings = {.replicas = 1, .keep_steps = 2, .nodes = 4, .storage = "/mnt/a", .persist_every = 10};
  config.settings.restore_from = "/mnt/a/j@7";
  coordinator_ = std::make_unique<Coordinator>(config, kStart, 1);
  const auto refused = [&](const JobSettings& settings, const NamedSettings& named) {
    Registration registration = From("b", 1);
    registration.settings = settings;
    registration.named = named;
    return Refused(registration);
  };
  const Status replicas = refused({2, 2, 4}, {.replicas = true});
  EXPECT_EQ(replicas.code(), Code::kInvalidArgument);
  EXPECT_THAT(replicas.message(),
              AllOf(HasSubstr("node b was given --replicas 2"), HasSubstr("runs with --replicas 1"),
                    HasSubstr("node a at 10.0.0.1")));
  EXPECT_THAT(refused({1, 3, 4}, {.keep_steps = true}).message(),
              AllOf(HasSubstr("--keep-steps 3"), HasSubstr("--keep-steps 2")));
  EXPECT_THAT(refused({1, 2, 1}, {.nodes = true}).message(),
              AllOf(HasSubstr("--nodes 1"), HasSubstr("--nodes 4")));
  EXPECT_THAT(refused({1, 2, 4, "/mnt/b"}, {.storage = true}).message(),
              AllOf(HasSubstr("--storage /mnt/b"), HasSubstr("--storage /mnt/a")));
  EXPECT_THAT(refused({1, 2, 4, "/mnt/a", 10, true}, {.persist_every = true}).message(),
              AllOf(HasSubstr("--persist-every 10s"), HasSubstr("--persist-every 10 ")));
  EXPECT_THAT(refused({1, 2, 4, "/mnt/a", 10, false, "/mnt/a/j"}, {.restore_from = true}).message(),
              AllOf(HasSubstr("--restore-from /mnt/a/j,"), HasSubstr("--restore-from /mnt/a/j@7 ")));
  EXPECT_EQ(coordinator_->registered(), 0u);
  EXPECT_TRUE(
      refused({1, 2, 4, "/mnt/a", 10, false, "/mnt/a/j@7"}, {true, true, true, true, true, true}).ok());
}

TEST_F(CoordinatorTest, WhatANodeDidNotNameItTakesFromTheJob) {
  MembershipConfig config = Config();
  config.settings = {.replicas = 2, .keep_steps = 5, .nodes = 3};
  coordinator_ = std::make_unique<Coordinator>(config, kStart, 1);
  Registration registration = From("b", 1);
  registration.settings = {.replicas = 0, .keep_steps = 2, .nodes = 1};
  ASSERT_TRUE(Refused(registration).ok());
  ASSERT_NE(coordinator_->view(), nullptr);
  EXPECT_EQ(coordinator_->view()->view.settings, config.settings);
}

TEST_F(CoordinatorTest, AfterARestartTheSettingsOfTheNewestReportedViewAreTheJobs) {
  MembershipConfig config = Config();
  config.coordinator_node = "a";
  config.settings = {.replicas = 2, .keep_steps = 2, .nodes = 2};
  config.nodes_expected = 2;
  coordinator_ = std::make_unique<Coordinator>(config, kStart, 1);
  Registration own = From("a", 1);
  own.settings = config.settings;
  own.named.replicas = true;
  ASSERT_TRUE(Refused(own).ok());
  const ConnectionId own_connection = connection_;
  auto seen = std::make_shared<ViewState>();
  seen->view.epoch = 5;
  seen->view.leader = 7;
  seen->view.members = {From("b", 7).member};
  seen->view.settings = {.replicas = 1, .keep_steps = 2, .nodes = 2};
  seen->joined = {1};
  Registration other = From("b", 7);
  other.settings = seen->view.settings;
  other.named.replicas = true;
  other.seen = seen;
  Status refusal;
  for (const auto& output : Register(other))
    if (const auto* send = std::get_if<Coordinator::Send>(&output); send != nullptr)
      if (const auto* refused = std::get_if<Refusal>(&send->message); refused != nullptr) {
        EXPECT_EQ(send->connection, own_connection);
        refusal = refused->status;
      }
  EXPECT_THAT(refusal.message(), AllOf(HasSubstr("node a was given --replicas 2"), HasSubstr("--replicas 1"),
                                       HasSubstr("node b reported")));
  ASSERT_NE(coordinator_->view(), nullptr);
  EXPECT_EQ(coordinator_->view()->view.settings, seen->view.settings);
  EXPECT_FALSE(coordinator_->view()->view.Contains(1));
}

TEST_F(CoordinatorTest, NamesAndAddressesOverTheirLimitsAreRefusedWithValueAndLimit) {
  struct Case {
    std::function<void(Member*)> spoil;
    std::string says;
  };
  const std::vector<Case> cases = {
      {[](Member* m) { m->name = std::string(64, 'n'); }, "node name of 64 bytes, limit 63"},
      {[](Member* m) { m->name = ""; }, "empty"},
      {[](Member* m) { m->name = "a b"; }, "space"},
      {[](Member* m) { m->domain = std::string(256, 'd'); }, "failure domain of 256 bytes, limit 255"},
      {[](Member* m) { m->control_address = std::string(1025, 'c'); },
       "control address of 1025 bytes, limit 1024"},
      {[](Member* m) { m->data_address = std::string(1025, 'd'); }, "data address of 1025 bytes, limit 1024"},
      {[](Member* m) { m->id = kNoNode; }, "reserved"},
  };
  for (const Case& spoiled : cases) {
    Registration registration = From("a", 1);
    spoiled.spoil(&registration.member);
    const Status status = Refused(registration);
    EXPECT_EQ(status.code(), Code::kInvalidArgument) << spoiled.says;
    EXPECT_THAT(status.message(), HasSubstr(spoiled.says));
  }
  Registration longest = From(std::string(63, 'n'), 1);
  longest.member.domain = std::string(255, 'd');
  longest.member.control_address = longest.member.data_address = std::string(1024, 'a');
  EXPECT_TRUE(Refused(longest).ok());
}

TEST_F(CoordinatorTest, OneNodeTooManyIsRefusedAndAReplacementIsNot) {
  for (NodeId id = 1; id <= kNodesMax; ++id) ASSERT_TRUE(Refused(From(Numbered("n", id), id)).ok());
  const Status status = Refused(From("another", 99'999));
  EXPECT_EQ(status.code(), Code::kNoSpace);
  EXPECT_THAT(status.message(), HasSubstr("limit 16384"));
  EXPECT_TRUE(Refused(From("n7", 100'000)).ok());
  EXPECT_EQ(coordinator_->registered(), kNodesMax);
}

TEST_F(CoordinatorTest, AViewThatCannotBeIsInvalid) {
  const auto validate = [&](const std::function<void(ViewState*)>& spoil) {
    ViewState state;
    state.view.epoch = 5;
    state.view.leader = 7;
    state.view.members = {From("x", 7).member, From("y", 8).member};
    state.joined = {1, 2};
    spoil(&state);
    return ValidateViewState(state);
  };
  EXPECT_EQ(validate([](ViewState* s) { s->view.epoch = ~0ull; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(validate([](ViewState* s) { s->view.epoch = 0; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(validate([](ViewState* s) { s->joined.pop_back(); }).code(), Code::kInvalidArgument);
  EXPECT_EQ(validate([](ViewState* s) { s->joined[0] = 6; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(validate([](ViewState* s) { s->view.leader = 9; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(validate([](ViewState* s) { s->view.members[1].id = 7; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(validate([](ViewState* s) { s->view.members[1].name = "x"; }).code(), Code::kInvalidArgument);
  EXPECT_EQ(validate([](ViewState* s) { s->removed.assign(65, 3); }).code(), Code::kInvalidArgument);
  EXPECT_TRUE(validate([](ViewState*) {}).ok());
}

TEST_F(CoordinatorTest, AnInstanceThatAReportedViewListsAsRemovedIsRemovedOnceThoughItIsListedTwice) {
  StartTwo();
  Registration reporter = From("c", 3);
  reporter.seen = Reported(500, {reporter.member}, {2, 9, 2});
  EXPECT_EQ(RefusedIn(Register(reporter)), std::vector<ConnectionId>{2});
  Publish();
  EXPECT_FALSE(coordinator_->view()->view.Contains(2));
  EXPECT_TRUE(coordinator_->view()->view.Contains(3));
  for (const NodeId out : {NodeId{2}, NodeId{9}}) EXPECT_EQ(Refused(From("other", out)).code(), Code::kStale);
}

TEST_F(CoordinatorTest, AReportedViewThatIsNotTheNewestStillTellsWhichInstancesHaveLeft) {
  StartTwo();
  Registration newest = From("c", 3);
  newest.seen = Reported(500, {newest.member});
  EXPECT_TRUE(RefusedIn(Register(newest)).empty());
  Registration reporter = From("d", 4);  // a new instance in a process that has seen an older view
  reporter.seen = Reported(400, {From("x", 7).member}, {2});
  EXPECT_EQ(RefusedIn(Register(reporter)), std::vector<ConnectionId>{2});
  EXPECT_EQ(Refused(From("x", 7)).code(), Code::kStale) << "d's next view is without it";
}

TEST_F(CoordinatorTest, AMemberThatIsMissingInANewerReportedViewIsRemoved) {
  StartTwo();
  Registration earlier = From("c", 3);
  earlier.seen = Reported(400, {earlier.member});
  EXPECT_TRUE(RefusedIn(Register(earlier)).empty());
  const ConnectionId missing = connection_;
  Registration later = From("d", 4);
  later.seen = Reported(500, {later.member});
  EXPECT_EQ(RefusedIn(Register(later)), std::vector<ConnectionId>{missing});
  Publish();
  EXPECT_FALSE(coordinator_->view()->view.Contains(3));
  EXPECT_TRUE(coordinator_->view()->view.Contains(1)) << "a was in no other coordinator's view";
}

TEST_F(CoordinatorTest, DuringTheHoldEveryReportedViewTellsWhichInstancesHaveLeft) {
  const Member b = From("b", 2).member;
  const Member c = From("c", 3).member;
  Registration newest = From("b", 2);
  newest.seen = Reported(500, {b, c});
  ASSERT_TRUE(Refused(newest).ok());
  Registration reporter = From("d", 4);  // a new instance in a process that has seen an older view
  reporter.seen = Reported(400, {b, From("x", 7).member}, {8});
  ASSERT_TRUE(Refused(reporter).ok());
  ASSERT_EQ(coordinator_->view(), nullptr) << "the hold lasts until c has come";
  Registration last = From("c", 3);
  last.seen = newest.seen;
  ASSERT_TRUE(Refused(last).ok());
  ASSERT_NE(coordinator_->view(), nullptr);
  for (const NodeId out : {NodeId{7}, NodeId{8}}) EXPECT_EQ(Refused(From("x", out)).code(), Code::kStale);
}

// A member returns from another coordinator, whose view it shares with c. The current view does not contain
// c, so it would make nodes fence c, which may be readmitted when the hold ends.
TEST_F(CoordinatorTest, WhileItHoldsAgainItSendsNoView) {
  coordinator_ = std::make_unique<Coordinator>(Config(), kStart, 1000);
  StartTwo();
  const auto views = [](const Coordinator::Outputs& outputs) {
    return std::count_if(outputs.begin(), outputs.end(), [](const auto& output) {
      const auto* send = std::get_if<Coordinator::Send>(&output);
      return send != nullptr && (std::holds_alternative<ViewStatePtr>(send->message) ||
                                 std::holds_alternative<ViewDeltaPtr>(send->message));
    });
  };
  Registration back = From("a", 1);
  Registration other = From("c", 3);
  back.attempt = 2;
  back.seen = other.seen = Reported(500, {back.member, other.member});
  EXPECT_EQ(views(Register(back)), 0);
  EXPECT_EQ(views(coordinator_->Received(now_, connection_, Heartbeat{500, 2, true})), 0);
  EXPECT_EQ(views(coordinator_->Flush(now_)), 0);
  Register(other);
  Publish();
  EXPECT_TRUE(coordinator_->view()->view.Contains(1));
  EXPECT_TRUE(coordinator_->view()->view.Contains(3));
}

// Two coordinators. A member here follows the other one, and fences the members that its views lack. If it came back as
// the same instance, it and they would be members of one view and never exchange a byte.
class CoordinatorRivalTest : public CoordinatorTest {
 protected:
  void SetUp() override {
    StartTwo();
    ASSERT_TRUE(Refused(From("c", 3)).ok());
    Publish();
    ASSERT_TRUE(coordinator_->view()->view.Contains(3));
  }
  // Node a, from a view of the other coordinator.
  Registration Back(const std::vector<Member>& members) {
    Registration back = From("a", 1);
    back.attempt = 2;
    back.seen = Reported(9000, members);
    back.epoch_known = 9000;
    return back;
  }
};

TEST_F(CoordinatorRivalTest, AMemberThatFollowedAnotherCoordinatorAwayFromMostMustComeBackAsANewInstance) {
  const Status status = Refused(Back({From("a", 1).member, From("x", 9).member}));
  EXPECT_EQ(status.code(), Code::kStale);
  EXPECT_THAT(status.message(), AllOf(HasSubstr("view 9000"), HasSubstr("without 2 of the 3")));
  Publish();
  EXPECT_FALSE(coordinator_->view()->view.Contains(1));
  EXPECT_TRUE(coordinator_->view()->view.Contains(2));
  EXPECT_TRUE(coordinator_->view()->view.Contains(3));
  EXPECT_GT(coordinator_->view()->view.epoch, 9000u) << "nobody takes it for older than what node a has seen";
  EXPECT_TRUE(Refused(From("a", 4)).ok());
}

TEST_F(CoordinatorRivalTest, AMemberThatMostFollowedAnotherCoordinatorWithoutIsOut) {
  const ConnectionId third = connection_;
  EXPECT_EQ(RefusedIn(Register(Back({From("a", 1).member, From("b", 2).member}))),
            std::vector<ConnectionId>{third});
  Publish();
  EXPECT_TRUE(coordinator_->view()->view.Contains(1));
  EXPECT_TRUE(coordinator_->view()->view.Contains(2));
  EXPECT_FALSE(coordinator_->view()->view.Contains(3));
}

TEST_F(CoordinatorRivalTest, AMemberWhoseLastViewLacksItselfIsNotRemovedInTheMiddleOfItsRegistration) {
  const ConnectionId third = connection_;
  EXPECT_EQ(RefusedIn(Register(Back({From("b", 2).member}))), std::vector<ConnectionId>{third});
  Publish();
  EXPECT_TRUE(coordinator_->view()->view.Contains(1));
  EXPECT_FALSE(coordinator_->view()->view.Contains(3));
}

// After a network pause all nodes reconnect to the coordinator at once. To answer them within dead_after, a
// reported view that it already knows must cost almost nothing.
TEST_F(CoordinatorTest, AllNodesReconnectWithTheCurrentViewAndNothingChanges) {
  for (NodeId id = 1; id <= kNodesMax; ++id) ASSERT_TRUE(Refused(From(Numbered("n", id), id)).ok());
  now_ += 900'000;
  coordinator_->Tick(now_);
  const ViewStatePtr view = coordinator_->view();
  ASSERT_EQ(view->view.members.size(), kNodesMax);
  const std::clock_t begin = std::clock();
  for (NodeId id = 1; id <= kNodesMax; ++id) {
    Registration again = From(Numbered("n", id), id);
    again.attempt = 2;
    again.seen = view;
    ASSERT_TRUE(Refused(again).ok());
  }
  const double seconds = static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC;
  EXPECT_LT(seconds, 20) << "it works through the whole view for each registration";
  EXPECT_EQ(coordinator_->view(), view);
  EXPECT_EQ(coordinator_->registered(), kNodesMax);
}

TEST_F(CoordinatorTest, AStrangerThatNeverRegistersIsClosedAfterDeadAfter) {
  EXPECT_TRUE(coordinator_->Opened(now_, 77).empty());
  size_t closed = 0;
  while (now_ < kStart + 1'300'000) {
    now_ = coordinator_->NextDeadline();
    for (const auto& output : coordinator_->Tick(now_))
      closed += std::holds_alternative<Coordinator::Close>(output);
    if (closed != 0) break;
  }
  EXPECT_EQ(closed, 1u);
  EXPECT_GE(now_, kStart + 1'000'000);
}

TEST_F(CoordinatorTest, AMessageBeforeTheRegistrationClosesTheConnection) {
  for (const NodeMessage& message : {NodeMessage(Heartbeat{}), NodeMessage(Suspicion{1, "x"}),
                                     NodeMessage(LeaveMessage{}), NodeMessage(ProbeAnswer{1})}) {
    coordinator_->Opened(now_, ++connection_);
    const auto outputs = coordinator_->Received(now_, connection_, message);
    ASSERT_EQ(outputs.size(), 1u);
    EXPECT_TRUE(std::holds_alternative<Coordinator::Close>(outputs[0]));
  }
}

TEST_F(CoordinatorTest, ASecondNodeOnAConnectionIsRefusedAndTheFirstCanComeAgain) {
  ASSERT_TRUE(Refused(From("a", 1)).ok());
  EXPECT_EQ(RefusalIn(coordinator_->Received(now_, connection_, From("b", 2))).code(),
            Code::kInvalidArgument);
  Registration again = From("a", 1);
  again.attempt = 2;
  EXPECT_TRUE(Refused(again).ok());
  EXPECT_EQ(coordinator_->registered(), 1u);
}

TEST_F(CoordinatorTest, ARegistrationThatWasOvertakenByANewerOneIsIgnored) {
  Registration newer = From("a", 1);
  newer.attempt = 2;
  ASSERT_TRUE(Refused(newer).ok());
  const ConnectionId current = connection_;
  const auto outputs = Register(From("a", 1));
  ASSERT_EQ(outputs.size(), 1u);
  EXPECT_EQ(std::get<Coordinator::Close>(outputs[0]).connection, connection_);
  // The newer connection counts.
  const auto answer = coordinator_->Received(now_, current, Heartbeat{});
  ASSERT_EQ(answer.size(), 1u);
  EXPECT_EQ(std::get<Coordinator::Send>(answer[0]).connection, current);
}

TEST_F(CoordinatorTest, AnInstanceThatChangesItsAddressIsRefused) {
  ASSERT_TRUE(Refused(From("a", 1)).ok());
  Registration changed = From("a", 1);
  changed.attempt = 2;
  changed.member.data_address = "elsewhere";
  EXPECT_EQ(Refused(changed).code(), Code::kInvalidArgument);
}

TEST_F(CoordinatorTest, ConnectionsBeyondTheLimitAreClosed) {
  for (ConnectionId id = 1; id <= kConnectionsMax; ++id) ASSERT_TRUE(coordinator_->Opened(now_, id).empty());
  EXPECT_EQ(coordinator_->Opened(now_, kConnectionsMax + 1).size(), 1u);
}

TEST_F(CoordinatorTest, AnEpochThatNobodyHasSeenIsNotGivenOutAgain) {
  // Each coordinator announces a view that reaches no node, and the next coordinator hears only of an older
  // one.
  const auto epoch = [&](Epoch first_epoch, Epoch reported) {
    coordinator_ = std::make_unique<Coordinator>(Config(), now_, first_epoch);
    auto seen = std::make_shared<ViewState>();
    seen->view.epoch = reported;
    seen->view.leader = 7;
    seen->view.members = {From("b", 7).member};
    seen->joined = {1};
    Registration back = From("b", 7);
    back.seen = seen;
    EXPECT_TRUE(Refused(back).ok());
    now_ += 100'000;
    EXPECT_TRUE(Refused(From("new", 8)).ok());
    return coordinator_->view()->view.epoch;
  };
  EXPECT_EQ(epoch(5000, 3700), 5000u);
  EXPECT_EQ(epoch(5800, 3700), 5800u);
  EXPECT_EQ(epoch(100, 3700), 4001u) << "the clock was set back";
}

// The arena of a restarted daemon knows an incarnation that began under another coordinator, in a later
// epoch. In an earlier epoch, a leader here and the other coordinator's leader could choose the same next
// incarnation number.
TEST_F(CoordinatorTest, EpochsGoOnAboveWhatANodesMemoryKnows) {
  ASSERT_TRUE(Refused(From("a", 1)).ok());
  now_ += 100'000;
  coordinator_->Tick(now_);
  const Epoch before = coordinator_->view()->view.epoch;
  Registration knows = From("b", 2);
  knows.epoch_known = before + 500;
  ASSERT_TRUE(Refused(knows).ok());
  now_ += 100'000;
  coordinator_->Tick(now_);
  const Epoch after = coordinator_->view()->view.epoch;
  EXPECT_GT(after, before + 500);
  Registration broken = From("c", 3);
  broken.epoch_known = kEpochKnownMax + 1;
  EXPECT_EQ(Refused(broken).code(), Code::kInvalidArgument);
}

TEST_F(CoordinatorTest, ANodeThatSaidWhatItHasSeenIsSentWhatChangedSince) {
  for (NodeId id = 1; id <= 5; ++id) ASSERT_TRUE(Refused(From(Numbered("n", id), id)).ok());
  now_ += 100'000;
  coordinator_->Tick(now_);  // all five are in the view
  const ViewStatePtr first = coordinator_->view();
  ASSERT_EQ(first->view.members.size(), 5u);
  for (ConnectionId at = 1; at <= 4; ++at)
    coordinator_->Received(now_, at, Heartbeat{at == 4 ? Epoch{0} : first->view.epoch, 1});
  std::map<ConnectionId, CoordinatorMessage> sent;
  const auto note = [&](const Coordinator::Outputs& outputs) {
    for (const auto& output : outputs)
      if (const auto* send = std::get_if<Coordinator::Send>(&output); send != nullptr)
        if (!std::holds_alternative<HeartbeatAnswer>(send->message)) sent[send->connection] = send->message;
  };
  now_ += 100'000;
  Registration restarted = From("n5", 6);
  note(Register(restarted));
  const ViewStatePtr last = coordinator_->view();
  ASSERT_TRUE(sent.contains(1) && sent.contains(2));
  EXPECT_FALSE(sent.contains(4)) << "it has one under way that it has not acknowledged";
  const auto* delta = std::get_if<ViewDeltaPtr>(&sent[1]);
  ASSERT_NE(delta, nullptr);
  EXPECT_EQ(*delta, std::get<ViewDeltaPtr>(sent[2])) << "one for all, made once";
  const ViewStatePtr applied = ApplyViewDelta(*first, **delta);
  ASSERT_NE(applied, nullptr);
  EXPECT_EQ(*applied, *last);
  // A node without the base view asks for the whole view. A node that does not acknowledge gets the whole
  // view.
  sent.clear();
  note(coordinator_->Received(now_, 1, Heartbeat{first->view.epoch, 2, true}));
  EXPECT_EQ(std::get<ViewStatePtr>(sent[1]), last);
  now_ += 300'000;
  note(coordinator_->Received(now_, 4, Heartbeat{0, 2}));
  EXPECT_EQ(std::get<ViewStatePtr>(sent[4]), last);
}

TEST(ViewDeltaTest, WhatDoesNotFitIsNotApplied) {
  ViewState base;
  base.view.epoch = 4;
  for (NodeId id = 1; id <= 4; ++id) {
    Member member;
    member.id = id;
    member.name = Numbered("n", id);
    member.ordinal = static_cast<uint32_t>(id);
    base.view.members.push_back(member);
    base.joined.push_back(id);
  }
  base.view.leader = 1;
  ViewState next = base;
  next.view.epoch = 6;
  next.view.members.erase(next.view.members.begin() + 1);
  next.joined.erase(next.joined.begin() + 1);
  const ViewDeltaPtr delta = MakeViewDelta(base, next);
  ASSERT_NE(delta, nullptr);
  ASSERT_NE(ApplyViewDelta(base, *delta), nullptr);
  EXPECT_EQ(*ApplyViewDelta(base, *delta), next);
  const auto spoilt = [&](const std::function<void(ViewDelta*)>& spoil) {
    ViewDelta copy = *delta;
    spoil(&copy);
    return ApplyViewDelta(base, copy);
  };
  EXPECT_EQ(spoilt([](ViewDelta* d) { d->base = 3; }), nullptr);
  EXPECT_EQ(spoilt([](ViewDelta* d) { d->left.push_back(77); }), nullptr);
  EXPECT_EQ(spoilt([](ViewDelta* d) { d->changed.joined.push_back(1); }), nullptr);
  EXPECT_EQ(spoilt([](ViewDelta* d) { d->changed.view.leader = 2; }), nullptr);
  EXPECT_EQ(spoilt([&](ViewDelta* d) {
              d->changed.view.members.push_back(base.view.members[0]);
              d->changed.joined.push_back(1);
            }),
            nullptr);
  ViewState other = base;
  other.view.epoch = 7;
  for (Member& member : other.view.members) member.id += 100;
  other.view.leader += 100;
  EXPECT_EQ(MakeViewDelta(base, other), nullptr) << "the whole view is smaller";
}

TEST(AgentTest, ADeltaFromAnotherViewMakesItAskForTheWholeOne) {
  Member self;
  self.id = 1;
  self.name = "a";
  Agent agent(DefaultConfig(), self);
  agent.Start(1000);
  auto state = std::make_shared<ViewState>();
  state->view.epoch = 3;
  state->view.leader = 1;
  state->view.members = {self};
  state->joined = {1};
  agent.Received(2000, 1, ViewStatePtr(state));
  auto delta = std::make_shared<ViewDelta>();
  delta->base = 4;
  delta->changed.view.epoch = 5;
  delta->changed.view.leader = 1;
  const auto asks = [](const Agent::Outputs& outputs) {
    for (const auto& output : outputs)
      if (const auto* send = std::get_if<Agent::Send>(&output); send != nullptr)
        if (const auto* beat = std::get_if<Heartbeat>(&send->message); beat != nullptr) return beat->whole;
    return false;
  };
  EXPECT_TRUE(asks(agent.Received(3000, 1, ViewDeltaPtr(delta))));
  EXPECT_EQ(agent.seen()->view.epoch, 3u);
  EXPECT_TRUE(asks(agent.Tick(agent.NextDeadline()))) << "the first may be lost";
  auto whole = std::make_shared<ViewState>(*state);
  whole->view.epoch = 5;
  EXPECT_FALSE(asks(agent.Received(400'000, 1, ViewStatePtr(whole))));
  EXPECT_EQ(agent.seen()->view.epoch, 5u);
}

TEST(MembershipConfigTest, BadConfigsAreNamed) {
  const auto with = [](const std::function<void(MembershipConfig*)>& spoil) {
    MembershipConfig config = DefaultConfig();
    spoil(&config);
    return ValidateConfig(config).message();
  };
  EXPECT_EQ(with([](auto*) {}), "");
  EXPECT_THAT(with([](auto* c) { c->job = ""; }), HasSubstr("job"));
  EXPECT_THAT(with([](auto* c) { c->job = std::string(256, 'j'); }), HasSubstr("256 bytes, limit 255"));
  EXPECT_THAT(with([](auto* c) { c->coordinator_addresses = {"localhost"}; }), HasSubstr("localhost"));
  EXPECT_THAT(with([](auto* c) { c->heartbeat_ms = 0; }), HasSubstr("0 ms"));
  EXPECT_THAT(with([](auto* c) { c->dead_after_ms = 799; }), AllOf(HasSubstr("799"), HasSubstr("800")));
  EXPECT_EQ(with([](auto* c) { c->dead_after_ms = 600'000; }), "") << "the lease stays below the quarantine";
  EXPECT_THAT(with([](auto* c) { c->nodes_expected = 20'000; }),
              AllOf(HasSubstr("20000"), HasSubstr("16384")));
}

TEST(MembershipConfigTest, ALeaseEndsBeforeDeadAfterAndBeforeTheQuarantineThoughTheClocksAreOff) {
  for (const uint64_t dead_after_ms : {40u, 1000u, 5000u, 600'000u}) {
    const double lease_us = LeaseMs(static_cast<uint32_t>(dead_after_ms)) * 1e3;
    // The lease on a slow clock, measured by a fast clock.
    const double seen_us = lease_us * (1 + kClockDriftPpm / 1e6) / (1 - kClockDriftPpm / 1e6);
    EXPECT_LT(seen_us, static_cast<double>(dead_after_ms) * 1e3) << dead_after_ms;
    EXPECT_LT(seen_us, kQuarantineMsMin * 1e3) << dead_after_ms;
    EXPECT_LE(seen_us, static_cast<double>(WithDrift(static_cast<TimeUs>(lease_us)))) << dead_after_ms;
  }
}

}  // namespace
}  // namespace ropeteam
