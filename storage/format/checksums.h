// SPDX-License-Identifier: Apache-2.0
//
// The checksums of a rank's files and of their parts. They are derived from the checksums that the stream's chunks had
// when they left the training process. For a chunk that is entirely in one part, its checksum is used and the chunk is
// not read. A chunk that is split (by a part's end, or because its objects are in several files) is read once. Each
// piece's checksum is computed, and all pieces with the bytes between them must combine to the chunk's own checksum.

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

// Not thread-safe. Keeps 24 bytes for each piece of a split chunk: at most as many pieces as parts, files and split
// chunks.
class PartChecksums {
 public:
  // `files` come from LayOut() for `stream`, which must outlive this. Part k of file i has its bytes from k ×
  // part_bytes[i] on. part_bytes[i] is Upload::part_bytes(), or at least the file's size if it is written in one piece.
  // All must be known here, because a chunk's pieces are computed in one reading.
  PartChecksums(const std::vector<FilePlan>& files, const ShardStream& stream,
                std::vector<uint64_t> part_bytes);

  uint32_t part_count(size_t file) const;  // at least 1
  // The part's CRC32C. Reads the chunks that this part splits and that no earlier call has read. kCorrupt: the bytes of
  // such a chunk do not match its checksum; `bad_chunk` (may be null) is its index, and nothing of it is kept.
  // kInternal: bytes between objects are not zero, so the stream could not be restored from its files.
  Result<uint32_t> Part(size_t file, uint32_t part, std::optional<uint64_t>* bad_chunk);
  // The CRC32C of the whole file. Computes the missing parts, with the errors of Part().
  Result<uint32_t> File(size_t file, std::optional<uint64_t>* bad_chunk);

 private:
  // The bytes that one part has of one cut chunk.
  struct Run {
    uint32_t file = 0;
    uint32_t part = 0;
    uint32_t crc = 0;
    uint64_t bytes = 0;
  };
  // A range of a chunk that belongs to one part.
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
  // Files with one range, by its place in the stream, and files with several. A chunk's files are found without a
  // search through all files.
  std::vector<uint32_t> single_;
  std::vector<uint32_t> several_;
  std::unordered_map<uint64_t, std::vector<Run>> runs_;  // of the chunks that have been read
};

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_CHECKSUMS_H_
