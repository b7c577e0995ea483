// SPDX-License-Identifier: Apache-2.0
//
// A few engines in one thread, each with an arena of its own. Messages, transfers and checks are carried out
// at once, unless a test delays or corrupts them. Every node has one rank.

#ifndef ROPETEAM_TESTS_ENGINE_ENGINES_FOR_TEST_H_
#define ROPETEAM_TESTS_ENGINE_ENGINES_FOR_TEST_H_

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "core/engine/engine.h"
#include "core/engine/messages.h"
#include "core/shard/manifest.h"
#include "tests/toy_cipher.h"

namespace ropeteam {

inline constexpr uint64_t kTestChunk = 4096;
// The job's key in a job that encrypts.
inline constexpr KeyId kTestKey = 0x1a2b3c4d00000001;

// What a rank saves: one object of `chunks` whole chunks, and the manifest in one more chunk.
struct TestShard {
  TestShard() = default;
  TestShard(uint64_t chunks, char seed) {
    for (uint64_t i = 0; i < chunks * kTestChunk; ++i)
      stream.push_back(static_cast<char>(i * 7 / 3 + i / 999 + static_cast<uint64_t>(seed)));
    Manifest manifest;
    (void)manifest.Add("x", stream.size());
    manifest_offset = manifest.manifest_offset();
    stream += manifest.Encode();
    for (uint64_t at = 0; at < stream.size(); at += kTestChunk)
      crcs.push_back(Crc32c(stream.data() + at, std::min<uint64_t>(kTestChunk, stream.size() - at)));
  }
  std::string stream;
  uint64_t manifest_offset = 0;
  std::vector<uint32_t> crcs;
};

class TestNode {
 public:
  TestNode(NodeId node_id, uint64_t chunks, uint64_t scrub_bytes_per_s, bool encrypts, TimeUs puts_wait_us)
      : id(node_id), bytes(Store::MemoryFor(chunks, kTestChunk, encrypts)) {
    memory = static_cast<std::byte*>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    const std::string name = "node-" + std::to_string(id);
    store = Store::Format({memory, bytes}, kTestChunk, {"job", name, encrypts}).value();
    config.self = id;
    config.job = "job";
    config.node = name;
    config.scrub_bytes_per_s = scrub_bytes_per_s;
    if (encrypts) config.keys = {kTestKey};
    config.puts_wait_us = puts_wait_us;
    config.salt.instance = {7, id};
    Start();
  }
  // A new engine that knows only the arena. A node that restarts must have been out of the view.
  void Start() { engine = std::make_unique<Engine>(config, store.get()); }
  ~TestNode() {
    engine.reset();
    store.reset();
    munmap(memory, bytes);
  }
  TestNode(const TestNode&) = delete;
  TestNode& operator=(const TestNode&) = delete;

  // The copy's bytes; empty if there is no copy.
  std::string Copy(const ShardId& shard) const {
    const SealedShard* copy = store->Find(shard);
    if (copy == nullptr) return "";
    std::string stream;
    for (uint32_t chunk = 0; chunk < copy->crcs.size(); ++chunk)
      stream.append(reinterpret_cast<const char*>(store->chunk(ChunkAt(copy->extents, chunk))), kTestChunk);
    stream.resize(copy->meta.stream_bytes);
    return stream;
  }
  void Flip(const ShardId& shard, uint32_t chunk) {
    const SealedShard* copy = store->Find(shard);
    ROPETEAM_CHECK(copy != nullptr);
    store->chunk(ChunkAt(copy->extents, chunk))[17] ^= std::byte{4};
  }
  NodeCounters counters() const { return engine->Report().counters; }

  const NodeId id;
  const size_t bytes;
  EngineConfig config;
  std::byte* memory = nullptr;
  std::unique_ptr<Store> store;
  std::unique_ptr<Engine> engine;
  uint64_t timers = 0;  // calls of OnTimer()
};

class Engines {
 protected:
  // Nodes 1, 2, …; the first leads, and rank i is on node i + 1.
  explicit Engines(uint32_t nodes, uint64_t chunks, uint64_t scrub_bytes_per_s, bool encrypts = false,
                   TimeUs puts_wait_us = 0) {
    SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kOff);
    for (uint32_t i = 0; i < nodes; ++i)
      nodes_.push_back(std::make_unique<TestNode>(i + 1, chunks, scrub_bytes_per_s, encrypts, puts_wait_us));
    for (const auto& node : nodes_) node->engine->OnLease(now_, UINT64_MAX);
    ShowView(1, nullptr);
    for (const auto& node : nodes_) Open(node.get());
  }
  ~Engines() {
    for (const auto& node : nodes_) node->engine->CheckInvariants();
    SetLogSink(nullptr, LogLevel::kWarning);
  }

  // Opens the node's rank. Handle 0 is its first one; another one is another process.
  void Open(TestNode* node, uint64_t handle = 0) {
    HelloInput hello;
    hello.rank = static_cast<Rank>(node->id - 1);
    hello.world_size = static_cast<uint32_t>(nodes_.size());
    hello.token = 100 + node->id + 1000 * handle;
    hello.incarnation_token = "run";
    hello.timeout_us = 1'000'000;
    node->engine->OnSessionOpened(now_, kSession);
    node->engine->OnHello(now_, kSession, ++request_, hello);
    Carry();
    EXPECT_TRUE(std::holds_alternative<AnswerHello>(answers_.at(request_).body));
  }
  // A view of all nodes but `lost`. That node keeps its state and gets no messages.
  void ShowView(Epoch epoch, const TestNode* lost) {
    lost_ = lost;
    View view;
    view.epoch = epoch;
    view.leader = lost == nodes_[0].get() ? 2 : 1;
    view.settings.replicas = nodes_.size() > 1 ? 1 : 0;
    view.settings.nodes = static_cast<uint32_t>(nodes_.size());
    for (const auto& node : nodes_) {
      if (node.get() == lost) continue;
      Member member;
      member.id = node->id;
      member.name = "node-" + std::to_string(node->id);
      member.ordinal = static_cast<uint32_t>(node->id);
      view.members.push_back(member);
    }
    for (const auto& node : nodes_)
      if (node.get() != lost) node->engine->OnView(now_, view);
    Carry();
  }
  TestNode& node(NodeId id) { return *nodes_.at(id - 1); }
  TestNode* Find(NodeId id) { return id != 0 && id <= nodes_.size() ? nodes_[id - 1].get() : nullptr; }
  ShardId Id(Step step, Rank rank) { return {node(1).engine->incarnation(), step, rank}; }

  void Carry() {
    for (bool quiet = false; !quiet;) {
      quiet = true;
      for (const auto& node : nodes_) {
        const Outbox out = std::exchange(node->engine->outbox(), Outbox());
        if (node.get() == lost_) continue;
        quiet = quiet && out.empty();
        for (const StartTransfer& transfer : out.transfers) Transfer(node.get(), transfer);
        for (const StartCheck& check : out.checks) {
          checks_.push_back({node.get(), check});
          if (on_check_) on_check_(*node, check);
        }
        for (const SendMessage& message : out.messages) {
          Envelope envelope;
          ROPETEAM_CHECK(Decode(message.envelope, envelope));
          if (held_kinds_.contains(envelope.kind))
            held_.emplace_back(node->id, message);
          else
            Deliver(node->id, message);
        }
        for (const Answer& answer : out.answers) answers_.emplace(answer.request, answer);
        for (const LevelEvent& event : out.events)
          if (event.level == Level::kReplicated) replicated_.push_back(event.shard);
      }
      if (!hold_checks_) quiet = quiet && checks_.empty(), EndChecks();
    }
  }
  // From now on, holds back messages of these kinds. Delivers those held so far.
  void HoldMessages(std::set<Kind> kinds) {
    held_kinds_ = std::move(kinds);
    for (const auto& [from, message] : std::exchange(held_, {})) Deliver(from, message);
    Carry();
  }
  // Carries out the outstanding checks now.
  void EndChecks() {
    for (; !checks_.empty(); checks_.pop_front()) {
      const auto& [node, check] = checks_.front();
      const ToyChecked checked = ToyCheckAll(node->memory, check);
      node->engine->OnCheckDone(now_, check.tag, checked.bad, checked.encrypted);
    }
  }
  void PassTime(TimeUs time) {
    for (const TimeUs end = now_ + time; now_ < end;) {
      TimeUs next = end;
      for (const auto& node : nodes_) next = std::min(next, node->engine->NextTimer());
      now_ = std::min(end, std::max(now_ + 1, next));
      for (const auto& node : nodes_) {
        if (node->engine->NextTimer() > now_) continue;
        node->engine->OnTimer(now_);
        ++node->timers;
      }
      Carry();
    }
  }

  // A save without its commit, which CommitSave() does.
  SaveId BeginSave(NodeId id, Step step, const TestShard& shard) {
    Engine& engine = *node(id).engine;
    engine.OnSaveBegin(now_, kSession, ++request_, step, shard.stream.size());
    Carry();
    const auto* grant = std::get_if<AnswerGrant>(&answers_.at(request_).body);
    ROPETEAM_CHECK(grant != nullptr);
    extents_ = grant->extents;
    for (uint64_t chunk = 0; chunk < shard.crcs.size(); ++chunk)
      std::memcpy(node(id).store->chunk(ChunkAt(extents_, chunk)), shard.stream.data() + chunk * kTestChunk,
                  std::min<uint64_t>(kTestChunk, shard.stream.size() - chunk * kTestChunk));
    return grant->save;
  }
  void CommitSave(NodeId id, SaveId save, const TestShard& shard) {
    node(id).engine->OnSaveCommit(now_, kSession, ++request_,
                                  {save, shard.stream.size(), shard.manifest_offset, 1, shard.crcs});
    Carry();
    ASSERT_TRUE(std::get<AnswerStatus>(answers_.at(request_).body).status.ok());
  }
  void Save(NodeId id, Step step, const TestShard& shard) {
    CommitSave(id, BeginSave(id, step, shard), shard);
  }
  bool Replicated(const ShardId& shard) const {
    return std::find(replicated_.begin(), replicated_.end(), shard) != replicated_.end();
  }

  static constexpr SessionId kSession = 1;
  TimeUs now_ = 1'000'000;
  std::vector<std::unique_ptr<TestNode>> nodes_;
  std::vector<Extent> extents_;  // of the last save
  bool hold_checks_ = false;
  std::deque<std::pair<TestNode*, StartCheck>> checks_;
  std::function<void(TestNode& node, const StartCheck& check)> on_check_;
  // Called before the bytes land in `to`; may change them.
  std::function<void(TestNode& to, std::string* bytes)> on_wire_;
  Code get_code_ = Code::kOk;  // result of gets whose bytes have landed
  RequestId request_ = 0;
  std::map<RequestId, Answer> answers_;

  const TestNode* lost_ = nullptr;
  std::vector<std::pair<NodeId, SendMessage>> held_;  // with their senders

 private:
  void Deliver(NodeId from, const SendMessage& message) {
    if (TestNode* to = Find(message.to); to != nullptr && to != lost_)
      to->engine->OnMessage(now_, from, message.envelope);
  }
  // Whether the range lies in the chunks: a transfer may touch nothing else.
  static bool InChunks(const TestNode& node, uint64_t offset, uint64_t length) {
    return offset >= node.store->chunk_offset(0) && offset <= node.bytes && length <= node.bytes - offset;
  }
  void Transfer(TestNode* here, const StartTransfer& transfer) {
    ROPETEAM_CHECK(InChunks(*here, transfer.local_offset, transfer.length));
    TestNode* const peer = Find(transfer.peer);
    if (peer == nullptr || peer == lost_)
      return here->engine->OnTransferDone(now_, transfer.tag, Code::kLinkFailed);
    // The peer names the remote range, and a fabric refuses an invalid one.
    const uint64_t remote_offset = peer->store->chunk_offset(0) + transfer.remote_offset;
    if (!InChunks(*peer, remote_offset, transfer.length))
      return here->engine->OnTransferDone(now_, transfer.tag, Code::kLinkFailed);
    PeerAccess::Use use;
    if (!use.Begin(peer->store->peer_access(), transfer.remote_offset, transfer.length,
                   transfer.get ? PeerAccess::Kind::kRead : PeerAccess::Kind::kWrite))
      return here->engine->OnTransferDone(now_, transfer.tag, Code::kInvalidArgument);
    use.End();
    TestNode& from = transfer.get ? *peer : *here;
    TestNode& to = transfer.get ? *here : *peer;
    const uint64_t source = transfer.get ? remote_offset : transfer.local_offset;
    const uint64_t target = transfer.get ? transfer.local_offset : remote_offset;
    std::string bytes(reinterpret_cast<const char*>(from.memory + source), transfer.length);
    if (on_wire_) on_wire_(to, &bytes);
    std::memcpy(to.memory + target, bytes.data(), bytes.size());
    here->engine->OnTransferDone(now_, transfer.tag, transfer.get ? get_code_ : Code::kOk);
  }

  std::set<Kind> held_kinds_;
  std::vector<ShardId> replicated_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_ENGINE_ENGINES_FOR_TEST_H_
