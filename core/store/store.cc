// SPDX-License-Identifier: Apache-2.0
#include "core/store/store.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "core/store/format.h"
#include "core/store/publish.h"
#include "core/store/table.h"

namespace ropeteam {

using arena::CrashPoint;
using arena::Publish;

namespace {

void (*crash_point_for_test)(const char* place) = nullptr;

// The chunks of a shard, in stream order.
std::vector<uint32_t> ChunksOf(const std::vector<Extent>& extents) {
  std::vector<uint32_t> chunks;
  chunks.reserve(ChunkCount(extents));
  for (const Extent& extent : extents) {
    for (uint32_t i = 0; i < extent.count; ++i) chunks.push_back(extent.first + i);
  }
  return chunks;
}

// Cuts the extents after `count` chunks and returns the rest.
std::vector<Extent> SplitAfter(std::vector<Extent>* extents, uint64_t count) {
  std::vector<Extent> rest;
  size_t kept = 0;
  for (Extent& extent : *extents) {
    const auto used = static_cast<uint32_t>(std::min<uint64_t>(extent.count, count));
    if (used < extent.count) rest.push_back({extent.first + used, extent.count - used});
    extent.count = used;
    count -= used;
    if (used != 0) ++kept;
  }
  extents->resize(kept);
  return rest;
}

Status CheckGeometry(std::span<std::byte> memory, uint64_t chunk_bytes, const ArenaIdentity& identity) {
  if (!arena::IsChunkBytes(chunk_bytes)) {
    return Error(Code::kInvalidArgument,
                 "chunk size of %" PRIu64 " bytes is no power of two from %" PRIu64 " to %" PRIu64,
                 chunk_bytes, kChunkBytesMin, kChunkBytesMax);
  }
  if (reinterpret_cast<uintptr_t>(memory.data()) % alignof(arena::Superblock) != 0) {
    return Error(Code::kInvalidArgument, "arena memory at %p is not aligned",
                 static_cast<void*>(memory.data()));
  }
  if (identity.job.size() > arena::kJobBytesMax) {
    return Error(Code::kInvalidArgument, "job name of %zu bytes, limit %zu", identity.job.size(),
                 arena::kJobBytesMax);
  }
  if (identity.node.size() > kNodeNameBytesMax) {
    return Error(Code::kInvalidArgument, "node name of %zu bytes, limit %zu", identity.node.size(),
                 kNodeNameBytesMax);
  }
  return OkStatus();
}

}  // namespace

void arena::CrashPoint(const char* place) {
  if (crash_point_for_test != nullptr) crash_point_for_test(place);
}

void Store::SetCrashPointForTest(void (*crash_point)(const char* place)) {
  crash_point_for_test = crash_point;
}

Store::Store(std::span<std::byte> memory, uint64_t chunk_bytes, const arena::Layout& layout)
    : memory_(memory),
      chunk_bytes_(chunk_bytes),
      chunk_count_(layout.chunk_count),
      slots_begin_(layout.slots_begin),
      descriptors_begin_(layout.descriptors_begin),
      tags_begin_(layout.tags_begin),
      chunks_begin_(layout.chunks_begin),
      free_runs_(static_cast<uint32_t>(layout.chunk_count)),
      chunk_use_(layout.chunk_count, ChunkUse::kFree),
      table_(std::make_unique<Table>()) {
  table_->descriptors.resize(layout.chunk_count);
  if (tags_begin_ == 0) return;
  table_->tags.resize(layout.chunk_count);
  peer_access_ = std::make_unique<PeerAccess>(layout.chunk_count, chunk_bytes);
}

Store::~Store() = default;

arena::Superblock* Store::superblock() { return reinterpret_cast<arena::Superblock*>(memory_.data()); }

arena::Slot* Store::slot(uint32_t index) {
  return reinterpret_cast<arena::Slot*>(memory_.data() + slots_begin_) + index;
}

arena::ChunkDescriptor* Store::descriptor(uint32_t chunk) {
  return reinterpret_cast<arena::ChunkDescriptor*>(memory_.data() + descriptors_begin_) + chunk;
}

ChunkTag* Store::tag(uint32_t chunk) {
  return reinterpret_cast<ChunkTag*>(memory_.data() + tags_begin_) + chunk;
}

uint64_t Store::MemoryFor(uint64_t chunk_count, uint64_t chunk_bytes, bool encrypted) {
  return arena::LayoutOf(chunk_count, chunk_bytes, encrypted).end;
}

Result<std::unique_ptr<Store>> Store::Format(std::span<std::byte> memory, uint64_t chunk_bytes,
                                             const ArenaIdentity& identity) {
  ROPETEAM_RETURN_IF_ERROR(CheckGeometry(memory, chunk_bytes, identity));
  const arena::Layout layout = arena::LayoutFor(memory.size(), chunk_bytes, identity.encrypted);
  if (layout.chunk_count == 0) {
    return Error(Code::kInvalidArgument,
                 "arena memory of %zu bytes, one chunk of %" PRIu64 " bytes takes %" PRIu64, memory.size(),
                 chunk_bytes, MemoryFor(1, chunk_bytes, identity.encrypted));
  }
  if (layout.chunk_count > arena::kChunksMax) {
    return Error(Code::kInvalidArgument,
                 "arena memory of %zu bytes has %" PRIu64 " chunks of %" PRIu64 " bytes, limit %" PRIu64
                 " chunks: take larger ones",
                 memory.size(), layout.chunk_count, chunk_bytes, arena::kChunksMax);
  }
  std::unique_ptr<Store> store(new Store(memory, chunk_bytes, layout));
  arena::Superblock* superblock = store->superblock();
  // From here to the last store there is no arena in this memory: after a kill, Adopt() returns kNotFound.
  Publish(&superblock->magic, arena::kFormattingMagic);
  CrashPoint("format: old arena withdrawn");
  for (uint32_t i = 0; i < layout.chunk_count; ++i) store->slot(i)->state = arena::kSlotFree;
  CrashPoint("format: slots free");

  arena::Superblock fresh = arena::NewSuperblock(memory.size(), chunk_bytes, layout, identity);
  store->table_->superblock = fresh;
  fresh.magic = arena::kFormattingMagic;
  std::memcpy(superblock, &fresh, sizeof(fresh));
  CrashPoint("format: superblock written");
  Publish(&superblock->magic, arena::kArenaMagic);
  CrashPoint("format: published");
  return store;
}

// ---- allocation

Result<std::vector<Extent>> Store::Allocate(uint64_t chunks) {
  const uint64_t needed = std::max<uint64_t>(chunks, 1);
  if (needed > kChunksPerShardMax) {
    return Error(Code::kInvalidArgument, "needed %" PRIu64 " chunks for one shard, limit %" PRIu64, needed,
                 kChunksPerShardMax);
  }
  const uint64_t free = chunks_free();
  if (needed > free) {
    return Error(Code::kNoSpace,
                 "needed %" PRIu64 " chunks (%" PRIu64 " bytes), free %" PRIu64 " (%" PRIu64
                 " bytes), limit %" PRIu64 " (%" PRIu64 " bytes, by --memory)",
                 needed, needed * chunk_bytes_, free, free * chunk_bytes_, chunk_count_,
                 chunk_count_ * chunk_bytes_);
  }
  std::vector<Extent> extents;
  for (auto left = static_cast<uint32_t>(needed); left > 0;) {
    // If no run is long enough for the rest, the longest run leaves the least.
    const uint32_t count = std::min(left, free_runs_.longest());
    const uint32_t first = free_runs_.FirstFit(count);
    free_runs_.Take(first, count);
    std::fill_n(chunk_use_.begin() + first, count, ChunkUse::kAllocated);
    extents.push_back({first, count});
    left -= count;
  }
  return extents;
}

void Store::Free(const std::vector<Extent>& extents) {
  for (const Extent& extent : extents) {
    ROPETEAM_CHECK(extent.first < chunk_count_ && extent.count <= chunk_count_ - extent.first);
    for (uint32_t i = 0; i < extent.count; ++i) {
      ChunkUse& use = chunk_use_[extent.first + i];
      ROPETEAM_CHECK(use == ChunkUse::kAllocated);
      use = ChunkUse::kFree;
    }
    if (extent.count != 0) free_runs_.Give(extent.first, extent.count);
  }
  SetAccess(extents, PeerAccess::Kind::kNone);
}

void Store::ReleaseChunks(const SealedShard& shard) {
  for (const Extent& extent : shard.extents) {
    for (uint32_t i = 0; i < extent.count; ++i) {
      ChunkUse& use = chunk_use_[extent.first + i];
      ROPETEAM_CHECK(use == ChunkUse::kSealed);
      use = ChunkUse::kFree;
    }
    free_runs_.Give(extent.first, extent.count);
  }
  SetAccess(shard.extents, PeerAccess::Kind::kNone);
}

void Store::SetAccess(const std::vector<Extent>& extents, PeerAccess::Kind kind) {
  if (peer_access_ == nullptr) return;
  for (const Extent& extent : extents) peer_access_->Set(extent.first, extent.count, kind);
}

void Store::AdmitPuts(const std::vector<Extent>& extents) {
  for (const Extent& extent : extents)
    for (uint32_t i = 0; i < extent.count; ++i)
      ROPETEAM_CHECK(chunk_use_[extent.first + i] == ChunkUse::kAllocated);
  SetAccess(extents, PeerAccess::Kind::kWrite);
}

void Store::AdmitGets(const SealedShard& shard) {
  SetAccess(shard.extents, shard.encrypted() ? PeerAccess::Kind::kRead : PeerAccess::Kind::kNone);
}

// ---- sealed shards

Status Store::Seal(const ShardMeta& meta, Role role, std::vector<Extent> extents, std::vector<uint32_t> crcs,
                   Encryption encryption) {
  ROPETEAM_RETURN_IF_ERROR(arena::CheckMeta(meta, chunk_bytes_));
  if (!arena::IsRole(role))
    return Error(Code::kInvalidArgument, "invalid role %u", static_cast<unsigned>(role));
  const uint64_t count = ChunksFor(meta.stream_bytes, chunk_bytes_);
  if (crcs.size() != count || ChunkCount(extents) < count) {
    return Error(Code::kInvalidArgument,
                 "%s has %" PRIu64 " chunks, given were %" PRIu64 " with %zu checksums",
                 meta.id.ToString().c_str(), count, ChunkCount(extents), crcs.size());
  }
  if (shards_.contains(meta.id)) {
    return Error(Code::kAlreadyExists, "%s is sealed here already", meta.id.ToString().c_str());
  }
  Free(SplitAfter(&extents, count));
  auto shard = std::make_unique<SealedShard>();
  shard->meta = meta;
  shard->role = role;
  shard->extents = std::move(extents);
  shard->crcs = std::move(crcs);
  shard->encryption = std::move(encryption);
  PublishShard(std::move(shard));
  return OkStatus();
}

void Store::Replace(const ShardId& id, std::vector<Extent> extents, std::vector<uint32_t> crcs,
                    Encryption encryption) {
  const auto it = shards_.find(id);
  ROPETEAM_CHECK(it != shards_.end());
  std::unique_ptr<SealedShard> before = std::move(it->second);
  shards_.erase(it);
  ROPETEAM_CHECK(crcs.size() == before->crcs.size() && ChunkCount(extents) >= crcs.size());
  Free(SplitAfter(&extents, crcs.size()));
  auto shard = std::make_unique<SealedShard>();
  shard->meta = before->meta;
  shard->role = before->role;
  shard->committed = before->committed;
  shard->extents = std::move(extents);
  shard->crcs = std::move(crcs);
  shard->encryption = std::move(encryption);
  const uint64_t content = before->content;
  PublishShard(std::move(shard));
  ROPETEAM_CHECK(Find(id)->content == content);
  Withdraw(std::move(before));
}

void Store::PublishShard(std::unique_ptr<SealedShard> shard) {
  const std::vector<uint32_t> chunks = ChunksOf(shard->extents);
  const std::vector<ChunkTag>& tags = shard->encryption.tags;
  // Without tags there is no place for a salt either: the arena has the format that older builds read.
  ROPETEAM_CHECK(tags_begin_ != 0 || shard->encryption == Encryption());
  ROPETEAM_CHECK(tags.empty() || tags.size() == chunks.size());
  ROPETEAM_CHECK(tags.empty() == (shard->encryption.key == kPlaintext));
  for (const uint32_t chunk : chunks) {
    ROPETEAM_CHECK(chunk < chunk_count_ && chunk_use_[chunk] == ChunkUse::kAllocated);
    chunk_use_[chunk] = ChunkUse::kSealed;
  }
  AdmitGets(*shard);

  // No other shard of this process begins here. The table in the memory may differ if another process wrote to it.
  ROPETEAM_CHECK(!table_->begins.contains(chunks[0]));
  HealSlot(chunks[0]);

  // Fill the slot. None of these chunks is in a published slot, so no reader uses these words yet.
  for (size_t i = 0; i < chunks.size(); ++i) {
    arena::ChunkDescriptor& known = table_->descriptors[chunks[i]];
    known = {i + 1 < chunks.size() ? chunks[i + 1] : arena::kChainEnd, shard->crcs[i]};
    *descriptor(chunks[i]) = known;
    if (tags_begin_ != 0) *tag(chunks[i]) = table_->tags[chunks[i]] = tags.empty() ? ChunkTag() : tags[i];
    CrashPoint("seal: descriptor written");
  }
  arena::Slot fresh =
      arena::SlotFor(shard->meta, ++generation_, chunks[0], static_cast<uint32_t>(chunks.size()),
                     shard->encryption.salt, shard->encryption.key);
  arena::Slot* place = slot(chunks[0]);
  fresh.state = arena::kSlotFree;
  std::memcpy(place, &fresh, sizeof(fresh));
  CrashPoint("seal: slot filled");

  shard->digest = arena::SlotDigest(fresh, chunks, shard->crcs, tags);
  shard->content = ContentDigest(shard->meta, PlainCrcs(shard->encryption, shard->crcs));
  shard->generation = fresh.generation;
  StoreState(*shard);
  CrashPoint("seal: published");
  LOG_DEBUG("shard sealed %s bytes %" PRIu64 " chunks %zu role %u", shard->meta.id.ToString().c_str(),
            shard->meta.stream_bytes, chunks.size(), static_cast<unsigned>(shard->role));
  table_->begins.emplace(chunks[0], shard.get());
  CountIn(*shard);
  shards_.emplace(ShardId(shard->meta.id), std::move(shard));
  ++changes_;
}

void Store::StoreState(const SealedShard& shard) {
  Publish(&slot(shard.extents[0].first)->state,
          arena::EncodeSlotState({shard.digest, shard.role, shard.committed}));
}

const SealedShard* Store::Find(const ShardId& id) const {
  const auto it = shards_.find(id);
  return it == shards_.end() ? nullptr : it->second.get();
}

void Store::SetCommitted(const ShardId& id) {
  const auto it = shards_.find(id);
  if (it == shards_.end() || it->second->committed) return;
  HealSlot(it->second->extents[0].first);
  it->second->committed = true;
  ++changes_;
  StoreState(*it->second);
  CrashPoint("committed");
}

void Store::CountIn(const SealedShard& shard) {
  Use& use = use_[static_cast<size_t>(shard.role)];
  ++use.shards;
  use.chunks += shard.crcs.size();
}

void Store::CountOut(const SealedShard& shard) {
  Use& use = use_[static_cast<size_t>(shard.role)];
  ROPETEAM_CHECK(use.shards > 0 && use.chunks >= shard.crcs.size());
  --use.shards;
  use.chunks -= shard.crcs.size();
}

void Store::SetRole(const ShardId& id, Role role) {
  const auto it = shards_.find(id);
  if (it == shards_.end() || it->second->role == role) return;
  HealSlot(it->second->extents[0].first);
  CountOut(*it->second);
  it->second->role = role;
  CountIn(*it->second);
  ++changes_;
  StoreState(*it->second);
  CrashPoint("role changed");
}

void Store::Remove(const ShardId& id) {
  const auto it = shards_.find(id);
  if (it == shards_.end()) return;
  std::unique_ptr<SealedShard> shard = std::move(it->second);
  shards_.erase(it);
  Withdraw(std::move(shard));
}

void Store::Withdraw(std::unique_ptr<SealedShard> shard) {
  CountOut(*shard);
  ++changes_;
  shard->removed = true;
  const size_t erased = table_->begins.erase(shard->extents[0].first);
  ROPETEAM_CHECK(erased == 1);
  // Before the chunks are freed: the next owner may write to them at once.
  Publish(&slot(shard->extents[0].first)->state, arena::kSlotFree);
  CrashPoint("removed");
  if (shard->leases == 0) {
    ReleaseChunks(*shard);
  } else {
    removed_.push_back(std::move(shard));
  }
}

Result<Store::LeaseToken> Store::Lease(const ShardId& id) {
  const auto it = shards_.find(id);
  if (it == shards_.end()) return Error(Code::kNotFound, "%s is not in this arena", id.ToString().c_str());
  ++it->second->leases;
  leases_.emplace(++lease_last_, it->second.get());
  return lease_last_;
}

void Store::EndLease(LeaseToken token) {
  const auto it = leases_.find(token);
  if (it == leases_.end()) return;
  SealedShard* shard = it->second;
  leases_.erase(it);
  if (--shard->leases > 0 || !shard->removed) return;
  ReleaseChunks(*shard);
  std::erase_if(removed_, [shard](const auto& removed) { return removed.get() == shard; });
}

const SealedShard* Store::Leased(LeaseToken token) const {
  const auto it = leases_.find(token);
  return it == leases_.end() ? nullptr : it->second;
}

void Store::MarkBad(const ShardId& id, uint32_t chunk_index) {
  const auto it = shards_.find(id);
  if (it == shards_.end() || chunk_index >= it->second->crcs.size()) return;
  std::vector<uint32_t>& bad = it->second->bad;
  const auto place = std::lower_bound(bad.begin(), bad.end(), chunk_index);
  if (place != bad.end() && *place == chunk_index) return;
  bad.insert(place, chunk_index);
  ++changes_;
}

void Store::MarkRepaired(const ShardId& id, uint32_t chunk_index) {
  const auto it = shards_.find(id);
  if (it != shards_.end() && std::erase(it->second->bad, chunk_index) != 0) ++changes_;
}

void Store::SetIncarnationMax(Incarnation incarnation) {
  ROPETEAM_CHECK(incarnation < kIncarnationMax);
  if (incarnation <= facts_.incarnation_max) return;
  NodeFacts facts = facts_;
  facts.incarnation_max = incarnation;
  StoreFacts(facts);
}

void Store::SetFacts(const NodeFacts& facts) {
  ROPETEAM_CHECK(facts.incarnation_max >= facts_.incarnation_max && facts.incarnation_max < kIncarnationMax);
  if (!(facts == facts_)) StoreFacts(facts);
}

void Store::SetRosterNames(uint64_t roster_revision, const std::vector<std::string>& names) {
  roster_names_.clear();
  std::string text;
  for (const std::string& name : names) {
    if (text.size() + name.size() + 1 > arena::kRosterNamesBytesMax) break;
    text += (text.empty() ? "" : ",") + name;
    roster_names_.push_back(name);
  }
  arena::Superblock* known = &table_->superblock;
  known->names_length = static_cast<uint32_t>(text.size());
  known->names_crc = Crc32c(text.data(), text.size(), static_cast<uint32_t>(roster_revision));
  std::memset(known->names, 0, sizeof(known->names));
  std::copy(text.begin(), text.end(), known->names);
  superblock()->names_length = known->names_length;
  superblock()->names_crc = known->names_crc;
  CrashPoint("names: length and checksum");
  std::memcpy(superblock()->names, known->names, sizeof(known->names));
  CrashPoint("names: text");
}

void Store::StoreFacts(const NodeFacts& facts) {
  const arena::CheckedFacts checked = arena::CheckedFactsOf(facts);
  // One place after the other: at any moment at least one of them is whole.
  for (arena::CheckedFacts& place : superblock()->facts) {
    for (size_t i = 0; i < arena::kFactWords; ++i) {
      if (place.words[i] == checked.words[i]) continue;
      Publish(&place.words[i], checked.words[i]);
      CrashPoint("facts: value");
    }
    Publish(&place.check, checked.check);
    CrashPoint("facts: check");
  }
  facts_ = facts;
  for (arena::CheckedFacts& place : table_->superblock.facts) place = checked;
}

// ---- invariants

void Store::CheckShard(const SealedShard& shard, std::vector<bool>* seen) const {
  const std::vector<uint32_t> chunks = ChunksOf(shard.extents);
  ROPETEAM_CHECK(!chunks.empty() && chunks.size() == shard.crcs.size());
  ROPETEAM_CHECK(chunks.size() == ChunksFor(shard.meta.stream_bytes, chunk_bytes_));
  for (const uint32_t chunk : chunks) {
    ROPETEAM_CHECK(chunk < chunk_count_ && !(*seen)[chunk] && chunk_use_[chunk] == ChunkUse::kSealed);
    (*seen)[chunk] = true;
    ROPETEAM_CHECK(peer_access_ == nullptr ||
                   (peer_access_->Of(chunk) == PeerAccess::Kind::kRead) == shard.encrypted());
  }
  ROPETEAM_CHECK(std::is_sorted(shard.bad.begin(), shard.bad.end()));
  ROPETEAM_CHECK(shard.bad.empty() || shard.bad.back() < shard.crcs.size());
  const auto begins = table_->begins.find(chunks[0]);
  if (shard.removed) {
    ROPETEAM_CHECK(shard.leases > 0);
    ROPETEAM_CHECK(begins == table_->begins.end());
    return;
  }
  ROPETEAM_CHECK(begins != table_->begins.end() && begins->second == &shard);
  ROPETEAM_CHECK(shard.generation <= generation_);
  const arena::Slot known = Table::SlotOf(shard);
  ROPETEAM_CHECK(arena::MetaOf(known) == shard.meta);
  ROPETEAM_CHECK(arena::SlotDigest(known, chunks, shard.crcs, shard.encryption.tags) == shard.digest);
  for (size_t i = 0; i < chunks.size(); ++i) {
    const arena::ChunkDescriptor& link = table_->descriptors[chunks[i]];
    ROPETEAM_CHECK(link.crc == shard.crcs[i]);
    ROPETEAM_CHECK(link.next == (i + 1 < chunks.size() ? chunks[i + 1] : arena::kChainEnd));
    if (tags_begin_ == 0) continue;
    ROPETEAM_CHECK(table_->tags[chunks[i]] == (shard.encrypted() ? shard.encryption.tags[i] : ChunkTag()));
  }
}

void Store::CheckInvariants() const {
  std::vector<bool> seen(chunk_count_, false);
  std::array<Use, std::tuple_size_v<decltype(use_)>> uses{};
  for (const auto& [id, shard] : shards_) {
    ROPETEAM_CHECK(shard != nullptr && shard->meta.id == id && !shard->removed);
    CheckShard(*shard, &seen);
    Use& use = uses[static_cast<size_t>(shard->role)];
    ++use.shards;
    use.chunks += shard->crcs.size();
  }
  ROPETEAM_CHECK(uses == use_);
  for (const auto& shard : removed_) {
    ROPETEAM_CHECK(shard->removed);
    CheckShard(*shard, &seen);
  }
  ROPETEAM_CHECK(table_->begins.size() == shards_.size());
  uint64_t free = 0;
  for (uint32_t chunk = 0; chunk < chunk_count_; ++chunk) {
    ROPETEAM_CHECK((chunk_use_[chunk] == ChunkUse::kSealed) == seen[chunk]);
    ROPETEAM_CHECK((chunk_use_[chunk] == ChunkUse::kFree) == free_runs_.IsFree(chunk));
    if (chunk_use_[chunk] == ChunkUse::kFree) ++free;
    if (peer_access_ == nullptr) continue;
    const PeerAccess::Kind kind = peer_access_->Of(chunk);
    ROPETEAM_CHECK(kind != PeerAccess::Kind::kWrite || chunk_use_[chunk] == ChunkUse::kAllocated);
    ROPETEAM_CHECK(kind != PeerAccess::Kind::kRead || chunk_use_[chunk] == ChunkUse::kSealed);
  }
  ROPETEAM_CHECK(free == chunks_free());
  std::unordered_map<const SealedShard*, uint32_t> leases;
  for (const auto& [token, shard] : leases_) ++leases[shard];
  uint64_t leased = 0;
  const auto check_leases = [&](const std::unique_ptr<SealedShard>& shard) {
    const auto it = leases.find(shard.get());
    ROPETEAM_CHECK(shard->leases == (it == leases.end() ? 0 : it->second));
    leased += shard->leases;
  };
  for (const auto& [id, shard] : shards_) check_leases(shard);
  for (const auto& shard : removed_) check_leases(shard);
  ROPETEAM_CHECK(leased == leases_.size());
  const arena::CheckedFacts facts = arena::CheckedFactsOf(facts_);
  for (const arena::CheckedFacts& place : table_->superblock.facts)
    ROPETEAM_CHECK(std::memcmp(&place, &facts, sizeof(facts)) == 0);
  const size_t damage = CountTableDamage();
  ROPETEAM_CHECK(damage == 0 || table_damage_expected_);
  if (damage == 0) table_damage_expected_ = false;
}

}  // namespace ropeteam
