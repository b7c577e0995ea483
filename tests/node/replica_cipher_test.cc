// SPDX-License-Identifier: Apache-2.0
#include "node/replica_cipher.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/base/checksum.h"

namespace ropeteam {
namespace {

constexpr uint64_t kLength = 200'000;  // several pieces and a part of one
constexpr uint64_t kThere = 1 << 18;   // where the ciphertext goes
constexpr uint64_t kBack = 1 << 19;    // where it is decrypted to

JobKey KeyOf(unsigned char first) {
  JobKey key;
  for (size_t i = 0; i < key.bytes.size(); ++i) key.bytes[i] = static_cast<unsigned char>(first + i);
  return key;
}

KeyId KeyIdOf(unsigned char first) { return JobKeyNumber(KeyOf(first), "llama"); }

class ReplicaCipherTest : public ::testing::Test {
 protected:
  ReplicaCipherTest() : memory_(1 << 20) {
    for (size_t i = 0; i < kLength; ++i) memory_[i] = static_cast<std::byte>(i * 7 + i / 251);
    encrypt_ = {0, kLength, Crc32c(memory_.data(), kLength), ChunkCipher()};
    *encrypt_.cipher = {
        kPlaintext, KeyIdOf(0), kThere, {3, 41, 2}, 5, {{0x1111111111111111, 0x2222222222222222}, 7}, {}};
  }
  StartCheck::Range Decrypt(const EncryptedChunk& encrypted, uint64_t to) const {
    StartCheck::Range range{kThere, kLength, encrypt_.crc, encrypt_.cipher};
    range.cipher->from_key = encrypt_.cipher->to_key;
    range.cipher->to_key = kPlaintext;
    range.cipher->to = to;
    range.cipher->tag = encrypted.tag;
    return range;
  }
  bool SameAt(uint64_t place) const {
    return std::equal(memory_.begin(), memory_.begin() + kLength,
                      memory_.begin() + static_cast<ptrdiff_t>(place));
  }

  std::vector<std::byte> memory_;
  StartCheck::Range encrypt_;
  const ReplicaCipher cipher_{{KeyOf(0)}, "llama"};
  EncryptedChunk chunk_;
};

// The derivation is a format: every build must read what another one has encrypted. The values were computed
// by other code (Python's hmac and cryptography) from the header's text.
TEST_F(ReplicaCipherTest, KeysNonceAndTagAreThoseOfTheHeadersText) {
  ASSERT_TRUE(cipher_.CarryOut(memory_.data(), encrypt_, &chunk_));
  uint64_t first = 0;
  std::memcpy(&first, &memory_[kThere], sizeof(first));
  EXPECT_EQ(first, 0xf7c2eb9724cd3db1);
  EXPECT_EQ(chunk_.tag.tag[0], 17692166942383481211u);
  EXPECT_EQ(chunk_.tag.tag[1], 3245430372668778543u);
  EXPECT_EQ(chunk_.tag.crc, encrypt_.crc);
  EXPECT_EQ(chunk_.crc, Crc32c(&memory_[kThere], kLength));
}

TEST_F(ReplicaCipherTest, WhatWasEncryptedIsDecryptedElsewhereAndInPlace) {
  ASSERT_TRUE(cipher_.CarryOut(memory_.data(), encrypt_, &chunk_));
  EXPECT_FALSE(SameAt(kThere));
  EXPECT_TRUE(cipher_.CarryOut(memory_.data(), Decrypt(chunk_, kBack), &chunk_));
  EXPECT_TRUE(SameAt(kBack));
  EXPECT_TRUE(cipher_.CarryOut(memory_.data(), Decrypt(chunk_, kThere), &chunk_));
  EXPECT_TRUE(SameAt(kThere));
}

TEST_F(ReplicaCipherTest, OtherBytesTagShardChunkSaltJobOrKeyAreNotDecrypted) {
  ASSERT_TRUE(cipher_.CarryOut(memory_.data(), encrypt_, &chunk_));
  const StartCheck::Range good = Decrypt(chunk_, kBack);
  const auto refused = [&](const StartCheck::Range& range, const ReplicaCipher& cipher) {
    EncryptedChunk ignored;
    return !cipher.CarryOut(memory_.data(), range, &ignored);
  };
  EXPECT_FALSE(refused(good, cipher_));
  memory_[kThere + 150'000] ^= std::byte{1};
  EXPECT_TRUE(refused(good, cipher_));
  memory_[kThere + 150'000] ^= std::byte{1};
  StartCheck::Range other = good;
  other.cipher->tag.tag[1] ^= 1;
  EXPECT_TRUE(refused(other, cipher_));
  for (const ShardId& id : {ShardId{4, 41, 2}, ShardId{3, 42, 2}, ShardId{3, 41, 3}}) {
    other = good;
    other.cipher->shard = id;
    EXPECT_TRUE(refused(other, cipher_));
  }
  other = good;
  other.cipher->chunk = 6;
  EXPECT_TRUE(refused(other, cipher_));
  other = good;
  ++other.cipher->salt.count;
  EXPECT_TRUE(refused(other, cipher_));
  EXPECT_TRUE(refused(good, ReplicaCipher({KeyOf(0)}, "other")));
  EXPECT_TRUE(refused(good, ReplicaCipher({KeyOf(1)}, "llama")));
  other = good;
  other.cipher->from_key = KeyIdOf(1);
  EXPECT_TRUE(refused(other, ReplicaCipher({KeyOf(1), KeyOf(0)}, "llama")));
  // While a key is being replaced both are accepted, in any order.
  EXPECT_FALSE(refused(good, ReplicaCipher({KeyOf(1), KeyOf(0)}, "llama")));
  EXPECT_FALSE(refused(good, ReplicaCipher({KeyOf(0), KeyOf(1)}, "llama")));
}

TEST_F(ReplicaCipherTest, AKeysIdIsTheBeginningOfItsHashAndDependsOnTheJob) {
  const ReplicaCipher both({KeyOf(1), KeyOf(0)}, "llama");
  EXPECT_EQ(both.key_ids(), (std::vector<KeyId>{KeyIdOf(1), KeyIdOf(0)}));
  EXPECT_NE(KeyIdOf(0), KeyIdOf(1));
  EXPECT_NE(KeyIdOf(0), JobKeyNumber(KeyOf(0), "other"));
  EXPECT_EQ(KeyName(KeyIdOf(0)), JobKeyId(KeyOf(0), "llama"));  // the digits that `ropeteam status` shows
}

// The plaintext is never in the arena. The result is what the second key would have made of the plaintext.
TEST_F(ReplicaCipherTest, AChunkOfOneKeyIsEncryptedWithAnotherInItsPlace) {
  const ReplicaCipher both({KeyOf(1), KeyOf(0)}, "llama");
  ASSERT_TRUE(cipher_.CarryOut(memory_.data(), encrypt_, &chunk_));
  StartCheck::Range again = Decrypt(chunk_, kThere);
  again.cipher->to_key = KeyIdOf(1);
  EncryptedChunk other;
  ASSERT_TRUE(both.CarryOut(memory_.data(), again, &other));
  StartCheck::Range direct = encrypt_;
  direct.cipher->to_key = KeyIdOf(1);
  direct.cipher->to = kBack;
  EncryptedChunk expected;
  ASSERT_TRUE(both.CarryOut(memory_.data(), direct, &expected));
  EXPECT_EQ(other.crc, expected.crc);
  EXPECT_EQ(other.tag, expected.tag);
  EXPECT_TRUE(
      std::equal(memory_.begin() + kThere, memory_.begin() + kThere + kLength, memory_.begin() + kBack));
  // Altered ciphertext is not encrypted again: no byte of it stays.
  memory_[kThere + 77'777] ^= std::byte{1};
  again.cipher->from_key = KeyIdOf(1);
  again.cipher->to_key = KeyIdOf(0);
  again.cipher->tag = other.tag;
  EXPECT_FALSE(both.CarryOut(memory_.data(), again, &other));
  EXPECT_TRUE(std::all_of(memory_.begin() + kThere, memory_.begin() + kThere + kLength,
                          [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST_F(ReplicaCipherTest, OtherBytesThanWereSummedLeaveNoCiphertext) {
  memory_[99'999] ^= std::byte{4};
  std::fill_n(memory_.begin() + kThere, kLength, std::byte{9});
  EXPECT_FALSE(cipher_.CarryOut(memory_.data(), encrypt_, &chunk_));
  EXPECT_TRUE(std::all_of(memory_.begin() + kThere, memory_.begin() + kThere + kLength,
                          [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST(EncryptionSalts, AreNotDrawnTwice) {
  EXPECT_NE(NewEncryptionSalt().instance, NewEncryptionSalt().instance);
}

}  // namespace
}  // namespace ropeteam
