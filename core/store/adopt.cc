// SPDX-License-Identifier: Apache-2.0
//
// Takes over the arena of a former process. Everything in the memory is checked before it is used, and nothing is
// written before the superblock is known to be ours.

#include <algorithm>
#include <atomic>
#include <cinttypes>
#include <cstring>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "core/store/format.h"
#include "core/store/publish.h"
#include "core/store/store.h"
#include "core/store/table.h"

namespace ropeteam {

struct Store::Found {
  arena::Slot slot{};
  arena::SlotState state;
  std::vector<uint32_t> chunks;
  std::vector<uint32_t> crcs;
  Encryption encryption;
  uint64_t content() const { return ContentDigest(arena::MetaOf(slot), PlainCrcs(encryption, crcs)); }
  ShardId id() const { return {slot.incarnation, slot.step, slot.rank}; }
};

namespace {

// Whether the memory never had an arena. If only the beginning of a superblock was wiped, or if there are slots, the
// arena may be recoverable.
bool Untouched(std::span<const std::byte> memory, uint64_t chunk_bytes) {
  const auto zero = [&](uint64_t begin, uint64_t end) {
    return std::all_of(memory.begin() + static_cast<ptrdiff_t>(begin),
                       memory.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(end, memory.size())),
                       [](std::byte byte) { return byte == std::byte{0}; });
  };
  if (!zero(0, sizeof(arena::Superblock))) return false;
  if (!arena::IsChunkBytes(chunk_bytes)) return true;
  const arena::Layout layout = arena::LayoutFor(memory.size(), chunk_bytes);
  return layout.chunk_count == 0 || zero(layout.slots_begin, layout.descriptors_begin);
}

}  // namespace

Result<arena::Layout> Store::CheckSuperblock(std::span<const std::byte> memory, uint64_t chunk_bytes,
                                             const ArenaIdentity& identity) {
  if (memory.size() < sizeof(arena::Superblock) ||
      reinterpret_cast<uintptr_t>(memory.data()) % alignof(arena::Superblock) != 0) {
    return Error(Code::kInvalidArgument, "arena memory of %zu bytes at %p cannot hold an arena",
                 memory.size(), static_cast<const void*>(memory.data()));
  }
  arena::Superblock superblock;
  std::memcpy(&superblock, memory.data(), sizeof(superblock));
  if (superblock.magic == arena::kFormattingMagic)
    return Error(Code::kNotFound, "an arena in this memory that was never finished");
  if (Untouched(memory, chunk_bytes)) return Error(Code::kNotFound, "no arena in this memory");
  if (superblock.magic != arena::kArenaMagic) {
    return Error(Code::kCorrupt, "memory begins with 0x%016" PRIx64 ", an arena with 0x%016" PRIx64,
                 superblock.magic, arena::kArenaMagic);
  }
  const uint32_t crc = arena::SuperblockCrc(superblock);
  if (crc != superblock.crc) {
    return Error(Code::kCorrupt, "arena's superblock has checksum 0x%08x, its bytes 0x%08x", superblock.crc,
                 crc);
  }
  // After the checksum, so that a flipped bit is not taken for another version, job or size.
  const uint32_t version = identity.encrypted ? arena::kEncryptedArenaVersion : arena::kArenaVersion;
  if (superblock.version == (identity.encrypted ? arena::kArenaVersion : arena::kEncryptedArenaVersion)) {
    return Error(Code::kInvalidArgument, "arena was made %s --encrypt-replicas, this daemon was started %s",
                 identity.encrypted ? "without" : "with", identity.encrypted ? "with" : "without");
  }
  if (superblock.version != version) {
    return Error(Code::kUnsupported, "arena of format version %u, this build reads %u", superblock.version,
                 version);
  }
  const std::string job(superblock.job, std::min<size_t>(superblock.job_length, arena::kJobBytesMax));
  const std::string node(superblock.node, std::min<size_t>(superblock.node_length, kNodeNameBytesMax));
  if (job != identity.job) {
    return Error(Code::kInvalidArgument, "arena belongs to job \"%s\", asked for was job \"%s\"", job.c_str(),
                 identity.job.c_str());
  }
  if (node != identity.node) {
    return Error(Code::kInvalidArgument, "arena belongs to node \"%s\", asked for was node \"%s\"",
                 node.c_str(), identity.node.c_str());
  }
  if (superblock.chunk_bytes != chunk_bytes) {
    return Error(Code::kInvalidArgument,
                 "arena has chunks of %" PRIu64 " bytes, asked for were chunks of %" PRIu64 " bytes",
                 superblock.chunk_bytes, chunk_bytes);
  }
  if (superblock.memory_bytes != memory.size()) {
    return Error(Code::kInvalidArgument, "arena was laid over %" PRIu64 " bytes of memory, given are %zu",
                 superblock.memory_bytes, memory.size());
  }
  arena::Layout layout;
  if (arena::IsChunkBytes(chunk_bytes))
    layout = arena::LayoutFor(memory.size(), chunk_bytes, identity.encrypted);
  if (layout.chunk_count == 0 || layout.chunk_count > arena::kChunksMax ||
      layout.chunk_count != superblock.chunk_count || layout.slots_begin != superblock.slots_begin ||
      layout.descriptors_begin != superblock.descriptors_begin ||
      layout.chunks_begin != superblock.chunks_begin) {
    return Error(Code::kCorrupt, "arena's superblock has a layout that no build of format version %u writes",
                 superblock.version);
  }
  return layout;
}

Status Store::ReadSlot(uint32_t index, Found* found) const {
  // Copied first, so that the checked bytes are also the used ones, even if another process writes to the memory.
  std::memcpy(&found->slot, slot(index), sizeof(found->slot));
  const arena::Slot& slot = found->slot;
  if (!arena::DecodeSlotState(slot.state, &found->state)) {
    return Error(Code::kCorrupt, "invalid state word 0x%016" PRIx64, slot.state);
  }
  if (slot.first_chunk != index)
    return Error(Code::kCorrupt, "says that it begins in chunk %u", slot.first_chunk);
  if (slot.generation > arena::kGenerationMax)
    return Error(Code::kCorrupt, "has generation %" PRIu64 ", limit %" PRIu64, slot.generation,
                 arena::kGenerationMax);
  const Status meta = arena::CheckMeta(arena::MetaOf(slot), chunk_bytes_);
  if (!meta.ok()) return Status(Code::kCorrupt, meta.message());
  if (slot.chunk_count != ChunksFor(slot.stream_bytes, chunk_bytes_) || slot.chunk_count > chunk_count_) {
    return Error(Code::kCorrupt, "%u chunks of an arena of %" PRIu64 " for %" PRIu64 " bytes",
                 slot.chunk_count, chunk_count_, slot.stream_bytes);
  }
  // HealTable() restores a slot from the Store's record of the shard, and the digest covers every byte of the slot. So
  // no other bytes may be in it.
  arena::Slot known = arena::SlotFor(arena::MetaOf(slot), slot.generation, index, slot.chunk_count,
                                     tags_begin_ != 0 ? slot.salt : EncryptionSalt(),
                                     tags_begin_ != 0 ? slot.key : kPlaintext);
  known.state = slot.state;
  if (std::memcmp(&known, &slot, sizeof(slot)) != 0)
    return Error(Code::kCorrupt, "has bytes that format version %u does not use",
                 tags_begin_ != 0 ? arena::kEncryptedArenaVersion : arena::kArenaVersion);
  found->encryption.salt = slot.salt;
  found->encryption.key = slot.key;
  uint32_t chunk = index;
  for (uint32_t i = 0; i < slot.chunk_count; ++i) {
    if (chunk >= chunk_count_) {
      return Error(Code::kCorrupt, "chain of %u chunks leads to chunk %u of %" PRIu64 " after %u",
                   slot.chunk_count, chunk, chunk_count_, i);
    }
    const arena::ChunkDescriptor link = *descriptor(chunk);
    found->chunks.push_back(chunk);
    found->crcs.push_back(link.crc);
    if (slot.key != kPlaintext) found->encryption.tags.push_back(*tag(chunk));
    chunk = link.next;
  }
  if (chunk != arena::kChainEnd) {
    return Error(Code::kCorrupt, "chain does not end after %u chunks", slot.chunk_count);
  }
  const uint32_t digest = arena::SlotDigest(slot, found->chunks, found->crcs, found->encryption.tags);
  if (digest != found->state.digest) {
    return Error(Code::kCorrupt, "digest is 0x%08x, its bytes have 0x%08x", found->state.digest, digest);
  }
  return OkStatus();
}

// Rejects slots that are each valid but contradict each other. Seal() and Remove() never leave such slots. If another
// process wrote them, none can be proved right, so all are rejected.
void Store::RejectOverlaps(const std::vector<Found>& found, std::vector<std::string>* reasons) const {
  constexpr uint32_t kNobody = UINT32_MAX;
  std::vector<uint32_t> owner(chunk_count_, kNobody);
  std::map<ShardId, uint32_t> by_id;
  const auto name = [&](uint32_t i) { return "slot " + std::to_string(found[i].slot.first_chunk); };
  const auto reject = [&](uint32_t a, uint32_t b, const std::string& why) {
    if ((*reasons)[a].empty()) (*reasons)[a] = why + " " + name(b);
    if ((*reasons)[b].empty()) (*reasons)[b] = why + " " + name(a);
  };
  for (uint32_t i = 0; i < found.size(); ++i) {
    for (const uint32_t chunk : found[i].chunks) {
      if (owner[chunk] == kNobody) {
        owner[chunk] = i;
      } else {
        reject(i, owner[chunk], "names chunk " + std::to_string(chunk) + " as does");
      }
    }
    const auto [it, inserted] = by_id.emplace(found[i].id(), i);
    if (inserted) continue;
    // A kill during Replace() leaves both, and both are whole.
    if (found[i].content() == found[it->second].content() && tags_begin_ != 0) {
      const bool later = found[i].slot.generation > found[it->second].slot.generation;
      (*reasons)[later ? it->second : i] = "was replaced by " + (later ? name(i) : name(it->second));
      if (later) it->second = i;
    } else {
      reject(i, it->second, "is the same shard as");
    }
  }
}

void Store::Install(Found found) {
  auto shard = std::make_unique<SealedShard>();
  shard->meta = arena::MetaOf(found.slot);
  shard->role = found.state.role;
  shard->committed = found.state.committed;
  shard->digest = found.state.digest;
  shard->generation = found.slot.generation;
  for (size_t i = 0; i < found.chunks.size(); ++i) {
    const uint32_t next = i + 1 < found.chunks.size() ? found.chunks[i + 1] : arena::kChainEnd;
    table_->descriptors[found.chunks[i]] = {next, found.crcs[i]};
    // No digest covers the tags of plaintext, so a bit may have flipped there. They are rewritten as zero.
    if (tags_begin_ != 0) {
      *tag(found.chunks[i]) = table_->tags[found.chunks[i]] =
          found.encryption.tags.empty() ? ChunkTag() : found.encryption.tags[i];
    }
  }
  table_->begins.emplace(found.chunks[0], shard.get());
  shard->content = found.content();
  shard->crcs = std::move(found.crcs);
  shard->encryption = std::move(found.encryption);
  for (const uint32_t chunk : found.chunks) {
    chunk_use_[chunk] = ChunkUse::kSealed;
    std::vector<Extent>& extents = shard->extents;
    if (!extents.empty() && extents.back().first + extents.back().count == chunk) {
      ++extents.back().count;
    } else {
      extents.push_back({chunk, 1});
    }
  }
  for (const Extent& extent : shard->extents) free_runs_.Take(extent.first, extent.count);
  AdmitGets(*shard);
  generation_ = std::max(generation_, found.slot.generation);
  CountIn(*shard);
  shards_.emplace(shard->meta.id, std::move(shard));
}

Status Store::AdoptFacts() {
  for (const arena::CheckedFacts& place : superblock()->facts) {
    const auto& words = place.words;
    if (place.check != arena::FactsCheck(words) || words[0] >= kIncarnationMax) continue;
    // Repairs a place that a kill left half written.
    StoreFacts({words[0], {words[1], words[2]}, words[3], words[4], words[5]});
    return OkStatus();
  }
  return Error(Code::kCorrupt, "arena's highest incarnation and newest commit are broken in both places");
}

void Store::AdoptRosterNames() {
  const arena::Superblock& there = *superblock();
  const size_t length = std::min<size_t>(there.names_length, arena::kRosterNamesBytesMax);
  const std::string text(there.names, length);
  std::vector<std::string> names;
  if (there.names_length <= length &&
      Crc32c(text.data(), length, static_cast<uint32_t>(facts_.roster_revision)) == there.names_crc) {
    for (size_t begin = 0, end = 0; begin < length; begin = end + 1) {
      end = std::min(text.find(',', begin), length);
      names.push_back(text.substr(begin, end - begin));
    }
  }
  SetRosterNames(facts_.roster_revision, names);
}

Result<std::unique_ptr<Store>> Store::Adopt(std::span<std::byte> memory, uint64_t chunk_bytes,
                                            const ArenaIdentity& identity, AdoptReport* report) {
  const Result<arena::Layout> layout = CheckSuperblock(memory, chunk_bytes, identity);
  if (!layout.ok()) return layout.status();
  std::atomic_thread_fence(std::memory_order_acquire);
  std::unique_ptr<Store> store(new Store(memory, chunk_bytes, *layout));
  store->table_->superblock = arena::NewSuperblock(memory.size(), chunk_bytes, *layout, identity);
  ROPETEAM_RETURN_IF_ERROR(store->AdoptFacts());
  store->AdoptRosterNames();

  AdoptReport result;
  // Frees the slot for reuse. Its chunks are free because no slot names them.
  const auto reject = [&](uint32_t index, const std::string& why) {
    result.rejected.push_back("slot " + std::to_string(index) + ": " + why);
    LOG_WARNING("arena slot rejected %u: %s", index, why.c_str());
    arena::Publish(&store->slot(index)->state, arena::kSlotFree);
    arena::CrashPoint("adopt: rejected");
  };
  std::vector<Found> found;
  for (uint32_t i = 0; i < store->chunk_count_; ++i) {
    if (store->slot(i)->state == arena::kSlotFree) continue;
    Found candidate;
    const Status whole = store->ReadSlot(i, &candidate);
    if (whole.ok()) {
      found.push_back(std::move(candidate));
    } else {
      reject(i, whole.message());
    }
  }
  std::vector<std::string> reasons(found.size());
  store->RejectOverlaps(found, &reasons);
  for (size_t i = 0; i < found.size(); ++i) {
    if (!reasons[i].empty()) {
      reject(found[i].slot.first_chunk, found[i].id().ToString() + " " + reasons[i]);
    } else {
      store->Install(std::move(found[i]));
    }
  }
  result.shards = store->shards_.size();
  LOG_INFO("arena adopted shards %" PRIu64 " rejected %zu chunks free %" PRIu64 " of %" PRIu64, result.shards,
           result.rejected.size(), store->chunks_free(), store->chunk_count_);
  if (report != nullptr) *report = std::move(result);
  return store;
}

}  // namespace ropeteam
