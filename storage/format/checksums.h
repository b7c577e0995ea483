// SPDX-License-Identifier: Apache-2.0
//
// The checksums of a rank's files and of their parts, from the checksums that the stream's chunks had when they left the
// training process. For a chunk that is entirely in one part, its checksum is used and the chunk is not read. A chunk that
// is split (by a part's end, or because its objects go to several files) is read once: each piece's checksum is computed,
// and all pieces with the bytes between them must combine to the chunk's own. So every part's checksum is derived from the
// source's.

#ifndef ROPETEAM_STORAGE_FORMAT_CHECKSUMS_H_
#define ROPETEAM_STORAGE_FORMAT_CHECKSUMS_H_

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/base/status.h"
#include "storage/format/layout.h"
#include "storage/format/stream.h"

namespace ropeteam::storage {

// Not thread-safe. Keeps 24 bytes for each piece of a cut chunk that belongs to one part: at most as many as there are
// parts, files and cut chunks.
class PartChecksums {
 public:
  // `files` as LayOut() gave them for `stream`, which must outlive this. Part k of file i is its bytes from
  // k × part_bytes[i] on; part_bytes[i] is Upload::part_bytes(), or anything not less than the file's size where it goes
  // in one piece. All of them must be known here: what a chunk is cut into is computed in one reading.
  PartChecksums(const std::vector<FilePlan>& files, const ShardStream& stream,
                std::vector<uint64_t> part_bytes);

  uint32_t part_count(size_t file) const;  // at least 1
  // The part's CRC32C. Reads the chunks that this part cuts and that no earlier call has read. kCorrupt: such a chunk's
  // bytes do not match its checksum; `bad_chunk` (may be null) is its index, and nothing is remembered of it. kInternal:
  // bytes between objects are not zero, so that the stream could not be put together from its files.
  Result<uint32_t> Part(size_t file, uint32_t part, std::optional<uint64_t>* bad_chunk);
  // The whole file's. Computes the parts that have not been, and fails as Part().
  Result<uint32_t> File(size_t file, std::optional<uint64_t>* bad_chunk);

 private:
  // The bytes that one part has of one cut chunk.
  struct Run {
    uint32_t file = 0;
    uint32_t part = 0;
    uint32_t crc = 0;
    uint64_t bytes = 0;
  };
  // A stretch of a chunk that belongs to one part.
  struct Slice {
    uint64_t begin = 0;  // in the stream
    uint64_t length = 0;
    uint32_t file = 0;
    uint32_t part = 0;
  };

  uint64_t PartBegin(size_t file, uint32_t part) const { return part * part_bytes_[file]; }
  uint64_t PartEnd(size_t file, uint32_t part) const;
  std::vector<Slice> Slices(uint64_t begin, uint64_t end) const;
  void AddSlices(uint32_t file, uint64_t begin, uint64_t end, std::vector<Slice>* slices) const;
  Result<const std::vector<Run>*> Runs(uint64_t chunk, std::optional<uint64_t>* bad_chunk);

  const std::vector<FilePlan>& files_;
  const ShardStream& stream_;
  const std::vector<uint64_t> part_bytes_;
  // Files with one range, by its place in the stream, and those with several: a chunk's files are found without a look at
  // each, however many a program has named.
  std::vector<uint32_t> single_;
  std::vector<uint32_t> several_;
  std::unordered_map<uint64_t, std::vector<Run>> runs_;  // of the chunks that have been read
};

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_CHECKSUMS_H_
