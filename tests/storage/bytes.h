// SPDX-License-Identifier: Apache-2.0
//
// Test data for the storage tests, checksums, and deadlines.

#ifndef ROPETEAM_TESTS_STORAGE_BYTES_H_
#define ROPETEAM_TESTS_STORAGE_BYTES_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/checksum.h"
#include "storage/sink.h"

namespace ropeteam::storage::test {

inline Deadline In(std::chrono::milliseconds time) { return std::chrono::steady_clock::now() + time; }
inline Deadline Soon() { return In(std::chrono::seconds(60)); }
inline uint32_t Crc(std::string_view bytes) { return Crc32c(bytes.data(), bytes.size()); }
inline Piece PieceOf(std::string_view bytes) {
  return {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
}
// No two blocks are the same, so that a misplaced block is noticed.
inline std::string Bytes(size_t length, uint32_t seed = 0) {
  std::string bytes(length, '\0');
  uint64_t state = (uint64_t{seed} << 32) + length + 1;
  for (char& c : bytes) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    c = static_cast<char>(state >> 56);
  }
  return bytes;
}

}  // namespace ropeteam::storage::test

#endif  // ROPETEAM_TESTS_STORAGE_BYTES_H_
