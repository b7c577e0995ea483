// SPDX-License-Identifier: Apache-2.0
#include "core/engine/persister.h"

#include <utility>

#include "core/base/check.h"
#include "core/base/log.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

void Persister::OnOrder(NodeId from, const PersistOrder& order) {
  Context& context = parts_.context;
  if (from != context.view.leader) return;
  const Key key{order.shard, order.phase};
  const auto known = jobs_.find(key);
  if (known == jobs_.end() || (!known->second.running && (known->second.order.taken != order.taken ||
                                                          known->second.order.attempt != order.attempt)))
    return Begin(order);
  if (known->second.running && !known->second.stalled) return;
  context.Send(from, known->second.result);
  // The next order is a new attempt.
  if (!known->second.running && known->second.result.code != Code::kOk) jobs_.erase(known);
}

void Persister::OnStalled(const Key& key) {
  Context& context = parts_.context;
  const auto found = jobs_.find(key);
  ROPETEAM_CHECK(found != jobs_.end() && found->second.running);
  Job& job = found->second;
  if (job.stalled) return;
  job.stalled = true;
  job.result.shard = key.first;
  job.result.phase = key.second;
  job.result.code = Code::kUnavailable;
  job.result.message = "writing to storage has made no progress for a minute";
  LOG_WARNING("%s: %s, another node is to write it", key.first.ToString().c_str(),
              job.result.message.c_str());
  if (context.view.leader != kNoNode) context.Send(context.view.leader, job.result);
}

void Persister::Begin(const PersistOrder& order) {
  Context& context = parts_.context;
  const Key key{order.shard, order.phase};
  jobs_[key] = {order, true, false, {}};
  const SealedShard* sealed = context.store.Find(key.first);
  if (sealed == nullptr || !sealed->encrypted()) return Write(key);
  // Storage gets plaintext, like every reader.
  parts_.converter.Convert(key.first, kPlaintext, [this, key](const Status& status) {
    if (status.ok()) return Write(key);
    Refuse(key, status.code(), status.message());
  });
}

void Persister::Refuse(const Key& key, Code code, const std::string& why) {
  Context& context = parts_.context;
  jobs_.erase(key);
  PersistResult result;
  result.shard = key.first;
  result.phase = key.second;
  result.code = code;
  result.message = why;
  if (context.view.leader != kNoNode) context.Send(context.view.leader, result);
}

void Persister::Write(const Key& key) {
  Context& context = parts_.context;
  const ShardId& id = key.first;
  const SealedShard* sealed = context.store.Find(id);
  if (sealed == nullptr) return Refuse(key, Code::kNotFound, id.ToString() + " is not here");
  if (!sealed->bad.empty()) return Refuse(key, Code::kCorrupt, id.ToString() + " has bad chunks here");
  Result<Store::LeaseToken> lease = context.store.Lease(id);
  ROPETEAM_CHECK(lease.ok());
  NameFiles shard{sealed->meta, sealed->extents, sealed->crcs};
  auto done = [this, key, token = *lease](const Status& status, const StorageDone& result) {
    OnDone(key, token, status, result);
  };
  const PersistOrder& order = jobs_.at(key).order;
  StorageWork work = key.second == PersistOrder::Phase::kName
                         ? StorageWork(std::move(shard))
                         : StorageWork(WriteShard{std::move(shard), order.taken, order.proof});
  parts_.storage.Start(std::move(work), std::move(done), [this, key] { OnStalled(key); });
}

void Persister::OnDone(const Key& key, Store::LeaseToken lease, const Status& status,
                       const StorageDone& done) {
  Context& context = parts_.context;
  const auto found = jobs_.find(key);
  ROPETEAM_CHECK(found != jobs_.end() && found->second.running);
  Job& job = found->second;
  job.running = false;
  PersistResult& result = job.result;
  result.shard = key.first;
  result.phase = key.second;
  result.code = status.code();
  result.message = status.message();
  if (status.ok() && key.second == PersistOrder::Phase::kName) {
    result.names = std::get<FileNames>(done.result).names;
  } else if (status.ok()) {
    result.stored = std::get<StoredRank>(done.result);
    for (const StoredFile& file : result.stored.files) context.counters.persisted_bytes += file.bytes;
    context.counters_dirty = true;
  }
  if (!done.bad.empty()) OnBadChunks(key.first, lease, done.bad);
  context.store.EndLease(lease);
  if (context.view.leader != kNoNode) context.Send(context.view.leader, result);
  // A failure is not recorded: a repeated order requests another attempt. If this message is lost, the order is
  // repeated anyway.
  if (!status.ok()) jobs_.erase(found);
}

// Chunks were read from memory to be written to storage, and their bytes differ from what was saved.
void Persister::OnBadChunks(const ShardId& shard, Store::LeaseToken lease, const std::vector<uint32_t>& bad) {
  Context& context = parts_.context;
  if (context.store.Find(shard) != context.store.Leased(lease)) return;
  LOG_WARNING("%zu chunks of %s are bad here, found when it was persisted", bad.size(),
              shard.ToString().c_str());
  context.counters.chunks_bad += bad.size();
  parts_.fetcher.Repair(shard, bad, [](const Status&) {});
}

void Persister::OnLeaderState(const std::set<StepId>& persisting) {
  std::erase_if(jobs_, [&](const auto& job) {
    return !job.second.running && !persisting.contains(StepOf(job.first.first));
  });
}

uint64_t Persister::Load(LoadChunks load, Loaded loaded, std::function<void()> stalled) {
  const uint64_t number = next_load_++;
  loading_.emplace(number, load.shard);
  parts_.context.inventory_dirty = true;
  const auto done = [this, number, loaded = std::move(loaded)](const Status& status,
                                                               const StorageDone& result) {
    loading_.erase(number);
    parts_.context.inventory_dirty = true;
    const auto* chunks = std::get_if<LoadedChunks>(&result.result);
    ROPETEAM_CHECK(!status.ok() || chunks != nullptr);
    if (const auto abandoned = abandoned_.find(number); abandoned != abandoned_.end()) {
      parts_.context.store.Free(abandoned->second);
      abandoned_.erase(abandoned);
      return;
    }
    loaded(status, status.ok() ? *chunks : LoadedChunks());
  };
  parts_.storage.Start(std::move(load), done, [this, number, stalled = std::move(stalled)] {
    if (loading_.erase(number) == 0) return;
    parts_.context.inventory_dirty = true;
    stalled();
  });
  return number;
}

void Persister::Abandon(uint64_t load, std::vector<Extent> extents) {
  const bool fresh = abandoned_.emplace(load, std::move(extents)).second;
  ROPETEAM_CHECK(fresh);
}

void Persister::OnCheck(NodeId from, const CheckStored& check) {
  Context& context = parts_.context;
  const ShardId& shard = check.shard;
  if (from != context.view.leader || checking_.contains(shard)) return;
  const uint64_t chunks = ChunksFor(check.stream_bytes, context.store.chunk_bytes());
  const bool possible = chunks != 0 && chunks <= kChunksPerShardMax;
  Result<std::vector<Extent>> extents =
      possible ? parts_.memory.Allocate(chunks)
               : Result<std::vector<Extent>>(Error(Code::kInvalidArgument, "%s of %llu bytes",
                                                   shard.ToString().c_str(),
                                                   static_cast<unsigned long long>(check.stream_bytes)));
  if (!extents.ok())
    return context.Send(from,
                        StoredChecked{check.shard, extents.status().code(), extents.status().message()});
  checking_[shard] = *extents;
  LoadChunks load;
  load.shard = shard;
  load.stream_bytes = check.stream_bytes;
  load.extents = *extents;
  for (uint32_t chunk = 0; chunk < chunks; ++chunk) load.chunks.push_back(chunk);
  parts_.storage.Start(std::move(load), [this, shard](const Status& status, const StorageDone&) {
    Context& now = parts_.context;
    now.store.Free(checking_.at(shard));
    checking_.erase(shard);
    if (now.view.leader != kNoNode)
      now.Send(now.view.leader, StoredChecked{shard, status.code(), status.message()});
  });
}

uint64_t Persister::allocated_chunks() const {
  uint64_t chunks = 0;
  for (const auto& [shard, extents] : checking_) chunks += ChunkCount(extents);
  for (const auto& [load, extents] : abandoned_) chunks += ChunkCount(extents);
  return chunks;
}

std::vector<ShardId> Persister::loading() const {
  std::set<ShardId> shards;
  for (const auto& [number, shard] : loading_) shards.insert(shard);
  std::vector<ShardId> keys;
  for (const ShardId& shard : shards) keys.push_back({shard});
  return keys;
}

}  // namespace ropeteam::engine
