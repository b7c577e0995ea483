// SPDX-License-Identifier: Apache-2.0
//
// Damaged tables of an arena that a former process left, without and with encrypted copies. The Store must work with
// whatever Adopt() accepts, and the next process must find the same shards.

#include "tests/core/store_arena_for_test.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/values.h"

namespace ropeteam::fuzz {
namespace {

constexpr uint64_t kChunks = 16;
constexpr KeyId kKey = 0x1a2b3c4d5e6f7788;

// Changes of the arena. A forge makes a checksum match the damaged slot or superblock.
enum Op : uint8_t { kBytes, kSlot, kDescriptor, kForgeSlot, kForgeSuperblock, kOps };

// The parts of an arena, as a former process has laid it out.
struct Image {
  explicit Image(bool encrypted)
      : identity{kIdentity.job, kIdentity.node, encrypted},
        layout(arena::LayoutOf(kChunks, kSmallChunk, encrypted)),
        memory(Store::MemoryFor(kChunks, kSmallChunk, encrypted)) {
    const auto store = Store::Format(memory.span(), kSmallChunk, identity).value();
    Save(store.get(), {1, 10, 0}, 2 * kSmallChunk + 5, Role::kOwn);
    Save(store.get(), {1, 10, 1}, 77, Role::kReplica);
    Save(store.get(), {1, 11, 0}, 3 * kSmallChunk, Role::kCache);
    store->SetIncarnationMax(4);
  }
  // A node of a job that encrypts has its own shards as plaintext, and those of others as ciphertext.
  void Save(Store* store, const ShardId& id, uint64_t bytes, Role role) const {
    const ShardMeta meta = MetaForTest(id, bytes);
    const std::vector<Extent> extents = store->Allocate(ChunksFor(bytes, kSmallChunk)).value();
    std::vector<uint32_t> crcs = FillForTest(store, meta, extents);
    Encryption encryption;
    if (identity.encrypted) encryption.salt = {{11, 12}, 1 + id.rank};
    if (identity.encrypted && role != Role::kOwn) {
      encryption.key = kKey;
      for (const uint32_t crc : crcs) encryption.tags.push_back({{crc, ~crc}, crc + 1, 0});
    }
    ROPETEAM_CHECK(store->Seal(meta, role, extents, std::move(crcs), std::move(encryption)).ok());
  }

  ArenaIdentity identity;
  arena::Layout layout;
  ArenaMemory memory;
};

void Change(FromBytes* in, const Image& image, ArenaMemory* memory) {
  const uint64_t slots = image.layout.slots_begin;
  const uint64_t descriptors = image.layout.descriptors_begin;
  const uint64_t end = image.identity.encrypted ? image.layout.tags_begin + kChunks * sizeof(ChunkTag)
                                                : descriptors + kChunks * sizeof(arena::ChunkDescriptor);
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
    *memory->superblock() =
        arena::NewSuperblock(memory->span().size(), kSmallChunk, image.layout, image.identity);
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

void RunOn(const Image& image, std::string_view input) {
  ArenaMemory memory = image.memory;
  for (FromBytes in(input); !in.done();) Change(&in, image, &memory);

  Store::AdoptReport report;
  Result<std::unique_ptr<Store>> store = Store::Adopt(memory.span(), kSmallChunk, image.identity, &report);
  if (!store.ok()) return;
  ROPETEAM_CHECK(report.shards == (*store)->shards().size());
  if (input.empty()) ROPETEAM_CHECK(report.shards == 3);
  Use(store->get());
  std::vector<std::pair<ShardMeta, Encryption>> found;
  for (const auto& [id, shard] : (*store)->shards()) found.emplace_back(shard->meta, shard->encryption);
  store->reset();

  store = Store::Adopt(memory.span(), kSmallChunk, image.identity, &report);
  ROPETEAM_CHECK(store.ok() && report.rejected.empty() && report.shards == found.size());
  for (const auto& [meta, encryption] : found) {
    const SealedShard* const again = (*store)->Find(meta.id);
    ROPETEAM_CHECK(again->meta == meta && again->encryption == encryption);
  }
}

void RunArena(std::string_view input) {
  static const Image* const kImage = new Image(false);
  RunOn(*kImage, input);
}

void RunEncryptedArena(std::string_view input) {
  static const Image* const kImage = new Image(true);
  RunOn(*kImage, input);
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

// As ArenaSeeds(), and changes of keys, salts and tags.
std::vector<std::string> EncryptedArenaSeeds() {
  std::vector<std::string> seeds = ArenaSeeds();
  const uint64_t tags = arena::LayoutOf(kChunks, kSmallChunk, true).tags_begin;
  for (const size_t field : {offsetof(arena::Slot, key), offsetof(arena::Slot, salt) + 16})
    for (const uint32_t index : {0, 3, 4})
      for (const uint64_t value : {uint64_t{0}, uint64_t{9}})
        seeds.push_back(
            ToBytes().Byte(kSlot).Byte(index).Byte(field).Put(value).Byte(kForgeSlot).Byte(index).bytes());
  seeds.push_back(
      ToBytes().Byte(kBytes).Byte(0).Put(tags + 3 * sizeof(ChunkTag)).Put(std::string(24, 'x')).bytes() +
      ToBytes().Byte(kForgeSlot).Byte(3).bytes());
  return seeds;
}

const Target kArena("arena", RunArena, ArenaSeeds);
const Target kEncryptedArena("arena_encrypted", RunEncryptedArena, EncryptedArenaSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
