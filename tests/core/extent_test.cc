// SPDX-License-Identifier: Apache-2.0
#include "core/shard/extent.h"

#include <gtest/gtest.h>

namespace ropeteam {
namespace {

TEST(Extent, ChunkAtFollowsStreamOrderNotArenaOrder) {
  const std::vector<Extent> extents = {{7, 2}, {100, 1}, {3, 3}};
  const std::vector<uint32_t> expected = {7, 8, 100, 3, 4, 5};
  ASSERT_EQ(ChunkCount(extents), expected.size());
  for (uint64_t i = 0; i < expected.size(); ++i) EXPECT_EQ(ChunkAt(extents, i), expected[i]) << "chunk " << i;
}

TEST(ExtentDeathTest, ChunkAtBehindTheEndIsOurBug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_DEATH(ChunkAt({{7, 2}}, 2), "check failed");
  EXPECT_DEATH(ChunkAt({}, 0), "check failed");
}

TEST(Extent, ChunksForCountsAShortLastChunk) {
  EXPECT_EQ(ChunksFor(0, 4096), 0u);
  EXPECT_EQ(ChunksFor(1, 4096), 1u);
  EXPECT_EQ(ChunksFor(4096, 4096), 1u);
  EXPECT_EQ(ChunksFor(4097, 4096), 2u);
  EXPECT_EQ(ChunksFor((3ull << 30) + 1, kChunkBytesDefault), 769u);
}

TEST(Extent, ChunksForAnAbsurdSizeDoesNotWrapAroundToFew) {
  EXPECT_EQ(ChunksFor(UINT64_MAX, 4096), uint64_t{1} << 52);
  EXPECT_EQ(ChunksFor(UINT64_MAX - 4094, 4096), uint64_t{1} << 52);
  EXPECT_EQ(ChunksFor(UINT64_MAX, kChunkBytesMax), uint64_t{1} << 34);
}

TEST(Extent, ChunkLengthsAddUpToTheStream) {
  for (const uint64_t stream : {1ull, 4095ull, 4096ull, 4097ull, 3 * 4096ull, 12345ull, (3ull << 30) + 1}) {
    uint64_t total = 0;
    for (uint64_t i = 0; i < ChunksFor(stream, 4096); ++i) {
      const uint64_t length = ChunkLength(stream, 4096, i);
      EXPECT_GE(length, 1u);
      EXPECT_LE(length, 4096u);
      total += length;
    }
    EXPECT_EQ(total, stream);
  }
}

TEST(Extent, AlignObjectRoundsUpToACacheLine) {
  EXPECT_EQ(AlignObject(0), 0u);
  EXPECT_EQ(AlignObject(1), 64u);
  EXPECT_EQ(AlignObject(64), 64u);
  EXPECT_EQ(AlignObject(65), 128u);
}

}  // namespace
}  // namespace ropeteam
