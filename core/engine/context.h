// SPDX-License-Identifier: Apache-2.0
//
// The state that the parts of one engine share: the store, the outbox, the time of the current input, the view, and the
// leader's last announcement. Each part has its own files and uses the others through Parts (parts.h). All of it runs
// on the engine's one thread.

#ifndef ROPETEAM_CORE_ENGINE_CONTEXT_H_
#define ROPETEAM_CORE_ENGINE_CONTEXT_H_

#include <algorithm>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>

#include "core/base/bytes.h"
#include "core/engine/copy_rules.h"
#include "core/engine/engine.h"
#include "core/engine/limits.h"
#include "core/engine/messages.h"
#include "core/engine/metrics.h"
#include "core/engine/placement.h"
#include "core/engine/trace.h"

namespace ropeteam::engine {

// A member that this node does not reach: links.h.
struct LostLink {
  TimeUs since = 0;
  std::string reason;
  bool data = false;     // the data path has lost it
  bool control = false;  // it does not answer
};

class Context {
 public:
  Context(const EngineConfig& engine_config, Store* engine_store)
      : config(engine_config), store(*engine_store) {}

  const EngineConfig config;
  Store& store;
  Outbox out;
  TimeUs now = 0;
  View view;
  uint32_t protocol = kProtocolVersion;  // of the view: the newest version that all members speak
  TimeUs settle_until = 0;               // until then a former leader may still act: View::settle_us
  TimeUs lease_until = 0;                // membership's lease; 0: no lease
  std::map<NodeId, LostLink> unreachable;
  std::map<NodeId, TimeUs>
      asked;  // members that have answered nothing since this time, when a request was sent
  TimeUs asked_look_at = kNever;  // when links.h looks at them next, if there are any
  NodeCounters counters;
  LocalCounters local;
  Trace trace;
  IncarnationState incarnation;  // as the leader announced or granted it last
  Announcement announced;
  std::vector<RestoreNote> restores;  // as the leader announced them last
  RankPolicy policy;          // the leader's last announcement, merged with what was known before (policy.h)
  StepId stored_with_others;  // the newest step on storage that a leader of several nodes has announced
  bool had_others = false;    // this instance was in a view with others
  Epoch joined = 0;           // of the first view that had this instance
  bool leaving = false;       // this node is drained: drainer.h
  bool inventory_dirty = false;  // the inventory for the leader has changed
  bool counters_dirty = false;   // the node's counters have changed; they may be reported late

  // The view's members by their ids, and which nodes hold the copies of which node's shards.
  Placement placement;
  void SetView(const View& next) {
    view = next;
    protocol = std::min(view.protocol(), config.protocol);
    placement = Placement(view);
    positions_.clear();
    for (size_t i = 0; i < view.members.size(); ++i) positions_.emplace(view.members[i].id, i);
  }
  static constexpr size_t kNowhere = SIZE_MAX;
  // The index in view.members, or kNowhere.
  size_t PositionOf(NodeId node) const {
    const auto at = positions_.find(node);
    return at == positions_.end() ? kNowhere : at->second;
  }
  const Member* Find(NodeId node) const {
    const size_t at = PositionOf(node);
    return at == kNowhere ? nullptr : &view.members[at];
  }
  bool Contains(NodeId node) const { return positions_.contains(node); }

  // Whether this node may take actions that others rely on: start puts, acknowledge copies, follow a leader or lead.
  bool has_lease() const { return now < lease_until; }

  // A message to this node itself is delivered after the current input.
  template <typename Message>
  void Send(NodeId to, const Message& message) {
    SendEncoded(to, Message::kKind, Encode(message, protocol));
  }
  void SendEncoded(NodeId to, Kind kind, std::string payload) {
    Envelope envelope{view.epoch, config.self, to, kind, std::move(payload)};
    if (to == config.self) {
      to_self.push_back(std::move(envelope));
    } else if (Contains(to)) {
      if (IsRequest(kind)) NoteAsked(to);
      out.messages.push_back({to, Encode(envelope)});
    }  // a node outside the view could not answer: callers check the view themselves
  }
  std::deque<Envelope> to_self;
  void NoteAsked(NodeId to) {
    if (asked.empty()) asked_look_at = now + kAskAgainUs;
    asked.try_emplace(to, now);
  }

  // Records an event that ends now and began at `begun`, or happens now (0).
  void Note(TraceEvent event, TimeUs begun = 0) {
    event.at = begun == 0 ? now : begun;
    event.duration_us = static_cast<uint32_t>(std::min<TimeUs>(now - event.at, UINT32_MAX));
    trace.Add(event);
  }

  // A copy that is encrypted with a key that this node lacks is none: it is neither counted nor read, sent or repaired.
  // It keeps its mark, and counts again when a daemon has the key.
  bool HasKey(KeyId key) const {
    return key == kPlaintext || std::find(config.keys.begin(), config.keys.end(), key) != config.keys.end();
  }
  bool Readable(const SealedShard& shard) const { return HasKey(shard.encryption.key); }
  std::string KeyAbsent(KeyId key) const {
    return "key " + KeyName(key) + " of this copy is not among the keys of " + config.node;
  }
  // Store::Seal(), in place of a copy of the same shard that is not readable.
  Status Seal(const ShardMeta& meta, Role role, const std::vector<Extent>& extents,
              const std::vector<uint32_t>& crcs, const Encryption& encryption) {
    const SealedShard* here = store.Find(meta.id);
    if (here == nullptr || Readable(*here) || here->meta != meta ||
        here->content != ContentDigest(meta, PlainCrcs(encryption, crcs)))
      return store.Seal(meta, role, extents, crcs, encryption);
    const bool promoted = Counts(role) && !Counts(here->role);
    store.Replace(meta.id, extents, crcs, encryption);
    if (promoted) store.SetRole(meta.id, role);
    return OkStatus();
  }

  // The encryption of a shard that has not been on another node yet; empty if the job does not encrypt.
  EncryptionSalt NewSalt() {
    EncryptionSalt salt = config.salt;
    salt.count = config.encrypts() ? ++salts_ : 0;
    return config.encrypts() ? salt : EncryptionSalt();
  }

  // Counts chunks that went to a member or came from it.
  void CountTraffic(NodeId node, Flow PeerTraffic::*flow, uint64_t bytes, uint64_t chunks) {
    const Member* member = Find(node);
    if (member == nullptr) return;
    PeerTraffic& peer = local.peers.try_emplace(node, PeerTraffic{.name = member->name}).first->second;
    (peer.*flow).bytes += bytes;
    (peer.*flow).chunks += chunks;
  }

  std::string NameOf(NodeId node) const {
    const Member* member = Find(node);
    return member != nullptr ? member->name : "a node that has left";
  }

 private:
  std::unordered_map<NodeId, size_t> positions_;
  uint64_t salts_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_CONTEXT_H_
