// SPDX-License-Identifier: Apache-2.0
//
// What the leader announces depends only on the reported inventories. So there is one engine, which leads;
// the members exist only as the messages that a test sends.

#ifndef ROPETEAM_TESTS_ENGINE_LEADER_FIXTURE_H_
#define ROPETEAM_TESTS_ENGINE_LEADER_FIXTURE_H_

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

inline constexpr NodeId kLeader = 1;
inline constexpr NodeId kFirst = 2;
inline constexpr NodeId kSecond = 3;
inline constexpr uint32_t kWorld = 2;
inline constexpr Incarnation kCurrent = 5;

inline CopyReport Copy(const StepId& step, Rank rank, Role role, bool committed = false) {
  CopyReport copy;
  copy.id = {step.incarnation, step.step, rank};
  copy.world_size = kWorld;
  copy.replicas = 1;
  copy.stream_bytes = 100;
  copy.role = role;
  copy.committed = committed;
  return copy;
}
inline CopyReport Own(const StepId& step, Rank rank) { return Copy(step, rank, Role::kOwn); }
inline CopyReport Replica(const StepId& step, Rank rank) { return Copy(step, rank, Role::kReplica); }
inline CopyReport Marked(CopyReport copy) {
  copy.committed = true;
  return copy;
}

inline CopyReport With(CopyReport copy, uint64_t content) {
  copy.content = content;
  return copy;
}

// Whether a member may release or evict its copies of the step after this announcement.
inline bool MayGo(const LeaderState& state, const StepId& step) {
  if (state.keep.contains(step)) return false;
  return step < state.release_before || state.evictable.contains(step);
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
    incarnation_.number = kCurrent;
    incarnation_.token = "run5";
    incarnation_.world_size = kWorld;
  }
  ~LeaderTest() override {
    engine_.reset();
    store_.reset();
    munmap(memory_, bytes_);
    SetLogSink(nullptr, LogLevel::kWarning);
  }

  // Begins the next epoch with the leader and these members.
  void Members(const std::vector<NodeId>& nodes) {
    View view;
    view.epoch = ++epoch_;
    view.leader = kLeader;
    view.settings = settings_;
    view.settle_us = settle_us_;
    view.led_since = led_since_;
    view.members.push_back(MemberOf(kLeader));
    for (const NodeId node : nodes) {
      view.members.push_back(MemberOf(node));
      joined_.try_emplace(node, epoch_);
    }
    std::erase_if(joined_, [&](const auto& member) {
      return std::find(nodes.begin(), nodes.end(), member.first) == nodes.end();
    });
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
  // The member reports this whole inventory.
  void Tell(NodeId from, std::vector<CopyReport> copies, std::vector<SessionReport> sessions = {}) {
    Inventory inventory;
    inventory.sequence = ++sequence_;
    inventory.report.id = from;
    inventory.report.copies = std::move(copies);
    inventory.report.sessions = std::move(sessions);
    for (const NodeId peer : std::exchange(cannot_reach_, {}))
      inventory.report.lost_links.push_back({peer, "node", "cut", 0});
    inventory.asking_from = question_ + 1;
    inventory.incarnation = incarnation_;
    inventory.incarnation_max = incarnation_.number;
    inventory.short_of_memory = short_of_memory_;
    inventory.joined = joined_[from];
    Send(from, inventory);
  }
  template <typename Message>
  void Send(NodeId from, const Message& message) {
    engine_->OnMessage(now_, from, Encode(Envelope{epoch_, from, kLeader, Message::kKind, Encode(message)}));
    Carry();
  }
  // A rank of the current incarnation that is connected to a member.
  static SessionReport Open(Rank rank) {
    SessionReport session;
    session.rank = rank;
    session.world_size = kWorld;
    session.incarnation = kCurrent;
    session.token = 100 + rank;
    return session;
  }
  // A rank with this incarnation token says hello to the member.
  Code Join(NodeId from, Rank rank, const std::string& token, uint32_t world_size = kWorld) {
    JoinQuestion join;
    join.rank = rank;
    join.world_size = world_size;
    join.token = 100 + rank;
    join.incarnation_token = token;
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
        ordered_.push_back(message.to);
      } else if (envelope.kind == Kind::kReply) {
        Reply reply;
        ASSERT_TRUE(Decode(envelope.payload, reply));
        replies_[reply.number] = reply;
      }
    }
  }
  // The last announcement to the member.
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
  Epoch led_since_ = 0;
  bool short_of_memory_ = false;
  Epoch epoch_ = 0;
  IncarnationState incarnation_;    // as the members know it
  std::map<NodeId, Epoch> joined_;  // the first epoch of each member
  uint64_t sequence_ = 0;
  uint64_t question_ = 0;
  std::map<uint64_t, Reply> replies_;
  std::vector<NodeId> cannot_reach_;  // what the next member to report cannot reach
  std::vector<CopyOrder> orders_;
  std::vector<NodeId> ordered_;     // the node that got each of the orders
  std::map<NodeId, size_t> drops_;  // orders to drop a copy
  std::map<NodeId, std::optional<LeaderState>> announced_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_ENGINE_LEADER_FIXTURE_H_
