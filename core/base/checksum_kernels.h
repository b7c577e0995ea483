// SPDX-License-Identifier: Apache-2.0
//
// The kernels behind checksum.h, for checksum.cc and nobody else. A kernel is a set of functions for one
// family of CPUs; every function may be called only on a CPU where `supported` says true.
//
// The functions work on the raw register of the CRC, without the xor by 0xffffffff before and after.

#ifndef ROPETEAM_CORE_BASE_CHECKSUM_KERNELS_H_
#define ROPETEAM_CORE_BASE_CHECKSUM_KERNELS_H_

#include <array>
#include <cstddef>
#include <cstdint>

namespace ropeteam::checksum_internal {

// The kernels stream around the cache in lines of this size, to a destination aligned to it.
inline constexpr size_t kLineBytes = 64;

struct Kernel {
  const char* name;
  bool (*supported)();
  // The register after `length` more bytes.
  uint32_t (*update)(uint32_t raw, const uint8_t* data, size_t length);
  // Copies and returns what `update` would. `destination` is aligned to kLineBytes and `length` is a multiple
  // of it. Stores go around the cache; the caller fences.
  uint32_t (*copy_update)(uint32_t raw, uint8_t* destination, const uint8_t* source, size_t length);
  // copy_update without the CRC, under the same rules.
  void (*copy)(uint8_t* destination, const uint8_t* source, size_t length);
  // Makes the stores of the two above globally visible.
  void (*fence)();
};

extern const Kernel kPortableKernel;
#if defined(__x86_64__)
extern const Kernel kSse42Kernel;
extern const Kernel kAvx2Kernel;
extern const Kernel kAvx512Kernel;
#endif

// CRC32C's polynomial, bit-reflected: bit 31 is the coefficient of x^0, and x^32 itself is implied.
inline constexpr uint32_t kPolynomial = 0x82f63b78;
inline constexpr uint32_t kOne = 0x80000000;  // the polynomial 1

// a * x modulo the polynomial.
constexpr uint32_t TimesX(uint32_t a) { return (a >> 1) ^ ((a & 1) ? kPolynomial : 0); }

// a * b modulo the polynomial.
constexpr uint32_t Multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (uint32_t bit = kOne; bit != 0; bit >>= 1) {
    if (a & bit) product ^= b;
    b = TimesX(b);
  }
  return product;
}

// x^(2^i) for i = 0 … 30. CRC32C's polynomial is x + 1 times a primitive one of degree 31, so x^(2^31 - 1) is
// 1 and x^(2^31) is x again: the table wraps around after 31.
constexpr std::array<uint32_t, 31> PowersOfX() {
  std::array<uint32_t, 31> powers{};
  powers[0] = TimesX(kOne);
  for (size_t i = 1; i < powers.size(); ++i) powers[i] = Multiply(powers[i - 1], powers[i - 1]);
  return powers;
}
inline constexpr std::array<uint32_t, 31> kPowersOfX = PowersOfX();
static_assert(Multiply(kPowersOfX.back(), kPowersOfX.back()) == kPowersOfX.front());

// x^n modulo the polynomial.
constexpr uint32_t PowerOfX(uint64_t n) {
  uint32_t power = kOne;
  for (size_t i = 0; n != 0; ++i, n >>= 1) {
    if (n & 1) power = Multiply(power, kPowersOfX[i % kPowersOfX.size()]);
  }
  return power;
}

}  // namespace ropeteam::checksum_internal

#endif  // ROPETEAM_CORE_BASE_CHECKSUM_KERNELS_H_
