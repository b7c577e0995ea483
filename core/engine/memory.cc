// SPDX-License-Identifier: Apache-2.0
#include "core/engine/memory.h"

#include <algorithm>

#include "core/base/log.h"

namespace ropeteam::engine {

Result<std::vector<Extent>> Memory::Allocate(uint64_t chunks) {
  const Store& store = context_.store;
  // All or nothing: a refused allocation evicts nothing.
  const bool enough = chunks <= store.chunks_free() || chunks <= store.chunks_free() + evictable_chunks();
  for (bool evicted = false;; evicted = true) {
    Result<std::vector<Extent>> extents = context_.store.Allocate(chunks);
    if (extents.ok() || extents.status().code() != Code::kNoSpace || !enough || !EvictOne()) {
      ROPETEAM_CHECK(extents.ok() || !evicted);
      if (!extents.ok()) return extents;
      ROPETEAM_CHECK(ChunkCount(*extents) == std::max<uint64_t>(chunks, 1));
      context_.counters_dirty = true;
      return extents;
    }
  }
}

Result<std::vector<Extent>> Memory::AllocateForSave(uint64_t chunks) {
  const Store& store = context_.store;
  if (context_.now < kept_until_ && refuses_replicas() && store.chunks_free() < chunks + refused_chunks_) {
    const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
    return Error(Code::kNoSpace,
                 "needed %llu chunks (%llu bytes), free %llu, of which %llu wait for a replica, limit %llu "
                 "(by --memory)",
                 number(chunks), number(chunks * store.chunk_bytes()), number(store.chunks_free()),
                 number(refused_chunks_), number(store.chunks_total()));
  }
  return Allocate(chunks);
}

void Memory::OnReplicaRefused(uint64_t chunks) {
  if (!refuses_replicas()) context_.inventory_dirty = true;
  ROPETEAM_CHECK(chunks != 0);
  refused_until_ = context_.now + kRefusedForUs;
  refused_chunks_ = chunks;
}

bool Memory::Evictable(const SealedShard& shard) const {
  return shard.leases == 0 &&
         FateOf(shard.role, StepOf(shard.meta.id), context_.announced) != CopyFate::kStays;
}

uint64_t Memory::evictable_chunks() const {
  uint64_t chunks = 0;
  for (const auto& [id, shard] : context_.store.shards())
    if (Evictable(*shard)) chunks += ChunkCount(shard->extents);
  return chunks;
}

bool Memory::EvictOne() {
  const SealedShard* victim = nullptr;
  for (const auto& [id, shard] : context_.store.shards()) {
    if (!Evictable(*shard)) continue;
    if (victim == nullptr) victim = shard.get();
    if (Counts(shard->role)) continue;
    victim = shard.get();  // caches go first
    break;
  }
  if (victim == nullptr) return false;
  LOG_INFO("evict %s bytes %llu to make room", victim->meta.id.ToString().c_str(),
           static_cast<unsigned long long>(victim->meta.stream_bytes));
  ROPETEAM_CHECK(Evictable(*victim));
  const uint64_t free_after = context_.store.chunks_free() + ChunkCount(victim->extents);
  context_.store.Remove(ShardId(victim->meta.id));
  ROPETEAM_CHECK(context_.store.chunks_free() == free_after);  // it had no reader
  context_.inventory_dirty = true;
  return true;
}

void Memory::Quarantine(std::vector<Extent> extents, NodeId writer) {
  if (extents.empty()) return;
  ROPETEAM_CHECK(writer != kNoNode && writer != context_.config.self);
  quarantine_.push_back({std::move(extents), writer, context_.now + context_.config.quarantine_us});
}

void Memory::OnPeerFenced(NodeId writer) {
  for (Held& held : quarantine_)
    if (held.writer == writer) held.until = context_.now;
  OnTimer();
}

void Memory::OnTimer() {
  if (refuses_replicas() && refused_until_ <= context_.now) {
    refused_until_ = 0;
    context_.inventory_dirty = true;
  }
  std::erase_if(quarantine_, [this](const Held& held) {
    if (held.until > context_.now) return false;
    const uint64_t free_after = context_.store.chunks_free() + ChunkCount(held.extents);
    context_.store.Free(held.extents);
    ROPETEAM_CHECK(context_.store.chunks_free() == free_after);
    return true;
  });
}

TimeUs Memory::NextTimer() const {
  TimeUs due = refuses_replicas() ? refused_until_ : kNever;
  for (const Held& held : quarantine_) due = std::min(due, held.until);
  return due;
}

uint64_t Memory::quarantined_chunks() const {
  uint64_t chunks = 0;
  for (const Held& held : quarantine_) chunks += ChunkCount(held.extents);
  return chunks;
}

}  // namespace ropeteam::engine
