// SPDX-License-Identifier: Apache-2.0
#include "core/engine/range_holder.h"

#include <algorithm>
#include <utility>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

RangesGrant RangeHolder::Describe(const RangesOpen& open) const {
  const Context& context = parts_.context;
  const SealedShard* shard = context.store.Find(open.shard);
  RangesGrant grant;
  grant.read = open.read;
  if (context.config.encrypts()) {
    grant.code = Code::kUnsupported;
    grant.message = "this job encrypts its replicas";
  } else if (shard == nullptr || (open.content != 0 && open.content != shard->content)) {
    grant.code = Code::kNotFound;
    grant.message = shard == nullptr ? "no copy is here" : "another shard of the same name is here";
  } else {
    grant.meta = shard->meta;
    grant.content = shard->content;
    if (!ValidPart(open.part, shard->meta)) {
      grant.code = Code::kInvalidArgument;
      grant.message = "the pieces do not fit the shard";
    }
  }
  return grant;
}

void RangeHolder::OnOpen(NodeId from, RangesOpen open) {
  Context& context = parts_.context;
  const Key key{from, open.read};
  if (const auto known = packed_.find(key); known != packed_.end()) {
    known->second.heard = context.now;
    if (known->second.state == Packed::State::kPacked) context.Send(from, known->second.grant);
    return;
  }
  RangesGrant grant = Describe(open);
  if (grant.code == Code::kOk && packed_.size() >= kPackedMax) {
    grant.code = Code::kUnavailable;
    grant.message = "too many ranged reads wait here";
  }
  if (grant.code != Code::kOk || open.part.pieces.empty()) return context.Send(from, grant);
  Packed packed;
  packed.open = std::move(open);
  packed.heard = context.now;
  packed_.emplace(key, std::move(packed));
  queue_.push_back(key);
  Pump();
}

void RangeHolder::Pump() {
  const uint64_t part = parts_.context.store.chunks_total() / kBouncePartMax;
  const uint64_t limit = std::clamp<uint64_t>(part, 2, kBouncesMax);
  while (!queue_.empty() && bounces_ < limit) {
    const Key key = queue_.front();
    queue_.pop_front();
    const auto waiting = packed_.find(key);
    if (waiting != packed_.end() && waiting->second.state == Packed::State::kQueued)
      Pack(key, &waiting->second);
  }
}

void RangeHolder::Refuse(const Key& key, Status why) {
  RangesGrant grant = std::move(packed_.at(key).grant);
  grant.code = why.code();
  grant.message = why.message();
  packed_.erase(key);
  parts_.context.Send(key.first, grant);
}

void RangeHolder::Pack(const Key& key, Packed* packed) {
  Store& store = parts_.context.store;
  packed->grant = Describe(packed->open);  // the shard may have been released during the wait
  if (packed->grant.code != Code::kOk) return Refuse(key, Status(packed->grant.code, packed->grant.message));
  // Lease the copy before memory is allocated, so that the allocation does not evict it.
  const Result<Store::LeaseToken> lease = store.Lease(packed->open.shard);
  ROPETEAM_CHECK(lease.ok());
  Result<std::vector<Extent>> bounce = parts_.memory.Allocate(1);
  if (!bounce.ok()) {
    store.EndLease(*lease);
    return Refuse(key, bounce.status());
  }
  ++bounces_;
  packed->state = Packed::State::kPacking;
  packed->lease = *lease;
  packed->bounce = std::move(*bounce);
  uint64_t to = store.chunk_offset(packed->bounce.front().first);
  packed->grant.place = to - store.chunk_offset(0) + kExportedChunksBegin;
  const SealedShard* shard = store.Leased(*lease);
  std::vector<StartCheck::Range> ranges;
  for (const ChunkPiece& piece : packed->open.part.pieces) {
    if (ranges.empty() || ranges.back().pack->pieces.front().chunk != piece.chunk) {
      ranges.push_back(
          RangeOf(store, shard->extents, shard->meta.stream_bytes, piece.chunk, shard->crcs[piece.chunk]));
      ranges.back().pack = ChunkPack{to, {}};
    }
    ranges.back().pack->pieces.push_back(piece);
    to += piece.bytes();
  }
  parts_.transfers.Encrypt(
      std::move(ranges), [this, key](const std::vector<uint32_t>& bad,
                                     const std::vector<EncryptedChunk>& crcs) { OnPacked(key, bad, crcs); });
}

void RangeHolder::OnPacked(const Key& key, const std::vector<uint32_t>& bad,
                           const std::vector<EncryptedChunk>& crcs) {
  Packed& packed = packed_.at(key);
  Context& context = parts_.context;
  ROPETEAM_CHECK(packed.state == Packed::State::kPacking && crcs.size() > (bad.empty() ? 0 : bad.back()));
  const ShardId id = packed.open.shard;
  const bool here = context.store.Find(id) == context.store.Leased(packed.lease);
  context.store.EndLease(packed.lease);
  packed.state = Packed::State::kPacked;
  packed.heard = context.now;
  std::vector<std::pair<uint32_t, uint64_t>> chunks;  // the touched chunks, and the bytes packed from each
  for (const ChunkPiece& piece : packed.open.part.pieces) {
    if (chunks.empty() || chunks.back().first != piece.chunk) chunks.emplace_back(piece.chunk, 0);
    chunks.back().second += piece.bytes();
  }
  ROPETEAM_CHECK(chunks.size() == crcs.size());
  if (!bad.empty()) {
    LOG_WARNING("%zu chunks of %s are bad here, found by a ranged read of %s", bad.size(),
                id.ToString().c_str(), context.NameOf(key.first).c_str());
    std::vector<uint32_t> bad_chunks;
    for (const uint32_t index : bad) bad_chunks.push_back(chunks[index].first);
    packed.grant.code = Code::kCorrupt;
    packed.grant.message = "a chunk does not match its checksum here";
    if (!packed.closed) context.Send(key.first, packed.grant);
    Release(key);
    if (here) parts_.fetcher.Repair(id, bad_chunks, [](const Status&) {});
    return;
  }
  for (size_t i = 0; i < chunks.size(); ++i)
    packed.grant.crc = Crc32cCombine(packed.grant.crc, crcs[i].crc, chunks[i].second);
  if (packed.closed) return Release(key);
  context.Send(key.first, packed.grant);
}

// Starts no other part, because the caller may go on with more keys.
void RangeHolder::Forget(const Key& key) {
  const auto found = packed_.find(key);
  ROPETEAM_CHECK(found != packed_.end());
  if (found->second.state == Packed::State::kPacking) {
    found->second.closed = true;
    return;
  }
  if (!found->second.bounce.empty()) {
    ROPETEAM_CHECK(bounces_ > 0);
    --bounces_;
    parts_.context.store.Free(found->second.bounce);
  }
  packed_.erase(found);
}

void RangeHolder::Release(const Key& key) {
  Forget(key);
  Pump();
}

void RangeHolder::OnClose(NodeId from, const RangesClose& close) {
  if (packed_.contains({from, close.read})) Release({from, close.read});
}

void RangeHolder::OnView() {
  std::vector<Key> gone;
  for (const auto& [key, packed] : packed_)
    if (!parts_.context.Contains(key.first)) gone.push_back(key);
  for (const Key& key : gone) Forget(key);
  Pump();
}

// A reader that no longer needs the part answers with RangesClose. So a lost RangesClose does not keep a chunk for
// ever.
void RangeHolder::OnTimer() {
  for (auto& [key, packed] : packed_) {
    if (packed.state != Packed::State::kPacked || packed.heard + kSilenceUs > parts_.context.now) continue;
    packed.heard = parts_.context.now;
    parts_.context.Send(key.first, packed.grant);
  }
}

TimeUs RangeHolder::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [key, packed] : packed_)
    if (packed.state == Packed::State::kPacked) due = std::min(due, packed.heard + kSilenceUs);
  return due;
}

}  // namespace ropeteam::engine
