// SPDX-License-Identifier: Apache-2.0
//
// Fetches from storage. fetcher.cc has the rest of the fetcher.

#include <utility>

#include "core/base/log.h"
#include "core/engine/fetcher.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

bool Fetcher::AskStorage(Job* job) {
  if (job->storage.state != StorageRead::State::kNotAsked || !parts_.context.view.settings.reads_storage())
    return false;
  if (job->storage.tries >= kStorageTriesMax) return false;
  if (job->storage.again_at > parts_.context.now) return true;
  job->storage.state = StorageRead::State::kAsked;
  Locate(job);
  return true;
}

void Fetcher::LoadFromStorage(Job* job) {
  Context& context = parts_.context;
  ROPETEAM_CHECK(job->storage.state == StorageRead::State::kOffered && job->outstanding == 0 &&
                 !job->locating);
  job->storage.state = StorageRead::State::kTried;
  if (job->have_meta && KeepsCiphertext(*job)) DropCiphertext(job);
  if (!job->have_meta) {
    const uint64_t chunks = ChunksFor(job->storage.offer.stream_bytes, context.store.chunk_bytes());
    if (chunks == 0 || chunks > kChunksPerShardMax) {
      job->storage.trouble = Error(Code::kCorrupt, "its manifest says %llu bytes",
                                   static_cast<unsigned long long>(job->storage.offer.stream_bytes));
      job->storage.tries = kStorageTriesMax;
      return Pump(job->id);
    }
    Result<std::vector<Extent>> extents = parts_.memory.Allocate(chunks);
    if (!extents.ok()) {
      job->failing = true;
      job->failure = extents.status();
      return Pump(job->id);
    }
    ROPETEAM_CHECK(!job->repair && job->extents.empty() && job->wanted.empty());
    job->extents = std::move(*extents);
    for (uint32_t chunk = 0; chunk < chunks; ++chunk) job->wanted.insert(chunk);
  }
  LoadChunks load;
  load.shard = job->shard;
  load.stream_bytes = job->have_meta ? job->meta.stream_bytes : job->storage.offer.stream_bytes;
  load.extents = job->extents;
  load.chunks.assign(job->wanted.begin(), job->wanted.end());
  job->busy.insert(job->wanted.begin(), job->wanted.end());
  job->wanted.clear();
  ++job->outstanding;
  const uint64_t id = job->id;
  const auto loaded = [this, id, chunks = load.chunks](const Status& status, const LoadedChunks& result) {
    OnLoaded(id, chunks, status, result);
  };
  job->storage.load = parts_.persister.Load(std::move(load), loaded, [this, id] { OnLoadStalled(id); });
}

// Discards the chunks received from holders: a copy never mixes ciphertext and plaintext. A repair goes on as a fetch,
// whose copy replaces the bad one.
void Fetcher::DropCiphertext(Job* job) {
  ROPETEAM_CHECK(job->outstanding == 0 && job->busy.empty());
  Store& store = parts_.context.store;
  if (std::exchange(job->repair, false)) {
    store.EndLease(job->lease);
    job->extents.clear();
  }
  store.Free(std::exchange(job->extents, {}));
  job->have_meta = false;
  job->wanted.clear();
  job->tried.clear();
  for (auto& [node, source] : job->sources) source.state = Source::State::kFailed;
}

// The stalled load continues. It counts if it ends before another node has the shard.
void Fetcher::OnLoadStalled(uint64_t id) {
  Job* job = Find(id);
  ROPETEAM_CHECK(job != nullptr && job->storage.load != 0 && !job->storage.load_stalled);
  LOG_WARNING("reading %s from storage has made no progress for a minute", job->shard.ToString().c_str());
  // The load may write between chunks that are already here, so there is no other place to read to.
  if (job->have_meta) return;
  ROPETEAM_CHECK(!job->locating && !job->failing);
  job->storage.load_stalled = true;
  Locate(job);
}

void Fetcher::AbandonLoad(Job* job) {
  ROPETEAM_CHECK(job->storage.load != 0 && job->outstanding == 1 && !job->have_meta && job->wanted.empty());
  parts_.persister.Abandon(std::exchange(job->storage.load, 0), std::exchange(job->extents, {}));
  job->busy.clear();
  job->outstanding = 0;
  job->storage.load_stalled = false;
  ++job->storage.tries;
  job->storage.trouble = Error(Code::kUnavailable, "reading it made no progress for a minute");
}

// Whether loaded bytes of a shard that is not here yet are those that were persisted.
bool Fetcher::AcceptLoaded(Job* job, const LoadedChunks& loaded) {
  const ShardMeta& meta = loaded.meta;
  if (meta.id != job->shard || meta.chunk_bytes != parts_.context.store.chunk_bytes() ||
      meta.stream_bytes != job->storage.offer.stream_bytes || loaded.crcs.size() != ChunkCount(job->extents))
    return false;
  if (job->storage.offer.chunk_bytes == meta.chunk_bytes &&
      ContentDigest(meta, loaded.crcs) != job->storage.offer.content)
    return false;
  job->meta = meta;
  job->meta.replicas = parts_.context.view.settings.replicas;  // a setting of this job, not stored on storage
  job->crcs = loaded.crcs;
  job->encryption = {parts_.context.NewSalt(), {}};
  job->have_meta = true;
  return true;
}

void Fetcher::OnLoaded(uint64_t id, const std::vector<uint32_t>& chunks, const Status& status,
                       const LoadedChunks& loaded) {
  Job* job = &Outstanding(id);
  Context& context = parts_.context;
  --job->outstanding;
  job->storage.load = 0;
  job->storage.load_stalled = false;
  for (const uint32_t chunk : chunks) {
    const size_t busy = job->busy.erase(chunk);
    ROPETEAM_CHECK(busy == 1);
  }
  const bool fresh = !job->have_meta;
  std::set<uint32_t> good;
  if (status.ok() && fresh && AcceptLoaded(job, loaded)) {
    good.insert(chunks.begin(), chunks.end());
  } else if (status.ok() && !fresh && loaded.crcs.size() == chunks.size()) {
    for (size_t i = 0; i < chunks.size(); ++i)
      if (loaded.crcs[i] == job->crcs[chunks[i]]) good.insert(chunks[i]);
  }
  const bool other_bytes = status.ok() && good.size() != chunks.size();
  job->storage.trouble = other_bytes ? Error(Code::kCorrupt, "other bytes than were committed") : status;
  if (!job->storage.trouble.ok()) {
    ++job->storage.tries;
    job->storage.again_at = context.now + kStorageAgainUs;
    job->storage.load_failed = context.view.members.size() > 1;
    if (!job->storage.load_failed) job->storage.state = StorageRead::State::kNotAsked;
  }
  // Only committed steps are persisted. Their chunks may be of another size than those of this job.
  if (!good.empty())
    job->committed = fresh ? ContentDigest(job->meta, job->crcs) : job->storage.offer.content;
  for (const uint32_t chunk : good) {
    context.counters.loaded_bytes += ChunkLength(job->meta.stream_bytes, context.store.chunk_bytes(), chunk);
    if (!job->repair) continue;
    if (StillHere(*job)) context.store.MarkRepaired(job->shard, chunk);
    ++context.counters.chunks_repaired;
    context.inventory_dirty = true;
  }
  context.counters_dirty = true;
  const StoredWord word = WordOf(job->storage.trouble.code());
  job->corrupt = job->corrupt || word == StoredWord::kBad;
  // The copy here may be the one that does not count. So bytes that differ from it need not be damaged.
  const bool says = !other_bytes || fresh;
  // A leader before protocol 9 takes every report for damage.
  const bool old = context.protocol < kStorageOrdersSince && word != StoredWord::kBad;
  if (says && !old && context.view.leader != kNoNode)
    context.Send(context.view.leader,
                 StoredRead{job->shard, job->storage.offer.stream_bytes, job->storage.trouble.code(),
                            job->storage.trouble.message()});
  if (fresh && !job->have_meta) {
    context.store.Free(std::exchange(job->extents, {}));
  } else {
    for (const uint32_t chunk : chunks)
      if (!good.contains(chunk)) job->wanted.insert(chunk);
  }
  Pump(id);
}

}  // namespace ropeteam::engine
