// SPDX-License-Identifier: Apache-2.0
#include "tests/simulation/content.h"

#include <algorithm>
#include <cstring>

#include "core/base/check.h"
#include "core/base/checksum.h"
#include "core/shard/manifest.h"
#include "tests/simulation/random.h"

namespace ropeteam::simulation {

Content MakeContent(const ContentShape& shape, uint64_t launch, Step step, Rank rank) {
  Random sizes(Mix(0x517e5, rank));
  std::vector<uint64_t> lengths(sizes.Below(shape.objects_max + 1));
  for (uint64_t& length : lengths) {
    const uint64_t kind = sizes.Below(8);
    length = kind == 0 ? 0 : kind == 1 ? 1 : sizes.Below(shape.object_bytes_max + 1);
  }
  return MakeContent(shape, launch, step, rank, lengths);
}

Content MakeContent(const ContentShape& shape, uint64_t launch, Step step, Rank rank,
                    const std::vector<uint64_t>& lengths) {
  Content content;
  Manifest manifest;
  for (size_t i = 0; i < lengths.size(); ++i) {
    std::string name = "object";
    name += std::to_string(i);
    ROPETEAM_CHECK(manifest.Add(name, lengths[i]).ok());
  }
  content.manifest_offset = manifest.manifest_offset();
  content.object_count = static_cast<uint32_t>(lengths.size());
  content.stream.assign(content.manifest_offset, '\0');
  uint64_t state = Mix(launch, step, rank, 0xc0ffee);
  for (const Object& object : manifest.objects()) {
    for (uint64_t at = 0; at < object.length; at += sizeof(uint64_t)) {
      const uint64_t word = SplitMix(&state);
      const size_t length = std::min<size_t>(sizeof(word), object.length - at);
      std::memcpy(content.stream.data() + object.offset + at, &word, length);
    }
  }
  content.stream += manifest.Encode();
  for (uint64_t at = 0; at < content.stream.size(); at += shape.chunk_bytes) {
    const size_t length = std::min<size_t>(shape.chunk_bytes, content.stream.size() - at);
    content.crcs.push_back(Crc32c(content.stream.data() + at, length));
  }
  return content;
}

}  // namespace ropeteam::simulation
