// SPDX-License-Identifier: Apache-2.0
//
// The parts of a shard's chunks that a ranged read requests. Packed, the runs follow one another in this order.

#ifndef ROPETEAM_CORE_SHARD_PIECES_H_
#define ROPETEAM_CORE_SHARD_PIECES_H_

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "core/shard/extent.h"

namespace ropeteam {

// `count` runs of `length` bytes in one chunk of a shard's stream. The first begins at `begin`, and each further one
// `stride` after the previous one.
struct ChunkPiece {
  uint32_t chunk = 0;
  uint32_t begin = 0;
  uint32_t length = 0;
  uint32_t count = 0;
  uint32_t stride = 0;
  auto Fields() { return std::tie(chunk, begin, length, count, stride); }
  uint64_t bytes() const { return uint64_t{length} * count; }
};

// This many fit one frame of a rank: it has kPackedPartsMax parts and takes 20 bytes per piece.
inline constexpr size_t kPiecesMax = 4096;
// Parts of one ranged read. With the default chunk size they are 32 MiB, or 2.5 ms on a link of 100 Gbit/s, so a round
// trip is negligible.
inline constexpr size_t kPackedPartsMax = 8;

// The pieces that are packed into one chunk of an arena. Without pieces nothing is packed, and only the shard's
// description is requested.
struct PackedPart {
  std::vector<ChunkPiece> pieces;
  auto Fields() { return std::tie(pieces); }
  uint64_t bytes() const;
};

// At most kPiecesMax pieces, none empty, each inside its chunk, chunks in order, and together at most one chunk of
// bytes.
bool ValidPart(const PackedPart& part, const ShardMeta& meta);

// Copies the pieces of one chunk to `to` if its `length` bytes have this CRC32C; `packed_crc` is the CRC32C of the
// copied bytes. Returns false if the checksum differs; the bytes at `to` are then useless. A chunk that is wanted whole
// is read once, other chunks twice. A byte that changes in memory between the two reads is not noticed, as in a partial
// read of a view.
bool PackIfGood(std::byte* to, const std::byte* chunk, uint64_t length, uint32_t crc,
                const std::vector<ChunkPiece>& pieces, uint32_t* packed_crc);

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_SHARD_PIECES_H_
