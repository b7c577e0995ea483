// SPDX-License-Identifier: Apache-2.0
//
// Splits a rank's shard into files, as ranges of its stream. The program's own files stay files, and everything else
// goes into one safetensors file (docs/format-on-storage.md). The same stream gives the same files, bit for bit, on
// every node with a copy.

#ifndef ROPETEAM_STORAGE_FORMAT_LAYOUT_H_
#define ROPETEAM_STORAGE_FORMAT_LAYOUT_H_

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "storage/format/stream.h"
#include "storage/sink.h"

namespace ropeteam::storage {

// The object in which the Python package says which objects are tensors or JSON values.
inline constexpr std::string_view kIndexObjectName = ".ropeteam/index";
// The object with the step's metadata. It is a JSON value even if no index says so.
inline constexpr std::string_view kMetadataObjectName = "ropeteam.metadata";
// A larger index is not read: its shard's tensors are then written as bytes. 100,000 tensors take about 8 MiB.
inline constexpr uint64_t kIndexBytesMax = 16ull << 20;
// A JSON value up to this size is text in the header; a larger one is written as bytes. Values are positions, options
// and random states, which a reader of the header wants.
inline constexpr uint64_t kTextBytesMax = 64ull << 10;
// The limit for all such values of a rank, in the order of the stream; the rest are written as bytes. It bounds the
// memory used.
inline constexpr uint64_t kTextsBytesMax = 4ull << 20;

// Bytes of a file that are bytes of the stream.
struct FileRange {
  uint64_t file_offset = 0;
  uint64_t stream_offset = 0;
  uint64_t length = 0;
  friend bool operator==(const FileRange&, const FileRange&) = default;
};

struct FilePlan {
  std::string path;  // below the step's folder
  uint64_t bytes = 0;
  std::string head;  // the file's first bytes, which are not the stream's; of a rank's file its header
  std::vector<FileRange> ranges;  // the rest, ascending in both, as few as can be
};

// The rank's file first, if there is one, then the program's files in the order of the stream. A rank with only file
// objects has no file of its own: their paths are their names, and the list has their order. `taken` are names of files
// that go into the rank's folder because a lower rank has the name (TakeFileNames() in core/shard).
//
// Reads and checks only the chunks that hold the index and the JSON values for the header. It takes about 350 bytes of
// memory per object of the index while it runs, in addition to the header. `objects` must be as StreamObject requires.
// kInvalidArgument: they are not, or the header would exceed its limit. kCorrupt: a chunk does not match its checksum;
// `bad_chunk` (may be null) is its index. kInternal: as CopyChecked().
Result<std::vector<FilePlan>> LayOut(uint32_t rank, const std::vector<StreamObject>& objects,
                                     const ShardStream& stream, const std::set<std::string>& taken,
                                     std::optional<uint64_t>* bad_chunk);

// The bytes [begin, end) of a file, for Upload::PutPart(): one piece for the head, and one for every range of a chunk.
// Valid as long as `file` and the chunks are.
std::vector<Piece> FilePieces(const FilePlan& file, uint64_t begin, uint64_t end, const ShardStream& stream);

// The first of `ranges` that contains or follows this byte of the file; ranges.size() if there is none.
size_t FindRange(const std::vector<FileRange>& ranges, uint64_t file_offset);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_LAYOUT_H_
