// SPDX-License-Identifier: Apache-2.0
//
// Engines of a job that encrypts: no transfer carries a plaintext chunk, and every copy can be read and
// repaired.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/engine/engines_for_test.h"

namespace ropeteam {
namespace {

class Encrypted : public ::testing::Test, protected Engines {
 protected:
  Encrypted() : Engines(3, 256, 0, true) {
    on_wire_ = [this](TestNode&, std::string* bytes) {
      ++transfers_;
      EXPECT_TRUE(shard_.stream.find(*bytes) == std::string::npos) << "transfer " << transfers_;
    };
    Save(1, 1, shard_);
    EXPECT_EQ(transfers_, 10);
    Save(2, 1, TestShard(3, 'b'));
    Save(3, 1, TestShard(3, 'c'));
    transfers_ = 0;
  }
  // Opens the shard of rank 0 at `id`, and passes the time that this needs.
  RequestId Open(NodeId id) {
    node(id).engine->OnViewOpen(now_, kSession, ++request_, 1, 0, 5'000'000);
    const RequestId request = request_;
    Carry();
    PassTime(2'000'000);
    return request;
  }
  std::string Read(NodeId id) {
    const RequestId request = Open(id);
    const auto* view = std::get_if<AnswerView>(&answers_.at(request).body);
    if (view == nullptr) return std::get<AnswerStatus>(answers_.at(request).body).status.ToString();
    EXPECT_EQ(view->crcs, shard_.crcs);
    std::string stream;
    for (uint32_t chunk = 0; chunk < view->crcs.size(); ++chunk)
      stream.append(reinterpret_cast<const char*>(node(id).store->chunk(ChunkAt(view->extents, chunk))),
                    kTestChunk);
    stream.resize(view->meta.stream_bytes);
    return stream;
  }
  void RepairOne(NodeId id) {
    node(id).engine->OnVerify(now_, kSession, ++request_, nullptr, 5'000'000);
    Carry();
    PassTime(3'000'000);
  }
  const SealedShard* At(NodeId id) { return node(id).store->Find(Id(1, 0)); }

  const TestShard shard_{9, 'a'};
  int transfers_ = 0;
};

TEST_F(Encrypted, TheHolderHasCiphertextAndItsOwnChecksums) {
  EXPECT_TRUE(Replicated(Id(1, 0)));
  ASSERT_NE(At(2), nullptr);
  EXPECT_TRUE(At(2)->encrypted());
  EXPECT_FALSE(At(1)->encrypted());
  EXPECT_EQ(At(2)->encryption.salt, At(1)->encryption.salt);
  EXPECT_NE(At(2)->crcs, shard_.crcs);
  EXPECT_EQ(PlainCrcs(At(2)->encryption, At(2)->crcs), shard_.crcs);
  EXPECT_EQ(At(2)->content, At(1)->content);
  const std::string held = node(2).Copy(Id(1, 0));
  for (size_t at = 0; at + 64 <= shard_.stream.size(); at += 64)
    EXPECT_TRUE(held.find(shard_.stream.substr(at, 64)) == std::string::npos);
}

TEST_F(Encrypted, TheHolderReadsWhatItHoldsAndIsAHolderStill) {
  EXPECT_TRUE(Read(2) == shard_.stream);
  EXPECT_EQ(transfers_, 0);
  EXPECT_FALSE(At(2)->encrypted());
  EXPECT_EQ(At(2)->role, Role::kReplica);
  EXPECT_EQ(At(2)->content, At(1)->content);
}

TEST_F(Encrypted, ANodeWithoutACopyReadsTheHoldersCiphertext) {
  EXPECT_TRUE(Read(3) == shard_.stream);
  EXPECT_EQ(transfers_, 10);
  EXPECT_TRUE(At(2)->encrypted());
  EXPECT_FALSE(At(1)->encrypted());  // it was not asked to encrypt
}

TEST_F(Encrypted, WhereOnlyPlaintextIsLeftItIsEncryptedFirst) {
  EXPECT_TRUE(Read(2) == shard_.stream);
  EXPECT_TRUE(Read(3) == shard_.stream);
  // One of the two was asked to encrypt its copy.
  EXPECT_NE(At(1)->encrypted(), At(2)->encrypted());
  EXPECT_TRUE(Read(1) == shard_.stream && Read(2) == shard_.stream);
}

TEST_F(Encrypted, ABadChunkOfTheSaverIsRepairedFromCiphertext) {
  node(1).Flip(Id(1, 0), 3);
  RepairOne(1);
  EXPECT_GE(transfers_, 1);
  EXPECT_TRUE(node(1).Copy(Id(1, 0)) == shard_.stream);
  EXPECT_TRUE(At(1)->bad.empty());
}

TEST_F(Encrypted, ABadChunkOfAHolderIsFoundWithoutTheKeyAndRepaired) {
  const std::string before = node(2).Copy(Id(1, 0));
  int decrypted = 0;
  on_check_ = [&](TestNode& at, const StartCheck& check) {
    for (const StartCheck::Range& range : check.ranges)
      decrypted += at.id == 2 && range.cipher && range.cipher->from_key != kPlaintext ? 1 : 0;
  };
  node(2).Flip(Id(1, 0), 3);
  RepairOne(2);
  // The saver's copy was the only other one, so it was encrypted.
  EXPECT_TRUE(At(1)->encrypted());
  EXPECT_EQ(decrypted, 0);
  EXPECT_TRUE(node(2).Copy(Id(1, 0)) == before);
  EXPECT_TRUE(At(2)->bad.empty());
  EXPECT_TRUE(Read(1) == shard_.stream);
}

TEST_F(Encrypted, AFlippedBitOfCiphertextIsRepairedBeforeItIsRead) {
  node(2).Flip(Id(1, 0), 5);
  EXPECT_TRUE(Read(2) == shard_.stream);
}

TEST_F(Encrypted, ATagThatDoesNotMatchIsNotRead) {
  // An attacker can make the checksum match. Only the tag shows the change.
  auto tags = At(2)->encryption;
  tags.tags[4].tag[0] ^= 1;
  const std::vector<uint32_t> crcs = At(2)->crcs;
  const std::string bytes = node(2).Copy(Id(1, 0));
  const std::vector<Extent> extents = node(2).store->Allocate(crcs.size()).value();
  for (uint32_t chunk = 0; chunk < crcs.size(); ++chunk)
    std::memcpy(node(2).store->chunk(ChunkAt(extents, chunk)), bytes.data() + chunk * kTestChunk,
                std::min<uint64_t>(kTestChunk, bytes.size() - chunk * kTestChunk));
  node(2).store->Replace(Id(1, 0), extents, crcs, tags);
  EXPECT_THAT(Read(2), ::testing::HasSubstr("chunk 4 of"));
  EXPECT_TRUE(Read(1) == shard_.stream);
}

TEST_F(Encrypted, ALostHoldersCopyIsMadeAgainWithTheSameBytes) {
  const std::string before = node(2).Copy(Id(1, 0));
  ShowView(2, &node(2));
  PassTime(10'000'000);
  ASSERT_NE(At(3), nullptr);
  EXPECT_TRUE(At(3)->encrypted());
  EXPECT_TRUE(node(3).Copy(Id(1, 0)) == before);
  // The saver is lost too: the remaining copy is read.
  ShowView(3, nullptr);
  ShowView(4, &node(1));
  EXPECT_TRUE(Read(3) == shard_.stream);
}

TEST_F(Encrypted, WhatDoesNotMatchItsChecksumDoesNotLeave) {
  const TestShard next(9, 'n');
  const SaveId save = BeginSave(1, 2, next);
  node(1).store->chunk(ChunkAt(extents_, 2))[0] ^= std::byte{1};
  CommitSave(1, save, next);
  PassTime(1'000'000);
  EXPECT_FALSE(Replicated(Id(2, 0)));
  node(1).store->chunk(ChunkAt(extents_, 2))[0] ^= std::byte{1};
  PassTime(20'000'000);
  EXPECT_TRUE(Replicated(Id(2, 0)));
}

TEST_F(Encrypted, EverySaveHasASaltOfItsOwn) {
  const TestShard next(9, 'n');
  const SaveId save = BeginSave(1, 2, next);
  node(1).engine->OnSaveAbort(now_, kSession, ++request_, save);
  Carry();
  Save(1, 2, next);
  EXPECT_EQ(At(1)->encryption.salt.count, 1u);
  EXPECT_EQ(node(1).store->Find(Id(2, 0))->encryption.salt.count, 3u);  // the aborted save used the second
}

}  // namespace
}  // namespace ropeteam
