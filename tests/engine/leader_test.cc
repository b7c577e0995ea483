// SPDX-License-Identifier: Apache-2.0
//
// What the leader announces is a function of the inventories it was told: one engine that leads, and members
// that exist only in what the test says of them.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/log.h"
#include "core/engine/engine.h"
#include "core/engine/messages.h"

namespace ropeteam {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr NodeId kLeader = 1;
constexpr NodeId kFirst = 2;
constexpr NodeId kSecond = 3;
constexpr uint32_t kWorld = 2;
constexpr Incarnation kLife = 5;

CopyReport Copy(const StepId& step, Rank rank, Role role, bool committed = false) {
  CopyReport copy;
  copy.id = {step.incarnation, step.step, rank};
  copy.world_size = kWorld;
  copy.replicas = 1;
  copy.stream_bytes = 100;
  copy.role = role;
  copy.committed = committed;
  return copy;
}
CopyReport Own(const StepId& step, Rank rank) { return Copy(step, rank, Role::kOwn); }
CopyReport Replica(const StepId& step, Rank rank) { return Copy(step, rank, Role::kReplica); }
CopyReport Marked(CopyReport copy) {
  copy.committed = true;
  return copy;
}

std::vector<StepId> Ids(const std::vector<StepKey>& keys) {
  std::vector<StepId> ids;
  for (const StepKey& key : keys) ids.push_back(key.id);
  return ids;
}

// The members' store copies go where what the leader announced allows: this is what a member may do.
bool MayGo(const LeaderState& state, const StepId& step) {
  const std::vector<StepId> keep = Ids(state.keep);
  if (std::find(keep.begin(), keep.end(), step) != keep.end()) return false;
  const std::vector<StepId> evictable = Ids(state.evictable);
  return step < state.release_before.id ||
         std::find(evictable.begin(), evictable.end(), step) != evictable.end();
}

class LeaderTest : public ::testing::Test {
 protected:
  LeaderTest() : bytes_(Store::MemoryFor(kChunks, kChunk)) {
    SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kOff);
    memory_ = static_cast<std::byte*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    store_ = Store::Format({memory_, bytes_}, kChunk, {"job", "leader"}).value();
    EngineConfig config;
    config.self = kLeader;
    config.job = "job";
    config.node = "leader";
    engine_ = std::make_unique<Engine>(config, store_.get());
    engine_->OnLease(0, UINT64_MAX);
    life_.incarnation = kLife;
    life_.token = "life5";
    life_.world_size = kWorld;
  }
  ~LeaderTest() override {
    engine_.reset();
    store_.reset();
    munmap(memory_, bytes_);
    SetLogSink(nullptr, LogLevel::kWarning);
  }

  // The leader and these are in the view, of the next epoch.
  void Members(const std::vector<NodeId>& nodes) {
    View view;
    view.epoch = ++epoch_;
    view.leader = kLeader;
    view.settings = settings_;
    view.settle_us = settle_us_;
    view.members.push_back(MemberOf(kLeader));
    for (const NodeId node : nodes) view.members.push_back(MemberOf(node));
    engine_->OnView(now_, view);
    Carry();
  }
  static Member MemberOf(NodeId node) {
    Member member;
    member.id = node;
    member.name = "node";
    member.name += std::to_string(node);
    member.ordinal = static_cast<uint32_t>(node);
    return member;
  }
  // The member's whole inventory from now on.
  void Tell(NodeId from, std::vector<CopyReport> copies, std::vector<SessionReport> sessions = {}) {
    Inventory inventory;
    inventory.sequence = ++sequence_;
    inventory.report.id = from;
    inventory.report.copies = std::move(copies);
    inventory.report.sessions = std::move(sessions);
    inventory.asking_from = question_ + 1;
    inventory.life = life_;
    inventory.incarnation_max = life_.incarnation;
    inventory.short_of_memory = short_of_memory_;
    Send(from, inventory);
  }
  template <typename Message>
  void Send(NodeId from, const Message& message) {
    engine_->OnMessage(now_, from, Encode(Envelope{epoch_, from, kLeader, Message::kKind, Encode(message)}));
    Carry();
  }
  // A rank of the current life that is connected to a member.
  static SessionReport Open(Rank rank) {
    SessionReport session;
    session.rank = rank;
    session.world_size = kWorld;
    session.incarnation = kLife;
    session.token = 100 + rank;
    return session;
  }
  // A rank of a life that has this name says hello on the member.
  Code Join(NodeId from, Rank rank, const std::string& life, uint32_t world_size = kWorld) {
    JoinQuestion join;
    join.rank = rank;
    join.world_size = world_size;
    join.token = 100 + rank;
    join.life = life;
    return Ask(from, Question::Topic::kJoin, Encode(join));
  }
  Code Ask(NodeId from, Question::Topic topic, std::string payload) {
    replies_.clear();
    Send(from, Question{++question_, topic, std::move(payload)});
    return replies_.contains(question_) ? replies_[question_].code : Code::kDeadlineExceeded;
  }
  void PassTime(TimeUs time) {
    for (const TimeUs end = now_ + time; now_ < end;) {
      now_ = std::min(end, std::max(now_ + 1, engine_->NextTimer()));
      engine_->OnTimer(now_);
      Carry();
    }
  }
  void Carry() {
    const Outbox out = std::exchange(engine_->outbox(), Outbox());
    for (const SendMessage& message : out.messages) {
      Envelope envelope;
      ASSERT_TRUE(Decode(message.envelope, envelope));
      if (envelope.kind == Kind::kLeaderState) {
        ASSERT_TRUE(Decode(envelope.payload, announced_[message.to].emplace()));
      } else if (envelope.kind == Kind::kDropCopy) {
        ++drops_[message.to];
      } else if (envelope.kind == Kind::kCopyOrder) {
        ASSERT_TRUE(Decode(envelope.payload, orders_.emplace_back()));
      } else if (envelope.kind == Kind::kReply) {
        Reply reply;
        ASSERT_TRUE(Decode(envelope.payload, reply));
        replies_[reply.number] = reply;
      }
    }
  }
  // What the member was told last.
  const LeaderState& Told(NodeId node) const { return announced_.at(node).value(); }

  static constexpr uint64_t kChunk = 4096;
  static constexpr uint64_t kChunks = 16;
  const size_t bytes_;
  std::byte* memory_ = nullptr;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Engine> engine_;
  TimeUs now_ = 1'000'000;
  JobSettings settings_{1, 2, 3};
  TimeUs settle_us_ = 0;
  bool short_of_memory_ = false;
  Epoch epoch_ = 0;
  Life life_;  // as the members know it
  uint64_t sequence_ = 0;
  uint64_t question_ = 0;
  std::map<uint64_t, Reply> replies_;
  std::vector<CopyOrder> orders_;
  std::map<NodeId, size_t> drops_;  // orders to drop a copy
  std::map<NodeId, std::optional<LeaderState>> announced_;
};

TEST_F(LeaderTest, WhatAllRanksHaveCopiesOfIsCommittedAndKept) {
  const StepId step{kLife, 7};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(step, 0), Replica(step, 1)});
  EXPECT_FALSE(announced_.contains(kFirst)) << "announced before every member has spoken";
  Tell(kSecond, {Own(step, 1), Replica(step, 0)});
  EXPECT_THAT(Ids(Told(kFirst).committed), ElementsAre(step));
  EXPECT_THAT(Ids(Told(kSecond).keep), ElementsAre(step));
}

// What members may evict from the moment it is announced must not be judged committed by a copy that is
// heard of afterwards: some member may have evicted its own meanwhile.
TEST_F(LeaderTest, AFormerStepThatMayGoIsCommittedByNoCopyThatComesLate) {
  const StepId restored{kLife - 1, 7};
  const StepId newer{kLife - 1, 8};
  life_.pinned_by = life_.incarnation;
  life_.pin = restored;
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(restored, 0), Own(newer, 0)});
  Tell(kSecond, {Own(restored, 1), Replica(newer, 0)});
  ASSERT_TRUE(MayGo(Told(kFirst), newer));
  Tell(kFirst, {Own(restored, 0), Own(newer, 0), Own(newer, 1)});
  Tell(kSecond, {Own(restored, 1), Replica(newer, 0), Replica(newer, 1)});
  EXPECT_THAT(Ids(Told(kFirst).committed), IsEmpty());
  // Unless somebody was told before, by a leader that knew more.
  Tell(kFirst, {Own(restored, 0), Marked(Own(newer, 0)), Own(newer, 1)});
  EXPECT_THAT(Ids(Told(kFirst).committed), ElementsAre(newer));
  EXPECT_FALSE(MayGo(Told(kFirst), newer));
}

// Nor by copies that are heard of all at once: the ranks train on from the older step, and a restart from the newer
// one would undo what they have done since.
TEST_F(LeaderTest, AFormerStepNewerThanTheRestoredOneIsNotCommitted) {
  const StepId older{kLife - 1, 6};
  const StepId restored{kLife - 1, 7};
  const StepId newer{kLife - 1, 8};
  life_.pinned_by = life_.incarnation;
  life_.pin = restored;
  Members({kFirst, kSecond});
  std::vector<CopyReport> first, second;
  for (const StepId& step : {older, restored, newer}) {
    first.insert(first.end(), {Own(step, 0), Replica(step, 1)});
    second.insert(second.end(), {Own(step, 1), Replica(step, 0)});
  }
  Tell(kFirst, first);
  Tell(kSecond, second);
  EXPECT_THAT(Ids(Told(kFirst).committed), ElementsAre(restored, older));
}

// Ranks are told of a commit, and older steps are released for it, when every member knows of it: whatever is
// lost then, what is left does.
TEST_F(LeaderTest, ACommitIsToldAndReleasesOlderStepsWhenEveryMemberHasMarkedIt) {
  settings_.keep_steps = 1;
  const StepId older{kLife, 7};
  const StepId newer{kLife, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Replica(older, 1), Own(newer, 0), Replica(newer, 1)});
  Tell(kSecond, {Own(older, 1), Replica(older, 0), Own(newer, 1), Replica(newer, 0)});
  EXPECT_THAT(Ids(Told(kFirst).committed), ElementsAre(newer, older));
  EXPECT_THAT(Ids(Told(kFirst).marked), IsEmpty());
  EXPECT_EQ(Told(kFirst).release_before.id, StepId());
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  EXPECT_THAT(Ids(Told(kFirst).marked), IsEmpty());
  Send(kSecond, LeaderStateAck{Told(kSecond).sequence});
  EXPECT_THAT(Ids(Told(kFirst).marked), ElementsAre(newer, older));
  EXPECT_EQ(Told(kSecond).release_before.id, newer);
}

// Its copies were marked by a leader that died before every member had done so. No rank was told, and now the world has
// gone on from an older step.
TEST_F(LeaderTest, AMarkedStepThatTheWorldHasLeftBehindIsKnownAndNotTold) {
  const StepId restored{kLife - 1, 3};
  const StepId left_behind{kLife - 1, 4};
  life_.pinned_by = kLife;
  life_.pin = restored;
  Members({kFirst, kSecond});
  std::vector<CopyReport> first, second;
  for (const StepId& step : {restored, left_behind}) {
    first.insert(first.end(), {Marked(Own(step, 0)), Marked(Replica(step, 1))});
    second.insert(second.end(), {Marked(Own(step, 1)), Marked(Replica(step, 0))});
  }
  Tell(kFirst, first);
  Tell(kSecond, second);
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  EXPECT_THAT(Ids(Told(kFirst).committed), ElementsAre(left_behind, restored));
  EXPECT_THAT(Ids(Told(kFirst).marked), ElementsAre(restored));
}

// More steps become committed at once than an announcement lists, behind one that has just been listed.
TEST_F(LeaderTest, ACommitThatRanksAreNotToldOfReleasesNothing) {
  settings_.keep_steps = 1;
  std::vector<CopyReport> first, second;
  const auto save = [&](Step step) {
    const StepId id{kLife, step};
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
  ASSERT_THAT(Ids(Told(kFirst).marked), ElementsAre(StepId{kLife, 1}));
  save(2);
  Tell(kFirst, first);
  Tell(kSecond, second);
  const uint64_t lists_the_second = Told(kFirst).sequence;
  for (Step step = 3; step <= 40; ++step) save(step);
  Tell(kFirst, first);
  Tell(kSecond, second);
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{lists_the_second});
  EXPECT_FALSE(MayGo(Told(kFirst), {kLife, 1}));
  acknowledge();
  EXPECT_THAT(Ids(Told(kFirst).marked), Contains(StepId{kLife, 40}));
  EXPECT_TRUE(MayGo(Told(kFirst), {kLife, 1}));
}

// Whatever changes all the time: a rank may save on, step after step, while the others have no room.
TEST_F(LeaderTest, OlderStepsAreGivenUpForWantOfMemoryAlsoWhileInventoriesKeepComing) {
  const StepId older{kLife, 7};
  const StepId newer{kLife, 8};
  short_of_memory_ = true;
  Members({kFirst, kSecond});
  Tell(kSecond, {Own(older, 1), Own(newer, 1)});
  for (Step step = 100; step < 300; ++step) {
    Tell(kFirst, {Own(older, 0), Own(newer, 0), Own({kLife, step}, 0)});
    PassTime(60'000);
  }
  EXPECT_THAT(Ids(Told(kFirst).dead), ElementsAre(older));
}

// The time counts from the shortage: before it nothing was saved, and so nothing replicated, for longer than that.
TEST_F(LeaderTest, OlderStepsAreGivenUpOnlyWhenMemoryHasBeenShortForLong) {
  const StepId older{kLife, 7};
  const StepId newer{kLife, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {});
  Tell(kSecond, {});
  PassTime(60'000'000);
  Tell(kFirst, {Own(older, 0), Own(newer, 0)});
  short_of_memory_ = true;
  Tell(kSecond, {Own(older, 1), Own(newer, 1)});
  PassTime(9'000'000);
  EXPECT_THAT(Ids(Told(kFirst).dead), IsEmpty());
  PassTime(2'000'000);
  EXPECT_THAT(Ids(Told(kFirst).dead), ElementsAre(older));
}

// A member says for a second after each refusal that it is short, and refusals may be further apart.
TEST_F(LeaderTest, AShortageWithGapsIsOne) {
  const StepId older{kLife, 7};
  const StepId newer{kLife, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Own(newer, 0)});
  for (int second = 0; second < 12; ++second) {
    short_of_memory_ = second % 2 == 0;
    Tell(kSecond, {Own(older, 1), Own(newer, 1)});
    PassTime(1'000'000);
  }
  EXPECT_THAT(Ids(Told(kFirst).dead), ElementsAre(older));
}

// A refused order ends after its time, and its target gets no other for as long again: so far apart are its refusals.
TEST_F(LeaderTest, RefusalsOfRepeatedOrdersAreOneShortage) {
  const StepId older{kLife, 7};
  const StepId newer{kLife, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Own(newer, 0)});
  for (int second = 0; second <= 41; ++second) {
    short_of_memory_ = second % 20 == 0;
    Tell(kSecond, {Own(older, 1), Own(newer, 1)});
    PassTime(1'000'000);
  }
  EXPECT_THAT(Ids(Told(kFirst).dead), ElementsAre(older));
}

// The node that is away may have what the rank saved before its daemon was started again.
TEST_F(LeaderTest, AStepThatARankMayHaveSavedInAnEarlierSessionIsHopelessOnlyWhenAllNodesAreHere) {
  const StepId before{kLife, 7};
  const StepId refused{kLife, 9};
  SessionReport rank = Open(0);
  rank.has_ended = true;
  rank.oldest_ended = 8;
  rank.newest_ended = 10;
  settings_.nodes = 4;
  Members({kFirst, kSecond});
  Tell(kFirst, {}, {rank});
  Tell(kSecond, {Own(before, 1), Own(refused, 1)});
  EXPECT_THAT(Ids(Told(kSecond).dead), ElementsAre(refused));
  settings_.nodes = 3;
  Members({kFirst, kSecond});
  Tell(kFirst, {}, {rank});
  Tell(kSecond, {Own(before, 1), Own(refused, 1)});
  EXPECT_THAT(Ids(Told(kSecond).dead), ElementsAre(before, refused));
}

// Nobody can complete the uncommitted step, and it takes the room of the committed one's copy; unless a node is away.
TEST_F(LeaderTest, WhatNobodyCanCompleteIsGivenUpForTheCopiesOfACommittedStepWhenAllNodesAreHere) {
  const StepId committed{kLife, 7};
  const StepId incomplete{kLife, 8};
  short_of_memory_ = true;
  for (const uint32_t nodes : {4, 3}) {
    settings_.nodes = nodes;
    Members({kFirst, kSecond});
    Tell(kFirst, {Marked(Own(committed, 0)), Marked(Own(committed, 1))});
    Tell(kSecond, {Marked(Replica(committed, 0)), Own(incomplete, 1)});
    PassTime(11'000'000);
    EXPECT_EQ(Ids(Told(kFirst).dead).size(), nodes == 3 ? 1u : 0u);
  }
}

// A side that had not heard of the choice has begun the newer incarnation.
TEST_F(LeaderTest, TheNewestChoiceBarsAlsoUnderAnIncarnationThatWasBegunWithoutIt) {
  const StepId restored{kLife - 2, 7};
  const StepId left_behind{kLife - 2, 8};
  for (const bool choice_first : {true, false}) {
    Members({kFirst, kSecond});
    const auto tell_choice = [&] {
      life_.incarnation = life_.pinned_by = kLife - 1;
      life_.pin = restored;
      Tell(kFirst, {Own(restored, 0), Own(left_behind, 0), Replica(left_behind, 1)});
    };
    const auto tell_newer = [&] {
      life_.incarnation = kLife;
      life_.pinned_by = kLife - 3;
      life_.pin = {};
      Tell(kSecond, {Own(restored, 1), Own(left_behind, 1), Replica(left_behind, 0)});
    };
    if (choice_first) tell_choice();
    tell_newer();
    if (!choice_first) tell_choice();
    EXPECT_EQ(Told(kFirst).life.incarnation, kLife);
    EXPECT_EQ(Told(kFirst).life.pin, restored);
    EXPECT_THAT(Ids(Told(kFirst).committed), IsEmpty());
  }
}

// What it chose is not known, so nothing uncommitted from before it is committed under the next one.
TEST_F(LeaderTest, UnderTheIncarnationAfterAForgottenOneNoStepFromBeforeIsCommitted) {
  const StepId before{kLife - 1, 7};
  life_.forgotten = true;
  life_.token.clear();
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(before, 0)});
  Tell(kSecond, {Own(before, 1)});
  ASSERT_EQ(Join(kFirst, 0, "next"), Code::kOk);
  Tell(kFirst, {Own(before, 0), Replica(before, 1)});
  Tell(kSecond, {Own(before, 1), Replica(before, 0)});
  EXPECT_GT(Told(kFirst).life.incarnation, kLife);
  EXPECT_EQ(Told(kFirst).life.pinned_by, kLife);
  EXPECT_THAT(Ids(Told(kFirst).committed), IsEmpty());
}

TEST_F(LeaderTest, ALifeThatCannotBeIsIgnored) {
  Members({kFirst, kSecond});
  Tell(kFirst, {});
  life_.incarnation = kLife + 1;
  life_.pinned_by = kLife;
  life_.pin = {kLife, 3};
  Tell(kSecond, {});
  EXPECT_EQ(Told(kFirst).life.incarnation, kLife);
  life_.pinned_by = kLife + 2;
  Tell(kSecond, {});
  EXPECT_EQ(Told(kFirst).life.incarnation, kLife);
}

TEST_F(LeaderTest, DecidesNothingWithoutALease) {
  const StepId step{kLife, 7};
  engine_->OnLease(now_, now_);
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(step, 0), Replica(step, 1)});
  Tell(kSecond, {Own(step, 1), Replica(step, 0)});
  PassTime(2'000'000);
  EXPECT_THAT(announced_, IsEmpty());
  EXPECT_EQ(Join(kFirst, 0, "life6"), Code::kUnavailable);
  engine_->OnLease(now_, now_ + 1'000'000);
  Carry();
  EXPECT_THAT(Ids(Told(kFirst).committed), ElementsAre(step));
  EXPECT_EQ(Join(kFirst, 0, "life6"), Code::kOk);
}

// The leader before may go on until its lease has run out.
TEST_F(LeaderTest, ANewLeaderDecidesNothingBeforeTheFormerOnesLeaseHasRunOut) {
  const StepId step{kLife, 7};
  settle_us_ = 500'000;
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(step, 0), Replica(step, 1)});
  Tell(kSecond, {Own(step, 1), Replica(step, 0)});
  EXPECT_EQ(Join(kFirst, 0, "life6"), Code::kUnavailable);
  PassTime(499'999);
  EXPECT_THAT(announced_, IsEmpty());
  PassTime(1);
  EXPECT_THAT(Ids(Told(kFirst).committed), ElementsAre(step));
}

// The step was chosen while a member had it that is lost, and no rank has heard of the choice.
TEST_F(LeaderTest, APinThatNoRankHasBeenToldIsChosenAgain) {
  const StepId older{kLife - 1, 7};
  const StepId newer{kLife - 1, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Own(older, 1), Own(newer, 0)});
  Tell(kSecond, {Own(newer, 1)});
  const LatestQuestion question{kLife};
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(question)), Code::kDeadlineExceeded);
  ASSERT_EQ(Told(kFirst).life.pin, newer);
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  life_ = Told(kFirst).life;
  settings_.nodes = 2;
  Members({kFirst});
  Tell(kFirst, {Own(older, 0), Own(older, 1), Own(newer, 0)});
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(question)), Code::kDeadlineExceeded);
  ASSERT_EQ(Told(kFirst).life.pin, older);
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  LatestReply latest;
  ASSERT_TRUE(Decode(replies_[question_].payload, latest));
  EXPECT_EQ(latest.step.id, older);
}

// The node that returns before any rank was told has a newer committed step.
TEST_F(LeaderTest, ANewerCommittedStepThatReturnsBeforeARankIsToldIsChosenInstead) {
  const StepId older{kLife - 1, 7};
  const StepId newer{kLife - 1, 8};
  settings_ = {1, 2, 2};
  Members({kFirst});
  Tell(kFirst, {Marked(Own(older, 0)), Marked(Own(older, 1)), Marked(Own(newer, 0))});
  const LatestQuestion question{kLife};
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(question)), Code::kDeadlineExceeded);
  ASSERT_EQ(Told(kFirst).life.pin, older);
  life_ = Told(kFirst).life;
  Members({kFirst, kSecond});
  Tell(kFirst, {Marked(Own(older, 0)), Marked(Own(older, 1)), Marked(Own(newer, 0))});
  Tell(kSecond, {Marked(Own(newer, 1))});
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(question)), Code::kDeadlineExceeded);
  EXPECT_EQ(Told(kFirst).life.pin, newer);
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  LatestReply latest;
  ASSERT_TRUE(Decode(replies_[question_].payload, latest));
  EXPECT_EQ(latest.step.id, newer);
}

// A node that returns holds what nobody knew of. Until it has said so it is told nothing, however long that
// takes: the state of the view before would have it release that.
TEST_F(LeaderTest, AReturningMemberIsToldNothingThatWasJudgedWithoutIt) {
  const StepId old{kLife, 7};
  const StepId lost{kLife, 9};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(old, 0), Replica(old, 1)});
  Tell(kSecond, {Own(old, 1), Replica(old, 0)});
  Members({kFirst});
  PassTime(1'000'000);
  announced_.clear();
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(old, 0), Replica(old, 1)});
  PassTime(1'000'000);
  EXPECT_THAT(announced_, IsEmpty());
  Tell(kSecond, {Own(old, 1), Replica(old, 0), Marked(Own(lost, 0)), Marked(Own(lost, 1))});
  EXPECT_THAT(Ids(Told(kSecond).keep), Contains(lost));
  EXPECT_THAT(Ids(Told(kSecond).committed), Contains(lost));
}

// A life that has not chosen yet may have to fall back to what the life before it restored, if what that one
// saved since is lost before anything of it is committed.
TEST_F(LeaderTest, WhatALifeRestoredStaysWhileTheNextHasNotChosen) {
  const StepId restored{kLife - 1, 5};
  const StepId since{kLife, 6};
  life_.pinned_by = life_.incarnation;
  life_.pin = restored;
  const std::vector<CopyReport> first = {Own(restored, 0), Replica(restored, 1), Own(since, 0)};
  const std::vector<CopyReport> second = {Own(restored, 1), Own(since, 1)};
  Members({kFirst, kSecond});
  Tell(kFirst, first);
  Tell(kSecond, second);
  ASSERT_FALSE(MayGo(Told(kFirst), restored));
  ASSERT_EQ(Join(kFirst, 0, "life6"), Code::kOk);
  ASSERT_GT(Told(kFirst).life.incarnation, kLife);
  EXPECT_FALSE(MayGo(Told(kFirst), restored));
  EXPECT_FALSE(MayGo(Told(kFirst), since));
  // And through a life that nobody chose in.
  ASSERT_EQ(Join(kFirst, 0, "life7"), Code::kOk);
  EXPECT_FALSE(MayGo(Told(kSecond), restored));
  // A newer step that is committed is better.
  life_ = Told(kFirst).life;
  Tell(kFirst, {Own(restored, 0), Replica(restored, 1), Own(since, 0), Replica(since, 1)});
  Tell(kSecond, {Own(restored, 1), Own(since, 1), Replica(since, 0)});
  EXPECT_THAT(Ids(Told(kFirst).committed), Contains(since));
  EXPECT_FALSE(MayGo(Told(kFirst), since));
}

// Who looks at a job that trains (a notebook, a script of another size) must not end its life; what the
// launcher starts anew gets its life as soon as the former world has left.
TEST_F(LeaderTest, AHandleWithoutALifesNameEndsNoOtherWorldThatIsOpen) {
  Members({kFirst, kSecond});
  Tell(kFirst, {}, {Open(0)});
  Tell(kSecond, {});
  EXPECT_EQ(Join(kSecond, 1, ""), Code::kUnavailable);
  EXPECT_THAT(replies_[question_].message, HasSubstr("life 'life5', 2 ranks) has 1 ranks open"));
  EXPECT_EQ(Told(kFirst).life.incarnation, kLife);
  Tell(kFirst, {});
  EXPECT_EQ(Join(kSecond, 1, ""), Code::kOk);
  EXPECT_GT(Told(kFirst).life.incarnation, kLife);
}

TEST_F(LeaderTest, AHandleOfAnotherWorldSizeEndsNoWorldWithoutANameThatIsOpen) {
  life_.token.clear();
  Members({kFirst, kSecond});
  Tell(kFirst, {}, {Open(1)});
  Tell(kSecond, {});
  EXPECT_EQ(Join(kSecond, 0, "", 1), Code::kUnavailable);
  EXPECT_EQ(Told(kFirst).life.incarnation, kLife);
  EXPECT_EQ(Join(kSecond, 0, ""), Code::kOk);
  EXPECT_EQ(Told(kFirst).life.incarnation, kLife);
  Tell(kFirst, {});
  Tell(kSecond, {});
  EXPECT_EQ(Join(kSecond, 0, "", 1), Code::kOk);
  EXPECT_GT(Told(kFirst).life.incarnation, kLife);
}

// Another question may be older than any to join that the node still asks.
TEST_F(LeaderTest, OfQuestionsThatComeLateOnlyThoseToJoinAreIgnored) {
  Members({kFirst});
  question_ = 9;
  Tell(kFirst, {});
  question_ = 0;
  EXPECT_EQ(Join(kFirst, 0, "life6"), Code::kDeadlineExceeded);
  EXPECT_EQ(Ask(kFirst, Question::Topic::kReport, ""), Code::kOk);
}

// Once the next incarnation has chosen another step, what the one before restored is as any other.
TEST_F(LeaderTest, WhatALifeRestoredMayGoWhenTheNextHasChosenAnother) {
  const StepId restored{kLife - 1, 5};
  const StepId since{kLife, 6};
  life_.pinned_by = life_.incarnation;
  life_.pin = restored;
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(restored, 0), Replica(restored, 1), Own(since, 0)});
  Tell(kSecond, {Own(restored, 1), Own(since, 1)});
  ASSERT_EQ(Join(kFirst, 0, "life6"), Code::kOk);
  ASSERT_EQ(Join(kSecond, 1, "life6"), Code::kOk);
  Ask(kFirst, Question::Topic::kLatest, Encode(LatestQuestion{Told(kFirst).life.incarnation}));
  ASSERT_TRUE(Told(kFirst).life.has_pin());
  EXPECT_EQ(Told(kFirst).life.pin, since);
  EXPECT_FALSE(MayGo(Told(kFirst), since));
  EXPECT_FALSE(MayGo(Told(kFirst), restored)) << "no rank has been told: it may be chosen again";
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  EXPECT_TRUE(MayGo(Told(kFirst), restored));
}

// A node was given a copy by a node of an incarnation that it has not heard of, and all that had are lost.
TEST_F(LeaderTest, AStepOfAnIncarnationThatNobodyHeardOfIsNotOfferedToAnOlderOne) {
  const StepId newer{kLife + 1, 9};
  Members({kFirst, kSecond});
  Tell(kFirst, {Replica(newer, 0), Replica(newer, 1)});
  Tell(kSecond, {});
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(LatestQuestion{kLife})), Code::kStale);
}

// The leader before made the choice, and was lost with the only copy of a shard of it. One member never heard
// of the choice: so no rank was told, and the incarnation need not wait for what is lost.
TEST_F(LeaderTest, APinThatAMemberNeverHeardOfIsChosenAgainByTheNextLeader) {
  const StepId older{kLife - 1, 7};
  const StepId newer{kLife - 1, 8};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Own(older, 1)});
  life_.pinned_by = life_.incarnation;
  life_.pin = newer;
  Tell(kSecond, {Own(newer, 1)});
  Ask(kFirst, Question::Topic::kLatest, Encode(LatestQuestion{kLife}));
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  EXPECT_EQ(Told(kFirst).life.pin, older);
  LatestReply latest;
  ASSERT_TRUE(Decode(replies_[question_].payload, latest));
  EXPECT_EQ(latest.step.id, older);
}

// Every member had heard: a rank may have been told, and gone on from it.
TEST_F(LeaderTest, APinThatEveryMemberHeardOfIsNotChosenAgainByTheNextLeader) {
  const StepId older{kLife - 1, 7};
  const StepId newer{kLife - 1, 8};
  life_.pinned_by = life_.incarnation;
  life_.pin = newer;
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(older, 0), Own(older, 1)});
  Tell(kSecond, {Own(newer, 1)});
  EXPECT_EQ(Ask(kFirst, Question::Topic::kLatest, Encode(LatestQuestion{kLife})), Code::kUnavailable);
  EXPECT_EQ(Told(kFirst).life.pin, newer);
}

CopyReport With(CopyReport copy, uint64_t content) {
  copy.content = content;
  return copy;
}

// Rank 0 was opened again elsewhere while the nodes with its committed shard were away, and has saved other
// bytes under the same name. They must not be marked: a marked copy is never dropped.
TEST_F(LeaderTest, AStepWithAnotherShardOfItsNameIsMarkedWhenThatHasGone) {
  const StepId step{kLife, 7};
  const std::vector<CopyReport> committed = {Marked(With(Own(step, 0), 1)), Marked(Replica(step, 1))};
  Members({kFirst, kSecond});
  Tell(kFirst, committed);
  CopyReport other = With(Own(step, 0), 2);
  other.seated = true;
  Tell(kSecond, {other, Own(step, 1)});
  EXPECT_THAT(Ids(Told(kSecond).committed), IsEmpty());
  const size_t ordered = drops_[kSecond];
  EXPECT_GT(ordered, 0u);
  // The orders are lost.
  PassTime(1'000'000);
  EXPECT_GT(drops_[kSecond], ordered);
  EXPECT_EQ(drops_[kFirst], 0u);
  Tell(kSecond, {Own(step, 1)});
  EXPECT_THAT(Ids(Told(kSecond).committed), ElementsAre(step));
}

// The state that listed the step first is lost on its way to the second member, and the step is not listed for a
// while. Acknowledging what came between says nothing of its mark.
TEST_F(LeaderTest, AStepThatIsListedAgainIsToldWhenThatListIsAcknowledged) {
  const StepId step{kLife, 7};
  const std::vector<CopyReport> first = {With(Own(step, 0), 1), Replica(step, 1)};
  const std::vector<CopyReport> second = {Own(step, 1), With(Replica(step, 0), 1)};
  Members({kFirst, kSecond});
  Tell(kFirst, first);
  Tell(kSecond, second);
  ASSERT_THAT(Ids(Told(kFirst).committed), ElementsAre(step));
  Send(kFirst, LeaderStateAck{Told(kFirst).sequence});
  Tell(kSecond, {Own(step, 1), With(Replica(step, 0), 2)});
  ASSERT_THAT(Ids(Told(kSecond).committed), IsEmpty());
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  Tell(kSecond, second);
  ASSERT_THAT(Ids(Told(kSecond).committed), ElementsAre(step));
  EXPECT_THAT(Ids(Told(kFirst).marked), IsEmpty());
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  EXPECT_THAT(Ids(Told(kFirst).marked), ElementsAre(step));
}

// A member marks what the leader has compared. A copy that is sealed behind the list is marked when the leader has
// heard of it.
TEST_F(LeaderTest, AMemberIsToldWhichOfItsCopiesWereJudged) {
  const StepId step{kLife, 7};
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

// What a member had in the epoch before it may have lost with the view's change.
TEST_F(LeaderTest, InANewEpochNothingIsAnnouncedBeforeEveryMemberHasAnsweredInIt) {
  const StepId step{kLife, 7};
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

// 16,384 members are told what has changed, not that something was said.
TEST_F(LeaderTest, WhatDecidesNothingIsNotAnnounced) {
  const StepId step{kLife, 7};
  Members({kFirst, kSecond});
  Tell(kFirst, {Own(step, 0)});
  Tell(kSecond, {});
  for (const NodeId node : {kFirst, kSecond}) Send(node, LeaderStateAck{Told(node).sequence});
  announced_.clear();
  Tell(kFirst, {Own(step, 0)}, {Open(0)});
  Tell(kFirst, {Own(step, 0), Own({kLife, 8}, 0)}, {Open(0)});
  PassTime(2'000'000);
  EXPECT_THAT(announced_, IsEmpty());
}

// The owner's report and the holder's are two messages: either may come first.
TEST_F(LeaderTest, AHoldersCopyThatIsReportedFirstIsNoOrphan) {
  const StepId step{kLife, 7};
  Members({kFirst, kSecond, kSecond + 1});
  Tell(kFirst, {Replica(step, 1)}, {Open(0)});
  Tell(kSecond + 1, {});
  Tell(kSecond, {Own(step, 0)}, {Open(1)});
  PassTime(100'000);
  EXPECT_TRUE(orders_.empty());
  Tell(kSecond, {Own(step, 0), Own(step, 1)}, {Open(1)});
  PassTime(1'000'000);
  EXPECT_TRUE(orders_.empty());
  // An own copy that does not come is lost.
  Tell(kSecond, {Own(step, 0)}, {Open(1)});
  PassTime(1'000'000);
  EXPECT_FALSE(orders_.empty());
}

// The target of the first orders has no room, and nobody tells the leader. The source carries out two orders at a time:
// they must not be the same two for ever.
TEST_F(LeaderTest, OrdersThatComeToNothingMakeWayForOthersAndGoElsewhere) {
  const StepId older{kLife, 7};
  const StepId newer{kLife, 8};
  Members({kFirst, kSecond, kSecond + 1, kSecond + 2});
  for (const NodeId node : {kSecond, kSecond + 1, kSecond + 2}) Tell(node, {});
  Tell(kFirst, {Marked(Own(older, 0)), Marked(Own(older, 1)), Marked(Own(newer, 0)), Marked(Own(newer, 1))});
  PassTime(1'000'000);
  ASSERT_EQ(orders_.size(), 2u);
  EXPECT_EQ(StepOf(orders_[0].shard.id), newer);
  const NodeId full = orders_[0].target;
  ASSERT_EQ(orders_[1].target, full);
  PassTime(10'000'000);
  ASSERT_EQ(orders_.size(), 4u);
  for (const size_t later : {2, 3}) {
    EXPECT_EQ(StepOf(orders_[later].shard.id), older);
    EXPECT_NE(orders_[later].target, full);
  }
}

}  // namespace
}  // namespace ropeteam
