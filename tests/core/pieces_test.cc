// SPDX-License-Identifier: Apache-2.0
#include "core/shard/pieces.h"

#include <gtest/gtest.h>

#include <string>

#include "core/base/checksum.h"

namespace ropeteam {
namespace {

constexpr uint64_t kChunk = 4096;

ShardMeta MetaOf(uint64_t stream_bytes) {
  ShardMeta meta;
  meta.chunk_bytes = kChunk;
  meta.stream_bytes = stream_bytes;
  return meta;
}

TEST(Pieces, APartMustFitItsShard) {
  const ShardMeta meta = MetaOf(2 * kChunk + 10);
  const auto valid = [&](std::vector<ChunkPiece> pieces) { return ValidPart({std::move(pieces)}, meta); };
  EXPECT_TRUE(valid({}));
  EXPECT_TRUE(valid({{0, 0, kChunk, 1, 0}}));
  EXPECT_TRUE(valid({{0, 396, 100, 5, 900}, {0, 0, 1, 1, 0}, {2, 9, 1, 1, 0}}));
  EXPECT_FALSE(valid({{0, 1, kChunk, 1, 0}}));   // beyond its chunk
  EXPECT_FALSE(valid({{2, 9, 2, 1, 0}}));        // beyond the stream
  EXPECT_FALSE(valid({{3, 0, 1, 1, 0}}));        // there is no such chunk
  EXPECT_FALSE(valid({{0, 397, 100, 5, 900}}));  // its last run is beyond the chunk
  EXPECT_FALSE(valid({{0, 0, 1, 0, 0}}));        // empty
  EXPECT_FALSE(valid({{0, 0, 0, 1, 0}}));
  EXPECT_FALSE(valid({{1, 0, 1, 1, 0}, {0, 0, 1, 1, 0}}));       // not in order
  EXPECT_FALSE(valid({{0, 0, kChunk, 1, 0}, {1, 0, 1, 1, 0}}));  // more bytes than a chunk has
  EXPECT_FALSE(valid({{0, 0, 1, UINT32_MAX, 0}}));               // the same
  EXPECT_FALSE(valid({{0, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX}}));
  EXPECT_TRUE(valid(std::vector<ChunkPiece>(kPiecesMax, {0, 0, 1, 1, 0})));
  EXPECT_FALSE(valid(std::vector<ChunkPiece>(kPiecesMax + 1, {0, 0, 1, 1, 0})));
}

TEST(Pieces, RunsArePackedOneBehindTheOtherWhereTheChunkIsGood) {
  std::string chunk(1000, '.');
  for (size_t i = 0; i < chunk.size(); ++i) chunk[i] = static_cast<char>(i * 7);
  const auto* bytes = reinterpret_cast<const std::byte*>(chunk.data());
  const uint32_t crc = Crc32c(bytes, chunk.size());
  const std::vector<ChunkPiece> some = {{0, 10, 3, 3, 100}, {0, 5, 2, 1, 0}};
  const std::vector<ChunkPiece> all = {{0, 0, 1000, 1, 0}};
  const std::string expected =
      chunk.substr(10, 3) + chunk.substr(110, 3) + chunk.substr(210, 3) + chunk.substr(5, 2);
  std::string packed(1000, '#');
  auto* to = reinterpret_cast<std::byte*>(packed.data());
  uint32_t packed_crc = 0;
  ASSERT_TRUE(PackIfGood(to, bytes, chunk.size(), crc, some, &packed_crc));
  EXPECT_EQ(packed, expected + std::string(1000 - expected.size(), '#'));
  EXPECT_EQ(packed_crc, Crc32c(expected.data(), expected.size()));
  ASSERT_TRUE(PackIfGood(to, bytes, chunk.size(), crc, all, &packed_crc));
  EXPECT_EQ(packed, chunk);
  EXPECT_EQ(packed_crc, crc);
  chunk[500] ^= 1;
  EXPECT_FALSE(PackIfGood(to, bytes, chunk.size(), crc, some, &packed_crc));
  EXPECT_FALSE(PackIfGood(to, bytes, chunk.size(), crc, all, &packed_crc));
}

}  // namespace
}  // namespace ropeteam
