// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-manifest.json, the last file of a step: what the step is, and every rank's files with their sizes and
// checksums. docs/format-on-storage.md has the fields. One line a rank or a file, so that a person can read it; the last
// line is the CRC32C of all before it, so that a damaged one is never taken for a good one. Pure functions over text.

#ifndef ROPETEAM_STORAGE_FORMAT_MANIFEST_H_
#define ROPETEAM_STORAGE_FORMAT_MANIFEST_H_

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::storage {

inline constexpr uint32_t kStepManifestVersion = 1;
// 500 bytes a rank at the most ranks there may be. A reader holds the text in memory.
inline constexpr uint64_t kStepManifestBytesMax = 64ull << 20;
inline constexpr uint32_t kStepRanksMax =
    131072;  // 16,384 nodes of 8, the largest cluster that Ropeteam is planned for
inline constexpr size_t kJobNameBytesMax = 255;               // as the arena's
inline constexpr uint64_t kUserMetadataBytesMax = 256 << 10;  // a few numbers and a configuration

// 1970-01-01T00:00:00Z to 9999-12-31T23:59:59Z, of seconds since 1970.
inline constexpr uint64_t kTimeMax = 253402300799;
std::string PrintTime(uint64_t time_s);

struct StepHead {
  std::string job;
  uint64_t step = 0;
  uint64_t incarnation = 0;
  uint32_t world_size = 0;
  uint64_t chunk_bytes = 0;  // of the arenas that it was saved in
  uint64_t time_s = 0;       // when it was written: seconds since 1970, UTC
  std::string user = "{}";   // the program's metadata: a JSON object
  friend bool operator==(const StepHead&, const StepHead&) = default;
};

struct FileEntry {
  std::string path;  // below the step's folder
  uint64_t bytes = 0;
  uint32_t crc32c = 0;
  // Of a rank's own file: its bytes before the tensors' data, and their CRC32C. Of any other 0.
  uint64_t header_bytes = 0;
  uint32_t header_crc32c = 0;
  friend bool operator==(const FileEntry&, const FileEntry&) = default;
};

struct RankEntry {
  uint32_t rank = 0;
  uint64_t stream_bytes = 0;     // of the shard, with its manifest
  uint64_t digest = 0;           // ContentDigest() of the shard
  std::vector<FileEntry> files;  // as LayOut() gives them: RankFileName() first where there is one
  friend bool operator==(const RankEntry&, const RankEntry&) = default;

  bool HasRankFile() const { return !files.empty() && files[0].header_bytes != 0; }
};

// The program's metadata as a manifest has it: the same JSON object without spaces. kInvalidArgument: not a JSON object
// (NaN and Infinity are not JSON), nested deeper than 63, over kUserMetadataBytesMax.
Result<std::string> CompactMetadata(std::string_view user);

// Writes a manifest, rank by rank, so that a large step's ranks need not be in memory all at once: 131,072 of one file each
// are 27 MiB of text.
class StepManifestWriter {
 public:
  // What is wrong with `head` is what every later call returns.
  explicit StepManifestWriter(const StepHead& head);
  // Of ranks 0, 1, 2, … in this order. kInvalidArgument: another rank, or what ParseStepManifest() would refuse of a rank
  // by itself; the message has the place.
  Status Add(const RankEntry& rank);
  // The text; the writer is used up. kInvalidArgument: a rank is missing, the head breaks a limit, `user` is not a JSON
  // object (NaN and Infinity are not JSON), the text is too large. Does not find that ranks contradict one another over
  // a file that they share.
  Result<std::string> Finish();

 private:
  Status CheckSize() const;
  const uint32_t world_size_;
  Status head_status_;
  std::string text_;
  uint32_t count_ = 0;
};

// Checks all of it. `each` (may be empty) is told every rank in order, while the text is read: until this has returned
// kOk nothing of it may be relied on but that the text has the right checksum. A status of `each` that is not OK ends
// the reading and is the result.
//
// kUnsupported: a newer version, both named. kCorrupt, with the place: the checksum does not match; not JSON, or a field
// that is missing, twice, unknown or of the wrong kind; over a limit above; a path that CheckFileName() refuses, that is
// ours, or another rank's; ranks that are not 0 to world_size - 1 in order; a rank whose files are larger than its stream;
// files of one path with different contents.
Result<StepHead> ParseStepManifest(std::string_view text, const std::function<Status(RankEntry&&)>& each);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_MANIFEST_H_
