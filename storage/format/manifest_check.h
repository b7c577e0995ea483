// SPDX-License-Identifier: Apache-2.0
//
// The rules for a step's manifest, checked by its writer and its reader. Internal to storage/format.

#ifndef ROPETEAM_STORAGE_FORMAT_MANIFEST_CHECK_H_
#define ROPETEAM_STORAGE_FORMAT_MANIFEST_CHECK_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "storage/format/manifest.h"

namespace ropeteam::storage {

// kCorrupt, naming the field.
Status CheckHead(const StepHead& head);
// kCorrupt, naming the field as it stands behind the rank's place: ".files[2].path …".
Status CheckRank(const RankEntry& rank);

// The inverse of PrintTime().
bool ParseTime(std::string_view text, uint64_t* time_s);

// The files that are not a rank's own, of all ranks. Those of one path must have one content, and a rank may use a path
// only once. 32 bytes a file: hashes stand for the paths, so that a good step may be refused once in 2^64 pairs, and a bad one is not
// accepted.
class SharedFiles {
 public:
  void Add(const RankEntry& rank);
  Status Check();

 private:
  struct File {
    uint64_t path_hash = 0;
    uint64_t bytes = 0;
    uint32_t crc32c = 0;
    uint32_t rank = 0;
    uint32_t number = 0;
  };
  std::vector<File> files_;
};

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_MANIFEST_CHECK_H_
