// SPDX-License-Identifier: Apache-2.0
//
// Compares every kernel that this CPU can run with ISA-L, which shares no code with ours.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <isa-l.h>

#include <algorithm>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/checksum.h"

namespace ropeteam {
namespace {

constexpr size_t kAlignments = 64;   // a cache line: the copies align the destination to it
constexpr size_t kGuardBytes = 128;  // two lines on each side, to catch stores outside the destination
constexpr uint8_t kGuard = 0xa5;

uint32_t IsalCrc32c(const uint8_t* data, size_t length, uint32_t crc = 0) {
  return ~crc32_iscsi(const_cast<uint8_t*>(data), static_cast<int>(length), ~crc);
}

// A destination of any alignment, with guards around it.
class GuardedBuffer {
 public:
  explicit GuardedBuffer(size_t length_max) : bytes_(length_max + kAlignments + 2 * kGuardBytes) {}

  // Returns `length` bytes at `alignment` modulo kAlignments. All bytes have the guard's value.
  uint8_t* Prepare(size_t length, size_t alignment) {
    std::fill(bytes_.begin(), bytes_.end(), kGuard);
    const size_t now = (reinterpret_cast<uintptr_t>(bytes_.data()) + kGuardBytes) % kAlignments;
    offset_ = kGuardBytes + (alignment + kAlignments - now) % kAlignments;
    length_ = length;
    return bytes_.data() + offset_;
  }
  bool GuardsUntouched() const {
    const auto is_guard = [](uint8_t byte) { return byte == kGuard; };
    const auto destination = bytes_.begin() + static_cast<ptrdiff_t>(offset_);
    return std::all_of(bytes_.begin(), destination, is_guard) &&
           std::all_of(destination + static_cast<ptrdiff_t>(length_), bytes_.end(), is_guard);
  }

 private:
  std::vector<uint8_t> bytes_;
  size_t offset_ = 0;
  size_t length_ = 0;
};

class ChecksumKernel : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (!UseChecksumKernelForTest(GetParam()))
      GTEST_SKIP() << "this CPU cannot run the kernel " << GetParam();
    for (uint8_t& byte : source_) byte = static_cast<uint8_t>(random_());
  }
  void TearDown() override { ASSERT_TRUE(UseChecksumKernelForTest(std::string(chosen_).c_str())); }

  // Checks the checksum, the copy and the copy with checksum of `length` bytes at these alignments, starting
  // from `crc`.
  void CheckOne(size_t length, size_t source_alignment, size_t destination_alignment, uint32_t crc) {
    SCOPED_TRACE(testing::Message() << "length " << length << " source " << source_alignment
                                    << " destination " << destination_alignment << " crc " << crc);
    const size_t now = reinterpret_cast<uintptr_t>(source_.data()) % kAlignments;
    const uint8_t* source = source_.data() + (source_alignment + kAlignments - now) % kAlignments;
    const uint32_t expected = IsalCrc32c(source, length, crc);
    ASSERT_EQ(Crc32c(source, length, crc), expected);
    uint8_t* destination = destination_.Prepare(length, destination_alignment);
    ASSERT_EQ(CopyCrc32c(destination, source, length, crc), expected);
    ASSERT_TRUE(std::equal(source, source + length, destination)) << "wrong bytes";
    ASSERT_TRUE(destination_.GuardsUntouched()) << "stored outside";
    destination = destination_.Prepare(length, destination_alignment);
    CopyNonTemporal(destination, source, length);
    ASSERT_TRUE(std::equal(source, source + length, destination)) << "wrong bytes without checksum";
    ASSERT_TRUE(destination_.GuardsUntouched()) << "stored outside without checksum";
  }

  // More than the longest group of streams, 4 x 64 KiB, so that every level of every loop runs.
  static constexpr size_t kLengthMax = 600'000;

  std::string_view chosen_ = ChecksumKernelName();
  std::mt19937 random_{7};
  std::vector<uint8_t> source_ = std::vector<uint8_t>(kLengthMax + kAlignments);
  GuardedBuffer destination_{kLengthMax};
};

TEST_P(ChecksumKernel, AgreesForEveryShortLength) {
  for (size_t length = 0; length <= 300; ++length)
    ASSERT_NO_FATAL_FAILURE(CheckOne(length, length % 7, length % 5, static_cast<uint32_t>(random_())));
}

// From 4096 bytes on, copies bypass the cache.
TEST_P(ChecksumKernel, AgreesForEveryAlignmentOfSourceAndDestination) {
  GuardedBuffer small(8192);
  std::swap(destination_, small);
  for (size_t source = 0; source < kAlignments; ++source) {
    for (size_t destination = 0; destination < kAlignments; ++destination) {
      const size_t length = 4000 + random_() % 1200;
      ASSERT_NO_FATAL_FAILURE(CheckOne(length, source, destination, static_cast<uint32_t>(random_())));
    }
  }
}

TEST_P(ChecksumKernel, AgreesForRandomLengthsAndAlignments) {
  for (int i = 0; i < 60; ++i) {
    const size_t length = random_() % (i % 3 == 0 ? kLengthMax : 40'000);
    ASSERT_NO_FATAL_FAILURE(
        CheckOne(length, random_() % kAlignments, random_() % kAlignments, static_cast<uint32_t>(random_())));
  }
}

// Lengths at and near those from which a loop over streams runs.
TEST_P(ChecksumKernel, AgreesAroundTheLengthsOfItsStreams) {
  for (const size_t stream : {256U, 4096U, 65536U}) {
    for (const size_t streams : {1U, 2U, 3U, 4U, 6U}) {
      for (const size_t off : {0U, 1U, 63U, 64U, 65U}) {
        const size_t length = stream * streams;
        ASSERT_NO_FATAL_FAILURE(CheckOne(length + off, off, 0, 0));
        ASSERT_NO_FATAL_FAILURE(CheckOne(length - off, 0, off, 0));
      }
    }
  }
}

TEST_P(ChecksumKernel, FindsOneFlippedBitAnywhereInAMebibyte) {
  std::vector<uint8_t> bytes(1 << 20);
  for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random_());
  const uint32_t whole = Crc32c(bytes.data(), bytes.size());
  for (int i = 0; i < 50; ++i) {
    const size_t bit = random_() % (8 * bytes.size());
    bytes[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
    ASSERT_NE(Crc32c(bytes.data(), bytes.size()), whole) << "bit " << bit;
    bytes[bit / 8] ^= static_cast<uint8_t>(1U << (bit % 8));
  }
  EXPECT_EQ(Crc32c(bytes.data(), bytes.size()), whole);
}

std::string TestName(const testing::TestParamInfo<const char*>& info) {
  std::string name = info.param;
  std::erase(name, '.');
  return name;
}
INSTANTIATE_TEST_SUITE_P(Every, ChecksumKernel, testing::Values("portable", "sse4.2", "avx2", "avx512"),
                         TestName);

}  // namespace
}  // namespace ropeteam
