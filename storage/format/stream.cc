// SPDX-License-Identifier: Apache-2.0
#include "storage/format/stream.h"

#include <algorithm>
#include <cinttypes>

#include "core/base/checksum.h"

namespace ropeteam::storage {

Status CheckStream(const ShardStream& stream) {
  const uint64_t chunk = stream.chunk_bytes;
  if (chunk == 0 || chunk % kStreamAlignmentBytes != 0 || stream.stream_bytes > kStreamSizeMax) {
    return Error(Code::kInvalidArgument,
                 "stream of %" PRIu64 " bytes in chunks of %" PRIu64 ", limit %" PRIu64
                 " in multiples of %" PRIu64,
                 stream.stream_bytes, chunk, kStreamSizeMax, kStreamAlignmentBytes);
  }
  const uint64_t chunks = (stream.stream_bytes + chunk - 1) / chunk;
  if (stream.crcs.size() != chunks) {
    return Error(Code::kInvalidArgument, "stream of %" PRIu64 " chunks with %zu checksums", chunks,
                 stream.crcs.size());
  }
  return OkStatus();
}

Status CheckPadding(std::span<const std::byte> chunk, uint64_t offset, uint64_t at) {
  const uint64_t end = std::min<uint64_t>(AlignInStream(at), chunk.size());
  for (uint64_t i = at; i < end; ++i) {
    if (chunk[i] != std::byte{0}) {
      return Error(Code::kInternal,
                   "the byte between two objects at offset %" PRIu64 " of the stream is not 0", offset + i);
    }
  }
  return OkStatus();
}

Status ChunkMismatch(const ShardStream& stream, uint64_t index, uint32_t crc,
                     std::optional<uint64_t>* bad_chunk) {
  if (bad_chunk != nullptr) *bad_chunk = index;
  return Error(Code::kCorrupt, "chunk %" PRIu64 " of the stream has the checksum 0x%08x, expected 0x%08x",
               index, crc, stream.crcs[index]);
}

Result<std::vector<std::string>> CopyChecked(const ShardStream& stream, std::span<const StreamRange> ranges,
                                             std::optional<uint64_t>* bad_chunk) {
  ROPETEAM_RETURN_IF_ERROR(CheckStream(stream));
  std::vector<std::string> copies(ranges.size());
  uint64_t covered = 0;
  for (size_t i = 0; i < ranges.size(); ++i) {
    const StreamRange& range = ranges[i];
    if (range.offset < covered || range.length > stream.stream_bytes ||
        range.offset > stream.stream_bytes - range.length) {
      return Error(Code::kInvalidArgument,
                   "range %" PRIu64 "+%" PRIu64 " of a stream of %" PRIu64
                   " bytes, the one before ends at %" PRIu64,
                   range.offset, range.length, stream.stream_bytes, covered);
    }
    covered = range.offset + range.length;
    copies[i].reserve(range.length);
  }
  // The loop goes chunk by chunk, so that a chunk with many small ranges is read once.
  for (size_t next = 0; next < ranges.size();) {
    if (ranges[next].length == copies[next].size()) {
      ++next;
      continue;
    }
    const uint64_t index = (ranges[next].offset + copies[next].size()) / stream.chunk_bytes;
    const uint64_t begin = index * stream.chunk_bytes;
    const std::span<const std::byte> bytes = stream.chunk(index);
    ROPETEAM_CHECK(bytes.size() == stream.ChunkLength(index));
    uint32_t crc = 0;
    uint64_t at = 0;  // in the chunk
    Status zeros;     // returned only if the chunk's checksum is right
    for (; next < ranges.size(); ++next) {
      std::string& copy = copies[next];
      const uint64_t from = ranges[next].offset + copy.size() - begin;
      if (from >= bytes.size()) break;
      const uint64_t length = std::min<uint64_t>(ranges[next].length - copy.size(), bytes.size() - from);
      const size_t copied = copy.size();
      copy.append(reinterpret_cast<const char*>(bytes.data()) + from, length);
      crc = Crc32c(bytes.data() + at, from - at, crc);
      crc = Crc32c(copy.data() + copied, length, crc);
      at = from + length;
      if (copy.size() < ranges[next].length) break;  // it continues in the next chunk
      if (zeros.ok()) zeros = CheckPadding(bytes, begin, at);
    }
    crc = Crc32c(bytes.data() + at, bytes.size() - at, crc);
    if (crc != stream.crcs[index]) return ChunkMismatch(stream, index, crc, bad_chunk);
    ROPETEAM_RETURN_IF_ERROR(zeros);
  }
  return copies;
}

}  // namespace ropeteam::storage
