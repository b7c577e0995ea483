// SPDX-License-Identifier: Apache-2.0
//
// From a rank's files back to its stream: which objects it had, in which order, and where their bytes are now. Nothing
// here proves that the files' bytes are the right ones; the shard's digest in the manifest does, over what comes out.

#ifndef ROPETEAM_STORAGE_FORMAT_RESTORE_H_
#define ROPETEAM_STORAGE_FORMAT_RESTORE_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "storage/format/manifest.h"
#include "storage/format/stream.h"

namespace ropeteam::storage {

// Bytes of the stream that come from one place.
struct RestorePiece {
  static constexpr uint32_t kTexts = UINT32_MAX;
  uint64_t stream_offset = 0;
  uint64_t length = 0;         // at least 1
  uint32_t file = 0;           // in RankEntry::files; kTexts: RestorePlan::texts
  uint64_t source_offset = 0;  // in that file, or in `texts`
  friend bool operator==(const RestorePiece&, const RestorePiece&) = default;
};

struct RestorePlan {
  std::vector<StreamObject> objects;  // the stream's, in its order: the shard's manifest is made of them
  std::vector<RestorePiece> pieces;   // in the stream's order, as few as can be
  std::string texts;                  // JSON values, one behind the other
  uint64_t manifest_offset =
      0;  // where the shard's manifest begins; bytes before it that no piece holds are 0
};

// `head`: of a rank with HasRankFile() the first header_bytes of its file, else empty.
//
// kCorrupt, with the place: `head` is not what the manifest says it is (size, checksum), is not a header as LayOut() writes
// it, or does not fit the files in `entry`; two objects of one name; objects that are not all of the stream but its
// manifest. kUnsupported: a newer version of the header. Takes about 250 bytes of memory an object.
Result<RestorePlan> PlanRestore(const RankEntry& entry, std::string_view head);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_RESTORE_H_
