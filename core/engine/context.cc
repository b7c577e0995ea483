// SPDX-License-Identifier: Apache-2.0
#include "core/engine/context.h"

#include <algorithm>

#include "core/base/log.h"

namespace ropeteam::engine {

Result<std::vector<Extent>> Memory::Allocate(uint64_t chunks) {
  const Store& store = context_.store;
  // All or nothing: what is evicted before a refusal is lost to no purpose.
  const bool enough = chunks <= store.chunks_free() || chunks <= store.chunks_free() + evictable_chunks();
  for (;;) {
    Result<std::vector<Extent>> extents = context_.store.Allocate(chunks);
    if (extents.ok() || extents.status().code() != Code::kNoSpace || !enough || !EvictOne()) {
      if (extents.ok()) context_.counters_dirty = true;
      return extents;
    }
  }
}

Result<std::vector<Extent>> Memory::AllocateForSave(uint64_t chunks) {
  const Store& store = context_.store;
  if (context_.now < kept_until_ && refuses_replicas() && store.chunks_free() < chunks + refused_chunks_) {
    const auto number = [](uint64_t value) { return static_cast<unsigned long long>(value); };
    return Error(Code::kNoSpace,
                 "needed %llu chunks (%llu bytes), free %llu, of which %llu wait for a replica, limit %llu",
                 number(chunks), number(chunks * store.chunk_bytes()), number(store.chunks_free()),
                 number(refused_chunks_), number(store.chunks_total()));
  }
  return Allocate(chunks);
}

void Memory::OnReplicaRefused(uint64_t chunks) {
  if (!refuses_replicas()) context_.inventory_dirty = true;
  refused_until_ = context_.now + kRefusedForUs;
  refused_chunks_ = chunks;
}

bool Memory::Abandoned(const SealedShard& shard) const {
  const ShardId& id = shard.meta.id;
  return id.incarnation < context_.life.incarnation && context_.leader_heard &&
         !context_.keep.contains(StepOf(id));
}

uint64_t Memory::evictable_chunks() const {
  uint64_t chunks = 0;
  for (const auto& [id, shard] : context_.store.shards())
    if (shard->leases == 0 && (shard->role == Role::kCache || Abandoned(*shard)))
      chunks += ChunkCount(shard->extents);
  return chunks;
}

bool Memory::EvictOne() {
  const SealedShard* victim = nullptr;
  for (const auto& [id, shard] : context_.store.shards()) {
    if (shard->leases != 0) continue;
    if (shard->role == Role::kCache) {
      victim = shard.get();
      break;
    }
    if (victim == nullptr && Abandoned(*shard)) victim = shard.get();
  }
  if (victim == nullptr) return false;
  LOG_INFO("evict %s bytes %llu to make room", victim->meta.id.ToString().c_str(),
           static_cast<unsigned long long>(victim->meta.stream_bytes));
  context_.store.Remove(ShardId(victim->meta.id));
  context_.inventory_dirty = true;
  return true;
}

void Memory::Quarantine(std::vector<Extent> extents, NodeId writer) {
  if (extents.empty()) return;
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
    context_.store.Free(held.extents);
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

uint64_t Transfers::Start(Priority priority, StartTransfer transfer, Done done) {
  const uint64_t tag = transfer.tag = next_tag_++;
  waiting_[static_cast<size_t>(priority)].push_back({transfer, std::move(done)});
  Pump();
  return tag;
}

bool Transfers::Withdraw(uint64_t tag) {
  for (std::deque<Waiting>& queue : waiting_)
    if (std::erase_if(queue, [tag](const Waiting& each) { return each.transfer.tag == tag; }) != 0)
      return true;
  return false;
}

void Transfers::Pump() {
  for (size_t p = 0; p < kPriorities; ++p) {
    while (!waiting_[p].empty() && running_.size() < kOutstandingMax) {
      const bool background = static_cast<Priority>(p) == Priority::kBackground;
      if (background && running_background_ >= kBackgroundOutstandingMax) break;
      Waiting next = std::move(waiting_[p].front());
      waiting_[p].pop_front();
      running_background_ += background ? 1 : 0;
      running_.emplace(next.transfer.tag, Running{static_cast<Priority>(p), std::move(next.done)});
      context_.out.transfers.push_back(next.transfer);
    }
  }
}

void Transfers::OnDone(uint64_t tag, Code code) {
  const auto running = running_.find(tag);
  ROPETEAM_CHECK(running != running_.end());  // each completes once
  Running finished = std::move(running->second);
  running_.erase(running);
  if (finished.priority == Priority::kBackground) --running_background_;
  finished.done(code);
  Pump();
}

void Transfers::Check(std::vector<StartCheck::Range> ranges, Checked checked) {
  const uint64_t tag = next_tag_++;
  checking_.emplace(tag, std::move(checked));
  context_.out.checks.push_back({tag, std::move(ranges)});
}

void Transfers::OnCheckDone(uint64_t tag, const std::vector<uint32_t>& bad) {
  const auto checking = checking_.find(tag);
  ROPETEAM_CHECK(checking != checking_.end());
  const Checked checked = std::move(checking->second);
  checking_.erase(checking);
  checked(bad);
}

StartCheck::Range RangeOf(const Store& store, const std::vector<Extent>& extents, uint64_t stream_bytes,
                          uint32_t index, uint32_t crc) {
  return {store.chunk_offset(ChunkAt(extents, index)), ChunkLength(stream_bytes, store.chunk_bytes(), index),
          crc};
}

}  // namespace ropeteam::engine
