// SPDX-License-Identifier: Apache-2.0
//
// CRC32C (Castagnoli, RFC 3720 appendix B.4: reflected, initial value and final xor 0xffffffff) and the copy
// that computes it on the way. "123456789" has 0xe3069283; no bytes have 0.
//
// All functions are pure, thread-safe, never allocate, and choose their kernel once by CPU (AVX-512, AVX2,
// SSE4.2, portable), never by compiler flag, so one binary runs anywhere.

#ifndef ROPETEAM_CORE_BASE_CHECKSUM_H_
#define ROPETEAM_CORE_BASE_CHECKSUM_H_

#include <cstddef>
#include <cstdint>

namespace ropeteam {

// The CRC of A||B is Crc32c(B, length, Crc32c(A, …)). `data` may be null when `length` is 0.
uint32_t Crc32c(const void* data, size_t length, uint32_t crc = 0);

// Copies `length` bytes and returns Crc32c(source, length, crc), reading the source once. Stores go around
// the cache for lengths where that pays (the destination is an arena that this core will not read again); the
// stores are globally visible when the call returns. The ranges must not overlap. Any alignment.
uint32_t CopyCrc32c(void* destination, const void* source, size_t length, uint32_t crc = 0);

// CopyCrc32c without the checksum: the yardstick for what the checksum costs, and the copy for bytes already
// checked.
void CopyNonTemporal(void* destination, const void* source, size_t length);

// The CRC of A||B from the CRCs of A and B and B's length in bytes.
uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b);

// The kernel in use: "avx512", "avx2", "sse4.2" or "portable".
const char* ChecksumKernelName();

// For tests: every kernel this CPU can run, by the names above. `Use` switches to one and returns false if
// the CPU cannot run it. Not thread-safe against the functions above.
bool UseChecksumKernelForTest(const char* name);

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_BASE_CHECKSUM_H_
