// SPDX-License-Identifier: Apache-2.0
//
// Thousands of random operations, compared with a model that records the owner of each chunk.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <set>
#include <string>

#include "tests/core/store_arena_for_test.h"

namespace ropeteam {
namespace {

struct ModelShard {
  ShardMeta meta;
  Role role = Role::kOwn;
  bool committed = false;
  std::vector<uint32_t> chunks;
  std::set<uint32_t> bad;
};

class RandomRun {
 public:
  RandomRun(uint64_t seed, uint64_t chunks)
      : random_(seed),
        memory_(ArenaMemory::ForChunks(chunks)),
        store_(FormatForTest(&memory_)),
        owner_(chunks, 0) {}

  void Step() {
    switch (random_() % 16) {
      case 0:
      case 1:
      case 2:
        return Allocate();
      case 3:
        return Free();
      case 4:
      case 5:
      case 6:
        return Seal();
      case 7:
      case 8:
        return Remove();
      case 9:
        return SetCommitted();
      case 10:
        return SetRole();
      case 11:
        return Lease();
      case 12:
      case 13:
        return EndLease();
      case 14:
        return MarkChunk();
      default:
        if (random_() % 20 == 0) return Restart();
        incarnation_ = std::max<Incarnation>(incarnation_, random_() % 50);
        return store_->SetIncarnationMax(incarnation_);
    }
  }

  void Compare() {
    store_->CheckInvariants();
    ASSERT_EQ(store_->chunks_free(), static_cast<uint64_t>(std::count(owner_.begin(), owner_.end(), 0u)));
    ASSERT_EQ(store_->incarnation_max(), incarnation_);
    ASSERT_EQ(store_->shards().size(), shards_.size());
    for (const auto& [id, model] : shards_) {
      const SealedShard* shard = store_->Find(id);
      ASSERT_NE(shard, nullptr) << id.ToString();
      ASSERT_EQ(shard->meta, model.meta);
      ASSERT_EQ(shard->role, model.role);
      ASSERT_EQ(shard->committed, model.committed);
      ASSERT_EQ(Chunks(shard->extents), model.chunks);
      ASSERT_TRUE(std::equal(shard->bad.begin(), shard->bad.end(), model.bad.begin(), model.bad.end()));
    }
  }

  void CompareBytes() {
    for (const auto& [id, shard] : store_->shards()) ASSERT_TRUE(HoldsItsBytes(*store_, *shard));
    for (const auto& [token, lease] : leases_) ASSERT_TRUE(HoldsItsBytes(*store_, *store_->Leased(token)));
  }

 private:
  struct Grant {
    std::vector<Extent> extents;
    uint64_t chunks = 0;
  };
  struct ModelLease {
    ShardId id;
    uint32_t owner = 0;
  };

  static std::vector<uint32_t> Chunks(const std::vector<Extent>& extents) {
    std::vector<uint32_t> chunks;
    for (uint64_t i = 0; i < ChunkCount(extents); ++i) chunks.push_back(ChunkAt(extents, i));
    return chunks;
  }
  void Own(const std::vector<uint32_t>& chunks, uint32_t from, uint32_t to) {
    for (const uint32_t chunk : chunks) {
      ASSERT_LT(chunk, owner_.size());
      ASSERT_EQ(owner_[chunk], from) << "chunk " << chunk;
      owner_[chunk] = to;
    }
  }
  ShardId AnySealed() {
    if (shards_.empty()) return {9, 9, 9};
    auto it = shards_.begin();
    std::advance(it, random_() % shards_.size());
    return it->first;
  }
  ModelShard* Model(const ShardId& id) {
    const auto it = shards_.find(id);
    return it == shards_.end() ? nullptr : &it->second;
  }

  void Allocate() {
    const uint64_t chunks = random_() % 7;
    const uint64_t needed = std::max<uint64_t>(chunks, 1);
    const uint64_t free = store_->chunks_free();
    auto extents = store_->Allocate(chunks);
    ASSERT_EQ(extents.ok(), needed <= free);
    if (!extents.ok()) {
      ASSERT_EQ(extents.status().code(), Code::kNoSpace);
      return;
    }
    ASSERT_EQ(ChunkCount(*extents), needed);
    Own(Chunks(*extents), 0, kGranted);
    grants_.push_back({*extents, needed});
  }

  void Free() {
    if (grants_.empty()) return;
    const size_t which = random_() % grants_.size();
    Own(Chunks(grants_[which].extents), kGranted, 0);
    store_->Free(grants_[which].extents);
    grants_.erase(grants_.begin() + static_cast<ptrdiff_t>(which));
  }

  void Seal() {
    if (grants_.empty()) return;
    const size_t which = random_() % grants_.size();
    const Grant grant = grants_[which];
    const ShardId id = {1 + random_() % 2, random_() % 4, static_cast<uint32_t>(random_() % 3)};
    const uint64_t used = 1 + random_() % grant.chunks;
    const uint64_t last = kManifestHeaderBytes + random_() % (kSmallChunk - kManifestHeaderBytes + 1);
    const ShardMeta meta = MetaForTest(id, (used - 1) * kSmallChunk + last);
    const auto role = static_cast<Role>(1 + random_() % 3);
    const Status status =
        store_->Seal(meta, role, grant.extents, FillForTest(store_.get(), meta, grant.extents));
    if (shards_.contains(id)) {
      ASSERT_EQ(status.code(), Code::kAlreadyExists);
      return;
    }
    ASSERT_TRUE(status.ok()) << status.ToString();
    grants_.erase(grants_.begin() + static_cast<ptrdiff_t>(which));
    std::vector<uint32_t> chunks = Chunks(grant.extents);
    Own(chunks, kGranted, 0);
    chunks.resize(used);
    Own(chunks, 0, ++owner_last_);
    shards_[id] = {meta, role, false, chunks, {}};
  }

  void Remove() {
    const ShardId id = AnySealed();
    store_->Remove(id);
    ModelShard* model = Model(id);
    if (model == nullptr) return;
    const uint32_t owner = owner_[model->chunks[0]];
    if (!Leased(owner)) Own(model->chunks, owner, 0);
    shards_.erase(id);
  }

  void SetCommitted() {
    const ShardId id = AnySealed();
    store_->SetCommitted(id);
    if (ModelShard* model = Model(id)) model->committed = true;
  }

  void SetRole() {
    const ShardId id = AnySealed();
    const auto role = static_cast<Role>(1 + random_() % 3);
    store_->SetRole(id, role);
    if (ModelShard* model = Model(id)) model->role = role;
  }

  void Lease() {
    const ShardId id = AnySealed();
    const auto token = store_->Lease(id);
    const ModelShard* model = Model(id);
    ASSERT_EQ(token.ok(), model != nullptr);
    if (token.ok()) leases_[*token] = {id, owner_[model->chunks[0]]};
  }

  bool Leased(uint32_t owner) const {
    return std::any_of(leases_.begin(), leases_.end(),
                       [owner](const auto& l) { return l.second.owner == owner; });
  }

  void EndLease() {
    if (leases_.empty()) return;
    auto it = leases_.begin();
    std::advance(it, random_() % leases_.size());
    const auto [token, lease] = *it;
    ASSERT_EQ(store_->Leased(token)->meta.id, lease.id);
    store_->EndLease(token);
    leases_.erase(it);
    const ModelShard* model = Model(lease.id);
    const bool published = model != nullptr && owner_[model->chunks[0]] == lease.owner;
    if (!published && !Leased(lease.owner)) std::replace(owner_.begin(), owner_.end(), lease.owner, 0u);
  }

  void MarkChunk() {
    const ShardId id = AnySealed();
    const auto chunk = static_cast<uint32_t>(random_() % 6);
    const bool bad = random_() % 2 == 0;
    bad ? store_->MarkBad(id, chunk) : store_->MarkRepaired(id, chunk);
    ModelShard* model = Model(id);
    if (model == nullptr || chunk >= model->chunks.size()) return;
    bad ? (void)model->bad.insert(chunk) : (void)model->bad.erase(chunk);
  }

  // The process ends and loses its grants, its leases and the marks of bad chunks.
  void Restart() {
    store_.reset();
    store_ = AdoptForTest(&memory_);
    grants_.clear();
    leases_.clear();
    std::fill(owner_.begin(), owner_.end(), 0u);
    for (auto& [id, model] : shards_) {
      model.bad.clear();
      Own(model.chunks, 0, ++owner_last_);
    }
  }

  static constexpr uint32_t kGranted = UINT32_MAX;

  std::mt19937_64 random_;
  ArenaMemory memory_;
  std::unique_ptr<Store> store_;
  std::map<ShardId, ModelShard> shards_;
  std::vector<Grant> grants_;
  std::map<Store::LeaseToken, ModelLease> leases_;
  Incarnation incarnation_ = 0;
  std::vector<uint32_t> owner_;  // by chunk: 0: free, kGranted, or the number of the seal
  uint32_t owner_last_ = 0;
};

TEST(StoreRandom, AgreesWithAModelThatOwnsEachChunk) {
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    SCOPED_TRACE("seed " + std::to_string(seed));
    RandomRun run(seed, 16 + seed * 3);
    for (int step = 0; step < 4000; ++step) {
      run.Step();
      run.Compare();
      if (step % 50 == 0) run.CompareBytes();
      ASSERT_FALSE(HasFatalFailure()) << "step " << step;
    }
  }
}

}  // namespace
}  // namespace ropeteam
