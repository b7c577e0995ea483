// SPDX-License-Identifier: Apache-2.0
#include "core/shard/pieces.h"

#include "core/base/checksum.h"

namespace ropeteam {

uint64_t PackedPart::bytes() const {
  uint64_t bytes = 0;
  for (const ChunkPiece& piece : pieces) bytes += piece.bytes();
  return bytes;
}

bool ValidPart(const PackedPart& part, const ShardMeta& meta) {
  if (part.pieces.size() > kPiecesMax) return false;
  const uint64_t chunks = ChunksFor(meta.stream_bytes, meta.chunk_bytes);
  uint64_t bytes = 0;
  uint32_t chunk = 0;
  for (const ChunkPiece& piece : part.pieces) {
    if (piece.chunk < chunk || piece.chunk >= chunks || piece.length == 0 || piece.count == 0) return false;
    const uint64_t end = piece.begin + (piece.count - uint64_t{1}) * piece.stride + piece.length;
    if (end > ChunkLength(meta.stream_bytes, meta.chunk_bytes, piece.chunk)) return false;
    bytes += piece.bytes();
    if (bytes > meta.chunk_bytes) return false;
    chunk = piece.chunk;
  }
  return true;
}

bool PackIfGood(std::byte* to, const std::byte* chunk, uint64_t length, uint32_t crc,
                const std::vector<ChunkPiece>& pieces, uint32_t* packed_crc) {
  const bool whole = pieces.size() == 1 && pieces.front().bytes() == length && pieces.front().count == 1;
  if (!whole && Crc32c(chunk, length) != crc) return false;
  *packed_crc = 0;
  for (const ChunkPiece& piece : pieces) {
    for (uint32_t run = 0; run < piece.count; ++run) {
      *packed_crc =
          CopyCrc32c(to, chunk + piece.begin + uint64_t{run} * piece.stride, piece.length, *packed_crc);
      to += piece.length;
    }
  }
  return !whole || *packed_crc == crc;
}

}  // namespace ropeteam
