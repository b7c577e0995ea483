// SPDX-License-Identifier: Apache-2.0
//
// A shard is one stream of bytes: its objects in saving order, each at a 64-byte aligned offset, then its manifest
// (manifest.h). The stream is cut into chunks of the arena's chunk size; the last one may be short. A list of extents,
// in stream order, says which chunks of an arena hold the stream.

#ifndef ROPETEAM_CORE_SHARD_EXTENT_H_
#define ROPETEAM_CORE_SHARD_EXTENT_H_

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/ids.h"

namespace ropeteam {

// An aligned object can be handed to a device or mapped. 64 bytes is a cache line, and the alignment for vector loads.
inline constexpr uint64_t kObjectAlignmentBytes = 64;
inline constexpr uint64_t AlignObject(uint64_t offset) {
  return (offset + kObjectAlignmentBytes - 1) & ~(kObjectAlignmentBytes - 1);
}

inline constexpr uint64_t kChunkBytesDefault = 4ull << 20;
inline constexpr uint64_t kChunkBytesMin = 4096;  // a page: the unit of mapping; small ones are for tests
inline constexpr uint64_t kChunkBytesMax = 1ull << 30;  // lengths within a chunk fit 32 bits
// 64 Ki × 4 MiB is a shard of 256 GiB, more than any node's memory per rank. Its checksums fit one frame of the local
// protocol.
inline constexpr uint64_t kChunksPerShardMax = 64 * 1024;
inline constexpr uint64_t kStreamBytesMax = kChunksPerShardMax * kChunkBytesMax;  // of any arena's shards

struct Extent {
  uint32_t first = 0;  // chunk number in the arena
  uint32_t count = 0;  // chunks, at least 1
  auto Fields() { return std::tie(first, count); }
  friend bool operator==(const Extent&, const Extent&) = default;
};

inline constexpr uint64_t ChunksFor(uint64_t bytes, uint64_t chunk_bytes) {
  // Not (bytes + chunk_bytes - 1) / chunk_bytes: a huge size from a socket must not wrap around to a small count.
  return bytes / chunk_bytes + (bytes % chunk_bytes != 0 ? 1 : 0);
}
inline uint64_t ChunkCount(const std::vector<Extent>& extents) {
  uint64_t count = 0;
  for (const Extent& extent : extents) count += extent.count;
  return count;
}
// The arena's chunk that holds the stream's chunk `index`; `index` must be below ChunkCount(extents).
uint32_t ChunkAt(const std::vector<Extent>& extents, uint64_t index);

// The properties that all copies of a sealed shard share.
struct ShardMeta {
  ShardId id;
  uint32_t world_size = 0;       // ranks of the incarnation that saved it
  uint32_t replicas = 0;         // copies on other nodes that REPLICATED requires
  uint64_t chunk_bytes = 0;      // of the arena it was saved in; all arenas with copies have the same
  uint64_t stream_bytes = 0;     // data and manifest; at least a manifest's header
  uint64_t manifest_offset = 0;  // offset of the manifest in the stream; AlignObject'ed end of the data
  uint32_t object_count = 0;
  // The rank's value from the begin of the save, or 0. A step is committed only if all its ranks have the same value.
  uint64_t agreement = 0;
  auto Fields() {
    return Tie(id.incarnation, id.step, id.rank, world_size, replicas, chunk_bytes, stream_bytes,
               manifest_offset, object_count, Since<9>(agreement));
  }
  // Compares without the agreement: copies made by a node of an older version lack it.
  friend bool operator==(const ShardMeta& a, const ShardMeta& b) {
    const auto key = [](const ShardMeta& of) {
      return std::tie(of.id, of.world_size, of.replicas, of.chunk_bytes, of.stream_bytes, of.manifest_offset,
                      of.object_count);
    };
    return key(a) == key(b);
  }
};

// Names a job key and does not reveal it.
using KeyId = uint64_t;
inline constexpr KeyId kPlaintext = 0;  // no key: the bytes are plaintext
// For messages: the eight digits that `ropeteam status` shows.
std::string KeyName(KeyId key);

// The encryption of bytes in an arena of a job that encrypts its replicas (docs/security.md). One key and nonce encrypt
// one plaintext only. The key is derived from a job key and the salt, which is drawn once for each shard that is saved
// or read from storage. The nonce is the chunk's number. So all copies of a shard that are encrypted with one job key
// have the same bytes.
struct EncryptionSalt {
  std::array<uint64_t, 2> instance{};  // random, of the engine that drew the salt
  uint64_t count = 0;                  // number of the salt drawn by that engine; 0: none
  auto Fields() { return std::tie(instance[0], instance[1], count); }
  friend bool operator==(const EncryptionSalt&, const EncryptionSalt&) = default;
};
// The tag of one encrypted chunk; stored in the arena.
struct ChunkTag {
  std::array<uint64_t, 2> tag{};  // of GCM
  uint32_t crc = 0;               // CRC32C of the plaintext
  uint32_t zero = 0;
  auto Fields() { return std::tie(tag[0], tag[1], crc); }
  friend bool operator==(const ChunkTag&, const ChunkTag&) = default;
};
static_assert(sizeof(ChunkTag) == 24);
struct Encryption {
  EncryptionSalt salt;         // empty if the job does not encrypt
  std::vector<ChunkTag> tags;  // one per chunk; empty: the bytes are plaintext
  KeyId key = kPlaintext;      // of the job; kPlaintext if and only if there are no tags
  auto Fields() { return Tie(salt, tags, Since<9>(key)); }
  friend bool operator==(const Encryption&, const Encryption&) = default;
};
// The checksums of the plaintext, if `crcs` are those of the stored bytes.
std::vector<uint32_t> PlainCrcs(const Encryption& encryption, const std::vector<uint32_t>& crcs);

// Tells two shards of one name apart: a digest of the size, the manifest's place and every chunk's checksum (of the
// plaintext). Copies of one shard have the same digest. Two shards have the same one with a probability of 2^-64 by
// chance, but an attacker can make them collide.
uint64_t ContentDigest(const ShardMeta& meta, const std::vector<uint32_t>& crcs);

// Bytes of the stream in its chunk `index`: chunk_bytes, or the rest in the last one.
inline uint64_t ChunkLength(uint64_t stream_bytes, uint64_t chunk_bytes, uint64_t index) {
  const uint64_t begin = index * chunk_bytes;
  return stream_bytes - begin < chunk_bytes ? stream_bytes - begin : chunk_bytes;
}

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_SHARD_EXTENT_H_
