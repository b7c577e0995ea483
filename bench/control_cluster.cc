// SPDX-License-Identifier: Apache-2.0
#include "bench/control_cluster.h"

#include <sys/mman.h>
#include <time.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>

#include "bench/command.h"
#include "core/base/bytes.h"
#include "core/base/check.h"
#include "core/base/checksum.h"
#include "core/engine/copy_rules.h"
#include "core/engine/inventory.h"
#include "core/shard/manifest.h"

namespace ropeteam::bench {
namespace {

constexpr NodeId kLeaderId = 1;
constexpr NodeId kFirstId = 2;            // of the nodes with ranks, in order of their ranks
constexpr TimeUs kTickUs = 1'000;         // delivery time of a message
constexpr TimeUs kReplicateUs = 5'000;    // from a shard's seal to its copy's
constexpr TimeUs kSaveSpreadUs = 50'000;  // a node's ranks seal within this time
constexpr TimeUs kForever = UINT64_MAX;
constexpr TimeUs kHelloTimeoutUs = 60'000'000;

double ThreadSeconds() {
  timespec time{};
  ROPETEAM_CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0);
  return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_nsec) * 1e-9;
}

Member MemberOf(NodeId id) {
  Member member;
  member.id = id;
  member.name = "node-" + std::to_string(id);
  member.ordinal = static_cast<uint32_t>(id);
  return member;
}

// Replication messages are not control messages, even if the leader's node sends or receives them.
bool IsControl(const std::string& bytes) {
  Envelope envelope;
  ROPETEAM_CHECK(Decode(bytes, envelope));
  return envelope.kind < Kind::kReplicaReserve || envelope.kind > Kind::kCopyQuery;
}

uint64_t TokenOf(Rank rank) { return 0x5eed000000000000 + rank; }

// ---- a node that only reports

class ModelNode : public ControlNode {
 public:
  ModelNode(NodeId id, Rank first_rank) : first_rank_(first_rank) {
    content_.report.id = id;
    content_.report.name = "node-" + std::to_string(id);
    content_.report.chunk_bytes = 1 << 20;
    content_.report.chunks_total = content_.report.chunks_free = 1 << 16;
    content_.report.has_lease = true;
    content_.asking_from = 1;
  }

  void BeginIncarnation(Incarnation incarnation, uint32_t world_size) {
    content_.incarnation = IncarnationState();
    content_.incarnation.number = content_.incarnation_max = incarnation;
    content_.incarnation.token = "bench-" + std::to_string(incarnation);
    content_.incarnation.world_size = world_size;
    content_.report.sessions.clear();
    for (Rank rank = first_rank_; rank < first_rank_ + kRanksPerNode; ++rank)
      content_.report.sessions.push_back({rank, world_size, incarnation, TokenOf(rank), false, 0, 0, {}});
  }

  void OnView(TimeUs now, const View& view, std::vector<SendMessage>* out) override {
    epoch_ = view.epoch;
    announced_ = engine::Announcement();
    state_sequence_ = 0;
    sender_.OnView(view.leader);
    Tell(now, out);
  }
  void OnMessage(TimeUs now, NodeId from, const std::string& bytes, std::vector<SendMessage>* out) override {
    Envelope envelope;
    ROPETEAM_CHECK(Decode(bytes, envelope) && envelope.from == from && from == kLeaderId);
    if (envelope.epoch != epoch_) return;
    if (envelope.kind == Kind::kInventoryAck) {
      InventoryAck ack;
      ROPETEAM_CHECK(Decode(envelope.payload, ack));
      sender_.OnAck(from, ack);
    } else if (envelope.kind == Kind::kLeaderState) {
      LeaderState state;
      ROPETEAM_CHECK(Decode(envelope.payload, state));
      Apply(state, out);
    }  // orders to copy are ignored: the copies stay missing
    Tell(now, out);
  }
  void OnTimer(TimeUs now, std::vector<SendMessage>* out) override { Tell(now, out); }
  TimeUs NextTimer() const override { return sender_.Due(coming_ != 0, counters_dirty_); }
  void BeginStep(TimeUs now, Step step, std::vector<SendMessage>* out) override {
    coming_ = (1 + kControlReplicas) * kRanksPerNode;
    for (SessionReport& session : content_.report.sessions) session.open_steps.push_back(step);
    counters_dirty_ = true;
    Tell(now, out);
  }
  void Save(TimeUs now, Step step, uint32_t local_rank, std::vector<SendMessage>* out) override {
    SessionReport& session = content_.report.sessions.at(local_rank);
    if (!session.has_ended) session.oldest_ended = step;
    session.has_ended = true;
    session.newest_ended = step;
    session.open_steps.clear();
    Seal(session.rank, step, Role::kOwn);
    Tell(now, out);
  }
  void Hold(TimeUs now, Step step, Rank rank, std::vector<SendMessage>* out) override {
    Seal(rank, step, Role::kReplica);
    Tell(now, out);
  }
  Step committed() const override { return committed_; }

 private:
  void Seal(Rank rank, Step step, Role role) {
    CopyReport copy;
    copy.id = {content_.incarnation.number, step, rank};
    copy.world_size = content_.incarnation.world_size;
    copy.replicas = kControlReplicas;
    copy.stream_bytes = 1 << 20;
    copy.role = role;
    copy.content = rank + step;
    copy.seated = role == Role::kOwn;
    ROPETEAM_CHECK(copies_.emplace(copy.id, copy).second && coming_ != 0);
    --coming_;
    counters_dirty_ = true;
    sender_.OnChange();
  }
  // As Engine::Impl::ApplyLeaderState() and Retain().
  void Apply(const LeaderState& state, std::vector<SendMessage>* out) {
    if (state.incarnation.number < content_.incarnation.number) return;
    Send(LeaderStateAck::kKind, Encode(LeaderStateAck{state.sequence}), out);
    if (announced_.heard && state.sequence <= state_sequence_) return;
    state_sequence_ = state.sequence;
    bool changed = !(content_.incarnation == state.incarnation);
    content_.incarnation = state.incarnation;
    announced_ = {state, true};
    for (const StepId& id : state.told) committed_ = std::max(committed_, id.step);
    for (auto at = copies_.begin(); at != copies_.end();) {
      CopyReport& copy = at->second;
      const StepId step = StepOf(copy.id);
      if (engine::FateOf(copy.role, step, announced_) == engine::CopyFate::kReleased) {
        at = copies_.erase(at);
        changed = true;
        continue;
      }
      if (!copy.committed && announced_.listed.contains(step)) copy.committed = changed = true;
      ++at;
    }
    if (changed) sender_.OnChange();
  }
  // As Engine::Impl::SendInventory().
  void Tell(TimeUs now, std::vector<SendMessage>* out) {
    if (NextTimer() > now) return;
    if (sender_.in_flight()) {
      const auto& repeat = sender_.Repeat(now);
      return Send(repeat.kind, repeat.payload, out);
    }
    content_.report.copies.clear();
    for (const auto& [id, copy] : copies_) content_.report.copies.push_back(copy);
    const auto& message = sender_.Send(now, content_);
    if (sender_.counters_at() == now) counters_dirty_ = false;
    Send(message.kind, message.payload, out);
  }
  void Send(Kind kind, std::string payload, std::vector<SendMessage>* out) {
    out->push_back(
        {kLeaderId, Encode(Envelope{epoch_, content_.report.id, kLeaderId, kind, std::move(payload)})});
  }

  const Rank first_rank_;
  Inventory content_;
  std::map<ShardId, CopyReport> copies_;
  engine::InventorySender sender_;
  Epoch epoch_ = 0;
  engine::Announcement announced_;
  uint64_t state_sequence_ = 0;
  Step committed_ = 0;
  uint32_t coming_ = 0;  // seals of the current step
  bool counters_dirty_ = false;
};

// ---- a node that is real

class EngineNode : public ControlNode {
 public:
  EngineNode(NodeId id, Rank first_rank, uint32_t world_size)
      : host_(id, 256), first_rank_(first_rank), world_size_(world_size) {
    stream_ = Manifest().Encode();
  }

  void OnView(TimeUs now, const View& view, std::vector<SendMessage>* out) override {
    Engine& engine = host_.engine();
    engine.OnLease(now, kForever);
    engine.OnView(now, view);
    for (uint32_t local = 0; local < kRanksPerNode && !open_; ++local) {
      engine.OnSessionOpened(now, local + 1);
      const Rank rank = first_rank_ + local;
      engine.OnHello(now, local + 1, ++request_,
                     {rank, world_size_, TokenOf(rank), "bench", kHelloTimeoutUs, 0});
    }
    open_ = true;
    Drain(now, out);
  }
  void OnMessage(TimeUs now, NodeId from, const std::string& envelope,
                 std::vector<SendMessage>* out) override {
    host_.engine().OnMessage(now, from, envelope);
    Drain(now, out);
  }
  void OnTimer(TimeUs now, std::vector<SendMessage>* out) override {
    host_.engine().OnTimer(now);
    Drain(now, out);
  }
  TimeUs NextTimer() const override { return host_.engine().NextTimer(); }
  void BeginStep(TimeUs now, Step step, std::vector<SendMessage>* out) override {
    for (uint32_t local = 0; local < kRanksPerNode; ++local) {
      const SessionId session = local + 1;
      granted_[session].reset();
      host_.engine().OnSaveBegin(now, session, ++request_, step, stream_.size());
      Drain(now, out);
      if (!granted_[session]) throw BenchError("a save of the real engines was refused");
    }
  }
  void Save(TimeUs now, Step, uint32_t local_rank, std::vector<SendMessage>* out) override {
    const SessionId session = local_rank + 1;
    const AnswerGrant& grant = granted_[session].value();
    std::memcpy(host_.store().chunk(ChunkAt(grant.extents, 0)), stream_.data(), stream_.size());
    const std::vector<uint32_t> crcs = {Crc32c(stream_.data(), stream_.size())};
    host_.engine().OnSaveFilled(now, session, grant.save, 0, crcs);
    host_.engine().OnSaveCommit(now, session, ++request_, {grant.save, stream_.size(), 0, 0, crcs});
    Drain(now, out);
  }
  void Hold(TimeUs, Step, Rank, std::vector<SendMessage>*) override {}
  Step committed() const override { return committed_; }

 private:
  // Puts and checks succeed at once: only the control plane is measured.
  void Drain(TimeUs now, std::vector<SendMessage>* out) {
    while (!host_.engine().outbox().empty()) {
      const Outbox outbox = std::exchange(host_.engine().outbox(), Outbox());
      for (const SendMessage& message : outbox.messages) out->push_back(message);
      for (const Answer& answer : outbox.answers) {
        if (const auto* grant = std::get_if<AnswerGrant>(&answer.body)) granted_[answer.session] = *grant;
      }
      for (const LevelEvent& event : outbox.events)
        if (event.shard.rank == LevelEvent::kNoRank) committed_ = std::max(committed_, event.shard.step);
      for (const StartTransfer& transfer : outbox.transfers)
        host_.engine().OnTransferDone(now, transfer.tag, Code::kOk);
      for (const StartCheck& check : outbox.checks) host_.engine().OnCheckDone(now, check.tag, {});
    }
  }

  mutable EngineHost host_;
  const Rank first_rank_;
  const uint32_t world_size_;
  std::string stream_;
  bool open_ = false;
  RequestId request_ = 0;
  std::map<SessionId, std::optional<AnswerGrant>> granted_;
  Step committed_ = 0;
};

}  // namespace

// ---- Worker

Worker::Worker() : thread_([this] { Loop(); }) {}

Worker::~Worker() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

double Worker::Run(const std::function<void()>& work) {
  std::unique_lock<std::mutex> lock(mutex_);
  work_ = &work;
  changed_.notify_all();
  changed_.wait(lock, [this] { return work_ == nullptr; });
  return seconds_;
}

void Worker::Loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return work_ != nullptr || ending_; });
    if (ending_) return;
    const double begin = ThreadSeconds();
    (*work_)();
    seconds_ = ThreadSeconds() - begin;
    work_ = nullptr;
    changed_.notify_all();
  }
}

// ---- EngineHost

EngineHost::EngineHost(NodeId id, uint64_t chunks) : bytes_(Store::MemoryFor(chunks, kChunkBytes)) {
  void* memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw BenchError("no memory for an engine's store");
  memory_ = static_cast<std::byte*>(memory);
  const Member member = MemberOf(id);
  store_ = Store::Format({memory_, bytes_}, kChunkBytes, {"bench", member.name}).value();
  EngineConfig config;
  config.self = id;
  config.job = "bench";
  config.node = member.name;
  engine_ = std::make_unique<Engine>(config, store_.get());
}

EngineHost::~EngineHost() {
  engine_.reset();
  store_.reset();
  munmap(memory_, bytes_);
}

// ---- ControlCluster

ControlCluster::ControlCluster(const ControlOptions& options) : options_(options), members_(options.nodes) {
  ROPETEAM_CHECK(options.nodes >= 3);
  const uint32_t world_size = members_ * kRanksPerNode;
  incarnation_ = NextIncarnation(0, 1);
  for (uint32_t node = 0; node < members_; ++node) {
    const Rank first_rank = node * kRanksPerNode;
    if (options.engines) {
      nodes_.push_back(std::make_unique<EngineNode>(kFirstId + node, first_rank, world_size));
      continue;
    }
    auto model = std::make_unique<ModelNode>(kFirstId + node, first_rank);
    model->BeginIncarnation(incarnation_, world_size);
    nodes_.push_back(std::move(model));
  }
  armed_.assign(members_, kForever);
  worker_.Run([this] {
    leader_ = std::make_unique<EngineHost>(kLeaderId, 256);
    leader_->engine().OnLease(now_, kForever);
  });
  ShowView();
  RunUntil(now_ + kControlStepUs);
}

ControlCluster::~ControlCluster() {
  worker_.Run([this] { leader_.reset(); });
}

void ControlCluster::ShowView() {
  View view;
  view.epoch = ++epoch_;
  view.leader = kLeaderId;
  view.settings.replicas = kControlReplicas;
  view.settings.nodes = static_cast<uint32_t>(nodes_.size()) + 1;
  view.members.push_back(MemberOf(kLeaderId));
  for (uint32_t node = 0; node < members_; ++node) view.members.push_back(MemberOf(kFirstId + node));
  to_leader_.clear();
  to_nodes_.clear();
  std::vector<SendMessage> messages;
  cost_.leader_cpu_s += worker_.Run([&] {
    leader_->engine().OnView(now_, view);
    DrainLeader(&messages);
  });
  Take(kLeaderId, &messages);
  for (uint32_t node = 0; node < members_; ++node) {
    nodes_[node]->OnView(now_, view, &messages);
    Take(kFirstId + node, &messages);
    Arm(node);
  }
}

void ControlCluster::Take(NodeId from, std::vector<SendMessage>* messages) {
  for (SendMessage& message : *messages) {
    if ((message.to == kLeaderId || from == kLeaderId) && (!options_.engines || IsControl(message.envelope)))
      cost_.leader_bytes += message.envelope.size();
    if (message.to == kLeaderId) {
      to_leader_.push_back({from, std::move(message.envelope)});
    } else {
      to_nodes_.push_back(
          {static_cast<uint32_t>(message.to - kFirstId), {from, std::move(message.envelope)}});
    }
  }
  messages->clear();
}

void ControlCluster::Arm(uint32_t node) {
  const TimeUs due = nodes_[node]->NextTimer();
  if (due >= armed_[node]) return;
  armed_[node] = due;
  timers_.emplace(due, node);
}

void ControlCluster::DrainLeader(std::vector<SendMessage>* messages) {
  Engine& leader = leader_->engine();
  while (!leader.outbox().empty()) {
    Outbox outbox = std::exchange(leader.outbox(), Outbox());
    for (SendMessage& message : outbox.messages) messages->push_back(std::move(message));
    for (const StartTransfer& transfer : outbox.transfers)
      leader.OnTransferDone(now_, transfer.tag, Code::kOk);
    for (const StartCheck& check : outbox.checks) leader.OnCheckDone(now_, check.tag, {});
  }
  leader_due_ = leader.NextTimer();
}

StepCost ControlCluster::RunUntil(TimeUs end) {
  std::vector<SendMessage> messages;
  while (now_ < end) {
    const std::deque<Delivery> to_leader = std::exchange(to_leader_, {});
    if (!to_leader.empty() || leader_due_ <= now_)
      cost_.leader_cpu_s += worker_.Run([&] {
        for (const Delivery& delivery : to_leader) {
          leader_->engine().OnMessage(now_, delivery.from, delivery.envelope);
          DrainLeader(&messages);
        }
        if (leader_due_ > now_) return;
        leader_->engine().OnTimer(now_);
        DrainLeader(&messages);
      });
    for (const auto& [node, delivery] : std::exchange(to_nodes_, {})) {
      if (node >= members_) continue;
      std::vector<SendMessage> out;
      nodes_[node]->OnMessage(now_, delivery.from, delivery.envelope, &out);
      Take(kFirstId + node, &out);
      Arm(node);
    }
    Take(kLeaderId, &messages);
    for (; !saves_.empty() && saves_.begin()->first <= now_; saves_.erase(saves_.begin())) {
      const auto [node, local] = saves_.begin()->second;
      nodes_[node]->Save(now_, step_, local, &messages);
      Take(kFirstId + node, &messages);
      Arm(node);
    }
    for (; !replicas_.empty() && replicas_.begin()->first <= now_; replicas_.erase(replicas_.begin())) {
      const auto [node, rank] = replicas_.begin()->second;
      nodes_[node]->Hold(now_, step_, rank, &messages);
      Take(kFirstId + node, &messages);
      Arm(node);
    }
    while (!timers_.empty() && timers_.begin()->first <= now_) {
      const auto [due, node] = *timers_.begin();
      timers_.erase(timers_.begin());
      if (node >= members_ || armed_[node] != due) continue;
      armed_[node] = kForever;
      nodes_[node]->OnTimer(now_, &messages);
      Take(kFirstId + node, &messages);
      Arm(node);
    }
    TimeUs next = std::min(end, leader_due_);
    if (!timers_.empty()) next = std::min(next, timers_.begin()->first);
    if (!saves_.empty()) next = std::min(next, saves_.begin()->first);
    if (!replicas_.empty()) next = std::min(next, replicas_.begin()->first);
    if (!to_leader_.empty() || !to_nodes_.empty()) next = now_;
    now_ = std::max(now_ + kTickUs, next);
  }
  return std::exchange(cost_, StepCost());
}

StepCost ControlCluster::RunStep() {
  ++step_;
  std::mt19937_64 random(step_);
  std::uniform_int_distribution<TimeUs> spread(0, kSaveSpreadUs);
  std::vector<SendMessage> messages;
  for (uint32_t node = 0; node < members_; ++node) {
    nodes_[node]->BeginStep(now_, step_, &messages);
    Take(kFirstId + node, &messages);
    Arm(node);
    for (uint32_t local = 0; local < kRanksPerNode; ++local) {
      const TimeUs at = now_ + spread(random);
      saves_.emplace(at, std::make_pair(node, local));
      if (!options_.engines)
        replicas_.emplace(at + kReplicateUs,
                          std::make_pair((node + 1) % members_, node * kRanksPerNode + local));
    }
  }
  const StepCost cost = RunUntil(now_ + kControlStepUs);
  for (uint32_t node = 0; node < members_; ++node)
    if (nodes_[node]->committed() != step_)
      throw BenchError("step " + std::to_string(step_) + " is not committed on node " + std::to_string(node));
  return cost;
}

StepCost ControlCluster::LoseNode() {
  ROPETEAM_CHECK(!options_.engines && members_ == nodes_.size());
  --members_;
  incarnation_ = NextIncarnation(incarnation_, epoch_ + 1);
  for (uint32_t node = 0; node < members_; ++node)
    static_cast<ModelNode&>(*nodes_[node]).BeginIncarnation(incarnation_, members_ * kRanksPerNode);
  ShowView();
  return RunUntil(now_ + kControlStepUs);
}

StepCost ControlCluster::ReturnNode() {
  ROPETEAM_CHECK(!options_.engines && members_ + 1 == nodes_.size());
  ++members_;
  incarnation_ = NextIncarnation(incarnation_, epoch_ + 1);
  nodes_.back() = std::make_unique<ModelNode>(kFirstId + members_ - 1, (members_ - 1) * kRanksPerNode);
  armed_.back() = kForever;
  for (uint32_t node = 0; node < members_; ++node)
    static_cast<ModelNode&>(*nodes_[node]).BeginIncarnation(incarnation_, members_ * kRanksPerNode);
  ShowView();
  return RunUntil(now_ + kControlStepUs);
}

}  // namespace ropeteam::bench
