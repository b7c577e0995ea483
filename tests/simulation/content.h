// SPDX-License-Identifier: Apache-2.0
//
// What a rank saves: bytes that are a function of whose they are, so that bytes read back tell at once
// whether they are the right ones. Another launch of the world writes other bytes for the same step and rank:
// a mix of incarnations shows.

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
  uint64_t object_bytes_max = 8192;  // of one object; some are 0 or 1 byte, whatever this is
};

struct Content {
  std::string stream;  // objects and manifest, as they lie in the shard
  uint64_t manifest_offset = 0;
  uint32_t object_count = 0;
  std::vector<uint32_t> crcs;  // of each chunk
};

// `launch` is the launcher's count of the world's restarts, whatever incarnation the cluster makes of it. How
// large a rank's objects are depends on the rank alone (uneven shards); what is in them depends on
// everything.
Content MakeContent(const ContentShape& shape, uint64_t launch, Step step, Rank rank);
// Given lengths, for the stories.
Content MakeContent(const ContentShape& shape, uint64_t launch, Step step, Rank rank,
                    const std::vector<uint64_t>& lengths);

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_CONTENT_H_
