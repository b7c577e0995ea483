// SPDX-License-Identifier: Apache-2.0
//
// An encrypted chunk that a holder, or a writer of its arena, has changed: its bytes, length and place, its tag, key and
// salt, and the names that are authenticated with it. Only the chunk as it was encrypted may be decrypted, even if the
// attacker knows the plaintext and forges its checksum as well. A chunk that is refused must leave no ciphertext.

#include "node/replica_cipher.h"

#include <algorithm>
#include <cstring>

#include "core/base/checksum.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/values.h"

namespace ropeteam::fuzz {
namespace {

// The places in memory of the plaintext, the ciphertext, and what becomes of it.
constexpr uint64_t kPlace = 128 * 1024;
constexpr uint64_t kThere = kPlace;
constexpr uint64_t kBack = 2 * kPlace;
constexpr uint64_t kPieceBytes = 64 * 1024;  // of node/replica_cipher.cc

enum Op : uint8_t { kByte, kTag, kShard, kChunk, kSalt, kKey, kLength, kOffset, kCrc, kOps };

JobKey KeyOf(unsigned char first) {
  JobKey key;
  for (unsigned char& byte : key.bytes) byte = first++;
  return key;
}

const ReplicaCipher& Cipher() {
  static const ReplicaCipher* const kCipher = new ReplicaCipher({KeyOf(1), KeyOf(2)}, "job");
  return *kCipher;
}

void Change(FromBytes* in, std::byte* memory, StartCheck::Range* range) {
  ChunkCipher& cipher = *range->cipher;
  switch (in->Byte() % kOps) {
    case kByte:
      memory[kThere + in->Number() % (range->length + 16)] ^= static_cast<std::byte>(in->Byte());
      return;
    case kTag:
      cipher.tag.tag[in->Byte() % 2] ^= in->Number();
      return;
    case kShard:
      in->Get(cipher.shard);
      return;
    case kChunk:
      in->Get(cipher.chunk);
      return;
    case kSalt:
      in->Get(cipher.salt);
      return;
    case kKey: {
      const uint8_t which = in->Byte();
      cipher.from_key = which < 2 ? Cipher().key_ids()[which] : 1 + in->Number() / 2;
      return;
    }
    case kLength:
      range->length = in->Number() % (kPlace - 64);
      return;
    case kOffset:
      range->offset = kThere + in->Byte() % 64;
      return;
    default:
      range->crc ^= static_cast<uint32_t>(in->Number());
  }
}

bool SameChunk(const StartCheck::Range& a, const StartCheck::Range& b) {
  return a.length == b.length && a.crc == b.crc && a.cipher->from_key == b.cipher->from_key &&
         a.cipher->shard == b.cipher->shard && a.cipher->chunk == b.cipher->chunk &&
         a.cipher->salt == b.cipher->salt && a.cipher->tag.tag == b.cipher->tag.tag;
}

void RunReplicaCipher(std::string_view input) {
  static std::byte* const memory = new std::byte[3 * kPlace]();
  FromBytes in(input);
  const std::vector<KeyId> keys = Cipher().key_ids();
  // Most chunks are short. The others have a second piece.
  const uint8_t size = in.Byte();
  const uint64_t length = size < 0xf0 ? size : kPieceBytes + size - 0xf8;
  for (uint64_t i = 0; i < length; ++i) memory[i] = static_cast<std::byte>(i * 7 + i / 251);
  StartCheck::Range range{0, length, Crc32c(memory, length), ChunkCipher(), {}};
  *range.cipher = {kPlaintext, keys[0], kThere, {3, 41, 2}, 5, {{11, 12}, 7}, {}};
  EncryptedChunk encrypted;
  ROPETEAM_CHECK(Cipher().CarryOut(memory, range, &encrypted));
  range.offset = kThere;
  range.cipher->from_key = keys[0];
  range.cipher->to_key = kPlaintext;
  range.cipher->to = kBack;
  range.cipher->tag = encrypted.tag;

  const StartCheck::Range before = range;
  const std::vector<std::byte> ciphertext(memory + kThere, memory + kThere + length);
  while (!in.done()) Change(&in, memory, &range);
  const bool genuine =
      SameChunk(range, before) && std::equal(ciphertext.begin(), ciphertext.end(), memory + range.offset);

  ROPETEAM_CHECK(Cipher().CarryOut(memory, range, &encrypted) == genuine);
  if (genuine) {
    ROPETEAM_CHECK(std::equal(memory, memory + length, memory + kBack));
    return;
  }
  const bool other_than_crc = [&] {
    StartCheck::Range same_crc = range;
    same_crc.crc = before.crc;
    return !SameChunk(same_crc, before) ||
           !std::equal(ciphertext.begin(), ciphertext.end(), memory + range.offset);
  }();
  range.crc = Crc32c(memory + kBack, range.length);
  if (other_than_crc) ROPETEAM_CHECK(!Cipher().CarryOut(memory, range, &encrypted));
  // Nor is it encrypted again, with another key or the same one.
  if (std::find(keys.begin(), keys.end(), range.cipher->from_key) == keys.end() || !other_than_crc) return;
  range.cipher->to_key = keys[range.crc % 2];
  ROPETEAM_CHECK(!Cipher().CarryOut(memory, range, &encrypted));
  ROPETEAM_CHECK(std::all_of(memory + kBack, memory + kBack + range.length,
                             [](std::byte byte) { return byte == std::byte{0}; }));
}

std::vector<std::string> ReplicaCipherSeeds() {
  const auto chunk = [](size_t length) { return ToBytes().Byte(length); };
  return {
      chunk(0).bytes(),
      chunk(100).bytes(),
      chunk(0xff).bytes(),
      chunk(100).Byte(kByte).Put(uint64_t{17}).Byte(1).bytes(),
      chunk(0xff).Byte(kByte).Put(kPieceBytes + 1).Byte(0x80).bytes(),
      chunk(40).Byte(kTag).Byte(1).Put(uint64_t{1}).bytes(),
      chunk(40).Byte(kShard).Put(ShardId{3, 42, 2}).bytes(),
      chunk(40).Byte(kChunk).Put(6u).Byte(kChunk).Put(5u).bytes(),
      chunk(40).Byte(kSalt).Put(EncryptionSalt{{11, 12}, 8}).bytes(),
      chunk(40).Byte(kKey).Byte(1).bytes() + ToBytes().Byte(kKey).Byte(2).Put(uint64_t{9}).bytes(),
      chunk(40).Byte(kLength).Put(uint64_t{39}).Byte(kOffset).Byte(1).bytes(),
      chunk(0).Byte(kLength).Put(uint64_t{16}).bytes(),
      chunk(40).Byte(kCrc).Put(uint64_t{1}).bytes(),
  };
}

const Target kReplicaCipher("replica_cipher", RunReplicaCipher, ReplicaCipherSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
