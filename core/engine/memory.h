// SPDX-License-Identifier: Apache-2.0
//
// Allocates chunks, and evicts copies where the rules allow it. Quarantines chunks that a departed node may still write
// to.

#ifndef ROPETEAM_CORE_ENGINE_MEMORY_H_
#define ROPETEAM_CORE_ENGINE_MEMORY_H_

#include <cstdint>
#include <vector>

#include "core/engine/context.h"

namespace ropeteam::engine {

class Memory {
 public:
  explicit Memory(Context* context) : context_(*context) {}

  // Store::Allocate(). If needed and sufficient, it evicts first: caches without readers, then steps that the leader
  // has announced as evictable (copy_rules.h). A refusal evicts nothing.
  Result<std::vector<Extent>> Allocate(uint64_t chunks);
  // For a new save: it does not use memory reserved for replicas.
  Result<std::vector<Extent>> AllocateForSave(uint64_t chunks);
  // A replica of `chunks` chunks was refused because memory is full. It belongs to a step of this incarnation, and its
  // source will ask again.
  void OnReplicaRefused(uint64_t chunks);
  bool refuses_replicas() const { return refused_until_ != 0; }
  // Steps that can never commit were released. If replicas are waiting, the freed memory is reserved for them for a
  // while.
  void KeepForReplicas() {
    if (refuses_replicas()) kept_until_ = context_.now + kKeptForReplicasUs;
  }
  // Quarantines chunks that the departed `writer` may still write to.
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
  bool EvictOne();
  bool Evictable(const SealedShard& shard) const;
  uint64_t evictable_chunks() const;
  Context& context_;
  std::vector<Held> quarantine_;
  TimeUs refused_until_ = 0;
  uint64_t refused_chunks_ = 0;
  TimeUs kept_until_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_MEMORY_H_
