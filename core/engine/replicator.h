// SPDX-License-Identifier: Apache-2.0
//
// The source's side of replication: makes the missing copies of a shard. It begins with the save, before any byte is
// there. It puts chunks as they become final, and asks the holder to check and seal. It chooses another holder if one
// is gone, full or failing. One attempt at one copy is a separate state machine (outgoing_copy.h); this class decides
// which copies are made, and where.
//
// A chunk that is not filled yet may be put from GPU memory instead of the arena (AddDevice). Its checksum is computed
// later, from the arena's bytes. If the holder's bytes do not match it, the chunk is put again from the arena.
//
// The fabric may read a chunk of the source until every put from it has completed or was withdrawn. So the chunk stays
// allocated until then, even if the save is aborted or the holder has died.

#ifndef ROPETEAM_CORE_ENGINE_REPLICATOR_H_
#define ROPETEAM_CORE_ENGINE_REPLICATOR_H_

#include <functional>
#include <map>
#include <set>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/outgoing_copy.h"

namespace ropeteam::engine {

struct Parts;

class Replicator {
 public:
  explicit Replicator(Parts* parts) : parts_(*parts) {}

  using SourceId = uint64_t;

  // A save has begun. The extents belong to the caller until Sealed() or the end of Cancel().
  SourceId Begin(const ShardId& shard, uint32_t replicas, std::vector<Extent> extents,
                 const EncryptionSalt& salt);
  void Extend(SourceId source, std::vector<Extent> all_extents);
  void Ready(SourceId source, uint32_t first, const std::vector<uint32_t>& crcs);
  // Adds chunks that may be put from device memory until EndDevice(), Sealed() or Cancel(). Returns false and does
  // nothing in three cases: one of these was called; some of the chunks already have a place in device memory; or the
  // job encrypts. A chunk is checked before it is encrypted, and a chunk in device memory has no checksum yet.
  bool AddDevice(SourceId source, const SaveDirectInput& chunks);
  // Starts no more puts from device memory. `settled` is called, now or later, when no put reads it.
  void EndDevice(SourceId source, std::function<void()> settled);
  // The shard is sealed in the store. A lease keeps its chunks as long as they are sent.
  void Sealed(SourceId source);
  // Ends the source. `quiescent` is called, now or later, when no transfer reads its chunks any more.
  void Cancel(SourceId source, std::function<void()> quiescent);

  // Copies a shard that may lack copies: after a restart, the loss of a holder, or a repair. Only if it was saved on this
  // node in the newest incarnation and is not marked: other copies are made by the leader's order.
  void Resume(const ShardId& shard);
  // The leader has ordered a copy on `target`.
  void Order(const ShardId& shard, NodeId target);
  // Ends sources that are no longer needed: of released shards, and of former incarnations that the leader does not
  // keep.
  void DropObsolete();

  void OnGrant(NodeId from, const ReplicaGrant& grant);
  void OnSealed(NodeId from, const ReplicaSealed& sealed);
  void OnQuery(NodeId from, const CopyQuery& query);
  void OnView();
  void OnPeerLink(NodeId peer, bool up);
  void OnTimer();
  TimeUs NextTimer() const;
  // For tests and the simulation; ROPETEAM_CHECKs.
  void CheckInvariants() const;

 private:
  class Effects;
  struct Source {
    ShardId shard;
    uint32_t wanted = 0;  // copies on other nodes
    std::vector<Extent> extents;
    std::vector<uint32_t> crcs;
    Encryption encryption;  // of the bytes here
    // Plaintext here: the encrypted chunks as they arrived at a holder.
    std::map<uint32_t, EncryptedChunk> encrypted;
    CopySource chunks;
    bool device_ended = false;
    std::vector<std::function<void()>> settling;  // callbacks for when no put reads device memory any more
    ShardMeta meta;                               // when chunks.sealed
    Store::LeaseToken lease = 0;
    NodeId ordered_target = kNoNode;
    bool ending = false;
    std::function<void()> quiescent;
    TimeUs begun = 0;
    std::set<NodeId> done;
    std::map<NodeId, TimeUs> avoid_until;
    std::map<CopyId, OutgoingCopy> copies;
    bool warned = false;
  };
  using SourceMap = std::map<SourceId, Source>;

  SourceId Add(Source source);
  bool AddSealed(Source* source);
  void Advance(SourceId id);  // may erase the source
  void ChooseTargets(SourceId id, Source* source);
  void AdvanceCopies(SourceId id, Source* source);
  uint64_t StartPut(SourceId id, const Source& source, const OutgoingCopy& copy, uint32_t chunk,
                    const SaveDirectInput* device);
  // `whole`: a whole chunk was put, before the stream's length was known.
  void OnPut(SourceId id, CopyId copy_id, uint32_t chunk, TimeUs begun, bool whole, Code code,
             const EncryptedChunk* encrypted);
  // Whether puts of the source's bytes must encrypt them.
  bool Encrypts(const Source& source) const;
  void SendArrived(const Source& source, const OutgoingCopy& copy, const std::vector<uint32_t>& chunks);
  void SendSeal(const Source& source, const OutgoingCopy& copy, uint32_t attempt);
  void CloseDevice(SourceId id, Source* source);
  static void TellSettled(Source* source);
  bool PutBadAgain(const Source& source, OutgoingCopy* copy, const std::vector<uint32_t>& bad);
  void Drop(SourceId id, Source* source, OutgoingCopy* copy, const std::string& why);
  void End(SourceId id);
  Source* FindSource(const CopyId& copy, SourceId* id);
  Source& SourceOf(SourceId id);
  static OutgoingCopy& CopyOf(Source* source, const CopyId& id);
  void Forget(Source* source, const CopyId& id);

  Parts& parts_;
  uint64_t next_source_ = 1;
  uint64_t next_copy_ = 1;
  SourceMap sources_;
  std::map<CopyId, SourceId> by_copy_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_REPLICATOR_H_
