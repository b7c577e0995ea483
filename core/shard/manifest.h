// SPDX-License-Identifier: Apache-2.0
//
// The manifest ends a shard's stream and lists its objects and their places. The rank's library writes it, the daemon
// checks it before it seals the shard, and every reader parses it. Format (docs/arena.md has the picture),
// little-endian, packed:
//
//     header   magic u32 'RTMF', version u32, object_count u32, names_bytes u32, data_bytes u64 (= manifest_offset)
//     entries  object_count × {offset u64, length u64, name_begin u32, name_length u32}, in saving order
//     names    names_bytes bytes, no terminators
//     crc      CRC32C of all the above, u32; last in every version
//
// A value type without I/O. Not thread-safe, except for const calls.

#ifndef ROPETEAM_CORE_SHARD_MANIFEST_H_
#define ROPETEAM_CORE_SHARD_MANIFEST_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "core/shard/extent.h"

namespace ropeteam {

inline constexpr uint32_t kManifestMagic = 0x464d5452;  // "RTMF"
inline constexpr uint32_t kManifestVersion = 1;
inline constexpr size_t kNameBytesMax = 255;      // ROPETEAM_NAME_MAX; a path's longest component
inline constexpr uint64_t kObjectsMax = 1000000;  // ROPETEAM_OBJECTS_MAX: bounds a manifest to 279 MB
// The object with the step's metadata: a JSON object, for retention rules and for operators.
inline constexpr std::string_view kMetadataObjectName = "ropeteam.metadata";  // ROPETEAM_METADATA
inline constexpr size_t kStepMetadataBytesMax = 4096;  // per rank: 100 numbers with their names
inline constexpr uint64_t kManifestHeaderBytes = 24;
inline constexpr uint64_t kManifestEntryBytes = 24;
// What encoded_bytes() of this many objects is at most.
constexpr uint64_t ManifestBytesMax(uint64_t objects) {
  return kManifestHeaderBytes + objects * (kManifestEntryBytes + kNameBytesMax) + sizeof(uint32_t);
}

struct Object {
  std::string name;
  uint64_t offset = 0;  // in the shard's stream, a multiple of kObjectAlignmentBytes
  uint64_t length = 0;  // bytes; 0 is allowed
};

class Manifest {
 public:
  // Adds an object after the last one, and returns its offset in the stream. kInvalidArgument: the name is empty, too
  // long, contains a zero byte or is already used; there are too many objects; or the end exceeds kStreamBytesMax. The
  // message has the value and the limit, and the manifest is unchanged.
  Result<uint64_t> Add(std::string_view name, uint64_t length);

  const std::vector<Object>& objects() const { return objects_; }
  // Null if there is no object with this name; valid until the next Add().
  const Object* Find(std::string_view name) const;

  // The end of the last object, unaligned; and the offset for the manifest.
  uint64_t data_end() const { return data_end_; }
  uint64_t manifest_offset() const { return AlignObject(data_end_); }
  uint64_t encoded_bytes() const;

  std::string Encode() const;
  // Checks everything: lengths, magic, version, CRC, order, alignment, overlaps, rules for names. kCorrupt: the CRC or
  // the structure is wrong. kUnsupported: another version.
  static Result<Manifest> Parse(std::string_view bytes, uint64_t manifest_offset);

  // An upper bound of encoded_bytes() for this many objects of unknown names. save_begin reserves this in addition to
  // the data. It assumes names of 64 bytes; with longer ones the save may request another chunk.
  static uint64_t EstimateBytes(uint64_t objects);

 private:
  // The slot of the index that holds `name`, or the empty slot for it.
  size_t IndexSlot(std::string_view name) const;
  void GrowIndex();
  static Result<Manifest> ParseEntries(std::string_view bytes, uint64_t manifest_offset);

  std::vector<Object> objects_;
  // Numbers of objects by the hash of their names, with open addressing. So the names are not stored twice.
  std::vector<uint32_t> index_;
  uint64_t data_end_ = 0;
  uint64_t names_bytes_ = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_SHARD_MANIFEST_H_
