// SPDX-License-Identifier: Apache-2.0
//
// The leader's part in persisting. Members and storage exist only as the messages that a test sends.

#ifndef ROPETEAM_TESTS_ENGINE_PERSISTENCE_FIXTURE_H_
#define ROPETEAM_TESTS_ENGINE_PERSISTENCE_FIXTURE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <memory>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/log.h"
#include "core/engine/persistence.h"

namespace ropeteam::engine {

inline constexpr Incarnation kCurrent = 5;
inline constexpr uint32_t kWorld = 2;

// Nodes 1 (the leader) to 3. Rank r is saved on node 2 + r and copied to the other one of nodes 2 and 3.
class PersistenceTest : public ::testing::Test {
 protected:
  PersistenceTest()
      : memory_(static_cast<std::byte*>(mmap(nullptr, Store::MemoryFor(4, 4096), PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
        store_(Store::Format({memory_, Store::MemoryFor(4, 4096)}, 4096, {"job", "a"}).value()),
        context_(Config(), store_.get()),
        works_(&context_),
        desk_(&context_, &works_),
        keeper_(&context_, &desk_),
        hold_(&keeper_, [] { return StepId(); }),
        stored_(&context_, &keeper_, &incarnation_),
        roster_(&context_),
        policy_(&context_),
        persistence_(
            &context_, &keeper_, &hold_, &roster_, &table_, &stored_, &policy_,
            [] {
              return std::vector<StepId>{{kCurrent, 1}};
            },
            [this] { return keep_; }) {
    SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kOff);
    incarnation_.number = kCurrent;
    settings_.nodes = 3;
    settings_.storage = "somewhere";
    settings_.persist_every = 10;
    context_.lease_until = kNever;
    context_.now = 1'000'000;
    Members({1, 2, 3});
    stored_.Begin();
    persistence_.Begin();
    keeper_.Begin();
  }
  ~PersistenceTest() override {
    store_.reset();
    munmap(memory_, Store::MemoryFor(4, 4096));
    SetLogSink(nullptr, LogLevel::kWarning);
  }
  static EngineConfig Config() {
    EngineConfig config;
    config.self = 1;
    config.node = "a";
    return config;
  }
  void Members(const std::vector<NodeId>& nodes) {
    View view;
    view.epoch = ++epoch_;
    view.leader = 1;
    view.settings = settings_;
    for (const NodeId node : nodes) {
      Member member;
      member.id = node;
      member.name = "node";
      member.name += std::to_string(node);
      view.members.push_back(member);
    }
    context_.SetView(view);
    for (NodeId node = 1; node <= 3; ++node)
      if (!context_.Contains(node)) table_.Replace(node, std::exchange(held_[node], {}), {});
  }
  // Both ranks of the step are on nodes 2 and 3, and committed.
  void Commit(Step step) {
    for (const NodeId node : {2, 3}) {
      std::vector<CopyReport> added;
      for (Rank rank = 0; rank < kWorld; ++rank) {
        CopyReport copy;
        copy.id = {kCurrent, step, rank};
        copy.world_size = kWorld;
        copy.replicas = 1;
        copy.stream_bytes = 100;
        copy.role = node == 2 + rank ? Role::kOwn : Role::kReplica;
        copy.committed = true;
        added.push_back(copy);
      }
      table_.Replace(node, {}, added);
      held_[node].insert(held_[node].end(), added.begin(), added.end());
    }
    told_.insert({kCurrent, step});
    persistence_.SetKept(told_);
    persistence_.Judge(told_, incarnation_);
  }
  // Answers the requests for the hold with `hold_says_`; null: no answer yet.
  void AnswerHolds() {
    while (hold_says_ && !context_.out.storage.empty() &&
           std::get_if<HoldStorage>(&context_.out.storage.back().work) != nullptr) {
      const uint64_t tag = context_.out.storage.back().tag;
      context_.out.storage.pop_back();
      ++holds_;
      Hold(tag, *hold_says_);
    }
  }
  // The request for the lock is answered, and the other members see the lock.
  void Hold(uint64_t tag, const Status& status = OkStatus()) {
    StorageDone done;
    if (status.ok()) done.result = StorageProof{"1:token"};
    std::vector<SendMessage> others = std::exchange(context_.out.messages, {});
    works_.OnDone(tag, status, done);
    for (const SendMessage& message : std::exchange(context_.out.messages, {})) {
      Envelope envelope;
      StorageOrder order;
      EXPECT_TRUE(Decode(message.envelope, envelope));
      if (envelope.kind != Kind::kStorageOrder) {
        others.push_back(message);
      } else if (Decode(envelope.payload, order, context_.protocol) &&
                 std::holds_alternative<ProveStorage>(order.work)) {
        keeper_.OnResult(message.to, {order.number, false, Code::kOk, "", {}});
      }
    }
    others.insert(others.end(), context_.out.messages.begin(), context_.out.messages.end());
    context_.out.messages = std::move(others);
  }
  // Takes the one other work that storage has to do for the leader.
  StartStorage TakeWork() {
    AnswerHolds();
    EXPECT_EQ(context_.out.storage.size(), 1u);
    StartStorage work = std::move(context_.out.storage.back());
    context_.out.storage.clear();
    return work;
  }
  void Listed(const std::vector<StepId>& steps = {}, const std::vector<StepId>& source_steps = {}) {
    const uint32_t protocol =
        std::exchange(context_.protocol, 8);  // only the leader lists; the stories have others
    stored_.OnTimer();
    StorageDone done;
    StoredList list;
    list.steps = steps;
    list.source_steps = source_steps;
    done.result = list;
    works_.OnDone(TakeWork().tag, OkStatus(), done);
    context_.protocol = protocol;
  }
  std::vector<std::pair<NodeId, PersistOrder>> TakeOrders() {
    AnswerHolds();
    std::vector<std::pair<NodeId, PersistOrder>> orders;
    for (const SendMessage& message : std::exchange(context_.out.messages, {})) {
      Envelope envelope;
      PersistOrder order;
      EXPECT_TRUE(Decode(message.envelope, envelope) && Decode(envelope.payload, order, context_.protocol));
      orders.emplace_back(message.to, order);
    }
    return orders;
  }
  void Answer(NodeId from, const PersistOrder& order, Code code = Code::kOk,
              std::vector<std::string> names = {}, std::string metadata = {}) {
    PersistResult result;
    result.shard = order.shard;
    result.phase = order.phase;
    result.code = code;
    result.names = std::move(names);
    result.stored.stream_bytes = 100;
    result.stored.metadata = std::move(metadata);
    persistence_.OnResult(from, result);
  }
  void AnswerAll() {
    for (const auto& [node, order] : TakeOrders()) Answer(node, order);
  }
  // Writes the current step, from naming to its manifest.
  void Write(const Status& manifest = OkStatus()) {
    AnswerAll();
    AnswerAll();
    works_.OnDone(TakeWork().tag, manifest, {});
  }
  void Finish(const Status& manifest = OkStatus()) {
    Write(manifest);
    if (manifest.ok()) works_.OnDone(TakeWork().tag, OkStatus(), {});  // the deletion finds nothing to delete
  }
  // Writes step 10 while it is unknown which steps are to be kept: no deletion begins.
  void WriteInDoubt(const Status& doubt) {
    Listed({{kCurrent, 1}});
    keep_ = doubt;
    Commit(10);
    Write();
    AnswerHolds();
    EXPECT_THAT(context_.out.storage, ::testing::IsEmpty());
  }
  void PassTime(TimeUs time) {
    context_.now += time;
    persistence_.OnTimer();
    AnswerHolds();
  }
  std::vector<Step> Persisting() const {
    std::vector<Step> steps;
    for (const StepId& id : persistence_.persisting()) steps.push_back(id.step);
    return steps;
  }
  std::string Why(Step step) const {
    for (const NotPersisted& note : persistence_.not_persisted())
      if (note.step == StepId{kCurrent, step}) return note.why;
    return "";
  }

  std::byte* memory_;
  std::unique_ptr<Store> store_;
  Context context_;
  StorageWorks works_;
  StepTable table_;
  StorageDesk desk_;
  StorageKeeper keeper_;
  StorageHold hold_;
  StoredSteps stored_;
  Roster roster_;
  Policy policy_;
  Result<uint64_t> keep_ = uint64_t{0};  // set by ranks
  Persistence persistence_;
  JobSettings settings_;
  IncarnationState incarnation_;
  Epoch epoch_ = 0;
  std::map<NodeId, std::vector<CopyReport>> held_;
  std::set<StepId> told_;
  std::optional<Status> hold_says_ = OkStatus();
  int holds_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_TESTS_ENGINE_PERSISTENCE_FIXTURE_H_
