// SPDX-License-Identifier: Apache-2.0
#include "core/store/format.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstring>

#include "core/base/checksum.h"

namespace ropeteam::arena {
namespace {

constexpr uint64_t AlignUp(uint64_t value, uint64_t alignment) {
  return (value + alignment - 1) & ~(alignment - 1);
}

uint8_t SlotCheck(uint8_t role, uint8_t committed) {
  return static_cast<uint8_t>(~(kSlotMark ^ role ^ committed));
}

}  // namespace

bool IsRole(Role role) { return role >= Role::kOwn && role <= Role::kCache; }

uint64_t EncodeSlotState(const SlotState& state) {
  ROPETEAM_CHECK(IsRole(state.role));
  const auto role = static_cast<uint8_t>(state.role);
  const uint8_t committed = state.committed ? 1 : 0;
  return uint64_t{state.digest} << 32 | uint64_t{SlotCheck(role, committed)} << 24 |
         uint64_t{committed} << 16 | uint64_t{role} << 8 | kSlotMark;
}

bool DecodeSlotState(uint64_t word, SlotState* state) {
  const auto mark = static_cast<uint8_t>(word);
  const auto role = static_cast<uint8_t>(word >> 8);
  const auto committed = static_cast<uint8_t>(word >> 16);
  const auto check = static_cast<uint8_t>(word >> 24);
  if (mark != kSlotMark || committed > 1 || check != SlotCheck(role, committed)) return false;
  if (!IsRole(static_cast<Role>(role))) return false;
  *state = {static_cast<uint32_t>(word >> 32), static_cast<Role>(role), committed == 1};
  return true;
}

uint64_t FactsCheck(const uint64_t (&words)[kFactWords]) {
  const uint32_t crc = Crc32c(words, sizeof(words));
  return uint64_t{crc} << 32 | static_cast<uint32_t>(~crc);
}

CheckedFacts CheckedFactsOf(const NodeFacts& facts) {
  CheckedFacts checked{{facts.incarnation_max, facts.committed.incarnation, facts.committed.step,
                        facts.roster_revision, facts.roster_epoch, facts.roster_nodes},
                       0};
  checked.check = FactsCheck(checked.words);
  return checked;
}

bool IsChunkBytes(uint64_t chunk_bytes) {
  return std::has_single_bit(chunk_bytes) && chunk_bytes >= kChunkBytesMin && chunk_bytes <= kChunkBytesMax;
}

Layout LayoutOf(uint64_t chunk_count, uint64_t chunk_bytes, bool encrypted) {
  Layout layout;
  layout.chunk_count = chunk_count;
  layout.slots_begin = sizeof(Superblock);
  layout.descriptors_begin = layout.slots_begin + chunk_count * sizeof(Slot);
  uint64_t tables_end = layout.descriptors_begin + chunk_count * sizeof(ChunkDescriptor);
  if (encrypted) {
    layout.tags_begin = tables_end;
    tables_end += chunk_count * sizeof(ChunkTag);
  }
  layout.chunks_begin = AlignUp(tables_end, std::min(chunk_bytes, kHugePageBytes));
  layout.end = layout.chunks_begin + chunk_count * chunk_bytes;
  return layout;
}

Layout LayoutFor(uint64_t memory_bytes, uint64_t chunk_bytes, bool encrypted) {
  if (memory_bytes < sizeof(Superblock)) return {};
  // Alignment costs less than a chunk, so the quotient is at most one too many.
  const uint64_t table = sizeof(Slot) + sizeof(ChunkDescriptor) + (encrypted ? sizeof(ChunkTag) : 0);
  uint64_t count = (memory_bytes - sizeof(Superblock)) / (chunk_bytes + table);
  while (count > 0 && LayoutOf(count, chunk_bytes, encrypted).end > memory_bytes) --count;
  return count == 0 ? Layout{} : LayoutOf(count, chunk_bytes, encrypted);
}

Superblock NewSuperblock(uint64_t memory_bytes, uint64_t chunk_bytes, const Layout& layout,
                         const ArenaIdentity& identity) {
  ROPETEAM_CHECK(identity.job.size() <= kJobBytesMax && identity.node.size() <= kNodeNameBytesMax);
  Superblock superblock{};
  superblock.magic = kArenaMagic;
  superblock.version = layout.tags_begin != 0 ? kEncryptedArenaVersion : kArenaVersion;
  for (CheckedFacts& place : superblock.facts) place = CheckedFactsOf({});
  superblock.memory_bytes = memory_bytes;
  superblock.chunk_bytes = chunk_bytes;
  superblock.chunk_count = layout.chunk_count;
  superblock.slots_begin = layout.slots_begin;
  superblock.descriptors_begin = layout.descriptors_begin;
  superblock.chunks_begin = layout.chunks_begin;
  superblock.job_length = static_cast<uint32_t>(identity.job.size());
  superblock.node_length = static_cast<uint32_t>(identity.node.size());
  std::copy(identity.job.begin(), identity.job.end(), superblock.job);
  std::copy(identity.node.begin(), identity.node.end(), superblock.node);
  superblock.crc = SuperblockCrc(superblock);
  return superblock;
}

uint32_t SuperblockCrc(const Superblock& superblock) {
  Superblock copy = superblock;
  copy.magic = 0;
  copy.crc = 0;
  std::memset(copy.facts, 0, sizeof(copy.facts));
  copy.names_length = copy.names_crc = 0;
  std::memset(copy.names, 0, sizeof(copy.names));
  return Crc32c(&copy, sizeof(copy));
}

uint32_t SlotDigest(const Slot& slot, std::span<const uint32_t> chunks, std::span<const uint32_t> crcs,
                    std::span<const ChunkTag> tags) {
  ROPETEAM_CHECK(chunks.size() == crcs.size());
  constexpr size_t kFieldsBegin = sizeof(slot.state);
  uint32_t digest = Crc32c(reinterpret_cast<const char*>(&slot) + kFieldsBegin, sizeof(Slot) - kFieldsBegin);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const uint32_t link[2] = {chunks[i], crcs[i]};
    digest = Crc32c(link, sizeof(link), digest);
  }
  return Crc32c(tags.data(), tags.size_bytes(), digest);
}

Slot SlotFor(const ShardMeta& meta, uint64_t generation, uint32_t first_chunk, uint32_t chunk_count,
             const EncryptionSalt& salt, KeyId key) {
  Slot slot{};
  slot.generation = generation;
  slot.first_chunk = first_chunk;
  slot.chunk_count = chunk_count;
  slot.incarnation = meta.id.incarnation;
  slot.step = meta.id.step;
  slot.rank = meta.id.rank;
  slot.world_size = meta.world_size;
  slot.replicas = meta.replicas;
  slot.object_count = meta.object_count;
  slot.chunk_bytes = meta.chunk_bytes;
  slot.stream_bytes = meta.stream_bytes;
  slot.manifest_offset = meta.manifest_offset;
  slot.salt = salt;
  slot.key = key;
  slot.agreement = meta.agreement;
  return slot;
}

ShardMeta MetaOf(const Slot& slot) {
  ShardMeta meta;
  meta.id = {slot.incarnation, slot.step, slot.rank};
  meta.world_size = slot.world_size;
  meta.replicas = slot.replicas;
  meta.chunk_bytes = slot.chunk_bytes;
  meta.stream_bytes = slot.stream_bytes;
  meta.manifest_offset = slot.manifest_offset;
  meta.object_count = slot.object_count;
  meta.agreement = slot.agreement;
  return meta;
}

Status CheckMeta(const ShardMeta& meta, uint64_t chunk_bytes) {
  if (meta.chunk_bytes != chunk_bytes) {
    return Error(Code::kInvalidArgument, "shard of chunks of %" PRIu64 " bytes, the arena's have %" PRIu64,
                 meta.chunk_bytes, chunk_bytes);
  }
  if (meta.id.incarnation >= kIncarnationMax) {
    return Error(Code::kInvalidArgument, "shard of incarnation %" PRIu64 ", limit %" PRIu64,
                 meta.id.incarnation, kIncarnationMax - 1);
  }
  const uint64_t stream_bytes_max = kChunksPerShardMax * chunk_bytes;
  if (meta.stream_bytes < kManifestHeaderBytes || meta.stream_bytes > stream_bytes_max) {
    return Error(Code::kInvalidArgument,
                 "shard of %" PRIu64 " bytes, the least is %" PRIu64 ", the limit %" PRIu64,
                 meta.stream_bytes, kManifestHeaderBytes, stream_bytes_max);
  }
  if (meta.manifest_offset % kObjectAlignmentBytes != 0 ||
      meta.manifest_offset > meta.stream_bytes - kManifestHeaderBytes) {
    return Error(Code::kInvalidArgument, "manifest at offset %" PRIu64 " of a shard of %" PRIu64 " bytes",
                 meta.manifest_offset, meta.stream_bytes);
  }
  if (meta.object_count > kObjectsMax) {
    return Error(Code::kInvalidArgument, "shard of %u objects, limit %" PRIu64, meta.object_count,
                 kObjectsMax);
  }
  return OkStatus();
}

}  // namespace ropeteam::arena
