// SPDX-License-Identifier: Apache-2.0
//
// The holder's side of replication. It accepts copies of other nodes' shards, and lets others read the shards sealed
// here. A copy gets chunks, is filled by the source's puts, is checked here chunk by chunk, and is sealed. It counts
// only after the seal. States:
//
//     granted ──seal──> checking ──all match──> sealed
//        │                 └──some do not──> granted (the source puts those again)
//        └── abort: freed;  the source left the view: quarantined, then freed

#ifndef ROPETEAM_CORE_ENGINE_HOLDER_H_
#define ROPETEAM_CORE_ENGINE_HOLDER_H_

#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

struct Parts;

class Holder {
 public:
  explicit Holder(Parts* parts) : parts_(*parts) {}

  void OnReserve(NodeId from, const ReplicaReserve& reserve);
  void OnArrived(NodeId from, const ReplicaArrived& arrived);
  // `encryption`: of the ciphertext that was put; empty if it was plaintext.
  void OnSeal(NodeId from, const ReplicaSeal& seal, const Encryption& encryption);
  void OnAbort(NodeId from, const ReplicaAbort& abort);

  void OnFetchOpen(NodeId from, const FetchOpen& open);
  void OnEncryptCopy(NodeId from, const EncryptCopy& encrypt);
  void OnFetchClose(NodeId from, const FetchClose& close);
  // A node has read bad bytes here: checks those chunks and repairs them.
  void OnBadCopy(NodeId from, const BadCopy& bad);
  void OnVerifyOrder(NodeId from, const VerifyOrder& order);

  void OnView();
  void OnTimer();
  TimeUs NextTimer() const;
  uint64_t granted_chunks() const;

 private:
  enum class Chunk : uint8_t { kUnknown, kChecking, kGood };
  struct Incoming {
    CopyId id;
    // A delayed reservation may create the copy again after its abort. Checks of the earlier copy do not count for the
    // new one.
    uint64_t serial = 0;
    ShardId shard;
    std::vector<Extent> extents;
    std::vector<Chunk> chunks;
    std::vector<uint32_t> checked_crcs;  // the checksums that kChecking and kGood refer to
    bool sealing = false;
    uint32_t attempt = 0;
    bool attempt_checked = false;
    ShardMeta meta;
    std::vector<uint32_t> crcs;
    Encryption encryption;
    bool committed = false;  // as in the seal
    TimeUs heard = 0;
  };
  Incoming* Find(NodeId from, const CopyId& id);
  void OnChecked(const CopyId& id, uint64_t serial, const std::vector<uint32_t>& chunks, TimeUs begun,
                 const std::vector<uint32_t>& bad);
  void Release(Incoming* incoming, bool quarantine);  // frees or quarantines its chunks, and erases it
  static void CheckIncoming(const Incoming& incoming);
  void StartChecks(Incoming* incoming, const std::vector<uint32_t>& chunks, const std::vector<uint32_t>& crcs,
                   uint64_t stream_bytes);
  void CheckAttempt(Incoming* incoming);  // may erase it
  void AnswerUnknownSeal(NodeId from, const ReplicaSeal& seal, const Encryption& encryption);
  // Acknowledges the sealed shard as a replica. It counts from now on, even if it was fetched as a cache.
  void Count(const ShardId& id, bool committed);

  Parts& parts_;
  std::map<CopyId, Incoming> incoming_;
  // Orders being carried out: the node that asked, and its number.
  std::set<std::pair<NodeId, uint64_t>> verifying_;
  uint64_t next_serial_ = 1;
  struct Reading {
    Store::LeaseToken lease = 0;
    TimeUs heard = 0;
  };
  std::map<std::pair<NodeId, uint64_t>, Reading> reading_;  // by fetcher and its fetch
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_HOLDER_H_
