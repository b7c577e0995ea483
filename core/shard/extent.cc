// SPDX-License-Identifier: Apache-2.0
#include "core/shard/extent.h"

#include <array>
#include <cstdio>

#include "core/base/check.h"
#include "core/base/checksum.h"

namespace ropeteam {

uint32_t ChunkAt(const std::vector<Extent>& extents, uint64_t index) {
  for (const Extent& extent : extents) {
    if (index < extent.count) return extent.first + static_cast<uint32_t>(index);
    index -= extent.count;
  }
  ROPETEAM_CHECK(!"chunk index behind the last extent");
  return 0;
}

std::string KeyName(KeyId key) {
  char text[16];
  std::snprintf(text, sizeof(text), "%08x", static_cast<unsigned>(key >> 32));
  return text;
}

std::vector<uint32_t> PlainCrcs(const Encryption& encryption, const std::vector<uint32_t>& crcs) {
  if (encryption.tags.empty()) return crcs;
  std::vector<uint32_t> plain;
  for (const ChunkTag& tag : encryption.tags) plain.push_back(tag.crc);
  return plain;
}

uint64_t ContentDigest(const ShardMeta& meta, const std::vector<uint32_t>& crcs) {
  const std::array<uint64_t, 4> shape = {meta.stream_bytes, meta.manifest_offset, meta.object_count,
                                         meta.world_size};
  const uint32_t of_shape = Crc32c(shape.data(), sizeof(shape));
  const uint32_t of_chunks = Crc32c(crcs.data(), crcs.size() * sizeof(uint32_t));
  return uint64_t{of_shape} << 32 | of_chunks;
}

}  // namespace ropeteam
