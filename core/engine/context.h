// SPDX-License-Identifier: Apache-2.0
//
// What the parts of one engine share: the store, the outbox, the time of the input being handled, the view,
// and what the leader announced last. Parts are in files of their own (replicator, holder, fetcher, sessions,
// asker, leader) and reach each other through Parts (parts.h). All of it runs on the engine's one thread.

#ifndef ROPETEAM_CORE_ENGINE_CONTEXT_H_
#define ROPETEAM_CORE_ENGINE_CONTEXT_H_

#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/engine/engine.h"
#include "core/engine/messages.h"

namespace ropeteam::engine {

// A message that is not answered is repeated after so long. A message takes well under a millisecond between
// two hosts and the leader a few to judge a thousand inventories; ten times that, and a lost message is still
// not felt.
inline constexpr TimeUs kRepeatUs = 100'000;
inline constexpr TimeUs kNever = UINT64_MAX;

class Context {
 public:
  Context(const EngineConfig& engine_config, Store* engine_store)
      : config(engine_config), store(*engine_store) {}

  const EngineConfig config;
  Store& store;
  Outbox out;
  TimeUs now = 0;
  View view;
  JobSettings settings;                       // of the view
  TimeUs lease_until = kNever;                // membership's lease
  std::map<NodeId, std::string> unreachable;  // members that the data path has lost, with the reason
  NodeCounters counters;
  Life life;  // as the leader announced or granted it last
  // As the leader announced it last. It is acted on only while `leader_heard`: a leader of this epoch has
  // said so, knowing of this life.
  std::set<StepId> keep;
  std::set<StepId> dead;  // never to be complete
  StepId release_before;  // older shards that are not kept are released
  bool leader_heard = false;
  bool inventory_dirty = false;  // something the leader should know has changed
  bool counters_dirty = false;   // something it may learn with delay

  // To oneself too: delivered after the input that is being handled.
  template <typename Message>
  void Send(NodeId to, const Message& message) {
    SendEncoded(to, Message::kKind, Encode(message));
  }
  void SendEncoded(NodeId to, Kind kind, std::string payload) {
    Envelope envelope{view.epoch, config.self, to, kind, std::move(payload)};
    if (to == config.self) {
      to_self.push_back(std::move(envelope));
    } else if (view.Contains(to)) {
      out.messages.push_back({to, Encode(envelope)});
    }  // who is not in the view could not answer; whatever waits for the answer looks at the view
  }
  std::deque<Envelope> to_self;

  std::string NameOf(NodeId node) const {
    const Member* member = view.Find(node);
    return member != nullptr ? member->name : "a node that has left";
  }
};

// Chunks for whoever needs them, and those that must not be used yet.
class Memory {
 public:
  explicit Memory(Context* context) : context_(*context) {}

  // Store::Allocate(), after evicting, where that is needed and enough: cached shards nobody reads, then
  // shards of former lives that the leader does not keep. A refusal evicts nothing.
  Result<std::vector<Extent>> Allocate(uint64_t chunks);
  // For a new save: room that was made for replicas is left to them.
  Result<std::vector<Extent>> AllocateForSave(uint64_t chunks);
  // A replica of a step of this life, of so many chunks, was refused for want of memory. Its source asks
  // again.
  void OnReplicaRefused(uint64_t chunks);
  bool refuses_replicas() const { return refused_until_ != 0; }
  // Steps were given up: if replicas are waiting, what has become free is theirs for a while.
  void KeepForReplicas() {
    if (refuses_replicas()) kept_until_ = context_.now + kKeptForReplicasUs;
  }
  // Chunks that the departed `writer` may still be writing.
  void Quarantine(std::vector<Extent> extents, NodeId writer);
  void OnPeerFenced(NodeId writer);
  void OnTimer();
  TimeUs NextTimer() const;
  uint64_t quarantined_chunks() const;

 private:
  struct Held {
    std::vector<Extent> extents;
    NodeId writer = kNoNode;
    TimeUs until = 0;
  };
  // A source that was refused asks again after half a second (Replicator); twice that, and it does not.
  static constexpr TimeUs kRefusedForUs = 1'000'000;
  static constexpr TimeUs kKeptForReplicasUs = 1'000'000;  // likewise
  bool EvictOne();
  bool Abandoned(const SealedShard& shard) const;
  uint64_t evictable_chunks() const;
  Context& context_;
  std::vector<Held> quarantine_;
  TimeUs refused_until_ = 0;
  uint64_t refused_chunks_ = 0;
  TimeUs kept_until_ = 0;
};

// The one place where transfers and checks leave the engine, so that they can be held back: what is wanted
// first goes first, and no more is outstanding than keeps a link busy.
class Transfers {
 public:
  explicit Transfers(Context* context) : context_(*context) {}

  enum class Priority : uint8_t { kFetch = 0, kSave = 1, kBackground = 2 };
  static constexpr size_t kPriorities = 3;
  // 32 chunks of 4 MiB are 128 MiB: 2.5 ms of a 400 Gbit/s link, more than a round trip and a completion's
  // handling.
  static constexpr size_t kOutstandingMax = 32;
  // Restoring redundancy may take its time; saves and fetches should not notice it.
  static constexpr size_t kBackgroundOutstandingMax = 4;

  using Done = std::function<void(Code)>;
  // Returns the transfer's tag, which is filled in here.
  uint64_t Start(Priority priority, StartTransfer transfer, Done done);
  // Takes back a transfer that has not left the engine yet: true, and its `done` is never called.
  bool Withdraw(uint64_t tag);
  void OnDone(uint64_t tag, Code code);

  using Checked = std::function<void(const std::vector<uint32_t>& bad)>;
  void Check(std::vector<StartCheck::Range> ranges, Checked checked);
  void OnCheckDone(uint64_t tag, const std::vector<uint32_t>& bad);

 private:
  struct Waiting {
    StartTransfer transfer;
    Done done;
  };
  struct Running {
    Priority priority;
    Done done;
  };
  void Pump();
  Context& context_;
  uint64_t next_tag_ = 1;
  std::deque<Waiting> waiting_[kPriorities];
  size_t running_background_ = 0;
  std::map<uint64_t, Running> running_;
  std::map<uint64_t, Checked> checking_;
};

// The range of the arena's memory in which the stream's chunk `index` lies.
StartCheck::Range RangeOf(const Store& store, const std::vector<Extent>& extents, uint64_t stream_bytes,
                          uint32_t index, uint32_t crc);

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_CONTEXT_H_
