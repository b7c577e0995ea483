// SPDX-License-Identifier: Apache-2.0
#include "core/engine/converter.h"

#include <utility>

#include "core/base/log.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

void Converter::Start(const ShardId& shard, KeyId key, bool repaired, Done done) {
  Store& store = parts_.context.store;
  const auto running = jobs_.find(shard);
  if (running != jobs_.end() && running->second.key == key)
    return running->second.waiters.push_back(std::move(done));
  if (running != jobs_.end())  // a conversion to another key runs: start this one after it
    return running->second.waiters.push_back(
        [this, shard, key, done = std::move(done)](const Status&) { Start(shard, key, false, done); });
  const SealedShard* here = store.Find(shard);
  if (here == nullptr) return done(Error(Code::kNotFound, "%s is not here", shard.ToString().c_str()));
  if (!parts_.context.Readable(*here))
    return done(Error(Code::kUnavailable, "%s: %s", shard.ToString().c_str(),
                      parts_.context.KeyAbsent(here->encryption.key).c_str()));
  if (here->encryption.key == key) return done(OkStatus());
  if (!here->bad.empty())
    return parts_.fetcher.Repair(shard, {}, [this, shard, key, done = std::move(done)](const Status& status) {
      if (!status.ok()) return done(status);
      Start(shard, key, true, done);
    });
  // Lease the copy before memory is allocated, so that the allocation does not evict it.
  const Result<Store::LeaseToken> lease = store.Lease(shard);
  ROPETEAM_CHECK(lease.ok());
  Result<std::vector<Extent>> extents = parts_.memory.Allocate(here->crcs.size());
  if (!extents.ok()) {
    store.EndLease(*lease);
    return done(extents.status());
  }
  std::vector<StartCheck::Range> ranges;
  const std::vector<uint32_t> plain = PlainCrcs(here->encryption, here->crcs);
  for (uint32_t chunk = 0; chunk < plain.size(); ++chunk) {
    StartCheck::Range range = RangeOf(store, here->extents, here->meta.stream_bytes, chunk, plain[chunk]);
    range.cipher = ChunkCipher{here->encryption.key,
                               key,
                               store.chunk_offset(ChunkAt(*extents, chunk)),
                               shard,
                               chunk,
                               here->encryption.salt,
                               here->encrypted() ? here->encryption.tags[chunk] : ChunkTag()};
    ranges.push_back(range);
  }
  Job job{key, repaired, *lease, std::move(*extents), {}};
  job.waiters.push_back(std::move(done));
  jobs_.emplace(shard, std::move(job));
  parts_.transfers.Encrypt(std::move(ranges), [this, shard](const std::vector<uint32_t>& bad,
                                                            const std::vector<EncryptedChunk>& encrypted) {
    OnDone(shard, bad, encrypted);
  });
}

void Converter::OnDone(const ShardId& shard, const std::vector<uint32_t>& bad,
                       const std::vector<EncryptedChunk>& encrypted) {
  Store& store = parts_.context.store;
  const auto found = jobs_.find(shard);
  ROPETEAM_CHECK(found != jobs_.end());
  const Job job = std::move(found->second);
  jobs_.erase(found);
  const SealedShard* leased = store.Leased(job.lease);
  ROPETEAM_CHECK(leased != nullptr && leased->encryption.key != job.key);
  const bool here = store.Find(shard) == leased;
  Status status = OkStatus();
  if (here && bad.empty()) {
    std::vector<uint32_t> crcs = PlainCrcs(leased->encryption, leased->crcs);
    Encryption encryption{leased->encryption.salt, {}, job.key};
    for (size_t chunk = 0; job.key != kPlaintext && chunk < encrypted.size(); ++chunk) {
      crcs[chunk] = encrypted[chunk].crc;
      encryption.tags.push_back(encrypted[chunk].tag);
    }
    store.Replace(shard, job.extents, std::move(crcs), std::move(encryption));
    parts_.context.inventory_dirty = true;
    LOG_DEBUG("%s is %s here from now on", shard.ToString().c_str(),
              job.key == kPlaintext ? "plaintext" : ("encrypted with key " + KeyName(job.key)).c_str());
  } else {
    store.Free(job.extents);
    status = here ? Error(Code::kCorrupt, "chunk %u of %s %s", bad.front(), shard.ToString().c_str(),
                          leased->encrypted() ? "fails authentication: it was altered since it was encrypted"
                                              : "does not match its checksum")
                  : Error(Code::kNotFound, "%s was released here", shard.ToString().c_str());
  }
  store.EndLease(job.lease);
  if (here && !bad.empty() && !job.repaired) {
    for (const Done& done : job.waiters)
      parts_.fetcher.Repair(shard, bad, [this, shard, key = job.key, done](const Status& repaired) {
        if (!repaired.ok()) return done(repaired);
        Start(shard, key, true, done);
      });
    return;
  }
  if (!status.ok()) LOG_WARNING("%s", status.ToString().c_str());
  for (const Done& done : job.waiters) done(status);
}

uint64_t Converter::allocated_chunks() const {
  uint64_t chunks = 0;
  for (const auto& [shard, job] : jobs_) chunks += ChunkCount(job.extents);
  return chunks;
}

}  // namespace ropeteam::engine
