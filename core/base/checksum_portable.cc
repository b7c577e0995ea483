// SPDX-License-Identifier: Apache-2.0
//
// Slicing by eight: eight tables of 256 entries, so that eight bytes cost eight independent look-ups.

#include <array>
#include <atomic>
#include <bit>
#include <cstring>

#include "core/base/checksum_kernels.h"

namespace ropeteam::checksum_internal {
namespace {

constexpr size_t kSlices = 8;
using Tables = std::array<std::array<uint32_t, 256>, kSlices>;

// kTables[k][b]: the register after byte b and then k zero bytes, from a register of 0.
constexpr Tables MakeTables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = TimesX(crc);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < kSlices; ++k) {
    for (size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xff];
    }
  }
  return tables;
}
constexpr Tables kTables = MakeTables();

// Bytes copied and then checked while they are in the first-level cache.
constexpr size_t kBlockBytes = 8192;

uint32_t LoadLittle(const uint8_t* data) {
  uint32_t word;
  std::memcpy(&word, data, sizeof(word));
  if constexpr (std::endian::native == std::endian::big) word = __builtin_bswap32(word);
  return word;
}

uint32_t Update(uint32_t raw, const uint8_t* data, size_t length) {
  for (; length >= kSlices; length -= kSlices, data += kSlices) {
    const uint32_t low = raw ^ LoadLittle(data);
    const uint32_t high = LoadLittle(data + 4);
    raw = kTables[7][low & 0xff] ^ kTables[6][(low >> 8) & 0xff] ^ kTables[5][(low >> 16) & 0xff] ^
          kTables[4][low >> 24] ^ kTables[3][high & 0xff] ^ kTables[2][(high >> 8) & 0xff] ^
          kTables[1][(high >> 16) & 0xff] ^ kTables[0][high >> 24];
  }
  for (; length != 0; --length) raw = (raw >> 8) ^ kTables[0][(raw ^ *data++) & 0xff];
  return raw;
}

void Copy(uint8_t* destination, const uint8_t* source, size_t length) {
  std::memcpy(destination, source, length);
}

uint32_t CopyUpdate(uint32_t raw, uint8_t* destination, const uint8_t* source, size_t length) {
  while (length != 0) {
    const size_t block = length < kBlockBytes ? length : kBlockBytes;
    raw = Update(raw, source, block);
    Copy(destination, source, block);
    destination += block;
    source += block;
    length -= block;
  }
  return raw;
}

void Fence() { std::atomic_signal_fence(std::memory_order_seq_cst); }  // plain stores need no more

bool Supported() { return true; }

}  // namespace

constexpr Kernel kPortableKernel = {"portable", Supported, Update, CopyUpdate, Copy, Fence};

}  // namespace ropeteam::checksum_internal
