// SPDX-License-Identifier: Apache-2.0
//
// The arena's layout in memory. The next process adopts it. docs/arena.md has the picture and the reasons for the order
// of the stores. From the memory's start:
//
//     superblock    one page: what this arena is; written once, by Format()
//     slots         chunk_count × Slot: slot i describes the sealed shard whose stream begins in chunk i, if any does.
//                   A chunk begins one shard at most, so slots need no allocator of their own.
//     descriptors   chunk_count × ChunkDescriptor: the next chunk of the same shard, and the chunk's checksum
//     tags          chunk_count × ChunkTag, only in the arena of a job that encrypts replicas: all zero for plaintext
//     chunks        chunk_count × chunk_bytes, from a multiple of min(chunk_bytes, 2 MiB), so that no chunk straddles
//                   a huge page that it could have avoided
//
// Everything is little-endian. Any change of the declarations here raises kArenaVersion. During use of the arena only
// these are written: the superblock's facts and names, the slots' state words, and slots and descriptors that no state
// word publishes. The exception: a word that differs from what the Store wrote is rewritten (heal.cc).

#ifndef ROPETEAM_CORE_STORE_FORMAT_H_
#define ROPETEAM_CORE_STORE_FORMAT_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "core/base/view.h"
#include "core/shard/extent.h"
#include "core/shard/manifest.h"
#include "core/store/store.h"

namespace ropeteam::arena {

inline constexpr uint64_t kArenaMagic = 0x314e455241504f52;  // "ROPAREN1"
// "FORMING0": Format() has not finished. Adopt() treats the memory as an empty arena. The two magics differ in many
// bits, so a few flipped bits never turn one into the other.
inline constexpr uint64_t kFormattingMagic = 0x30474e494d524f46;
static_assert(std::popcount(kArenaMagic ^ kFormattingMagic) >= 8);
inline constexpr uint32_t kArenaVersion = 1;
inline constexpr uint32_t kEncryptedArenaVersion = 2;  // with tags
inline constexpr uint64_t kPageBytes = 4096;
inline constexpr uint64_t kHugePageBytes = 2ull << 20;
// 4 Mi × 4 MiB is 16 TiB. The limit bounds the Store's own memory (core/store/free_runs.h and table.h) to 160 MiB, with
// tags to 256.
inline constexpr uint64_t kChunksMax = 4ull << 20;
inline constexpr size_t kJobBytesMax = 255;
inline constexpr size_t kRosterNamesBytesMax = 2048;  // more than a hundred names

// NodeFacts, which change while the arena is in use. They must survive a kill between any two stores, and a flipped bit.
// They are written to two places, the first before the second. A place is valid if its values match its check. The first
// valid place counts: it is the newer one, or both are equal.
inline constexpr size_t kFactWords = 6;
struct CheckedFacts {
  uint64_t words[kFactWords];  // in the order of NodeFacts
  uint64_t check;              // FactsCheck(words)
};
static_assert(sizeof(NodeFacts) == sizeof(CheckedFacts::words));
uint64_t FactsCheck(const uint64_t (&words)[kFactWords]);
CheckedFacts CheckedFactsOf(const NodeFacts& facts);

struct Superblock {
  uint64_t magic;  // stored last, by one store
  uint32_t version;
  uint32_t crc;  // SuperblockCrc(); in this place in every version
  CheckedFacts facts[2];
  uint64_t memory_bytes;
  uint64_t chunk_bytes;
  uint64_t chunk_count;
  uint64_t slots_begin;  // offsets from the memory's start
  uint64_t descriptors_begin;
  uint64_t chunks_begin;
  uint32_t job_length;
  uint32_t node_length;
  char job[kJobBytesMax + 1];
  char node[kNodeNameBytesMax + 1];
  // The names of the roster's nodes, separated by commas, as many as fit. They are lost if a kill strikes while they are
  // written; nothing but messages and a wait that is too long rests on them.
  uint32_t names_length;
  uint32_t names_crc;  // CRC32C of the names, continued from the low half of the roster's revision
  char names[kRosterNamesBytesMax];
  uint8_t reserved[1536];  // zero
};
static_assert(sizeof(Superblock) == kPageBytes);
static_assert(std::is_trivially_copyable_v<Superblock>);
static_assert(kNodeNameBytesMax == 63, "the superblock's size and offsets hang on it");

// A slot's state word. 0: free. Otherwise published; from the low bits up:
//
//     mark       8 bits, kSlotMark
//     role       8 bits, Role
//     committed  8 bits, 0 or 1
//     check      8 bits, ~(mark ^ role ^ committed): detects a flipped bit in the three
//     digest    32 bits, SlotDigest()
//
// So one 8-byte store publishes, withdraws, or changes role or committed, and leaves the digest valid.
inline constexpr uint64_t kSlotFree = 0;
inline constexpr uint8_t kSlotMark = 0xa5;

struct SlotState {
  uint32_t digest = 0;
  Role role = Role::kOwn;
  bool committed = false;
};
bool IsRole(Role role);  // whether this version stores the role
// The role must be IsRole(), which is checked: any other role would be published and never adopted.
uint64_t EncodeSlotState(const SlotState& state);
// Returns false if EncodeSlotState() never produces this `word`, for example for a free slot.
bool DecodeSlotState(uint64_t word, SlotState* state);

// Adopt() rejects a slot with a greater generation, so counting on never overflows.
inline constexpr uint64_t kGenerationMax = UINT64_MAX / 2;

struct Slot {
  uint64_t state;
  // Counts up with every seal and starts above the published ones. So the same shard sealed again in the same chunks
  // has another digest.
  uint64_t generation;
  uint32_t first_chunk;  // the slot's own number
  uint32_t chunk_count;
  uint64_t incarnation;
  uint64_t step;
  uint32_t rank;
  uint32_t world_size;
  uint32_t replicas;
  uint32_t object_count;
  uint64_t chunk_bytes;
  uint64_t stream_bytes;
  uint64_t manifest_offset;
  // Zero in an arena without tags.
  EncryptionSalt salt;
  KeyId key;  // that encrypted the chunks, which have tags then; kPlaintext: they are plaintext
  // ShardMeta::agreement. Slots of daemons before protocol 9 have zero, which means none, so kArenaVersion is
  // unchanged. Such a daemon rejects a slot with a value here, as it rejects any unknown byte.
  uint64_t agreement;
  uint64_t reserved;  // zero
};
static_assert(sizeof(Slot) == 128, "two cache lines; never shared with a neighbour");
static_assert(offsetof(Slot, state) == 0);
static_assert(std::is_trivially_copyable_v<Slot>);
static_assert(kPageBytes % sizeof(Slot) == 0, "slots begin on a page and must not straddle a line");

struct ChunkDescriptor {
  uint32_t next;  // the shard's next chunk, or kChainEnd
  uint32_t crc;   // CRC32C of the chunk's bytes of the stream
};
static_assert(sizeof(ChunkDescriptor) == 8);
inline constexpr uint32_t kChainEnd = UINT32_MAX;
static_assert(kChunksMax < kChainEnd);
static_assert(kChunksPerShardMax <= kChunksMax);
static_assert(kObjectsMax <= UINT32_MAX);

struct Layout {
  uint64_t chunk_count = 0;
  uint64_t slots_begin = 0;
  uint64_t descriptors_begin = 0;
  uint64_t tags_begin = 0;  // 0: the arena has no tags
  uint64_t chunks_begin = 0;
  uint64_t end = 0;  // bytes of memory that it takes
};
// `chunk_bytes` must be IsChunkBytes() and chunk_count at most kChunksMax.
Layout LayoutOf(uint64_t chunk_count, uint64_t chunk_bytes, bool encrypted = false);
// The layout with the most chunks that fit. chunk_count is 0 if no chunk fits, and may exceed kChunksMax.
Layout LayoutFor(uint64_t memory_bytes, uint64_t chunk_bytes, bool encrypted = false);
bool IsChunkBytes(uint64_t chunk_bytes);

// A complete superblock with its checksum, for an arena without known facts. The names must be within their
// limits.
Superblock NewSuperblock(uint64_t memory_bytes, uint64_t chunk_bytes, const Layout& layout,
                         const ArenaIdentity& identity);

// CRC32C of the superblock with magic, crc, facts and names set to zero.
uint32_t SuperblockCrc(const Superblock& superblock);

// CRC32C of the slot after its state word, then of every chunk's {number, checksum} in stream order, then of the tags.
uint32_t SlotDigest(const Slot& slot, std::span<const uint32_t> chunks, std::span<const uint32_t> crcs,
                    std::span<const ChunkTag> tags = {});

Slot SlotFor(const ShardMeta& meta, uint64_t generation, uint32_t first_chunk, uint32_t chunk_count,
             const EncryptionSalt& salt = {}, KeyId key = kPlaintext);
ShardMeta MetaOf(const Slot& slot);

// Checks the rules for a shard in an arena with this chunk size, both for a call of Seal() and for a slot of the table.
// kInvalidArgument with the value and the limit.
Status CheckMeta(const ShardMeta& meta, uint64_t chunk_bytes);

}  // namespace ropeteam::arena

#endif  // ROPETEAM_CORE_STORE_FORMAT_H_
