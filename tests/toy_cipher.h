// SPDX-License-Identifier: Apache-2.0
//
// Does a driver's work for StartCheck in one call. Its cipher is not secret: it changes every word,
// differently for each key, salt and chunk, and recognises its ciphertext.

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
inline uint64_t ToyKey(KeyId key, const EncryptionSalt& salt, uint64_t chunk) {
  return ToyMix(ToyMix(ToyMix(ToyMix(key, salt.instance[0]), salt.instance[1]), salt.count), chunk);
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
  const ShardId& id = cipher.shard;
  const uint64_t name = ToyMix(ToyMix(id.incarnation, id.step), id.rank);
  const auto key = [&](KeyId of) { return ToyKey(of, cipher.salt, cipher.chunk); };
  const auto crypt = [&](const std::string& text, KeyId of) {
    return of == kPlaintext ? text
                            : ToyCrypt(reinterpret_cast<const std::byte*>(text.data()), text.size(), key(of));
  };
  const auto sum = [](const std::string& text) { return Crc32c(text.data(), text.size()); };
  const auto tag = [&](KeyId of, uint32_t encrypted, uint32_t plain) {
    return ChunkTag{{ToyMix(key(of), encrypted), ToyMix(key(of), name)}, plain, 0};
  };
  const std::string before(reinterpret_cast<const char*>(bytes), range.length);
  const std::string plain = crypt(before, cipher.from_key);
  const std::string after = crypt(plain, cipher.to_key);
  *out = {sum(after), tag(cipher.to_key, sum(after), sum(plain))};
  const bool good = sum(plain) == range.crc && (cipher.from_key == kPlaintext ||
                                                tag(cipher.from_key, sum(before), sum(plain)) == cipher.tag);
  if (good || cipher.to_key == kPlaintext) std::memcpy(memory + cipher.to, after.data(), after.size());
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
    if (range.pack || (range.cipher && range.cipher->to_key != kPlaintext))
      checked.encrypted.push_back(encrypted);
  }
  return checked;
}

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_TOY_CIPHER_H_
