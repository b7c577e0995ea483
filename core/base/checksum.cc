// SPDX-License-Identifier: Apache-2.0
#include "core/base/checksum.h"

#include <algorithm>
#include <cstring>

#include "core/base/check.h"
#include "core/base/checksum_kernels.h"

namespace ropeteam {
namespace {

using checksum_internal::Kernel;
using checksum_internal::kLineBytes;

// Below this a copy stays in the cache: its stores are absorbed there, and a fence that waits for them to
// reach memory would cost more than the copy. Measured into a destination that is not in the cache: going
// around it takes 1.4 times as long at 1 KiB, about as long from 2 to 4 KiB, and three quarters as long from
// 16 KiB on.
constexpr size_t kAroundCacheBytesMin = 4096;
static_assert(kAroundCacheBytesMin >= 2 * kLineBytes,
              "a copy around the cache has whole lines after its head");

// Fastest first; the first that the CPU can run is used.
constexpr const Kernel* kKernels[] = {
#if defined(__x86_64__)
    &checksum_internal::kAvx512Kernel,
    &checksum_internal::kAvx2Kernel,
    &checksum_internal::kSse42Kernel,
#endif
    &checksum_internal::kPortableKernel,
};

const Kernel*& TheKernel() {
  static const Kernel* kernel = *std::find_if(std::begin(kKernels), std::end(kKernels),
                                              [](const Kernel* candidate) { return candidate->supported(); });
  return kernel;
}

// Bytes before the first destination line that starts inside the copy.
size_t HeadBytes(const void* destination) {
  return (kLineBytes - reinterpret_cast<uintptr_t>(destination) % kLineBytes) % kLineBytes;
}

}  // namespace

uint32_t Crc32c(const void* data, size_t length, uint32_t crc) {
  if (length == 0) return crc;
  return ~TheKernel()->update(~crc, static_cast<const uint8_t*>(data), length);
}

uint32_t CopyCrc32c(void* destination, const void* source, size_t length, uint32_t crc) {
  if (length == 0) return crc;
  const Kernel& kernel = *TheKernel();
  auto* to = static_cast<uint8_t*>(destination);
  auto* from = static_cast<const uint8_t*>(source);
  if (length < kAroundCacheBytesMin) {
    std::memcpy(to, from, length);
    return ~kernel.update(~crc, from, length);
  }
  const size_t head = HeadBytes(to);
  const size_t lines = (length - head) / kLineBytes * kLineBytes;
  const size_t tail = length - head - lines;
  std::memcpy(to, from, head);
  uint32_t raw = kernel.update(~crc, from, head);
  raw = kernel.copy_update(raw, to + head, from + head, lines);
  std::memcpy(to + head + lines, from + head + lines, tail);
  raw = kernel.update(raw, from + head + lines, tail);
  kernel.fence();
  return ~raw;
}

void CopyNonTemporal(void* destination, const void* source, size_t length) {
  if (length == 0) return;
  auto* to = static_cast<uint8_t*>(destination);
  auto* from = static_cast<const uint8_t*>(source);
  if (length < kAroundCacheBytesMin) {
    std::memcpy(to, from, length);
    return;
  }
  const Kernel& kernel = *TheKernel();
  const size_t head = HeadBytes(to);
  const size_t lines = (length - head) / kLineBytes * kLineBytes;
  std::memcpy(to, from, head);
  kernel.copy(to + head, from + head, lines);
  std::memcpy(to + head + lines, from + head + lines, length - head - lines);
  kernel.fence();
}

uint32_t Crc32cCombine(uint32_t crc_a, uint32_t crc_b, uint64_t length_b) {
  // Appending a zero bit multiplies the register by x; the xors by 0xffffffff at both ends of A and B cancel
  // out. x has order 2^32 - 1 here, so 8 * length_b may be taken bit by bit without overflow: 3 squarings
  // first.
  uint32_t power = checksum_internal::PowerOfX(length_b);
  for (int i = 0; i < 3; ++i) power = checksum_internal::Multiply(power, power);
  return checksum_internal::Multiply(power, crc_a) ^ crc_b;
}

const char* ChecksumKernelName() { return TheKernel()->name; }

bool UseChecksumKernelForTest(const char* name) {
  for (const Kernel* kernel : kKernels) {
    if (std::strcmp(kernel->name, name) != 0) continue;
    if (!kernel->supported()) return false;
    TheKernel() = kernel;
    return true;
  }
  return false;
}

}  // namespace ropeteam
