// SPDX-License-Identifier: Apache-2.0
//
// The source's side of replication: gives a shard the copies it lacks. Begins with the save, before a byte is
// there; puts chunks as they become final; asks the holder to check and seal; tries another holder when one
// is gone, full or failing. The states of one copy:
//
//     reserving ──grant──> sending ──all put──> sealing ──checked──> done
//         │  └─sealed_already──────────────────────^  │
//         │                      ^────bad chunks──────┘
//         └──────────────── refused, failed, pointless: dropping ──nothing outstanding──> gone (ReplicaAbort)
//
// A chunk that is not filled yet may be put from a GPU's memory instead of the arena (AddDevice). Its
// checksum comes later, and is of the arena's bytes: should the holder find others, the chunk is put once
// more, from the arena.
//
// A chunk of the source stays allocated until every put from it has completed, also when the save is aborted
// or the holder has died: the fabric may still be reading it.

#ifndef ROPETEAM_CORE_ENGINE_REPLICATOR_H_
#define ROPETEAM_CORE_ENGINE_REPLICATOR_H_

#include <functional>
#include <map>
#include <set>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

struct Parts;

class Replicator {
 public:
  explicit Replicator(Parts* parts) : parts_(*parts) {}

  using SourceId = uint64_t;

  // A save has begun; the extents are the caller's until Sealed() or the end of Cancel().
  SourceId Begin(const ShardId& shard, uint32_t replicas, std::vector<Extent> extents);
  void Extend(SourceId source, std::vector<Extent> all_extents);
  void Ready(SourceId source, uint32_t first, const std::vector<uint32_t>& crcs);
  // Chunks that may be put from device memory until EndDevice(), Sealed() or Cancel(). False, and nothing is
  // done: one of those has been, or some of the chunks have a place in device memory already.
  bool AddDevice(SourceId source, const SaveDirectInput& chunks);
  // Starts no put from device memory any more. `settled` is called, at once or later, when none reads it.
  void EndDevice(SourceId source, std::function<void()> settled);
  // The shard is sealed in the store; a lease keeps its chunks for as long as they are sent.
  void Sealed(SourceId source);
  // Ends the source; `quiescent` is called, at once or later, when no transfer reads its chunks any more.
  void Cancel(SourceId source, std::function<void()> quiescent);

  // A sealed shard of this node's own that may lack copies: after a restart, or when a holder was lost.
  void Resume(const ShardId& shard);
  // The leader wants a copy there.
  void Order(const ShardId& shard, NodeId target);
  // Ends what has become pointless: shards that were released, and those of former lives that the leader does
  // not keep.
  void DropObsolete();

  void OnGrant(NodeId from, const ReplicaGrant& grant);
  void OnSealed(NodeId from, const ReplicaSealed& sealed);
  void OnQuery(NodeId from, const CopyQuery& query);
  void OnView();
  void OnPeerLink(NodeId peer, bool up);
  void OnTimer();
  TimeUs NextTimer() const;
  bool idle() const { return sources_.empty(); }

 private:
  enum class State : uint8_t { kReserving, kSending, kSealing, kDropping };
  struct Copy {
    CopyId id;
    NodeId target = kNoNode;
    State state = State::kReserving;
    uint64_t chunks_begin = 0;    // of the target's arena
    std::vector<Extent> extents;  // on the target
    uint64_t reserve_sent = 0;    // chunks asked for last
    std::vector<bool> put;        // chunk was put, or is being
    uint32_t cursor = 0;          // all chunks before it are put
    uint64_t arrived = 0;         // chunks put with success
    uint32_t outstanding = 0;
    bool sealed_already = false;
    bool put_failed = false;
    std::vector<uint32_t> unreported;          // arrived, the holder not told yet
    std::map<uint32_t, uint64_t> device_puts;  // chunks on their way from device memory, and their transfers
    std::set<uint32_t> from_device;            // chunks that arrived so
    uint32_t attempt = 0;
    uint32_t rounds_bad = 0;
    TimeUs next_send = 0;
  };
  struct Source {
    ShardId shard;
    uint32_t wanted = 0;  // copies on other nodes
    std::vector<Extent> extents;
    std::vector<uint32_t> crcs;
    std::vector<bool> ready;
    std::map<uint32_t, SaveDirectInput> device;  // by first chunk; no two of the same chunk
    bool device_ended = false;
    uint32_t device_puts = 0;                     // of all copies
    std::vector<std::function<void()>> settling;  // told when that is 0
    bool sealed = false;
    ShardMeta meta;
    Store::LeaseToken lease = 0;
    NodeId ordered_target = kNoNode;
    bool ending = false;
    std::function<void()> quiescent;
    TimeUs begun = 0;
    std::set<NodeId> done;
    std::map<NodeId, TimeUs> avoid_until;
    std::map<CopyId, Copy> copies;
    bool warned = false;
  };
  using SourceMap = std::map<SourceId, Source>;

  SourceId Add(Source source);
  bool AddSealed(Source* source);
  void Advance(SourceId id);  // may erase the source
  void ChooseTargets(SourceId id, Source* source);
  void AdvanceCopy(SourceId id, Source* source, Copy* copy);
  void SendChunks(SourceId id, Source* source, Copy* copy);
  void OnPut(SourceId id, CopyId copy_id, uint32_t chunk, Code code);
  void ReportArrived(const Source& source, Copy* copy);
  // The chunk's place in device memory; null: none that may be used.
  static const SaveDirectInput* FindDevice(const Source& source, uint32_t chunk);
  void CloseDevice(Source* source);
  static void TellSettled(Source* source);
  static void PutAgain(Copy* copy, uint32_t chunk);
  bool PutBadAgain(const Source& source, Copy* copy, const std::vector<uint32_t>& bad);
  void Drop(Source* source, Copy* copy, const std::string& why);
  void End(SourceId id);
  Source* FindSource(const CopyId& copy, SourceId* id);

  Parts& parts_;
  uint64_t next_source_ = 1;
  uint64_t next_copy_ = 1;
  SourceMap sources_;
  std::map<CopyId, SourceId> by_copy_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_REPLICATOR_H_
