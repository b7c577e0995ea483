// SPDX-License-Identifier: Apache-2.0
//
// Does a driver's work for StartCheck in one call. Its cipher is not secret: it changes every word,
// differently for each salt and chunk, and recognises its ciphertext.

#ifndef ROPETEAM_TESTS_TOY_CIPHER_H_
#define ROPETEAM_TESTS_TOY_CIPHER_H_

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "core/base/checksum.h"
#include "core/engine/engine.h"

namespace ropeteam {

inline uint64_t ToyMix(uint64_t a, uint64_t b) {
  uint64_t mixed = (a ^ (b + 0x9e3779b97f4a7c15)) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ (mixed >> 29)) * 0x94d049bb133111eb;
  return mixed ^ (mixed >> 32);
}
inline uint64_t ToyKey(const EncryptionSalt& salt, uint64_t chunk) {
  return ToyMix(ToyMix(ToyMix(salt.instance[0], salt.instance[1]), salt.count), chunk);
}
// Encrypts and decrypts.
inline std::string ToyCrypt(const std::byte* bytes, size_t length, uint64_t key) {
  std::string out(reinterpret_cast<const char*>(bytes), length);
  for (size_t at = 0; at < length; at += sizeof(uint64_t)) {
    uint64_t word = 0;
    const size_t part = std::min(sizeof(word), length - at);
    std::memcpy(&word, out.data() + at, part);
    word ^= ToyMix(key, at) | 0x0101010101010101;  // changes every byte
    std::memcpy(out.data() + at, &word, part);
  }
  return out;
}

// Whether the range is good. `out`: the result of encrypting it.
inline bool ToyCheck(std::byte* memory, const StartCheck::Range& range, EncryptedChunk* out) {
  const std::byte* bytes = memory + range.offset;
  if (range.pack)
    return PackIfGood(memory + range.pack->to, bytes, range.length, range.crc, range.pack->pieces, &out->crc);
  if (!range.cipher) return Crc32c(bytes, range.length) == range.crc;
  const ChunkCipher& cipher = *range.cipher;
  const uint64_t key = ToyKey(cipher.salt, cipher.chunk);
  const ShardId& id = cipher.shard;
  const uint64_t name = ToyMix(ToyMix(id.incarnation, id.step), id.rank);
  const std::string result = ToyCrypt(bytes, range.length, key);
  const uint32_t plain = cipher.encrypt ? Crc32c(bytes, range.length) : Crc32c(result.data(), result.size());
  const uint32_t encrypted =
      cipher.encrypt ? Crc32c(result.data(), result.size()) : Crc32c(bytes, range.length);
  *out = {encrypted, {{ToyMix(key, encrypted), ToyMix(key, name)}, plain, 0}};
  const bool good = plain == range.crc && (cipher.encrypt || out->tag == cipher.tag);
  if (good || !cipher.encrypt) std::memcpy(memory + cipher.to, result.data(), result.size());
  return good;
}

struct ToyChecked {
  std::vector<uint32_t> bad;
  std::vector<EncryptedChunk> encrypted;
};
inline ToyChecked ToyCheckAll(std::byte* memory, const StartCheck& check) {
  ToyChecked checked;
  for (uint32_t i = 0; i < check.ranges.size(); ++i) {
    EncryptedChunk encrypted;
    if (!ToyCheck(memory, check.ranges[i], &encrypted)) checked.bad.push_back(i);
    const StartCheck::Range& range = check.ranges[i];
    if (range.pack || (range.cipher && range.cipher->encrypt)) checked.encrypted.push_back(encrypted);
  }
  return checked;
}

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_TOY_CIPHER_H_
