// SPDX-License-Identifier: Apache-2.0
//
// The Store is a node's arena together with its index: the free chunks, and the place of each sealed shard. The caller
// provides the memory (a mapping in ropeteamd, a vector in the simulation); format.h has its layout. The Store does no
// I/O and never reads the bytes of chunks.
//
// Crash consistency: the process may be killed between any two stores to the memory. The host stays up, so completed
// stores survive. A slot of the table is filled, checksummed, fenced, and only then published by one 8-byte store. One
// store withdraws it before any of its chunks is free. So a published slot describes a whole shard, and Adopt() derives
// the free list from the published slots alone.
//
// The table in the memory is for the next process; this process uses its own copy. Other processes map the memory and
// bits may flip, so a word of the table may differ from what the Store wrote. Such a word is rewritten from the Store's
// own copy: before a slot is used, and by HealTable().
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
#include "core/base/peer_access.h"
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
  std::vector<uint32_t> crcs;  // CRC32C of each chunk's bytes as stored here, ChunkLength() of them
  Encryption encryption;
  std::vector<uint32_t> bad;  // indices of chunks known to be bad, sorted; not stored
  uint32_t leases = 0;        // readers; not stored
  bool removed = false;       // withdrawn; its chunks are freed with the last lease
  uint32_t digest = 0;        // of its slot; used by the Store only
  uint64_t content = 0;       // ContentDigest()
  // Assigned by the seal: a shard sealed again under the same id has a higher one.
  uint64_t generation = 0;
  bool encrypted() const { return !encryption.tags.empty(); }
};

// What a node must remember across a restart of its daemon, besides its shards. The fields of `roster` are 0 until a
// step was committed: core/engine/roster.h says what they mean.
struct NodeFacts {
  Incarnation incarnation_max = 0;  // the highest that this node has heard of
  StepId committed;                 // the newest step that it has heard to be committed
  uint64_t roster_revision = 0;
  Epoch roster_epoch = 0;
  uint64_t roster_nodes = 0;
  friend bool operator==(const NodeFacts&, const NodeFacts&) = default;
};

struct ArenaIdentity {
  std::string job;
  std::string node;
  bool encrypted = false;  // of a job that encrypts replicas: has tags
};

class Store {
 public:
  struct AdoptReport {
    uint64_t shards = 0;                // complete sealed shards
    std::vector<std::string> rejected;  // one sentence per rejected slot
  };

  // Bytes of memory that an arena with `chunk_count` chunks takes, tables included.
  static uint64_t MemoryFor(uint64_t chunk_count, uint64_t chunk_bytes, bool encrypted = false);

  // Lays out a new, empty arena in `memory`, which must be page-aligned and outlive the Store. kInvalidArgument: the
  // chunk size is not a power of two in [kChunkBytesMin, kChunkBytesMax]; the memory is too small for one chunk, or too
  // large for the tables; or the identity exceeds its limits. The memory is unchanged then. Otherwise the first store
  // destroys any arena that was there.
  static Result<std::unique_ptr<Store>> Format(std::span<std::byte> memory, uint64_t chunk_bytes,
                                               const ArenaIdentity& identity);
  // Takes over the arena of a former process. kNotFound: no arena here (all zero, or an unfinished Format()). kCorrupt:
  // the superblock does not match its checksum. kUnsupported: another format version. kInvalidArgument: another job,
  // node, chunk size or memory size (the message has both), or tags where none are expected, or the reverse. Bad slots
  // are rejected and reported; they are not fatal. Chunk contents are not read: the caller checks them (crcs) and calls
  // MarkBad().
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

  // ---- allocation: not stored; chunks that are allocated but not sealed are free after a restart
  // Returns one extent if a large enough run is free (first fit), otherwise as few extents as possible. After an error
  // nothing is allocated. kNoSpace: the message has the chunks and bytes needed, free and the limit. kInvalidArgument:
  // more than kChunksPerShardMax. Zero chunks means one chunk, because every shard has a manifest.
  Result<std::vector<Extent>> Allocate(uint64_t chunks);
  void Free(const std::vector<Extent>& extents);

  // ---- access of peers, only in the arena of a job that encrypts: peers reach no plaintext
  // Peers may read the chunks of encrypted shards, until those are released. They may write to the chunks of
  // AdmitPuts(). Null: the job does not encrypt, and peers reach every chunk.
  PeerAccess* peer_access() { return peer_access_.get(); }
  // Peers may write to these allocated chunks until they are sealed or freed. Call it before a peer learns their places.
  void AdmitPuts(const std::vector<Extent>& extents);

  // ---- sealed shards
  // Publishes the shard and frees its chunks beyond ChunksFor(stream_bytes). kAlreadyExists: the id is already sealed
  // here, in any role. kInvalidArgument: the meta does not fit this arena, the number of crcs differs from that of the
  // chunks, or there are too few chunks for the stream. After an error the chunks still belong to the caller. The
  // extents must come from Allocate(), which is checked.
  Status Seal(const ShardMeta& meta, Role role, std::vector<Extent> extents, std::vector<uint32_t> crcs,
              Encryption encryption = {});
  // Moves the shard to other chunks: encrypted with another key, or plaintext. Role and mark stay. The old chunks are
  // freed at once, or when their last lease ends. New chunks beyond the stream are freed, as by Seal(). The shard must
  // be here. The extents must come from Allocate(), and the content must be equal. All this is checked. After a kill
  // during the call, one or both versions exist, and Adopt() takes the later one.
  void Replace(const ShardId& id, std::vector<Extent> extents, std::vector<uint32_t> crcs,
               Encryption encryption);
  const SealedShard* Find(const ShardId& id) const;
  // All published shards, ordered by id, without removed ones that are still leased.
  const std::map<ShardId, std::unique_ptr<SealedShard>>& shards() const { return shards_; }
  // The memory of the published shards of a role, kept up to date.
  struct Use {
    uint64_t shards = 0;
    uint64_t chunks = 0;
    friend bool operator==(const Use&, const Use&) = default;
  };
  Use use(Role role) const { return use_[static_cast<size_t>(role)]; }
  // Grows whenever shards() changes, except by leases. Callers can skip work if it is unchanged.
  uint64_t changes() const { return changes_; }
  void SetCommitted(const ShardId& id);
  void SetRole(const ShardId& id, Role role);
  // Withdraws the shard. Its chunks are freed at once, or when its last lease ends. No-op if the id is unknown.
  void Remove(const ShardId& id);

  // A lease keeps chunks in place for a reader. The token stays valid when the shard is removed.
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

  // ---- repair; no-ops for unknown shards and chunks
  void MarkBad(const ShardId& id, uint32_t chunk_index);
  // The caller has written the chunk again, in place, and checked it against its CRC.
  void MarkRepaired(const ShardId& id, uint32_t chunk_index);

  // ---- facts that survive the process. Incarnations are below kIncarnationMax: callers check values from outside
  // first. The highest incarnation never falls.
  const NodeFacts& facts() const { return facts_; }
  void SetFacts(const NodeFacts& facts);
  // The names of the roster's nodes, as many as fit into the arena. Set them before the facts of the same roster.
  const std::vector<std::string>& roster_names() const { return roster_names_; }
  void SetRosterNames(uint64_t roster_revision, const std::vector<std::string>& names);
  Incarnation incarnation_max() const { return facts_.incarnation_max; }
  void SetIncarnationMax(Incarnation incarnation);

  // ---- the table in the memory
  // Compares slots and descriptors with what the Store wrote: the slots of chunks [first, first + count), the
  // descriptors of the sealed chunks among them and, if `first` is 0, the superblock. Rewrites what differs. Logs a
  // warning with the place and both values for the first few, and a count for the others. Returns the number of
  // differing places. Chunks beyond the last are skipped. It reads some 136 bytes per chunk. A kill between any two of
  // its stores leaves no shard that was not sealed.
  size_t HealTable(uint32_t first, uint32_t count);
  // Places of the table that were rewritten since this Store was constructed.
  uint64_t table_repairs() const { return table_repairs_; }
  // Places that differ now. Reads the whole table and writes nothing. For tests and the simulation.
  size_t CountTableDamage() const;

  // Recomputes all state and compares it, with ROPETEAM_CHECK: no chunk in two places, correct counts, table equal to
  // the index. For tests and the simulation.
  void CheckInvariants() const;
  // Tests that damage the table call this first. CheckInvariants() then skips the comparison until the table is whole
  // again.
  void ExpectTableDamage() { table_damage_expected_ = true; }

  // `crash_point` is called between the stores to the arena's tables, with the name of the place where a kill would
  // leave them. Null: none. Not thread-safe. It may read the arena's memory but not call the Store.
  static void SetCrashPointForTest(void (*crash_point)(const char* place));

 private:
  enum class ChunkUse : uint8_t { kFree, kAllocated, kSealed };

  // A shard as its slot describes it, after the checks.
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
  // Fills the tables, publishes the slot and adds the shard. The caller has set meta, role, mark, extents, crcs and
  // encryption.
  void PublishShard(std::unique_ptr<SealedShard> shard);
  void Withdraw(std::unique_ptr<SealedShard> shard);

  // adopt.cc
  static Result<arena::Layout> CheckSuperblock(std::span<const std::byte> memory, uint64_t chunk_bytes,
                                               const ArenaIdentity& identity);
  Status ReadSlot(uint32_t index, Found* found) const;
  void RejectOverlaps(const std::vector<Found>& found, std::vector<std::string>* reasons) const;
  void Install(Found found);
  Status AdoptFacts();
  void AdoptRosterNames();

  // heal.cc
  size_t HealSlot(uint32_t index);
  size_t HealPlace(const char* what, uint32_t index, void* place, const void* known, size_t bytes,
                   bool report);

  void StoreFacts(const NodeFacts& facts);
  void StoreState(const SealedShard& shard);
  void ReleaseChunks(const SealedShard& shard);
  void SetAccess(const std::vector<Extent>& extents, PeerAccess::Kind kind);
  void AdmitGets(const SealedShard& shard);
  void CountIn(const SealedShard& shard);
  void CountOut(const SealedShard& shard);
  void CheckShard(const SealedShard& shard, std::vector<bool>* seen) const;

  std::span<std::byte> memory_;
  uint64_t chunk_bytes_ = 0;
  uint64_t chunk_count_ = 0;
  uint64_t slots_begin_ = 0;
  uint64_t descriptors_begin_ = 0;
  uint64_t tags_begin_ = 0;  // 0: the arena has no tags
  uint64_t chunks_begin_ = 0;
  uint64_t generation_ = 0;  // of the last seal
  NodeFacts facts_;
  std::vector<std::string> roster_names_;
  FreeRuns free_runs_;
  std::vector<ChunkUse> chunk_use_;          // by chunk
  std::unique_ptr<PeerAccess> peer_access_;  // null: the arena has no tags
  std::map<ShardId, std::unique_ptr<SealedShard>> shards_;
  std::array<Use, static_cast<size_t>(Role::kCache) + 1> use_{};  // by role
  // Withdrawn shards with readers. Their chunks are in use here, but free in the table.
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
