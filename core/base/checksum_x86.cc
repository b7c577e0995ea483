// SPDX-License-Identifier: Apache-2.0
//
// CRC32C by the crc32 instruction, three streams at once. One crc32q takes 8 bytes and answers after 3 cycles
// but a new one can start every cycle, so three independent streams keep the unit full; carry-less
// multiplication joins them.

#if defined(__x86_64__)

#include <immintrin.h>

#include <atomic>
#include <cstring>

#include "core/base/checksum_kernels.h"

// The attribute, and not a compiler flag, raises the instruction set: the rest of the binary runs anywhere.
#define ROPETEAM_SSE42 __attribute__((target("sse4.2,pclmul")))
#define ROPETEAM_AVX2 __attribute__((target("avx2,sse4.2,pclmul")))
#define ROPETEAM_AVX512 __attribute__((target("avx512f,avx2,sse4.2,pclmul")))

namespace ropeteam::checksum_internal {
namespace {

// The bytes of one stream of three. Memory answers best when several runs of pages are read at once and far
// ahead; the shorter streams are for what is left over and for short inputs.
constexpr size_t kLongStreamBytes = 65536;
constexpr size_t kPageStreamBytes = 4096;
constexpr size_t kShortStreamBytes = 256;

// How far ahead of the reader of a stream the next lines are asked for. Measured on a Cascade Lake: 256 to
// 1024 are alike, none at all costs a tenth, because the hardware's own prefetcher stops at every page.
constexpr size_t kPrefetchBytes = 512;
static_assert(kPrefetchBytes < kPageStreamBytes && kPrefetchBytes >= kShortStreamBytes,
              "streams that are too short to prefetch do not");

// A copy without checksum walks four streams at once; of 2 to 8, four was the fastest.
constexpr size_t kCopyStreams = 4;

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

// The register of three streams of kBytes each, from the registers of each.
template <size_t kBytes>
ROPETEAM_SSE42 inline uint64_t Join(uint64_t a, uint64_t b, uint64_t c) {
  const __m128i joined = _mm_xor_si128(MultiplyWide(a, Shift(2 * kBytes)), MultiplyWide(b, Shift(kBytes)));
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(joined))) ^ c;
}

// Asks for the lines that kStreams streams of kBytes each will need next. An address beyond the source is
// harmless.
template <size_t kStreams, size_t kBytes>
ROPETEAM_SSE42 inline void PrefetchNext(const uint8_t* line) {
  if constexpr (kBytes <= kPrefetchBytes) return;
  const char* next = reinterpret_cast<const char*>(line) + kPrefetchBytes;
  for (size_t stream = 0; stream < kStreams; ++stream) _mm_prefetch(next + stream * kBytes, _MM_HINT_T0);
}

// The register of three streams of kBytes each that lie one behind the other.
template <size_t kBytes>
ROPETEAM_SSE42 inline uint64_t Streams3(uint64_t raw, const uint8_t* data) {
  uint64_t a = raw;
  uint64_t b = 0;
  uint64_t c = 0;
  for (size_t i = 0; i < kBytes; i += kLineBytes) {
    const uint8_t* line = data + i;
    PrefetchNext<3, kBytes>(line);
#pragma GCC unroll 8
    for (size_t j = 0; j < kLineBytes; j += 8) {
      a = _mm_crc32_u64(a, Load(line + j));
      b = _mm_crc32_u64(b, Load(line + kBytes + j));
      c = _mm_crc32_u64(c, Load(line + 2 * kBytes + j));
    }
  }
  return Join<kBytes>(a, b, c);
}

template <size_t kBytes>
ROPETEAM_SSE42 inline uint64_t Groups(uint64_t raw, const uint8_t* data, size_t length, size_t* done) {
  for (; length - *done >= 3 * kBytes; *done += 3 * kBytes) raw = Streams3<kBytes>(raw, data + *done);
  return raw;
}

ROPETEAM_SSE42 uint32_t Update(uint32_t raw, const uint8_t* data, size_t length) {
  uint64_t crc = raw;
  size_t done = 0;
  crc = Groups<kLongStreamBytes>(crc, data, length, &done);
  crc = Groups<kPageStreamBytes>(crc, data, length, &done);
  crc = Groups<kShortStreamBytes>(crc, data, length, &done);
  for (; length - done >= 8; done += 8) crc = _mm_crc32_u64(crc, Load(data + done));
  raw = static_cast<uint32_t>(crc);
  for (; done < length; ++done) raw = _mm_crc32_u8(raw, data[done]);
  return raw;
}

// One namespace per instruction set: how a line is loaded, and stored around the cache, and the copies made
// of that.
#define ROPETEAM_COPY_TARGET ROPETEAM_SSE42
namespace sse42 {
struct Line {
  __m128i parts[4];
};
ROPETEAM_COPY_TARGET inline Line LoadLine(const uint8_t* source) {
  auto* from = reinterpret_cast<const __m128i*>(source);
  return {{_mm_loadu_si128(from), _mm_loadu_si128(from + 1), _mm_loadu_si128(from + 2),
           _mm_loadu_si128(from + 3)}};
}
ROPETEAM_COPY_TARGET inline void StoreLine(uint8_t* destination, const Line& line) {
  auto* to = reinterpret_cast<__m128i*>(destination);
  for (int i = 0; i < 4; ++i) _mm_stream_si128(to + i, line.parts[i]);
}
#include "core/base/checksum_x86_copy.inc"
}  // namespace sse42
#undef ROPETEAM_COPY_TARGET

#define ROPETEAM_COPY_TARGET ROPETEAM_AVX2
namespace avx2 {
struct Line {
  __m256i low;
  __m256i high;
};
ROPETEAM_COPY_TARGET inline Line LoadLine(const uint8_t* source) {
  auto* from = reinterpret_cast<const __m256i*>(source);
  return {_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1)};
}
ROPETEAM_COPY_TARGET inline void StoreLine(uint8_t* destination, const Line& line) {
  auto* to = reinterpret_cast<__m256i*>(destination);
  _mm256_stream_si256(to, line.low);
  _mm256_stream_si256(to + 1, line.high);
}
#include "core/base/checksum_x86_copy.inc"
}  // namespace avx2
#undef ROPETEAM_COPY_TARGET

#define ROPETEAM_COPY_TARGET ROPETEAM_AVX512
namespace avx512 {
struct Line {
  __m512i all;
};
ROPETEAM_COPY_TARGET inline Line LoadLine(const uint8_t* source) { return {_mm512_loadu_si512(source)}; }
ROPETEAM_COPY_TARGET inline void StoreLine(uint8_t* destination, const Line& line) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(destination), line.all);
}
#include "core/base/checksum_x86_copy.inc"
}  // namespace avx512
#undef ROPETEAM_COPY_TARGET

void Fence() { _mm_sfence(); }

bool SupportsSse42() { return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"); }
bool SupportsAvx2() { return SupportsSse42() && __builtin_cpu_supports("avx2"); }
bool SupportsAvx512() { return SupportsAvx2() && __builtin_cpu_supports("avx512f"); }

}  // namespace

constexpr Kernel kSse42Kernel = {"sse4.2", SupportsSse42, Update, sse42::CopyUpdate, sse42::Copy, Fence};
constexpr Kernel kAvx2Kernel = {"avx2", SupportsAvx2, Update, avx2::CopyUpdate, avx2::Copy, Fence};
constexpr Kernel kAvx512Kernel = {"avx512", SupportsAvx512, Update, avx512::CopyUpdate, avx512::Copy, Fence};

}  // namespace ropeteam::checksum_internal

#endif  // defined(__x86_64__)
