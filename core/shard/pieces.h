// SPDX-License-Identifier: Apache-2.0
//
// What a ranged read names: parts of a shard's chunks. Packed, they lie one run behind the other, in this order.

#ifndef ROPETEAM_CORE_SHARD_PIECES_H_
#define ROPETEAM_CORE_SHARD_PIECES_H_

#include <cstddef>
#include <cstdint>
#include <tuple>
#include <vector>

#include "core/shard/extent.h"

namespace ropeteam {

// `count` runs of `length` bytes in one chunk of a shard's stream; the first begins at `begin`, each other one `stride`
// behind the one before.
struct ChunkPiece {
  uint32_t chunk = 0;
  uint32_t begin = 0;
  uint32_t length = 0;
  uint32_t count = 0;
  uint32_t stride = 0;
  auto Fields() { return std::tie(chunk, begin, length, count, stride); }
  uint64_t bytes() const { return uint64_t{length} * count; }
};

// So many fit beside each other: a rank's frame has kPackedPartsMax parts, 20 bytes a piece.
inline constexpr size_t kPiecesMax = 4096;
// Of one ranged read: with the default chunks 32 MiB, 2.5 ms of a 100 Gbit/s link, so a round trip does not count.
inline constexpr size_t kPackedPartsMax = 8;

// What goes into one chunk of an arena: its pieces are packed there. None: nothing is packed, the shard is described only.
struct PackedPart {
  std::vector<ChunkPiece> pieces;
  auto Fields() { return std::tie(pieces); }
  uint64_t bytes() const;
};

// At most kPiecesMax, none empty, each inside its chunk, chunks in order, and no more bytes than a chunk has.
bool ValidPart(const PackedPart& part, const ShardMeta& meta);

// Copies the pieces of one chunk to `to` if its `length` bytes have this CRC32C; `packed_crc` is that of what was copied.
// False: they have not; what lies at `to` is then of no use. A chunk that is wanted whole is read once, others twice: a
// byte that changes in memory between the two is not noticed, as in a partial read of a view.
bool PackIfGood(std::byte* to, const std::byte* chunk, uint64_t length, uint32_t crc,
                const std::vector<ChunkPiece>& pieces, uint32_t* packed_crc);

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_SHARD_PIECES_H_
