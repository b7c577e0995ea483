// SPDX-License-Identifier: Apache-2.0
//
// The manifest at the end of a shard's stream. Accepted bytes must be encoded to the same bytes again.

#include "core/shard/manifest.h"

#include <cstring>

#include "core/base/checksum.h"
#include "tests/fuzz/fuzz.h"

namespace ropeteam::fuzz {
namespace {

// Input: a manifest without its checksum.
void RunShardManifest(std::string_view input) {
  std::string bytes(input);
  uint64_t offset = 0;  // data_bytes of its header
  if (bytes.size() >= kManifestHeaderBytes) std::memcpy(&offset, bytes.data() + 16, sizeof(offset));
  (void)Manifest::Parse(bytes, offset);
  const uint32_t crc = Crc32c(bytes.data(), bytes.size());
  bytes.append(reinterpret_cast<const char*>(&crc), sizeof(crc));
  const Result<Manifest> manifest = Manifest::Parse(bytes, offset);
  if (!manifest.ok()) return;
  ROPETEAM_CHECK(manifest->Encode() == bytes && manifest->manifest_offset() == offset);
  for (const Object& object : manifest->objects())
    ROPETEAM_CHECK(manifest->Find(object.name) == &object && object.offset + object.length <= offset);
}

std::vector<std::string> ShardManifestSeeds() {
  Manifest manifest;
  std::vector<std::string> seeds;
  for (const char* name : {"", "a", "model.layers.0.weight", "b"}) {
    if (*name != '\0') (void)manifest.Add(name, 100);
    const std::string bytes = manifest.Encode();
    seeds.push_back(bytes.substr(0, bytes.size() - sizeof(uint32_t)));
  }
  return seeds;
}

const Target kShardManifest("shard_manifest", RunShardManifest, ShardManifestSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
