// SPDX-License-Identifier: Apache-2.0
#include "core/store/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>

#include "tests/core/store_arena_for_test.h"

namespace ropeteam {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr ShardId kShard = {1, 10, 0};
constexpr ShardId kOther = {1, 10, 1};
constexpr ShardId kThird = {1, 11, 0};

// ---- format and geometry

TEST(StoreFormat, AFreshArenaIsEmptyAndAllFree) {
  ArenaMemory memory = ArenaMemory::ForChunks(9);
  const auto store = FormatForTest(&memory);
  EXPECT_EQ(store->chunks_total(), 9u);
  EXPECT_EQ(store->chunks_free(), 9u);
  EXPECT_EQ(store->chunk_bytes(), kSmallChunk);
  EXPECT_EQ(store->incarnation_max(), 0u);
  EXPECT_TRUE(store->shards().empty());
  EXPECT_EQ(store->memory().data(), memory.data());
  store->CheckInvariants();
}

TEST(StoreFormat, MemoryForIsExactAtEverySize) {
  for (const uint64_t chunk_bytes : {uint64_t{4096}, uint64_t{65536}, uint64_t{1} << 20}) {
    for (const uint64_t chunks : {1, 2, 29, 30, 31, 32, 33, 64, 100}) {
      const uint64_t bytes = Store::MemoryFor(chunks, chunk_bytes);
      EXPECT_EQ(arena::LayoutFor(bytes, chunk_bytes).chunk_count, chunks);
      EXPECT_EQ(arena::LayoutFor(bytes - 1, chunk_bytes).chunk_count, chunks - 1);
      EXPECT_LE(arena::LayoutFor(bytes + chunk_bytes - 1, chunk_bytes).chunk_count, chunks);
    }
  }
}

TEST(StoreFormat, TablesAndChunksDoNotOverlapAndChunksAreAligned) {
  for (const uint64_t chunk_bytes :
       {uint64_t{4096}, uint64_t{1} << 20, uint64_t{2} << 20, uint64_t{4} << 20}) {
    for (const uint64_t chunks : {1, 7, 1000, 100000}) {
      const arena::Layout layout = arena::LayoutOf(chunks, chunk_bytes);
      EXPECT_GE(layout.slots_begin, sizeof(arena::Superblock));
      EXPECT_GE(layout.descriptors_begin, layout.slots_begin + chunks * sizeof(arena::Slot));
      EXPECT_GE(layout.chunks_begin, layout.descriptors_begin + chunks * sizeof(arena::ChunkDescriptor));
      EXPECT_EQ(layout.chunks_begin % std::min(chunk_bytes, arena::kHugePageBytes), 0u);
      EXPECT_EQ(layout.end, layout.chunks_begin + chunks * chunk_bytes);
    }
  }
}

TEST(StoreFormat, ChunksLieWhereChunkOffsetSaysAndEndWithTheMemory) {
  ArenaMemory memory = ArenaMemory::ForChunks(5);
  const auto store = FormatForTest(&memory);
  for (uint32_t i = 0; i < 5; ++i) {
    EXPECT_EQ(store->chunk(i), memory.data() + store->chunk_offset(i));
    EXPECT_EQ(store->chunk_offset(i), store->chunk_offset(0) + i * kSmallChunk);
  }
  EXPECT_EQ(store->chunk_offset(4) + kSmallChunk, memory.span().size());
}

TEST(StoreFormat, BadArgumentsAreRefusedAndTheMemoryIsUntouched) {
  ArenaMemory memory = ArenaMemory::ForChunks(9);
  std::memset(memory.data(), 0x5a, memory.span().size());
  const ArenaMemory before = memory;
  const auto refusal = [&](uint64_t chunk_bytes, uint64_t bytes, const ArenaIdentity& identity) {
    const Status status = Store::Format(memory.span().first(bytes), chunk_bytes, identity).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_TRUE(memory == before);
    return status.message();
  };
  const uint64_t bytes = memory.span().size();
  EXPECT_THAT(refusal(0, bytes, kIdentity), HasSubstr("chunk size of 0"));
  EXPECT_THAT(refusal(2048, bytes, kIdentity), HasSubstr("2048"));
  EXPECT_THAT(refusal(4097, bytes, kIdentity), HasSubstr("4097"));
  EXPECT_THAT(refusal(12288, bytes, kIdentity), HasSubstr("12288"));
  EXPECT_THAT(refusal(kChunkBytesMax * 2, bytes, kIdentity), HasSubstr("2147483648"));
  EXPECT_THAT(refusal(4096, 0, kIdentity), HasSubstr("memory of 0 bytes"));
  EXPECT_THAT(refusal(4096, 4096, kIdentity), HasSubstr("memory of 4096 bytes"));
  EXPECT_THAT(refusal(4096, Store::MemoryFor(1, 4096) - 1, kIdentity), HasSubstr("12288"));
  EXPECT_THAT(refusal(4096, bytes, {std::string(256, 'j'), "n"}), HasSubstr("256 bytes, limit 255"));
  EXPECT_THAT(refusal(4096, bytes, {"j", std::string(64, 'n')}), HasSubstr("64 bytes, limit 63"));
}

TEST(StoreFormat, TheLongestNamesAreKept) {
  ArenaMemory memory = ArenaMemory::ForChunks(1);
  const ArenaIdentity longest = {std::string(255, 'j'), std::string(63, 'n')};
  ASSERT_TRUE(Store::Format(memory.span(), kSmallChunk, longest).ok());
  EXPECT_TRUE(Store::Adopt(memory.span(), kSmallChunk, longest, nullptr).ok());
}

// ---- allocation

TEST(StoreAllocate, TakesTheLowestRunThatFits) {
  ArenaMemory memory = ArenaMemory::ForChunks(20);
  const auto store = FormatForTest(&memory);
  const auto all = *store->Allocate(20);
  EXPECT_THAT(all, ElementsAre(Extent{0, 20}));
  store->Free({{2, 2}});
  store->Free({{6, 3}});
  store->Free({{12, 5}});
  EXPECT_THAT(*store->Allocate(3), ElementsAre(Extent{6, 3}));
  EXPECT_THAT(*store->Allocate(1), ElementsAre(Extent{2, 1}));
  EXPECT_THAT(*store->Allocate(4), ElementsAre(Extent{12, 4}));
  store->CheckInvariants();
}

TEST(StoreAllocate, TakesAsFewPiecesAsThereAreWhenNoRunFits) {
  ArenaMemory memory = ArenaMemory::ForChunks(20);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(store->Allocate(20).ok());
  store->Free({{2, 2}});
  store->Free({{6, 3}});
  store->Free({{12, 5}});
  const auto pieces = *store->Allocate(7);
  EXPECT_THAT(pieces, ElementsAre(Extent{12, 5}, Extent{2, 2}));
  EXPECT_THAT(ChunkAt(pieces, 4), 16u);
  EXPECT_THAT(ChunkAt(pieces, 5), 2u);
  EXPECT_EQ(store->chunks_free(), 3u);
  store->CheckInvariants();
}

TEST(StoreAllocate, ZeroChunksIsOne) {
  ArenaMemory memory = ArenaMemory::ForChunks(3);
  const auto store = FormatForTest(&memory);
  EXPECT_THAT(*store->Allocate(0), ElementsAre(Extent{0, 1}));
}

TEST(StoreAllocate, NoSpaceSaysNeededFreeAndLimitAndTakesNothing) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(store->Allocate(5).ok());
  const Status status = store->Allocate(4).status();
  EXPECT_EQ(status.code(), Code::kNoSpace);
  EXPECT_EQ(status.message(),
            "needed 4 chunks (16384 bytes), free 3 (12288 bytes), limit 8 (32768 bytes, by --memory)");
  EXPECT_EQ(store->chunks_free(), 3u);
  EXPECT_TRUE(store->Allocate(3).ok());
  EXPECT_EQ(store->Allocate(0).status().code(), Code::kNoSpace);
  store->CheckInvariants();
}

TEST(StoreAllocate, MoreThanAShardMayHaveIsRefusedWithTheLimit) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  for (const uint64_t chunks : {kChunksPerShardMax + 1, UINT64_MAX}) {
    const Status status = store->Allocate(chunks).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("limit 65536"));
  }
}

TEST(StoreAllocate, AFragmentedArenaGivesEveryFreeChunk) {
  ArenaMemory memory = ArenaMemory::ForChunks(64);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(store->Allocate(64).ok());
  for (uint32_t chunk = 0; chunk < 64; chunk += 2) store->Free({{chunk, 1}});
  const auto pieces = *store->Allocate(32);
  EXPECT_EQ(pieces.size(), 32u);
  for (uint64_t i = 0; i < 32; ++i) EXPECT_EQ(ChunkAt(pieces, i), 2 * i);
  EXPECT_EQ(store->chunks_free(), 0u);
  store->CheckInvariants();
}

TEST(StoreAllocateDeathTest, FreeingTwiceOrWhatIsSealedIsOurBug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  const auto extents = *store->Allocate(2);
  store->Free(extents);
  EXPECT_DEATH(store->Free(extents), "check failed");
  EXPECT_DEATH(store->Free({{7, 2}}), "check failed");
  ASSERT_TRUE(SaveForTest(store.get(), kShard, 100).ok());
  EXPECT_DEATH(store->Free(store->Find(kShard)->extents), "check failed");
}

// ---- sealing

TEST(StoreSeal, AShardIsFoundWithAllThatWasSaidOfIt) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(SaveForTest(store.get(), kShard, 2 * kSmallChunk + 100, Role::kReplica).ok());
  const SealedShard* shard = store->Find(kShard);
  ASSERT_NE(shard, nullptr);
  EXPECT_EQ(shard->meta, MetaForTest(kShard, 2 * kSmallChunk + 100));
  EXPECT_EQ(shard->role, Role::kReplica);
  EXPECT_FALSE(shard->committed);
  EXPECT_EQ(shard->crcs.size(), 3u);
  EXPECT_TRUE(shard->bad.empty());
  EXPECT_TRUE(HoldsItsBytes(*store, *shard));
  EXPECT_EQ(store->Find(kOther), nullptr);
  EXPECT_EQ(store->chunks_free(), 5u);
  store->CheckInvariants();
}

TEST(StoreSeal, ChunksBeyondTheStreamAreFreed) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(store->Allocate(8).ok());
  store->Free({{1, 2}});
  store->Free({{4, 3}});
  const ShardMeta meta = MetaForTest(kShard, 3 * kSmallChunk + 1);
  const auto extents = *store->Allocate(5);
  ASSERT_THAT(extents, ElementsAre(Extent{4, 3}, Extent{1, 2}));
  ASSERT_TRUE(store->Seal(meta, Role::kOwn, extents, FillForTest(store.get(), meta, extents)).ok());
  EXPECT_THAT(store->Find(kShard)->extents, ElementsAre(Extent{4, 3}, Extent{1, 1}));
  EXPECT_EQ(store->chunks_free(), 1u);
  EXPECT_TRUE(HoldsItsBytes(*store, *store->Find(kShard)));
  store->CheckInvariants();
}

TEST(StoreSeal, WholeExtentsBeyondTheStreamAreFreedToo) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  std::vector<Extent> extents = *store->Allocate(2);
  const auto more = *store->Allocate(3);
  extents.insert(extents.end(), more.begin(), more.end());
  const ShardMeta meta = MetaForTest(kShard, kManifestHeaderBytes);
  ASSERT_TRUE(store->Seal(meta, Role::kOwn, extents, FillForTest(store.get(), meta, extents)).ok());
  EXPECT_THAT(store->Find(kShard)->extents, ElementsAre(Extent{0, 1}));
  EXPECT_EQ(store->chunks_free(), 7u);
  store->CheckInvariants();
}

TEST(StoreSeal, TheSameIdTwiceIsRefusedInAnyRoleAndTheChunksStayTheCallers) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(SaveForTest(store.get(), kShard, 100, Role::kReplica).ok());
  const ShardMeta meta = MetaForTest(kShard, 100);
  const auto extents = *store->Allocate(2);
  const Status status = store->Seal(meta, Role::kOwn, extents, {0});
  EXPECT_EQ(status.code(), Code::kAlreadyExists);
  EXPECT_THAT(status.message(), HasSubstr("step 10 rank 0"));
  EXPECT_EQ(store->chunks_free(), 5u);
  store->Free(extents);
  EXPECT_EQ(store->chunks_free(), 7u);
  store->CheckInvariants();
}

TEST(StoreSeal, WhatCannotBeOfThisArenaIsRefused) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  const auto extents = *store->Allocate(2);
  const ArenaMemory before = memory;
  const auto refusal = [&](const ShardMeta& meta, size_t crcs) {
    const Status status = store->Seal(meta, Role::kOwn, extents, std::vector<uint32_t>(crcs));
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    return status.message();
  };
  const ShardMeta good = MetaForTest(kShard, kSmallChunk + 1);
  ShardMeta meta = good;
  meta.chunk_bytes = 8192;
  EXPECT_THAT(refusal(meta, 2), HasSubstr("8192"));
  meta = good;
  meta.stream_bytes = 0;
  EXPECT_THAT(refusal(meta, 0), HasSubstr("0 bytes"));
  meta = good;
  meta.stream_bytes = UINT64_MAX;
  EXPECT_THAT(refusal(meta, 2), HasSubstr("18446744073709551615"));
  meta = good;
  meta.manifest_offset = 1;
  EXPECT_THAT(refusal(meta, 2), HasSubstr("offset 1 "));
  meta = good;
  meta.manifest_offset = AlignObject(meta.stream_bytes);
  EXPECT_THAT(refusal(meta, 2), HasSubstr("manifest at offset"));
  meta = good;
  meta.id.incarnation = kIncarnationMax;
  EXPECT_THAT(refusal(meta, 2), HasSubstr("incarnation 9223372036854775808, limit 9223372036854775807"));
  meta = good;
  meta.object_count = kObjectsMax + 1;
  EXPECT_THAT(refusal(meta, 2), HasSubstr("1000001 objects, limit 1000000"));
  EXPECT_THAT(refusal(good, 1), HasSubstr("2 chunks"));
  EXPECT_THAT(refusal(good, 3), HasSubstr("3 checksums"));
  EXPECT_THAT(refusal(MetaForTest(kShard, 2 * kSmallChunk + 1), 3), HasSubstr("given were 2"));
  for (const uint32_t role : {0u, 4u, 257u}) {
    const Status status = store->Seal(good, static_cast<Role>(role), extents, {1, 2});
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("role " + std::to_string(role)));
  }
  EXPECT_TRUE(memory == before);
  EXPECT_EQ(store->chunks_free(), 6u);
  ASSERT_TRUE(store->Seal(good, Role::kOwn, extents, {1, 2}).ok());
  store->CheckInvariants();
}

TEST(StoreSealDeathTest, SealingWhatWasNotAllocatedIsOurBug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  const auto extents = *store->Allocate(1);
  const ShardMeta meta = MetaForTest(kShard, kSmallChunk + 1);
  EXPECT_DEATH((void)store->Seal(meta, Role::kOwn, {extents[0], {5, 1}}, {1, 2}), "check failed");
  EXPECT_DEATH((void)store->Seal(meta, Role::kOwn, {extents[0], extents[0]}, {1, 2}), "check failed");
}

TEST(StoreSeal, ShardsAreOrderedById) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  for (const ShardId& id : {kThird, ShardId{2, 1, 0}, kShard, kOther}) {
    ASSERT_TRUE(SaveForTest(store.get(), id, 100).ok());
  }
  std::vector<ShardId> ids;
  for (const auto& [id, shard] : store->shards()) ids.push_back(id);
  EXPECT_THAT(ids, ElementsAre(kShard, kOther, kThird, ShardId{2, 1, 0}));
}

// ---- removal and leases

TEST(StoreRemove, FreesTheChunksAtOnceWithoutReaders) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(SaveForTest(store.get(), kShard, 3 * kSmallChunk).ok());
  store->Remove(kShard);
  EXPECT_EQ(store->Find(kShard), nullptr);
  EXPECT_EQ(store->chunks_free(), 8u);
  store->Remove(kShard);
  store->CheckInvariants();
  EXPECT_TRUE(SaveForTest(store.get(), kShard, 8 * kSmallChunk).ok());
}

TEST(StoreLease, RemovalWaitsForTheLastLeaseAndTheChunksAreNotReused) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(SaveForTest(store.get(), kShard, 3 * kSmallChunk).ok());
  const auto first = *store->Lease(kShard);
  const auto second = *store->Lease(kShard);
  EXPECT_NE(first, second);
  store->Remove(kShard);
  EXPECT_EQ(store->Find(kShard), nullptr);
  EXPECT_TRUE(store->shards().empty());
  EXPECT_EQ(store->Lease(kShard).status().code(), Code::kNotFound);
  EXPECT_EQ(store->chunks_free(), 5u);

  // The same step is saved again. It must not use the chunks that are still read.
  ASSERT_TRUE(SaveForTest(store.get(), kThird, 5 * kSmallChunk).ok());
  EXPECT_EQ(SaveForTest(store.get(), kOther, 1000).code(), Code::kNoSpace);
  ASSERT_NE(store->Leased(first), nullptr);
  EXPECT_TRUE(store->Leased(first)->removed);
  EXPECT_TRUE(HoldsItsBytes(*store, *store->Leased(first)));
  store->CheckInvariants();

  store->EndLease(first);
  EXPECT_EQ(store->Leased(first), nullptr);
  EXPECT_EQ(store->chunks_free(), 0u);
  EXPECT_TRUE(HoldsItsBytes(*store, *store->Leased(second)));
  store->CheckInvariants();
  store->EndLease(second);
  EXPECT_EQ(store->chunks_free(), 3u);
  EXPECT_EQ(store->Leased(second), nullptr);
  store->CheckInvariants();
}

TEST(StoreLease, AShardRemovedUnderALeaseCanBeSealedAgain) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(SaveForTest(store.get(), kShard, 2 * kSmallChunk).ok());
  const auto lease = *store->Lease(kShard);
  const SealedShard* old = store->Leased(lease);
  store->Remove(kShard);
  ASSERT_TRUE(SaveForTest(store.get(), kShard, 3 * kSmallChunk, Role::kCache).ok());
  EXPECT_NE(store->Find(kShard), old);
  EXPECT_EQ(store->Leased(lease)->meta.stream_bytes, 2 * kSmallChunk);
  EXPECT_EQ(store->chunks_free(), 3u);
  store->CheckInvariants();
  store->EndLease(lease);
  EXPECT_EQ(store->chunks_free(), 5u);
  EXPECT_TRUE(HoldsItsBytes(*store, *store->Find(kShard)));
  store->CheckInvariants();
}

TEST(StoreLease, EndingALeaseOfAShardThatStaysFreesNothing) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(SaveForTest(store.get(), kShard, 100).ok());
  const auto lease = *store->Lease(kShard);
  store->EndLease(lease);
  store->EndLease(lease);
  store->EndLease(12345);
  EXPECT_NE(store->Find(kShard), nullptr);
  EXPECT_EQ(store->chunks_free(), 7u);
  store->CheckInvariants();
}

// ---- bad chunks

TEST(StoreRepair, BadChunksAreASortedSet) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  ASSERT_TRUE(SaveForTest(store.get(), kShard, 5 * kSmallChunk).ok());
  for (const uint32_t chunk : {3u, 0u, 4u, 3u}) store->MarkBad(kShard, chunk);
  EXPECT_THAT(store->Find(kShard)->bad, ElementsAre(0, 3, 4));
  store->MarkRepaired(kShard, 3);
  store->MarkRepaired(kShard, 2);
  EXPECT_THAT(store->Find(kShard)->bad, ElementsAre(0, 4));
  // A reader may name a chunk or a shard that does not exist.
  store->MarkBad(kShard, 5);
  store->MarkBad(kShard, UINT32_MAX);
  store->MarkBad(kOther, 0);
  store->MarkRepaired(kOther, 0);
  EXPECT_THAT(store->Find(kShard)->bad, ElementsAre(0, 4));
  store->CheckInvariants();
}

// A caller that has looked at every shard looks again only when changes() has grown. So every visible change
// must increase it.
TEST(StoreChanges, GrowWithEveryChangeAndWithNothingElse) {
  ArenaMemory memory = ArenaMemory::ForChunks(8);
  const auto store = FormatForTest(&memory);
  uint64_t seen = store->changes();
  const auto changed = [&] { return std::exchange(seen, store->changes()) != seen; };
  ASSERT_TRUE(SaveForTest(store.get(), kShard, 3 * kSmallChunk).ok());
  EXPECT_TRUE(changed());
  for (const bool first : {true, false}) {
    store->SetCommitted(kShard);
    EXPECT_EQ(changed(), first);
    store->SetRole(kShard, Role::kCache);
    EXPECT_EQ(changed(), first);
    store->MarkBad(kShard, 1);
    EXPECT_EQ(changed(), first);
  }
  for (const bool first : {true, false}) {
    store->MarkRepaired(kShard, 1);
    EXPECT_EQ(changed(), first);
  }
  const auto lease = *store->Lease(kShard);
  store->Free(*store->Allocate(2));
  EXPECT_FALSE(changed());
  store->Remove(kShard);
  EXPECT_TRUE(changed());
  store->EndLease(lease);
  store->Remove(kShard);
  EXPECT_FALSE(changed());
}

TEST(StoreIncarnation, NeverFalls) {
  ArenaMemory memory = ArenaMemory::ForChunks(1);
  const auto store = FormatForTest(&memory);
  store->SetIncarnationMax(5);
  store->SetIncarnationMax(3);
  EXPECT_EQ(store->incarnation_max(), 5u);
  store->SetIncarnationMax(kIncarnationMax - 1);
  EXPECT_EQ(store->incarnation_max(), kIncarnationMax - 1);
  store->CheckInvariants();
}

}  // namespace
}  // namespace ropeteam
