// SPDX-License-Identifier: Apache-2.0
//
// What a rank saves. Launch, step and rank determine the bytes, so bytes that are read back can be checked.
// Another launch writes other bytes for the same step and rank, so a mix of incarnations is noticed.

#ifndef ROPETEAM_TESTS_SIMULATION_CONTENT_H_
#define ROPETEAM_TESTS_SIMULATION_CONTENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/ids.h"

namespace ropeteam::simulation {

struct ContentShape {
  uint64_t chunk_bytes = 4096;
  uint32_t objects_max = 4;
  uint64_t object_bytes_max = 8192;  // of one object; some always have 0 or 1 byte
};

struct Content {
  std::string stream;  // objects and manifest, as in the shard
  uint64_t manifest_offset = 0;
  uint32_t object_count = 0;
  std::vector<uint32_t> crcs;  // of each chunk
};

// `launch` is the launcher's count of starts, not the cluster's number of the incarnation. The sizes of a
// rank's objects depend on the rank alone (uneven shards), their bytes on launch, step and rank.
Content MakeContent(const ContentShape& shape, uint64_t launch, Step step, Rank rank);
// With given lengths of the objects, for the stories.
Content MakeContent(const ContentShape& shape, uint64_t launch, Step step, Rank rank,
                    const std::vector<uint64_t>& lengths);

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_CONTENT_H_
