// SPDX-License-Identifier: Apache-2.0
//
// Damaged tables of an arena that a former process left. The Store must work with whatever Adopt() accepts,
// and the next process must find the same shards.

#include "tests/core/store_arena_for_test.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/values.h"

namespace ropeteam::fuzz {
namespace {

constexpr uint64_t kChunks = 16;

// Changes of the arena. A forge makes a checksum match the damaged slot or superblock.
enum Op : uint8_t { kBytes, kSlot, kDescriptor, kForgeSlot, kForgeSuperblock, kOps };

ArenaMemory ThreeShards() {
  ArenaMemory memory = ArenaMemory::ForChunks(kChunks);
  const auto store = FormatForTest(&memory);
  ROPETEAM_CHECK(SaveForTest(store.get(), {1, 10, 0}, 2 * kSmallChunk + 5).ok());
  ROPETEAM_CHECK(SaveForTest(store.get(), {1, 10, 1}, 77, Role::kReplica).ok());
  ROPETEAM_CHECK(SaveForTest(store.get(), {1, 11, 0}, 3 * kSmallChunk, Role::kCache).ok());
  store->SetIncarnationMax(4);
  return memory;
}

void Change(FromBytes* in, ArenaMemory* memory) {
  const uint64_t slots = sizeof(arena::Superblock);
  const uint64_t descriptors = slots + kChunks * sizeof(arena::Slot);
  const uint64_t end = descriptors + kChunks * sizeof(arena::ChunkDescriptor);
  const auto write = [&](uint64_t at, const auto& value) {
    std::memcpy(memory->data() + std::min(at, end - sizeof(value)), &value, sizeof(value));
  };
  const uint8_t op = in->Byte() % kOps;
  const uint32_t index = in->Byte() % kChunks;
  if (op == kBytes) {
    const uint64_t at = in->Number() % end;
    const std::string bytes = in->Text();
    std::memcpy(memory->data() + at, bytes.data(), std::min<uint64_t>(bytes.size(), end - at));
  } else if (op == kSlot) {
    write(slots + index * sizeof(arena::Slot) + in->Byte() % sizeof(arena::Slot), in->Number());
  } else if (op == kDescriptor) {
    write(descriptors + index * sizeof(arena::ChunkDescriptor), static_cast<uint32_t>(in->Number()));
  } else if (op == kForgeSlot) {
    // ForgeDigest() finds the slots by the superblock, which may be damaged.
    arena::Superblock damaged = *memory->superblock();
    *memory->superblock() = arena::NewSuperblock(memory->span().size(), kSmallChunk,
                                                 arena::LayoutOf(kChunks, kSmallChunk), kIdentity);
    if (memory->slot(index)->chunk_count <= kChunks) ForgeDigest(memory, index);
    *memory->superblock() = damaged;
  } else {
    memory->superblock()->crc = arena::SuperblockCrc(*memory->superblock());
  }
}

// Uses the Store as a daemon does after Adopt().
void Use(Store* store) {
  // Adopt() does not repair everything. The daemon repairs the rest of the table in the background.
  store->HealTable(0, kChunks);
  ROPETEAM_CHECK(store->CountTableDamage() == 0);
  store->CheckInvariants();
  const uint64_t free = store->chunks_free();
  const Result<std::vector<Extent>> all = store->Allocate(free);
  if (free != 0) {
    ROPETEAM_CHECK(all.ok() && ChunkCount(*all) == free);
    store->CheckInvariants();
  }
  if (all.ok()) store->Free(*all);
  const ShardId added = {9, 9, 9};
  if (store->chunks_free() != 0 && store->Find(added) == nullptr)
    ROPETEAM_CHECK(SaveForTest(store, added, 100).ok());
  if (!store->shards().empty()) {
    const ShardId first = store->shards().begin()->first;
    store->SetCommitted(first);
    store->Remove(first);
  }
  store->CheckInvariants();
}

void RunArena(std::string_view input) {
  static const ArenaMemory* const kImage = new ArenaMemory(ThreeShards());
  ArenaMemory memory = *kImage;
  for (FromBytes in(input); !in.done();) Change(&in, &memory);

  Store::AdoptReport report;
  Result<std::unique_ptr<Store>> store = Store::Adopt(memory.span(), kSmallChunk, kIdentity, &report);
  if (!store.ok()) return;
  ROPETEAM_CHECK(report.shards == (*store)->shards().size());
  Use(store->get());
  std::vector<ShardMeta> metas;
  for (const auto& [id, shard] : (*store)->shards()) metas.push_back(shard->meta);
  store->reset();

  store = Store::Adopt(memory.span(), kSmallChunk, kIdentity, &report);
  ROPETEAM_CHECK(store.ok() && report.rejected.empty() && report.shards == metas.size());
  for (const ShardMeta& meta : metas) ROPETEAM_CHECK((*store)->Find(meta.id)->meta == meta);
}

std::vector<std::string> ArenaSeeds() {
  const auto slot = [](uint32_t index, size_t field, uint64_t value) {
    return ToBytes().Byte(kSlot).Byte(index).Byte(field).Put(value).bytes();
  };
  const auto forged = [](uint32_t index) { return ToBytes().Byte(kForgeSlot).Byte(index).bytes(); };
  const std::string cycle = ToBytes().Byte(kDescriptor).Byte(2).Put(0u).bytes();
  const std::string shared = ToBytes().Byte(kDescriptor).Byte(4).Put(2u).bytes();
  const std::string bytes = ToBytes().Byte(kBytes).Byte(0).Put(uint64_t{16}).Put(std::string("job")).bytes();
  return {
      "",
      bytes + ToBytes().Byte(kForgeSuperblock).Byte(0).bytes(),
      cycle + forged(0),
      shared + forged(4),
      slot(0, offsetof(arena::Slot, stream_bytes), UINT64_MAX) + forged(0),
      slot(3, offsetof(arena::Slot, step), 10) + slot(3, offsetof(arena::Slot, rank), 0) + forged(3),
  };
}

const Target kArena("arena", RunArena, ArenaSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
