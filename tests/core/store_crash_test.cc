// SPDX-License-Identifier: Apache-2.0
//
// kill -9 between any two stores to the arena's tables. At each such point the memory is copied as a killed
// process would leave it, and a new process adopts the copy.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>

#include "core/base/log.h"
#include "tests/core/store_arena_for_test.h"

namespace ropeteam {
namespace {

using ::testing::SizeIs;

struct Known {
  ShardMeta meta;
  Role role = Role::kOwn;
  bool committed = false;
  friend bool operator==(const Known&, const Known&) = default;
};
using World = std::map<ShardId, Known>;

// A new process must find the state before the current operation or the state after it.
::testing::AssertionResult IsOneOf(const World& found, const World& before, const World& after) {
  if (found == before || found == after) return ::testing::AssertionSuccess();
  std::string text = "found";
  for (const auto& [id, known] : found)
    text += " [" + id.ToString() + (known.committed ? " committed]" : "]");
  return ::testing::AssertionFailure()
         << text << ", before " << before.size() << " and after " << after.size();
}

class CrashEverywhere {
 public:
  CrashEverywhere(uint64_t seed, uint64_t chunks)
      : random_(seed),
        memory_(ArenaMemory::ForChunks(chunks)),
        store_(FormatForTest(&memory_)),
        chunks_(chunks) {}

  void Run(int steps) {
    for (int step = 0; step < steps && !::testing::Test::HasFatalFailure(); ++step) {
      after_ = before_;
      incarnation_after_ = incarnation_before_;
      const AtCrashPoints hook([this](const char* place) { TakeOverACopy(place); });
      Step();
      before_ = after_;
      incarnation_before_ = incarnation_after_;
      TakeOverACopy("between operations");
      if (random_() % 8 == 0) Restart();
    }
  }
  const std::map<std::string, uint64_t>& places() const { return places_; }

 private:
  ShardId AnyId() { return {1 + random_() % 2, random_() % 5, static_cast<uint32_t>(random_() % 3)}; }
  ShardId AnySealed() {
    if (before_.empty()) return AnyId();
    auto it = before_.begin();
    std::advance(it, random_() % before_.size());
    return it->first;
  }

  void Step() {
    switch (random_() % 8) {
      case 0:
      case 1:
      case 2:
        Save();
        break;
      case 3:
      case 4: {
        const ShardId id = AnySealed();
        if (random_() % 3 == 0 && before_.contains(id)) leases_.push_back(*store_->Lease(id));
        after_.erase(id);
        store_->Remove(id);
        break;
      }
      case 5: {
        const ShardId id = AnySealed();
        if (after_.contains(id)) after_[id].committed = true;
        store_->SetCommitted(id);
        break;
      }
      case 6: {
        const ShardId id = AnySealed();
        const auto role = static_cast<Role>(1 + random_() % 3);
        if (after_.contains(id)) after_[id].role = role;
        store_->SetRole(id, role);
        break;
      }
      case 7:
        incarnation_after_ = incarnation_before_ + random_() % 3;
        store_->SetIncarnationMax(incarnation_after_);
        if (!leases_.empty()) {
          store_->EndLease(leases_.back());
          leases_.pop_back();
        }
        break;
    }
  }

  void Save() {
    const ShardId id = AnyId();
    const ShardMeta meta = MetaForTest(id, kManifestHeaderBytes + random_() % (4 * kSmallChunk));
    const uint64_t extra = random_() % 2;
    const auto extents = store_->Allocate(ChunksFor(meta.stream_bytes, kSmallChunk) + extra);
    if (!extents.ok()) return;
    auto crcs = FillForTest(store_.get(), meta, *extents);
    TakeOverACopy("chunks filled");
    const auto role = static_cast<Role>(1 + random_() % 3);
    after_.try_emplace(id, Known{meta, role, false});
    if (!store_->Seal(meta, role, *extents, std::move(crcs)).ok()) store_->Free(*extents);
  }

  void Restart() {
    leases_.clear();
    store_ = AdoptForTest(&memory_);
    store_->CheckInvariants();
  }

  // Simulates kill -9 at this point and a new process.
  void TakeOverACopy(const char* place) {
    ++places_[place];
    ArenaMemory left = memory_;
    Store::AdoptReport report;
    const auto store = AdoptForTest(&left, &report);
    ASSERT_NE(store, nullptr) << place;
    ASSERT_THAT(report.rejected, SizeIs(0)) << place;
    store->CheckInvariants();
    World found;
    std::set<uint32_t> used;
    for (const auto& [id, shard] : store->shards()) {
      found[id] = {shard->meta, shard->role, shard->committed};
      ASSERT_TRUE(HoldsItsBytes(*store, *shard)) << place;
      for (uint64_t i = 0; i < shard->crcs.size(); ++i) {
        ASSERT_TRUE(used.insert(ChunkAt(shard->extents, i)).second) << place;
      }
    }
    ASSERT_TRUE(IsOneOf(found, before_, after_)) << place;
    ASSERT_EQ(store->chunks_free(), chunks_ - used.size()) << place;
    ASSERT_TRUE(store->incarnation_max() == incarnation_before_ ||
                store->incarnation_max() == incarnation_after_)
        << place;
  }

  std::mt19937_64 random_;
  ArenaMemory memory_;
  std::unique_ptr<Store> store_;
  uint64_t chunks_;
  World before_;
  World after_;
  Incarnation incarnation_before_ = 0;
  Incarnation incarnation_after_ = 0;
  std::vector<Store::LeaseToken> leases_;
  std::map<std::string, uint64_t> places_;
};

TEST(StoreCrash, WhereverItIsKilledEverySealedShardIsThereAndNoHalfOne) {
  std::map<std::string, uint64_t> places;
  for (uint64_t seed = 1; seed <= 12; ++seed) {
    std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
    SCOPED_TRACE("seed " + std::to_string(seed));
    CrashEverywhere run(seed, 14);
    run.Run(120);
    if (HasFatalFailure()) return;
    for (const auto& [place, count] : run.places()) places[place] += count;
  }
  for (const char* place :
       {"chunks filled", "seal: descriptor written", "seal: slot filled", "seal: published", "removed",
        "committed", "role changed", "facts: value", "facts: check", "between operations"}) {
    EXPECT_GT(places[place], 10u) << place;
  }
}

// One store publishes the shard: before it the shard does not exist, after it it does.
TEST(StoreCrash, AShardAppearsWithOneStore) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  std::map<std::string, uint64_t> shards_at;
  {
    const AtCrashPoints hook([&](const char* place) {
      ArenaMemory left = memory;
      shards_at[place] = AdoptForTest(&left)->shards().size();
    });
    ASSERT_TRUE(SaveForTest(store.get(), {1, 1, 0}, 3 * kSmallChunk).ok());
    store->Remove({1, 1, 0});
  }
  const std::map<std::string, uint64_t> expected = {
      {"seal: descriptor written", 0}, {"seal: slot filled", 0}, {"seal: published", 1}, {"removed", 0}};
  EXPECT_EQ(shards_at, expected);
}

TEST(StoreCrash, AFormatThatDidNotFinishLeftNoArenaAndCanBeDoneAgain) {
  // Formats fresh memory, garbage, and an older arena with shards.
  for (const int what : {0, 1, 2}) {
    ArenaMemory memory = ArenaMemory::ForChunks(8);
    if (what == 1) std::memset(memory.data(), 0xa5, memory.span().size());
    if (what == 2) {
      const auto old = FormatForTest(&memory);
      ASSERT_TRUE(SaveForTest(old.get(), {1, 1, 0}, 3 * kSmallChunk).ok());
    }
    std::vector<std::string> places;
    {
      const AtCrashPoints hook([&](const char* place) {
        places.push_back(place);
        ArenaMemory left = memory;
        const auto adopted = Store::Adopt(left.span(), kSmallChunk, kIdentity, nullptr);
        if (std::string(place) == "format: published") {
          ASSERT_TRUE(adopted.ok());
          EXPECT_TRUE((*adopted)->shards().empty());
          return;
        }
        EXPECT_EQ(adopted.status().code(), Code::kNotFound) << place;
        const auto again = FormatForTest(&left);
        EXPECT_EQ(again->chunks_free(), 8u);
        again->CheckInvariants();
        EXPECT_TRUE(AdoptForTest(&left)->shards().empty());
      });
      (void)FormatForTest(&memory);
    }
    EXPECT_THAT(places, SizeIs(4));
  }
}

// The new process may be killed too, while it clears the rejected slots.
TEST(StoreCrash, AnAdoptionThatDidNotFinishIsDoneAgain) {
  ArenaMemory memory = ArenaMemory::ForChunks(16);
  {
    const auto store = FormatForTest(&memory);
    for (uint32_t rank = 0; rank < 4; ++rank) {
      ASSERT_TRUE(SaveForTest(store.get(), {1, 1, rank}, 2 * kSmallChunk).ok());
    }
    store->SetIncarnationMax(7);
  }
  memory.slot(2)->stream_bytes ^= 1;
  memory.descriptor(7)->crc ^= 1;
  memory.superblock()->facts[0].check ^= 1;
  uint64_t killed = 0;
  Store::AdoptReport report;
  {
    const AtCrashPoints hook([&](const char* place) {
      ++killed;
      ArenaMemory left = memory;
      const auto store = AdoptForTest(&left);
      ASSERT_NE(store, nullptr) << place;
      store->CheckInvariants();
      EXPECT_EQ(store->incarnation_max(), 7u) << place;
      ASSERT_EQ(store->shards().size(), 2u) << place;
      EXPECT_NE(store->Find({1, 1, 0}), nullptr);
      EXPECT_NE(store->Find({1, 1, 2}), nullptr);
    });
    const auto store = AdoptForTest(&memory, &report);
    ASSERT_NE(store, nullptr);
  }
  EXPECT_THAT(report.rejected, SizeIs(2));
  EXPECT_EQ(killed, 6u);  // two times two stores of the incarnation, and two slots
}

}  // namespace
}  // namespace ropeteam
