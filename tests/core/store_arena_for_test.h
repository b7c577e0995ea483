// SPDX-License-Identifier: Apache-2.0
//
// Shared by the Store's tests: memory that can be copied like a value (the copy is what a killed process
// leaves), and shards whose bytes are derived from their ids.

#ifndef ROPETEAM_TESTS_CORE_STORE_ARENA_FOR_TEST_H_
#define ROPETEAM_TESTS_CORE_STORE_ARENA_FOR_TEST_H_

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/base/checksum.h"
#include "core/store/format.h"
#include "core/store/store.h"

namespace ropeteam {

inline constexpr uint64_t kSmallChunk = kChunkBytesMin;

class ArenaMemory {
 public:
  explicit ArenaMemory(uint64_t bytes) : pages_(bytes / arena::kPageBytes) {}
  // Memory for exactly this many chunks.
  static ArenaMemory ForChunks(uint64_t chunks, uint64_t chunk_bytes = kSmallChunk) {
    return ArenaMemory(Store::MemoryFor(chunks, chunk_bytes));
  }
  std::span<std::byte> span() {
    return {reinterpret_cast<std::byte*>(pages_.data()), pages_.size() * sizeof(Page)};
  }
  std::byte* data() { return span().data(); }
  friend bool operator==(const ArenaMemory& a, const ArenaMemory& b) {
    return a.pages_.size() == b.pages_.size() &&
           std::memcmp(a.pages_.data(), b.pages_.data(), a.pages_.size() * sizeof(Page)) == 0;
  }

  arena::Superblock* superblock() { return reinterpret_cast<arena::Superblock*>(data()); }
  arena::Slot* slot(uint32_t index) {
    return reinterpret_cast<arena::Slot*>(data() + superblock()->slots_begin) + index;
  }
  arena::ChunkDescriptor* descriptor(uint32_t index) {
    return reinterpret_cast<arena::ChunkDescriptor*>(data() + superblock()->descriptors_begin) + index;
  }
  // Of an arena with tags.
  ChunkTag* tag(uint32_t index) {
    const arena::Layout layout = arena::LayoutOf(superblock()->chunk_count, superblock()->chunk_bytes, true);
    return reinterpret_cast<ChunkTag*>(data() + layout.tags_begin) + index;
  }

 private:
  struct Page {
    alignas(arena::kPageBytes) std::byte bytes[arena::kPageBytes];
  };
  std::vector<Page> pages_;
};

inline const ArenaIdentity kIdentity = {"llama", "node-3"};

inline ShardMeta MetaForTest(const ShardId& id, uint64_t stream_bytes, uint64_t chunk_bytes = kSmallChunk) {
  ShardMeta meta;
  meta.id = id;
  meta.world_size = id.rank + 1;
  meta.replicas = 1;
  meta.chunk_bytes = chunk_bytes;
  meta.stream_bytes = stream_bytes;
  meta.manifest_offset =
      (stream_bytes - kManifestHeaderBytes) / kObjectAlignmentBytes * kObjectAlignmentBytes;
  meta.object_count = 3;
  return meta;
}

// The bytes that the tests save as chunk `index` of the shard.
inline std::vector<std::byte> PatternFor(const ShardId& id, uint64_t index, uint64_t length) {
  std::vector<std::byte> bytes(length);
  uint64_t state = id.incarnation * 1000003 + id.step * 10007 + id.rank * 101 + index + 1;
  for (std::byte& byte : bytes) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    byte = static_cast<std::byte>(state >> 56);
  }
  return bytes;
}

// Writes the shard's pattern into its chunks; returns their checksums.
inline std::vector<uint32_t> FillForTest(Store* store, const ShardMeta& meta,
                                         const std::vector<Extent>& extents) {
  std::vector<uint32_t> crcs;
  for (uint64_t i = 0; i < ChunksFor(meta.stream_bytes, meta.chunk_bytes); ++i) {
    const auto bytes = PatternFor(meta.id, i, ChunkLength(meta.stream_bytes, meta.chunk_bytes, i));
    crcs.push_back(CopyCrc32c(store->chunk(ChunkAt(extents, i)), bytes.data(), bytes.size()));
  }
  return crcs;
}

inline Status SaveForTest(Store* store, const ShardId& id, uint64_t stream_bytes, Role role = Role::kOwn) {
  const ShardMeta meta = MetaForTest(id, stream_bytes, store->chunk_bytes());
  Result<std::vector<Extent>> extents = store->Allocate(ChunksFor(stream_bytes, store->chunk_bytes()));
  if (!extents.ok()) return extents.status();
  std::vector<uint32_t> crcs = FillForTest(store, meta, *extents);
  const Status status = store->Seal(meta, role, *extents, std::move(crcs));
  if (!status.ok()) store->Free(*extents);
  return status;
}

// Whether the shard's chunks hold its pattern and match its checksums.
inline ::testing::AssertionResult HoldsItsBytes(const Store& store, const SealedShard& shard) {
  const ShardMeta& meta = shard.meta;
  for (uint64_t i = 0; i < shard.crcs.size(); ++i) {
    const auto expected = PatternFor(meta.id, i, ChunkLength(meta.stream_bytes, meta.chunk_bytes, i));
    const std::byte* bytes = store.chunk(ChunkAt(shard.extents, i));
    if (std::memcmp(bytes, expected.data(), expected.size()) != 0) {
      return ::testing::AssertionFailure() << meta.id.ToString() << " chunk " << i << " has other bytes";
    }
    if (Crc32c(bytes, expected.size()) != shard.crcs[i]) {
      return ::testing::AssertionFailure() << meta.id.ToString() << " chunk " << i << " has another checksum";
    }
  }
  return ::testing::AssertionSuccess();
}

inline std::unique_ptr<Store> FormatForTest(ArenaMemory* memory, uint64_t chunk_bytes = kSmallChunk) {
  Result<std::unique_ptr<Store>> store = Store::Format(memory->span(), chunk_bytes, kIdentity);
  if (!store.ok()) {
    ADD_FAILURE() << store.status().ToString();
    return nullptr;
  }
  return std::move(store).value();
}

inline std::unique_ptr<Store> AdoptForTest(ArenaMemory* memory, Store::AdoptReport* report = nullptr) {
  Result<std::unique_ptr<Store>> store = Store::Adopt(memory->span(), kSmallChunk, kIdentity, report);
  if (!store.ok()) {
    ADD_FAILURE() << store.status().ToString();
    return nullptr;
  }
  return std::move(store).value();
}

// Rewrites a slot's digest and state word to match its content, as an attacker would.
inline void ForgeDigest(ArenaMemory* memory, uint32_t index) {
  arena::Slot* slot = memory->slot(index);
  std::vector<uint32_t> chunks;
  std::vector<uint32_t> crcs;
  std::vector<ChunkTag> tags;
  uint32_t chunk = index;
  for (uint32_t i = 0; i < slot->chunk_count && chunk < memory->superblock()->chunk_count; ++i) {
    chunks.push_back(chunk);
    crcs.push_back(memory->descriptor(chunk)->crc);
    if (slot->key != kPlaintext) tags.push_back(*memory->tag(chunk));
    chunk = memory->descriptor(chunk)->next;
  }
  slot->state = arena::EncodeSlotState({arena::SlotDigest(*slot, chunks, crcs, tags), Role::kOwn, false});
}

// While it exists, calls `action` at each crash point of the Store, except those reached within `action`.
class AtCrashPoints {
 public:
  explicit AtCrashPoints(std::function<void(const char*)> action) : action_(std::move(action)) {
    current_ = this;
    Store::SetCrashPointForTest(Reached);
  }
  ~AtCrashPoints() {
    Store::SetCrashPointForTest(nullptr);
    current_ = nullptr;
  }

 private:
  static void Reached(const char* place) {
    Store::SetCrashPointForTest(nullptr);
    current_->action_(place);
    Store::SetCrashPointForTest(Reached);
  }
  inline static AtCrashPoints* current_ = nullptr;
  std::function<void(const char*)> action_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_CORE_STORE_ARENA_FOR_TEST_H_
