// SPDX-License-Identifier: Apache-2.0
//
// The arena of a job that encrypts its replicas: tags beside the descriptors, and copies that change between
// plaintext and ciphertext.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>

#include "tests/core/store_arena_for_test.h"

namespace ropeteam {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr uint64_t kChunks = 24;
constexpr ShardId kShard = {1, 7, 3};
constexpr uint64_t kBytes = 4 * kSmallChunk + 100;
const ArenaIdentity kEncrypted = {"llama", "node-3", true};
const EncryptionSalt kSalt = {{11, 12}, 13};
constexpr KeyId kKey = 0x1a2b3c4d5e6f7788;
constexpr KeyId kOtherKey = 99;

class StoreEncrypted : public ::testing::Test {
 protected:
  StoreEncrypted()
      : memory_(Store::MemoryFor(kChunks, kSmallChunk, true)),
        store_(Store::Format(memory_.span(), kSmallChunk, kEncrypted).value()) {}

  std::unique_ptr<Store> Adopt(ArenaMemory* memory, Store::AdoptReport* report = nullptr) {
    auto store = Store::Adopt(memory->span(), kSmallChunk, kEncrypted, report);
    EXPECT_TRUE(store.ok()) << store.status().ToString();
    return store.ok() ? std::move(*store) : nullptr;
  }
  void SaveOwn() {
    const std::vector<Extent> extents = store_->Allocate(5).value();
    const ShardMeta meta = MetaForTest(kShard, kBytes);
    plain_ = FillForTest(store_.get(), meta, extents);
    ASSERT_TRUE(store_->Seal(meta, Role::kOwn, extents, plain_, {kSalt, {}}).ok());
    store_->SetCommitted(kShard);
  }
  // Replaces the copy as a converter does. The Store does not look at the bytes.
  void Replace(KeyId key) {
    std::vector<uint32_t> crcs = plain_;
    Encryption encryption{kSalt, {}, key};
    for (size_t i = 0; key != kPlaintext && i < plain_.size(); ++i) {
      encryption.tags.push_back({{i + 1, ~i}, plain_[i], 0});
      crcs[i] = plain_[i] + static_cast<uint32_t>(key);
    }
    store_->Replace(kShard, store_->Allocate(5).value(), crcs, encryption);
  }

  ArenaMemory memory_;
  std::unique_ptr<Store> store_;
  std::vector<uint32_t> plain_;
};

TEST_F(StoreEncrypted, SaltKeyAndTagsAreThereForTheNextProcess) {
  SaveOwn();
  const uint64_t content = store_->Find(kShard)->content;
  Replace(kKey);
  store_->CheckInvariants();
  const Encryption encryption = store_->Find(kShard)->encryption;
  const std::vector<uint32_t> crcs = store_->Find(kShard)->crcs;
  store_.reset();
  store_ = Adopt(&memory_);
  store_->CheckInvariants();
  const SealedShard* shard = store_->Find(kShard);
  ASSERT_NE(shard, nullptr);
  EXPECT_EQ(shard->encryption, encryption);
  EXPECT_EQ(shard->encryption.key, kKey);
  EXPECT_EQ(shard->crcs, crcs);
  EXPECT_EQ(shard->content, content);
  EXPECT_TRUE(shard->committed && shard->role == Role::kOwn);
  EXPECT_EQ(store_->chunks_free(), kChunks - 5);
}

TEST_F(StoreEncrypted, AKillAnywhereInAReplacementLeavesTheShardOnce) {
  SaveOwn();
  int places = 0;
  for (const KeyId key : {kKey, kPlaintext, kKey, kOtherKey}) {
    const AtCrashPoints hook([&](const char* place) {
      ++places;
      ArenaMemory left = memory_;
      Store::AdoptReport report;
      const auto next = Adopt(&left, &report);
      ASSERT_NE(next, nullptr);
      next->CheckInvariants();
      const SealedShard* shard = next->Find(kShard);
      ASSERT_NE(shard, nullptr) << place;
      EXPECT_TRUE(shard->committed) << place;
      EXPECT_EQ(PlainCrcs(shard->encryption, shard->crcs), plain_) << place;
      EXPECT_EQ(next->chunks_free(), kChunks - 5) << place;
      // For a moment both copies are in the table; the newer one counts.
      const bool both = std::string(place) == "seal: published";
      EXPECT_THAT(report.rejected, SizeIs(both ? 1 : 0)) << place;
      EXPECT_TRUE(!both || shard->encryption.key == key) << place;
    });
    Replace(key);
  }
  EXPECT_GE(places, 4 * 8);
}

TEST_F(StoreEncrypted, AReaderKeepsTheChunksOfBefore) {
  SaveOwn();
  const Store::LeaseToken lease = store_->Lease(kShard).value();
  Replace(kKey);
  store_->CheckInvariants();
  EXPECT_EQ(store_->chunks_free(), kChunks - 10);
  EXPECT_TRUE(HoldsItsBytes(*store_, *store_->Leased(lease)));
  store_->EndLease(lease);
  EXPECT_EQ(store_->chunks_free(), kChunks - 5);
  EXPECT_TRUE(store_->Find(kShard)->encrypted());
}

TEST_F(StoreEncrypted, PeersReadCiphertextWriteWhatWasAdmittedAndReachNothingElse) {
  using Kind = PeerAccess::Kind;
  // Chunks by what peers may do with them: read, write.
  const auto reached = [this] {
    store_->CheckInvariants();
    std::pair<int, int> counts;
    for (uint32_t chunk = 0; chunk < kChunks; ++chunk) {
      counts.first += store_->peer_access()->Of(chunk) == Kind::kRead ? 1 : 0;
      counts.second += store_->peer_access()->Of(chunk) == Kind::kWrite ? 1 : 0;
    }
    return counts;
  };
  SaveOwn();
  EXPECT_EQ(reached(), std::pair(0, 0)) << "plaintext";
  Replace(kKey);
  EXPECT_EQ(reached(), std::pair(5, 0));
  EXPECT_EQ(store_->peer_access()->Of(store_->Find(kShard)->extents[0].first), Kind::kRead);
  const Store::LeaseToken lease = store_->Lease(kShard).value();
  Replace(kOtherKey);
  EXPECT_EQ(reached(), std::pair(10, 0)) << "a reader may still be reading the copy of before";
  store_->EndLease(lease);
  EXPECT_EQ(reached(), std::pair(5, 0));

  const std::vector<Extent> incoming = store_->Allocate(3).value();
  EXPECT_EQ(reached(), std::pair(5, 0));
  store_->AdmitPuts(incoming);
  EXPECT_EQ(reached(), std::pair(5, 3));
  store_->Free(incoming);
  EXPECT_EQ(reached(), std::pair(5, 0));

  store_.reset();
  store_ = Adopt(&memory_);
  EXPECT_EQ(reached(), std::pair(5, 0)) << "the next daemon";
  Replace(kPlaintext);
  EXPECT_EQ(reached(), std::pair(0, 0)) << "decrypted for a reader";
  Replace(kKey);
  store_->Remove(kShard);
  EXPECT_EQ(reached(), std::pair(0, 0));
}

TEST_F(StoreEncrypted, ASealEndsTheAccessOfItsSource) {
  constexpr ShardId kReplica = {1, 7, 4};
  const std::vector<Extent> incoming = store_->Allocate(6).value();
  store_->AdmitPuts(incoming);
  Encryption encryption{kSalt, {}, kKey};
  encryption.tags.resize(5);
  ASSERT_TRUE(store_
                  ->Seal(MetaForTest(kReplica, kBytes), Role::kReplica, incoming, std::vector<uint32_t>(5),
                         encryption)
                  .ok());
  store_->CheckInvariants();
  for (uint32_t i = 0; i < 6; ++i)
    EXPECT_EQ(store_->peer_access()->Of(incoming[0].first + i),
              i < 5 ? PeerAccess::Kind::kRead : PeerAccess::Kind::kNone);
}

TEST(StoreNotEncrypted, PeersReachEveryChunk) {
  ArenaMemory memory(Store::MemoryFor(kChunks, kSmallChunk));
  const auto store = Store::Format(memory.span(), kSmallChunk, {"llama", "node-3"}).value();
  EXPECT_EQ(store->peer_access(), nullptr);
  store->AdmitPuts(store->Allocate(3).value());
  store->CheckInvariants();
}

TEST_F(StoreEncrypted, ABitThatFlipsInAnyTagIsHealedOrTheShardIsRejected) {
  SaveOwn();
  Replace(kKey);
  const arena::Layout layout = arena::LayoutFor(memory_.span().size(), kSmallChunk, true);
  ASSERT_NE(layout.tags_begin, 0u);
  std::mt19937_64 random(9);
  for (int round = 0; round < 200; ++round) {
    const uint32_t chunk = ChunkAt(store_->Find(kShard)->extents, random() % 5);
    const uint64_t at = layout.tags_begin + chunk * sizeof(ChunkTag) + random() % sizeof(ChunkTag);
    ArenaMemory damaged = memory_;
    damaged.data()[at] ^= static_cast<std::byte>(1u << random() % 8);
    EXPECT_EQ(Adopt(&damaged)->Find(kShard), nullptr);
    store_->ExpectTableDamage();
    memory_.data()[at] ^= std::byte{4};
    EXPECT_EQ(store_->HealTable(0, kChunks), 1u);
    store_->CheckInvariants();
  }
  EXPECT_NE(Adopt(&memory_)->Find(kShard), nullptr);
}

// Simulation seed 96100591: no digest covers the tags of plaintext.
TEST_F(StoreEncrypted, ABitThatFlipsInATagOfPlaintextIsRepairedByTheNextDaemon) {
  SaveOwn();
  const arena::Layout layout = arena::LayoutFor(memory_.span().size(), kSmallChunk, true);
  const uint32_t chunk = ChunkAt(store_->Find(kShard)->extents, 2);
  ArenaMemory damaged = memory_;
  damaged.data()[layout.tags_begin + chunk * sizeof(ChunkTag)] ^= std::byte{4};
  const auto adopted = Adopt(&damaged);
  ASSERT_NE(adopted->Find(kShard), nullptr);
  EXPECT_EQ(adopted->CountTableDamage(), 0u);
  adopted->CheckInvariants();
}

TEST_F(StoreEncrypted, ArenasOfTheTwoKindsAreNotTakenForEachOther) {
  const auto as_plain = Store::Adopt(memory_.span(), kSmallChunk, kIdentity, nullptr);
  EXPECT_EQ(as_plain.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(as_plain.status().message(),
              HasSubstr("made with --encrypt-replicas, this daemon was started without"));
  ASSERT_TRUE(Store::Format(memory_.span(), kSmallChunk, kIdentity).ok());
  EXPECT_EQ(memory_.superblock()->version, 1u);
  const auto as_encrypted = Store::Adopt(memory_.span(), kSmallChunk, kEncrypted, nullptr);
  EXPECT_THAT(as_encrypted.status().message(),
              HasSubstr("made without --encrypt-replicas, this daemon was started with"));
}

}  // namespace
}  // namespace ropeteam
