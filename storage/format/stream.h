// SPDX-License-Identifier: Apache-2.0
//
// A shard's stream as storage sees it: objects one after the other, each at a multiple of 64 bytes with zero bytes
// before it, then the shard's own manifest; cut into chunks whose checksums were computed when the bytes left the
// training process (docs/arena.md). Nothing here knows an arena: the caller shows the chunks.

#ifndef ROPETEAM_STORAGE_FORMAT_STREAM_H_
#define ROPETEAM_STORAGE_FORMAT_STREAM_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::storage {

// What a stream is by its definition; core/shard packs and limits it in the same way, and a test holds the two together.
inline constexpr uint64_t kStreamAlignmentBytes = 64;
inline constexpr uint64_t kStreamSizeMax = 1ull << 46;  // 64 Ki chunks of 1 GiB
inline constexpr uint64_t kStreamObjectsMax = 1000000;
inline constexpr size_t kStreamNameBytesMax = 255;
constexpr uint64_t AlignInStream(uint64_t offset) {
  return (offset + kStreamAlignmentBytes - 1) & ~(kStreamAlignmentBytes - 1);
}

struct StreamObject {
  std::string name;
  uint64_t offset = 0;  // in the stream; objects stand in ascending order
  uint64_t length = 0;  // bytes
  friend bool operator==(const StreamObject&, const StreamObject&) = default;
};

struct StreamRange {
  uint64_t offset = 0;
  uint64_t length = 0;
};

// A sealed shard in memory.
struct ShardStream {
  uint64_t stream_bytes = 0;       // with the shard's manifest
  uint64_t chunk_bytes = 0;        // a multiple of kStreamAlignmentBytes
  std::span<const uint32_t> crcs;  // CRC32C of every chunk
  // The bytes of chunk `index`, ChunkLength(index) of them. They stay where they are as long as the shard is held.
  std::function<std::span<const std::byte>(uint64_t index)> chunk;

  uint64_t ChunkLength(uint64_t index) const {
    const uint64_t begin = index * chunk_bytes;
    return stream_bytes - begin < chunk_bytes ? stream_bytes - begin : chunk_bytes;
  }
};

// kInvalidArgument: sizes that do not fit one another. Every function that takes a ShardStream checks it.
Status CheckStream(const ShardStream& stream);

// Copies of these ranges, in ascending order and not overlapping, whose chunks have the right checksum with the copied
// bytes in place: what is returned is what the program saved, also if the memory changes afterwards. Reads each chunk
// that a range touches once, as a whole. kCorrupt: a chunk does not match, `bad_chunk` (may be null) is its index;
// kInternal: the bytes between a range's end and the next multiple of 64 are not zero.
Result<std::vector<std::string>> CopyChecked(const ShardStream& stream, std::span<const StreamRange> ranges,
                                             std::optional<uint64_t>* bad_chunk);

// kInternal unless the bytes of `chunk` from `at` to the next multiple of 64 are zero: what is put back together from
// files has zeros there. `offset`: of the chunk in the stream.
Status CheckPadding(std::span<const std::byte> chunk, uint64_t offset, uint64_t at);
// kCorrupt, with the message for it, and `bad_chunk` set.
Status ChunkMismatch(const ShardStream& stream, uint64_t index, uint32_t crc,
                     std::optional<uint64_t>* bad_chunk);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_STREAM_H_
