// SPDX-License-Identifier: Apache-2.0
//
// CRC32C by the crc32 instruction, three streams at once. One crc32q takes 8 bytes and answers after 3 cycles
// but a new one can start every cycle, so three independent streams keep the unit full; carry-less
// multiplication joins them.

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "core/base/checksum_kernels.h"

// The attribute, and not a compiler flag, raises the instruction set: the rest of the binary runs anywhere.
#define ROPETEAM_SSE42 __attribute__((target("sse4.2,pclmul")))
#define ROPETEAM_AVX2 __attribute__((target("avx2,sse4.2,pclmul")))
#define ROPETEAM_AVX512 __attribute__((target("avx512f,avx2,sse4.2,pclmul")))

namespace ropeteam::checksum_internal {
namespace {

// The bytes of one stream of three. Long blocks pay for the joining once in a while, short ones serve short
// inputs.
constexpr size_t kLongStreamBytes = 2048;
constexpr size_t kShortStreamBytes = 128;

// Multiplying two reflected 32-bit registers without carry gives the product times x, in 64 bits; crc32q of
// that multiplies by x^32 and reduces. So a factor of x^(n - 33) moves a register over n zero bits.
constexpr uint64_t Shift(size_t bytes) { return PowerOfX(8 * bytes - 33); }

ROPETEAM_SSE42 inline uint64_t Load(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

ROPETEAM_SSE42 inline __m128i MultiplyWide(uint64_t a, uint64_t b) {
  return _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<int64_t>(a)),
                              _mm_cvtsi64_si128(static_cast<int64_t>(b)), 0);
}

// The register of three streams of kBytes each that lie one behind the other.
template <size_t kBytes>
ROPETEAM_SSE42 inline uint64_t Streams3(uint64_t raw, const uint8_t* data) {
  uint64_t a = raw;
  uint64_t b = 0;
  uint64_t c = 0;
  for (size_t i = 0; i < kBytes; i += 8) {
    a = _mm_crc32_u64(a, Load(data + i));
    b = _mm_crc32_u64(b, Load(data + kBytes + i));
    c = _mm_crc32_u64(c, Load(data + 2 * kBytes + i));
  }
  const __m128i joined = _mm_xor_si128(MultiplyWide(a, Shift(2 * kBytes)), MultiplyWide(b, Shift(kBytes)));
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(joined))) ^ c;
}

ROPETEAM_SSE42 uint32_t UpdateSse42(uint32_t raw, const uint8_t* data, size_t length) {
  uint64_t crc = raw;
  for (; length >= 3 * kLongStreamBytes; length -= 3 * kLongStreamBytes, data += 3 * kLongStreamBytes)
    crc = Streams3<kLongStreamBytes>(crc, data);
  for (; length >= 3 * kShortStreamBytes; length -= 3 * kShortStreamBytes, data += 3 * kShortStreamBytes)
    crc = Streams3<kShortStreamBytes>(crc, data);
  for (; length >= 8; length -= 8, data += 8) crc = _mm_crc32_u64(crc, Load(data));
  raw = static_cast<uint32_t>(crc);
  for (; length != 0; --length) raw = _mm_crc32_u8(raw, *data++);
  return raw;
}

ROPETEAM_SSE42 void CopySse42(uint8_t* destination, const uint8_t* source, size_t length) {
  for (size_t i = 0; i < length; i += kLineBytes) {
    for (size_t j = 0; j < kLineBytes; j += sizeof(__m128i)) {
      const __m128i part = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i + j));
      _mm_stream_si128(reinterpret_cast<__m128i*>(destination + i + j), part);
    }
  }
}

ROPETEAM_AVX2 void CopyAvx2(uint8_t* destination, const uint8_t* source, size_t length) {
  for (size_t i = 0; i < length; i += kLineBytes) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i + 32));
    _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + i), low);
    _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + i + 32), high);
  }
}

ROPETEAM_AVX512 void CopyAvx512(uint8_t* destination, const uint8_t* source, size_t length) {
  for (size_t i = 0; i < length; i += kLineBytes)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + i), _mm512_loadu_si512(source + i));
}

// Bytes checked and then stored while they are in the first-level cache.
constexpr size_t kBlockBytes = 6 * kLongStreamBytes;

template <void (*kCopy)(uint8_t*, const uint8_t*, size_t)>
uint32_t CopyUpdate(uint32_t raw, uint8_t* destination, const uint8_t* source, size_t length) {
  while (length != 0) {
    const size_t block = length < kBlockBytes ? length : kBlockBytes;
    raw = UpdateSse42(raw, source, block);
    kCopy(destination, source, block);
    destination += block;
    source += block;
    length -= block;
  }
  return raw;
}

void Fence() { _mm_sfence(); }

bool SupportsSse42() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }
bool SupportsAvx2() { return SupportsSse42() && __builtin_cpu_supports("avx2"); }
bool SupportsAvx512() { return SupportsAvx2() && __builtin_cpu_supports("avx512f"); }

}  // namespace

constexpr Kernel kSse42Kernel = {"sse4.2",  SupportsSse42, UpdateSse42, CopyUpdate<CopySse42>,
                                 CopySse42, Fence};
constexpr Kernel kAvx2Kernel = {"avx2", SupportsAvx2, UpdateSse42, CopyUpdate<CopyAvx2>, CopyAvx2, Fence};
constexpr Kernel kAvx512Kernel = {"avx512",   SupportsAvx512, UpdateSse42, CopyUpdate<CopyAvx512>,
                                  CopyAvx512, Fence};

}  // namespace ropeteam::checksum_internal

#endif  // defined(__x86_64__)
