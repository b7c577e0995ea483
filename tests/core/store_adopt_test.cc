// SPDX-License-Identifier: Apache-2.0
//
// What a new process accepts from the arena that the former process left, whatever its content.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <random>
#include <set>

#include "tests/core/store_arena_for_test.h"

namespace ropeteam {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr ShardId kShard = {1, 10, 0};
constexpr ShardId kOther = {1, 10, 1};
constexpr ShardId kThird = {1, 11, 0};

// Three shards in 16 chunks: kShard in 0–2, kOther in 3, kThird in pieces (6–7, 4).
ArenaMemory ThreeShards() {
  ArenaMemory memory = ArenaMemory::ForChunks(16);
  const auto store = FormatForTest(&memory);
  EXPECT_TRUE(SaveForTest(store.get(), kShard, 2 * kSmallChunk + 5).ok());
  EXPECT_TRUE(SaveForTest(store.get(), kOther, 77, Role::kReplica).ok());
  const auto rest = *store->Allocate(12);
  store->Free({{6, 2}});
  store->Free({{4, 1}});
  EXPECT_TRUE(SaveForTest(store.get(), kThird, 2 * kSmallChunk + 1, Role::kCache).ok());
  EXPECT_THAT(store->Find(kThird)->extents, ElementsAre(Extent{6, 2}, Extent{4, 1}));
  store->SetCommitted(kOther);
  store->SetIncarnationMax(4);
  return memory;
}

Status AdoptStatus(ArenaMemory* memory) {
  return Store::Adopt(memory->span(), kSmallChunk, kIdentity, nullptr).status();
}

// Adopts and expects that exactly one slot is rejected with a message that contains `why`, and that the store
// goes on without it.
void ExpectOneRejected(ArenaMemory memory, const char* why) {
  Store::AdoptReport report;
  const auto store = AdoptForTest(&memory, &report);
  ASSERT_NE(store, nullptr);
  ASSERT_THAT(report.rejected, SizeIs(1)) << why;
  EXPECT_THAT(report.rejected[0], HasSubstr(why));
  EXPECT_EQ(report.shards, 2u);
  EXPECT_EQ(store->shards().size(), 2u);
  for (const auto& [id, shard] : store->shards()) EXPECT_TRUE(HoldsItsBytes(*store, *shard));
  store->CheckInvariants();
  // A rejected slot is cleared: the next process has nothing to reject.
  const auto again = AdoptForTest(&memory, &report);
  EXPECT_THAT(report.rejected, SizeIs(0));
  EXPECT_EQ(report.shards, 2u);
}

// If it were accepted, a repair of the table would clear the byte, and the digest would no longer match.
TEST(StoreAdopt, ASlotWithAByteThatNothingUsesIsRejected) {
  ArenaMemory memory = ThreeShards();
  memory.slot(3)->reserved = 1;
  ForgeDigest(&memory, 3);
  ExpectOneRejected(memory, "bytes that format version 1 does not use");
}

// The next seal would begin again at 0, and a later process would take the older of two copies for the newer.
TEST(StoreAdopt, AGenerationThatLeavesNoneForTheNextSealIsRejected) {
  for (const uint64_t generation : {UINT64_MAX, arena::kGenerationMax + 1}) {
    ArenaMemory memory = ThreeShards();
    memory.slot(3)->generation = generation;
    ForgeDigest(&memory, 3);
    ExpectOneRejected(memory, "limit 9223372036854775807");
  }
}

TEST(StoreAdopt, EveryShardIsBackAsItWas) {
  ArenaMemory memory = ThreeShards();
  Store::AdoptReport report;
  const auto store = AdoptForTest(&memory, &report);
  EXPECT_EQ(report.shards, 3u);
  EXPECT_THAT(report.rejected, SizeIs(0));
  ASSERT_EQ(store->shards().size(), 3u);
  EXPECT_EQ(store->Find(kShard)->meta, MetaForTest(kShard, 2 * kSmallChunk + 5));
  EXPECT_EQ(store->Find(kShard)->role, Role::kOwn);
  EXPECT_FALSE(store->Find(kShard)->committed);
  EXPECT_EQ(store->Find(kOther)->role, Role::kReplica);
  EXPECT_TRUE(store->Find(kOther)->committed);
  EXPECT_EQ(store->Find(kThird)->role, Role::kCache);
  EXPECT_THAT(store->Find(kThird)->extents, ElementsAre(Extent{6, 2}, Extent{4, 1}));
  for (const auto& [id, shard] : store->shards()) EXPECT_TRUE(HoldsItsBytes(*store, *shard));
  EXPECT_EQ(store->chunks_free(), 9u);
  EXPECT_EQ(store->incarnation_max(), 4u);
  store->CheckInvariants();
}

TEST(StoreAdopt, WorksOnLikeTheFormerProcess) {
  ArenaMemory memory = ThreeShards();
  auto store = AdoptForTest(&memory);
  EXPECT_EQ(SaveForTest(store.get(), kOther, 100).code(), Code::kAlreadyExists);
  store->Remove(kShard);
  ASSERT_TRUE(SaveForTest(store.get(), {2, 1, 0}, 12 * kSmallChunk).ok());
  EXPECT_EQ(store->chunks_free(), 0u);
  store->SetCommitted({2, 1, 0});
  store->SetRole(kOther, Role::kOwn);
  store->CheckInvariants();
  store = AdoptForTest(&memory);
  ASSERT_EQ(store->shards().size(), 3u);
  EXPECT_EQ(store->Find(kShard), nullptr);
  EXPECT_TRUE(store->Find({2, 1, 0})->committed);
  EXPECT_EQ(store->Find(kOther)->role, Role::kOwn);
  for (const auto& [id, shard] : store->shards()) EXPECT_TRUE(HoldsItsBytes(*store, *shard));
  store->CheckInvariants();
}

TEST(StoreAdopt, GenerationsGoOnAboveThePublishedOnes) {
  ArenaMemory memory = ThreeShards();
  const auto store = AdoptForTest(&memory);
  store->Remove(kOther);
  ASSERT_TRUE(SaveForTest(store.get(), kOther, 77).ok());
  const uint32_t slot = store->Find(kOther)->extents[0].first;
  EXPECT_GT(memory.slot(slot)->generation, memory.slot(0)->generation);
  EXPECT_GT(memory.slot(slot)->generation, memory.slot(6)->generation);
}

TEST(StoreAdopt, WhatWasOnlyAllocatedIsFreeAgain) {
  ArenaMemory memory = ThreeShards();
  auto store = AdoptForTest(&memory);
  ASSERT_TRUE(store->Allocate(9).ok());
  ASSERT_TRUE(store->Lease(kShard).ok());
  store->Remove(kShard);  // removed from the table, although a reader of the old process has a lease
  store = AdoptForTest(&memory);
  EXPECT_EQ(store->chunks_free(), 12u);
  store->CheckInvariants();
}

// ---- the superblock

TEST(StoreAdoptSuperblock, EmptyMemoryHasNoArena) {
  ArenaMemory memory = ArenaMemory::ForChunks(4);
  EXPECT_EQ(AdoptStatus(&memory).code(), Code::kNotFound);
}

// If the beginning of the file is wiped, even its whole superblock, an operator may still want the shards
// back.
TEST(StoreAdoptSuperblock, AnArenaWithAWipedBeginningIsNotTakenForFreshMemory) {
  for (const size_t wiped : {size_t{8}, size_t{64}, sizeof(arena::Superblock)}) {
    ArenaMemory memory = ThreeShards();
    std::fill_n(memory.span().begin(), wiped, std::byte{0});
    ArenaMemory before = memory;
    EXPECT_EQ(AdoptStatus(&memory).code(), Code::kCorrupt) << wiped;
    EXPECT_TRUE(std::equal(memory.span().begin(), memory.span().end(), before.span().begin())) << wiped;
  }
}

TEST(StoreAdoptSuperblock, TooLittleMemoryIsRefused) {
  ArenaMemory memory = ThreeShards();
  for (const size_t bytes : {0, 1, 8, 4095}) {
    EXPECT_EQ(Store::Adopt(memory.span().first(bytes), kSmallChunk, kIdentity, nullptr).status().code(),
              Code::kInvalidArgument);
  }
}

TEST(StoreAdoptSuperblock, AnotherJobNodeChunkSizeOrMemoryIsRefusedWithBothNamed) {
  ArenaMemory memory = ThreeShards();
  const ArenaMemory before = memory;
  const auto refusal = [&](uint64_t bytes, uint64_t chunk_bytes, const ArenaIdentity& identity) {
    const Status status = Store::Adopt(memory.span().first(bytes), chunk_bytes, identity, nullptr).status();
    EXPECT_EQ(status.code(), Code::kInvalidArgument);
    EXPECT_TRUE(memory == before);
    return status.message();
  };
  const uint64_t bytes = memory.span().size();
  const std::string job = refusal(bytes, kSmallChunk, {"mistral", "node-3"});
  EXPECT_THAT(job, HasSubstr("\"llama\""));
  EXPECT_THAT(job, HasSubstr("\"mistral\""));
  const std::string node = refusal(bytes, kSmallChunk, {"llama", "node-30"});
  EXPECT_THAT(node, HasSubstr("\"node-3\""));
  EXPECT_THAT(node, HasSubstr("\"node-30\""));
  const std::string chunk = refusal(bytes, 8192, kIdentity);
  EXPECT_THAT(chunk, HasSubstr("4096"));
  EXPECT_THAT(chunk, HasSubstr("8192"));
  const std::string size = refusal(bytes - 4096, kSmallChunk, kIdentity);
  EXPECT_THAT(size, HasSubstr(std::to_string(bytes)));
  EXPECT_THAT(size, HasSubstr(std::to_string(bytes - 4096)));
}

TEST(StoreAdoptSuperblock, AnotherVersionIsUnsupportedWithBothNamed) {
  ArenaMemory memory = ThreeShards();
  memory.superblock()->version = 9;
  memory.superblock()->crc = arena::SuperblockCrc(*memory.superblock());
  const ArenaMemory before = memory;
  const Status status = AdoptStatus(&memory);
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("version 9"));
  EXPECT_THAT(status.message(), HasSubstr("reads 1"));
  EXPECT_TRUE(memory == before);
}

TEST(StoreAdoptSuperblock, EveryFlippedByteIsCorruptAndNothingIsOverwritten) {
  ArenaMemory memory = ThreeShards();
  const size_t facts = offsetof(arena::Superblock, facts);
  const size_t names = offsetof(arena::Superblock, names_length);
  for (size_t at = 0; at < sizeof(arena::Superblock); ++at) {
    if (at >= facts && at < facts + sizeof(arena::Superblock::facts)) continue;
    if (at >= names && at < offsetof(arena::Superblock, reserved)) continue;
    memory.data()[at] ^= std::byte{0x10};
    const ArenaMemory before = memory;
    ASSERT_EQ(AdoptStatus(&memory).code(), Code::kCorrupt) << "byte " << at;
    ASSERT_TRUE(memory == before) << "byte " << at;
    memory.data()[at] ^= std::byte{0x10};
  }
  EXPECT_TRUE(AdoptStatus(&memory).ok());
}

TEST(StoreAdoptSuperblock, AForeignFileIsCorruptNotEmpty) {
  ArenaMemory memory = ArenaMemory::ForChunks(4);
  std::memset(memory.data(), 0x7f, memory.span().size());
  EXPECT_EQ(AdoptStatus(&memory).code(), Code::kCorrupt);
}

TEST(StoreAdoptSuperblock, ALayoutThatNoBuildWritesIsCorrupt) {
  for (const int field : {0, 1, 2, 3}) {
    ArenaMemory memory = ThreeShards();
    arena::Superblock* superblock = memory.superblock();
    uint64_t* fields[] = {&superblock->chunk_count, &superblock->slots_begin, &superblock->descriptors_begin,
                          &superblock->chunks_begin};
    *fields[field] += 4096;
    superblock->crc = arena::SuperblockCrc(*superblock);
    EXPECT_EQ(AdoptStatus(&memory).code(), Code::kCorrupt) << field;
  }
}

TEST(StoreAdoptSuperblock, TheFactsSurviveAFlipInEitherPlace) {
  ArenaMemory good = ThreeShards();
  const NodeFacts facts{4, {3, 90}, 7, 1'000'001, 64};
  AdoptForTest(&good)->SetFacts(facts);
  for (const int place : {0, 1}) {
    for (size_t word = 0; word <= arena::kFactWords; ++word) {
      ArenaMemory memory = good;
      auto& broken = memory.superblock()->facts[place];
      (word < arena::kFactWords ? broken.words[word] : broken.check) ^= uint64_t{1} << 40;
      const auto store = AdoptForTest(&memory);
      ASSERT_NE(store, nullptr);
      EXPECT_EQ(store->facts(), facts) << "place " << place << " word " << word;
      store->CheckInvariants();  // and that it is repaired
    }
  }
  for (auto& place : good.superblock()->facts) place.words[0] ^= 1;
  EXPECT_EQ(AdoptStatus(&good).code(), Code::kCorrupt);
}

TEST(StoreAdoptSuperblock, NamesOfAnotherRosterOrWithAFlippedByteAreForgotten) {
  ArenaMemory good = ThreeShards();
  {
    const auto store = AdoptForTest(&good);
    store->SetRosterNames(7, {"node-0", "node-1"});
    store->SetFacts({4, {3, 90}, 7, 1'000'001, 2});
    EXPECT_THAT(store->roster_names(), ElementsAre("node-0", "node-1"));
  }
  ArenaMemory again = good;
  EXPECT_THAT(AdoptForTest(&again)->roster_names(), ElementsAre("node-0", "node-1"));
  ArenaMemory flipped = good;
  flipped.superblock()->names[3] ^= 1;
  EXPECT_THAT(AdoptForTest(&flipped)->roster_names(), IsEmpty());
  AdoptForTest(&good)->SetFacts({4, {3, 90}, 8, 1'000'002, 3});
  EXPECT_THAT(AdoptForTest(&good)->roster_names(), IsEmpty());
}

// ---- slots

TEST(StoreAdoptSlot, EveryFlippedByteOfAPublishedSlotRejectsIt) {
  const ArenaMemory good = ThreeShards();
  for (size_t at = 0; at < sizeof(arena::Slot); ++at) {
    ArenaMemory memory = good;
    reinterpret_cast<std::byte*>(memory.slot(6))[at] ^= std::byte{0x04};
    Store::AdoptReport report;
    const auto store = AdoptForTest(&memory, &report);
    ASSERT_THAT(report.rejected, SizeIs(1)) << "byte " << at;
    EXPECT_THAT(report.rejected[0], HasSubstr("slot 6: "));
    ASSERT_EQ(store->Find(kThird), nullptr);
    ASSERT_EQ(store->chunks_free(), 12u);
    store->CheckInvariants();
  }
}

TEST(StoreAdoptSlot, EveryFlippedByteOfAChainRejectsItsShardOnly) {
  const ArenaMemory good = ThreeShards();
  for (const uint32_t chunk : {6u, 7u, 4u}) {
    for (size_t at = 0; at < sizeof(arena::ChunkDescriptor); ++at) {
      ArenaMemory memory = good;
      reinterpret_cast<std::byte*>(memory.descriptor(chunk))[at] ^= std::byte{0x01};
      ExpectOneRejected(memory, "slot 6: ");
    }
  }
}

TEST(StoreAdoptSlot, AChainThatLoopsIsRejectedEvenWithAFittingDigest) {
  ArenaMemory memory = ThreeShards();
  memory.descriptor(4)->next = 6;
  ForgeDigest(&memory, 6);
  ExpectOneRejected(memory, "chain does not end after 3 chunks");
}

TEST(StoreAdoptSlot, AChainOutOfRangeIsRejected) {
  ArenaMemory memory = ThreeShards();
  memory.descriptor(7)->next = 16;
  ForgeDigest(&memory, 6);
  ExpectOneRejected(memory, "leads to chunk 16 of 16 after 2");
}

TEST(StoreAdoptSlot, AChainThatEndsEarlyIsRejected) {
  ArenaMemory memory = ThreeShards();
  memory.descriptor(7)->next = arena::kChainEnd;
  ForgeDigest(&memory, 6);
  ExpectOneRejected(memory, "leads to chunk 4294967295");
}

TEST(StoreAdoptSlot, AbsurdSizesAreRejectedEvenWithAFittingDigest) {
  const auto forged = [](auto change) {
    ArenaMemory memory = ThreeShards();
    change(memory.slot(6));
    ForgeDigest(&memory, 6);
    return memory;
  };
  ExpectOneRejected(forged([](arena::Slot* s) { s->stream_bytes = 0; }), "shard of 0 bytes");
  ExpectOneRejected(forged([](arena::Slot* s) { s->stream_bytes = UINT64_MAX; }), "18446744073709551615");
  ExpectOneRejected(forged([](arena::Slot* s) { s->incarnation = UINT64_MAX; }), "18446744073709551615");
  ExpectOneRejected(forged([](arena::Slot* s) { s->chunk_count = 0; }), "0 chunks");
  ExpectOneRejected(forged([](arena::Slot* s) { s->chunk_count = UINT32_MAX; }), "4294967295 chunks");
  ExpectOneRejected(forged([](arena::Slot* s) {
                      s->chunk_count = 17;
                      s->stream_bytes = 17 * kSmallChunk;
                    }),
                    "17 chunks of an arena of 16");
  ExpectOneRejected(forged([](arena::Slot* s) { s->chunk_bytes = 8192; }), "8192");
  ExpectOneRejected(forged([](arena::Slot* s) { s->manifest_offset = 1 << 20; }), "manifest at offset");
  ExpectOneRejected(forged([](arena::Slot* s) { s->object_count = UINT32_MAX; }), "4294967295 objects");
  ExpectOneRejected(forged([](arena::Slot* s) { s->first_chunk = 5; }), "begins in chunk 5");
}

TEST(StoreAdoptSlot, AStateWordOfAnUnknownRoleIsRejected) {
  for (const uint32_t role : {0u, 4u, 255u}) {
    ArenaMemory memory = ThreeShards();
    ForgeDigest(&memory, 6);
    // Role and check change together, so that the check matches.
    const uint64_t change = role ^ static_cast<uint32_t>(Role::kOwn);
    memory.slot(6)->state ^= change << 8 | change << 24;
    ExpectOneRejected(memory, "state word");
  }
}

TEST(StoreAdoptSlot, TwoThatNameTheSameChunkAreBothRejected) {
  ArenaMemory memory = ThreeShards();
  // kOther, in chunk 3, is made to continue in chunk 4, which is the last chunk of kThird.
  memory.slot(3)->chunk_count = 2;
  memory.slot(3)->stream_bytes = kSmallChunk + 1;
  memory.descriptor(3)->next = 4;
  ForgeDigest(&memory, 3);
  Store::AdoptReport report;
  const auto store = AdoptForTest(&memory, &report);
  ASSERT_THAT(report.rejected, SizeIs(2));
  EXPECT_THAT(report.rejected,
              ElementsAre(HasSubstr("slot 3: step 10 rank 1 incarnation 1 names chunk 4 as does slot 6"),
                          HasSubstr("slot 6: step 11 rank 0 incarnation 1 names chunk 4 as does slot 3")));
  ASSERT_EQ(store->shards().size(), 1u);
  EXPECT_TRUE(HoldsItsBytes(*store, *store->Find(kShard)));
  EXPECT_EQ(store->chunks_free(), 13u);
  store->CheckInvariants();
}

TEST(StoreAdoptSlot, TwoOfOneShardAreBothRejected) {
  ArenaMemory memory = ThreeShards();
  memory.slot(3)->step = kThird.step;
  memory.slot(3)->rank = kThird.rank;
  ForgeDigest(&memory, 3);
  Store::AdoptReport report;
  const auto store = AdoptForTest(&memory, &report);
  EXPECT_THAT(report.rejected, ElementsAre(HasSubstr("is the same shard as slot 6"),
                                           HasSubstr("is the same shard as slot 3")));
  EXPECT_EQ(store->shards().size(), 1u);
  store->CheckInvariants();
}

TEST(StoreAdoptSlot, GarbageInWhatNobodyPublishedIsIgnored) {
  ArenaMemory memory = ThreeShards();
  const std::set<uint32_t> used = {0, 1, 2, 3, 4, 6, 7};
  std::mt19937_64 random(5);
  for (uint32_t chunk = 0; chunk < 16; ++chunk) {
    if (!used.contains(chunk)) {
      *memory.descriptor(chunk) = {static_cast<uint32_t>(random() % 16), static_cast<uint32_t>(random())};
    }
    if (memory.slot(chunk)->state != arena::kSlotFree) continue;
    auto* bytes = reinterpret_cast<std::byte*>(memory.slot(chunk));
    for (size_t at = 8; at < sizeof(arena::Slot); ++at) bytes[at] = static_cast<std::byte>(random());
  }
  Store::AdoptReport report;
  const auto store = AdoptForTest(&memory, &report);
  EXPECT_EQ(report.shards, 3u);
  EXPECT_THAT(report.rejected, SizeIs(0));
  EXPECT_EQ(store->chunks_free(), 9u);
  store->CheckInvariants();
}

TEST(StoreFormatOver, AnOlderArenaIsGoneWhole) {
  ArenaMemory memory = ThreeShards();
  ASSERT_TRUE(Store::Format(memory.span(), kSmallChunk, {"other", "name"}).ok());
  const auto store = Store::Adopt(memory.span(), kSmallChunk, {"other", "name"}, nullptr);
  ASSERT_TRUE(store.ok());
  EXPECT_TRUE((*store)->shards().empty());
  EXPECT_EQ((*store)->chunks_free(), 16u);
  EXPECT_EQ((*store)->incarnation_max(), 0u);
}

// ---- random damage

// Random bit flips in the tables: every adopted shard was sealed, is unchanged, and overlaps no other.
TEST(StoreAdoptFuzz, DamagedTablesYieldOnlyTrueShards) {
  std::mt19937_64 random(6);
  std::printf("seed 6\n");
  const ArenaMemory good = ThreeShards();
  ArenaMemory copy = good;
  const auto before = AdoptForTest(&copy);
  const uint64_t begin = copy.superblock()->slots_begin;
  const uint64_t end = copy.superblock()->descriptors_begin + 16 * sizeof(arena::ChunkDescriptor);
  for (int round = 0; round < 20000; ++round) {
    ArenaMemory memory = good;
    for (uint64_t flips = 1 + random() % 8; flips > 0; --flips) {
      memory.data()[begin + random() % (end - begin)] ^= static_cast<std::byte>(1u << (random() % 8));
    }
    const auto store = AdoptForTest(&memory);
    ASSERT_NE(store, nullptr);
    store->CheckInvariants();
    for (const auto& [id, shard] : store->shards()) {
      const SealedShard* original = before->Find(id);
      ASSERT_NE(original, nullptr) << "round " << round;
      ASSERT_EQ(shard->meta, original->meta) << "round " << round;
      ASSERT_EQ(shard->extents, original->extents) << "round " << round;
      ASSERT_EQ(shard->crcs, original->crcs) << "round " << round;
    }
  }
}

// The same with matching digests, which accidental damage cannot produce: nothing may overlap or crash.
TEST(StoreAdoptFuzz, ForgedTablesNeverYieldOverlaps) {
  std::mt19937_64 random(7);
  std::printf("seed 7\n");
  uint64_t adopted = 0;
  uint64_t rejected = 0;
  for (int round = 0; round < 20000; ++round) {
    ArenaMemory memory = ArenaMemory::ForChunks(12);
    (void)FormatForTest(&memory);
    for (uint32_t i = 0; i < 12; ++i) {
      memory.descriptor(i)->next =
          random() % 3 == 0 ? arena::kChainEnd : static_cast<uint32_t>(random() % 13);
    }
    for (uint32_t i = 0; i < 12; ++i) {
      if (random() % 3 != 0) continue;
      const uint64_t chunks = 1 + random() % 4;
      const ShardMeta meta =
          MetaForTest({1, random() % 4, static_cast<uint32_t>(random() % 4)}, chunks * kSmallChunk);
      *memory.slot(i) = arena::SlotFor(meta, random() % 5, i, static_cast<uint32_t>(chunks));
      ForgeDigest(&memory, i);
    }
    Store::AdoptReport report;
    const auto store = AdoptForTest(&memory, &report);
    ASSERT_NE(store, nullptr);
    store->CheckInvariants();
    adopted += report.shards;
    rejected += report.rejected.size();
  }
  EXPECT_GT(adopted, 1000u);
  EXPECT_GT(rejected, 1000u);
}

}  // namespace
}  // namespace ropeteam
