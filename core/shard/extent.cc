// SPDX-License-Identifier: Apache-2.0
#include "core/shard/extent.h"

#include "core/base/check.h"

namespace ropeteam {

uint32_t ChunkAt(const std::vector<Extent>& extents, uint64_t index) {
  for (const Extent& extent : extents) {
    if (index < extent.count) return extent.first + static_cast<uint32_t>(index);
    index -= extent.count;
  }
  ROPETEAM_CHECK(!"chunk index behind the last extent");
  return 0;
}

}  // namespace ropeteam
