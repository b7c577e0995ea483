// SPDX-License-Identifier: Apache-2.0
//
// The Store is a node's arena together with its index: which chunks are free, and where each sealed shard is.
// The memory is given by the caller (a mapping in ropeteamd, a vector in the simulation); format.h has its layout. The
// Store does no I/O and never reads the bytes of chunks.
//
// Crash consistency: the process may be killed between any two stores to the memory (not the host: what a
// store has written stays). A slot of the table is filled, checksummed, fenced and only then published by one
// 8-byte store; it is withdrawn by one store before any of its chunks is free. So a published slot
// describes a whole shard, and Adopt() derives the free list from the published slots and nothing else.
//
// The table in the memory is for the next process; this process uses its own copy. The memory is
// mapped by other processes and bits may flip, so a word of the table may differ from what the Store wrote.
// Such a word is rewritten from the Store's own memory: before a slot is used, and by HealTable().
//
// One thread at a time. Pointers to SealedShard are valid until the next non-const call.

#ifndef ROPETEAM_CORE_STORE_STORE_H_
#define ROPETEAM_CORE_STORE_STORE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/shard/extent.h"
#include "core/store/free_runs.h"

namespace ropeteam {

namespace arena {  // format.h
struct Slot;
struct ChunkDescriptor;
struct Superblock;
struct Layout;
}  // namespace arena

// Append-only: stored in the arena.
enum class Role : uint32_t {
  kOwn = 1,      // saved by a rank of this node
  kReplica = 2,  // copied here by the node that saved it, or to restore lost redundancy
  kCache = 3,    // fetched here to be read; evicted first when memory is needed
};

struct SealedShard {
  ShardMeta meta;
  Role role = Role::kOwn;
  bool committed = false;  // the leader announced its step as committed
  std::vector<Extent> extents;
  std::vector<uint32_t> crcs;  // CRC32C of each chunk's bytes as they lie here, ChunkLength() of them
  Encryption encryption;
  std::vector<uint32_t> bad;   // chunk indices known not to match, sorted; not stored
  uint32_t leases = 0;         // readers; not stored
  bool removed = false;        // withdrawn; its chunks are free once the last lease ends
  uint32_t digest = 0;         // of its slot; the Store's own
  uint64_t content = 0;        // ContentDigest()
  // Of its seal: a shard that is sealed again under the same id has a higher one.
  uint64_t generation = 0;
  bool encrypted() const { return !encryption.tags.empty(); }
};

struct ArenaIdentity {
  std::string job;
  std::string node;
  bool encrypted = false;  // of a job that encrypts replicas: has tags
};

class Store {
 public:
  struct AdoptReport {
    uint64_t shards = 0;                // sealed shards found whole
    std::vector<std::string> rejected;  // one sentence for each rejected slot
  };

  // Bytes of memory that an arena with `chunk_count` chunks takes, tables included.
  static uint64_t MemoryFor(uint64_t chunk_count, uint64_t chunk_bytes, bool encrypted = false);

  // Lays a fresh, empty arena over `memory` (page-aligned, must outlive the Store). kInvalidArgument: chunk
  // size not a power of two in [kChunkBytesMin, kChunkBytesMax], memory too small for one chunk or larger
  // than the tables can name, identity over its limits; the memory is untouched then. Whatever arena was
  // there is gone with the first store.
  static Result<std::unique_ptr<Store>> Format(std::span<std::byte> memory, uint64_t chunk_bytes,
                                               const ArenaIdentity& identity);
  // Takes over the arena of a former process. kNotFound: no arena here (all zero, or a Format() that did not
  // finish); kCorrupt: the superblock does not match its checksum; kUnsupported: another format version;
  // kInvalidArgument: another job, node, chunk size or memory size (both are named), or tags where none are expected, or
  // the reverse. Single bad slots are rejected and reported, and are not fatal. Chunk contents are not read: the caller
  // checks them (crcs) and calls MarkBad().
  static Result<std::unique_ptr<Store>> Adopt(std::span<std::byte> memory, uint64_t chunk_bytes,
                                              const ArenaIdentity& identity, AdoptReport* report);
  ~Store();  // writes nothing: the arena stays as it is

  // ---- geometry: for processes that map the same memory
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  uint64_t chunks_total() const { return chunk_count_; }
  uint64_t chunks_free() const { return free_runs_.free(); }
  uint64_t chunk_offset(uint32_t chunk) const {
    return chunks_begin_ + chunk * chunk_bytes_;
  }  // from memory's start
  std::byte* chunk(uint32_t chunk) { return memory_.data() + chunk_offset(chunk); }
  const std::byte* chunk(uint32_t chunk) const { return memory_.data() + chunk_offset(chunk); }
  std::span<std::byte> memory() { return memory_; }

  // ---- allocation: not stored; chunks allocated and not sealed are free after a restart
  // One extent when a run is free (first fit), else as few as can be. kNoSpace: chunks needed, free and the
  // limit, in bytes too; kInvalidArgument: more than kChunksPerShardMax; nothing is allocated then. Zero
  // chunks is one chunk: every shard has a manifest.
  Result<std::vector<Extent>> Allocate(uint64_t chunks);
  void Free(const std::vector<Extent>& extents);

  // ---- sealed shards
  // Publishes the shard; the chunks beyond ChunksFor(stream_bytes) are freed. kAlreadyExists: the id is
  // sealed here already (in any role). kInvalidArgument: a meta that does not fit this arena, another number
  // of crcs than chunks, fewer chunks than the stream needs. After an error the chunks still belong to the
  // caller. The extents must come from Allocate(), which is checked.
  Status Seal(const ShardMeta& meta, Role role, std::vector<Extent> extents, std::vector<uint32_t> crcs,
              Encryption encryption = {});
  // Moves the shard to other chunks: encrypted if it was plaintext, or the reverse. Role and mark stay. The former chunks
  // are freed at once, or when their last lease ends. The shard must be here, the extents must come from Allocate() and
  // have as many chunks, and the content must be equal; all this is checked. A kill in between leaves one of the two, or
  // both, of which Adopt() takes the later.
  void Replace(const ShardId& id, std::vector<Extent> extents, std::vector<uint32_t> crcs,
               Encryption encryption);
  const SealedShard* Find(const ShardId& id) const;
  // All published shards, ordered by id. Removed ones that are still leased are not among them.
  const std::map<ShardId, std::unique_ptr<SealedShard>>& shards() const { return shards_; }
  // The memory of the published shards of a role, kept up to date.
  struct Use {
    uint64_t shards = 0;
    uint64_t chunks = 0;
    friend bool operator==(const Use&, const Use&) = default;
  };
  Use use(Role role) const { return use_[static_cast<size_t>(role)]; }
  // Grows whenever shards() changes, except by leases: callers can skip a second look at the same state.
  uint64_t changes() const { return changes_; }
  void SetCommitted(const ShardId& id);
  void SetRole(const ShardId& id, Role role);
  // Withdraws the shard; its chunks are free at once, or when its last lease ends. No-op when unknown.
  void Remove(const ShardId& id);

  // A lease keeps chunks where they are for a reader. The token stays valid when the shard is removed.
  using LeaseToken = uint64_t;
  Result<LeaseToken> Lease(const ShardId& id);
  void EndLease(LeaseToken token);
  const SealedShard* Leased(LeaseToken token) const;  // null when unknown
  // Chunks of removed shards that a lease still keeps.
  uint64_t removed_chunks() const {
    uint64_t chunks = 0;
    for (const auto& shard : removed_) chunks += ChunkCount(shard->extents);
    return chunks;
  }

  // ---- repair; no-ops for what is not there
  void MarkBad(const ShardId& id, uint32_t chunk_index);
  // The chunk has been written again, in place, and checked against its CRC by the caller.
  void MarkRepaired(const ShardId& id, uint32_t chunk_index);

  // ---- the highest incarnation this node has heard of; survives the process, never falls. Below kIncarnationMax: what
  // comes from outside is checked before.
  Incarnation incarnation_max() const { return incarnation_max_; }
  void SetIncarnationMax(Incarnation incarnation);

  // ---- the table in the memory
  // Compares the slots of chunks [first, first + count) and the descriptors of those that are sealed with what
  // the Store wrote there, and with `first` 0 the superblock too. Rewrites what differs, each with a warning
  // that names the place and both values (only the first few of a call; the others are
  // counted). Returns how many places differed. Chunks beyond the last are skipped; the cost is some 136 bytes
  // read a chunk. A kill between any two stores of it leaves no shard that was not sealed.
  size_t HealTable(uint32_t first, uint32_t count);
  // Places of the table that were rewritten since this Store was made.
  uint64_t table_repairs() const { return table_repairs_; }
  // Places that differ now; reads the whole table and writes nothing. For tests and the simulation.
  size_t CountTableDamage() const;

  // Recomputes and compares all state: no chunk in two places, counts right, table equal to the index. For tests and
  // the simulation; ROPETEAM_CHECKs.
  void CheckInvariants() const;
  // Tests that damage the table call this first: CheckInvariants() does not compare the table until it finds it
  // whole again.
  void ExpectTableDamage() { table_damage_expected_ = true; }

  // Called, with the name of the place, between the stores to the arena's tables: where a kill would leave
  // them. Null for none. Not thread-safe; the arena's memory may be read in it, the Store not called.
  static void SetCrashPointForTest(void (*crash_point)(const char* place));

 private:
  enum class ChunkUse : uint8_t { kFree, kAllocated, kSealed };

  // A shard as its slot describes it, checked.
  struct Found;
  // The table as the Store last wrote it (table.h).
  struct Table;

  Store(std::span<std::byte> memory, uint64_t chunk_bytes, const arena::Layout& layout);

  arena::Superblock* superblock();
  arena::Slot* slot(uint32_t index);
  const arena::Slot* slot(uint32_t index) const { return const_cast<Store*>(this)->slot(index); }
  arena::ChunkDescriptor* descriptor(uint32_t chunk);
  const arena::ChunkDescriptor* descriptor(uint32_t chunk) const {
    return const_cast<Store*>(this)->descriptor(chunk);
  }

  ChunkTag* tag(uint32_t chunk);
  const ChunkTag* tag(uint32_t chunk) const { return const_cast<Store*>(this)->tag(chunk); }
  // Fills the tables, publishes the slot and enters the shard; its meta, role, mark, extents, crcs and encryption are set.
  void PublishShard(std::unique_ptr<SealedShard> shard);
  void Withdraw(std::unique_ptr<SealedShard> shard);

  // adopt.cc
  static Result<arena::Layout> CheckSuperblock(std::span<const std::byte> memory, uint64_t chunk_bytes,
                                               const ArenaIdentity& identity);
  Status ReadSlot(uint32_t index, Found* found) const;
  void RejectOverlaps(const std::vector<Found>& found, std::vector<std::string>* reasons) const;
  void Install(Found found);
  Status AdoptIncarnation();

  // heal.cc
  size_t HealSlot(uint32_t index);
  size_t HealPlace(const char* what, uint32_t index, void* place, const void* known, size_t bytes,
                   bool report);

  void StoreIncarnation(Incarnation incarnation);
  void StoreState(const SealedShard& shard);
  void ReleaseChunks(const SealedShard& shard);
  void CountIn(const SealedShard& shard);
  void CountOut(const SealedShard& shard);
  void CheckShard(const SealedShard& shard, std::vector<bool>* seen) const;

  std::span<std::byte> memory_;
  uint64_t chunk_bytes_ = 0;
  uint64_t chunk_count_ = 0;
  uint64_t slots_begin_ = 0;
  uint64_t descriptors_begin_ = 0;
  uint64_t tags_begin_ = 0;  // 0: there are none
  uint64_t chunks_begin_ = 0;
  uint64_t generation_ = 0;  // of the last seal
  Incarnation incarnation_max_ = 0;
  FreeRuns free_runs_;
  std::vector<ChunkUse> chunk_use_;  // by chunk
  std::map<ShardId, std::unique_ptr<SealedShard>> shards_;
  std::array<Use, static_cast<size_t>(Role::kCache) + 1> use_{};  // by role
  // Withdrawn but still read. Their chunks are in use here and free in the table.
  std::vector<std::unique_ptr<SealedShard>> removed_;
  std::unordered_map<LeaseToken, SealedShard*> leases_;
  LeaseToken lease_last_ = 0;
  uint64_t changes_ = 0;
  std::unique_ptr<Table> table_;
  uint64_t table_repairs_ = 0;
  mutable bool table_damage_expected_ = false;
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_STORE_STORE_H_
