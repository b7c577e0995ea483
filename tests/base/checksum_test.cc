// SPDX-License-Identifier: Apache-2.0
//
// The promises of checksum.h, tested on the kernel that this machine uses.

#include "core/base/checksum.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <random>
#include <string_view>
#include <vector>

namespace ropeteam {
namespace {

std::vector<uint8_t> RandomBytes(size_t length, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> bytes(length);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

// From RFC 3720, appendix B.4, which gives the bytes in wire order.
TEST(Crc32c, HasTheValuesOfTheStandard) {
  std::vector<uint8_t> bytes(32, 0);
  EXPECT_EQ(Crc32c(bytes.data(), bytes.size()), 0x8a9136aaU);
  std::fill(bytes.begin(), bytes.end(), static_cast<uint8_t>(0xff));
  EXPECT_EQ(Crc32c(bytes.data(), bytes.size()), 0x62a8ab43U);
  std::iota(bytes.begin(), bytes.end(), static_cast<uint8_t>(0));
  EXPECT_EQ(Crc32c(bytes.data(), bytes.size()), 0x46dd794eU);
  std::reverse(bytes.begin(), bytes.end());
  EXPECT_EQ(Crc32c(bytes.data(), bytes.size()), 0x113fdb5cU);
  EXPECT_EQ(Crc32c("123456789", 9), 0xe3069283U);
}

TEST(Crc32c, OfNoBytesIsWhatItWas) {
  EXPECT_EQ(Crc32c(nullptr, 0), 0U);
  EXPECT_EQ(Crc32c(nullptr, 0, 0x12345678), 0x12345678U);
  EXPECT_EQ(CopyCrc32c(nullptr, nullptr, 0, 0x12345678), 0x12345678U);
  CopyNonTemporal(nullptr, nullptr, 0);
}

TEST(Crc32c, MayBeSplitAnywhere) {
  const std::vector<uint8_t> bytes = RandomBytes(1000, 1);
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const uint32_t front = Crc32c(bytes.data(), cut);
    ASSERT_EQ(Crc32c(bytes.data() + cut, bytes.size() - cut, front), whole) << "cut at " << cut;
  }
}

TEST(Crc32c, ChangesWithEveryBit) {
  std::vector<uint8_t> bytes = RandomBytes(97, 2);
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
    ASSERT_NE(Crc32c(bytes.data(), bytes.size()), whole) << "bit " << bit;
    bytes[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
  }
}

TEST(Crc32cCombine, JoinsTheTwoHalvesWhereverTheCutWas) {
  const std::vector<uint8_t> bytes = RandomBytes(1000, 3);
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  for (size_t cut = 0; cut <= bytes.size(); ++cut) {
    const uint32_t front = Crc32c(bytes.data(), cut);
    const uint32_t back = Crc32c(bytes.data() + cut, bytes.size() - cut);
    ASSERT_EQ(Crc32cCombine(front, back, bytes.size() - cut), whole) << "cut at " << cut;
  }
}

TEST(Crc32cCombine, OfNothingAddedIsTheFirst) {
  EXPECT_EQ(Crc32cCombine(0xdeadbeef, 0, 0), 0xdeadbeefU);
  EXPECT_EQ(Crc32cCombine(0, 0xdeadbeef, 1234), 0xdeadbeefU);
}

// Lengths whose number of bits overflows 64 bits: combining twice with half must equal combining once.
TEST(Crc32cCombine, TakesAnyLength) {
  for (const uint64_t half :
       {uint64_t{1} << 31, uint64_t{1} << 40, uint64_t{1} << 60, (uint64_t{1} << 63) - 1}) {
    const uint32_t once = Crc32cCombine(0x01234567, 0, 2 * half);
    EXPECT_EQ(Crc32cCombine(Crc32cCombine(0x01234567, 0, half), 0, half), once) << "half " << half;
  }
}

TEST(Crc32cCombine, AgreesWithReadingManyZeros) {
  const std::vector<uint8_t> zeros((size_t{1} << 20) + 5);
  const uint32_t front = Crc32c("123456789", 9);
  const uint32_t back = Crc32c(zeros.data(), zeros.size());
  EXPECT_EQ(Crc32cCombine(front, back, zeros.size()), Crc32c(zeros.data(), zeros.size(), front));
}

TEST(ChecksumKernel, IsOneOfTheFourAndUnknownNamesAreRefused) {
  const std::string_view name = ChecksumKernelName();
  EXPECT_THAT(name, testing::AnyOf("avx512", "avx2", "sse4.2", "portable"));
  EXPECT_FALSE(UseChecksumKernelForTest("avx1024"));
  EXPECT_EQ(ChecksumKernelName(), name);
}

// One binary runs on any CPU, so it must choose the fastest kernel by itself.
TEST(ChecksumKernel, IsTheFastestThatTheCpuCanRun) {
  const std::string_view chosen = ChecksumKernelName();
  for (const char* name : {"avx512", "avx2", "sse4.2", "portable"}) {
    if (!UseChecksumKernelForTest(name)) continue;
    EXPECT_EQ(chosen, name);
    break;
  }
  EXPECT_TRUE(UseChecksumKernelForTest(chosen.data()));
}

}  // namespace
}  // namespace ropeteam
