// SPDX-License-Identifier: Apache-2.0
//
// A sealed shard as core packs it, for tests of the format: objects with bytes, packed into a stream that
// ends with the real manifest, and the chunks' checksums.

#ifndef ROPETEAM_TESTS_STORAGE_FORMAT_SHARD_BUILDER_H_
#define ROPETEAM_TESTS_STORAGE_FORMAT_SHARD_BUILDER_H_

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "core/base/checksum.h"
#include "core/shard/extent.h"
#include "core/shard/manifest.h"
#include "storage/format/layout.h"
#include "storage/format/manifest.h"
#include "storage/format/restore.h"
#include "storage/format/stream.h"

namespace ropeteam::storage {

using NamedBytes = std::vector<std::pair<std::string, std::string>>;

class TestShard {
 public:
  TestShard(const NamedBytes& named, uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes) {
    Manifest manifest;
    for (const auto& [name, bytes] : named) {
      const Result<uint64_t> offset = manifest.Add(name, bytes.size());
      ROPETEAM_CHECK(offset.ok());
      bytes_.resize(*offset, '\0');
      bytes_ += bytes;
      objects_.push_back({name, *offset, bytes.size()});
    }
    bytes_.resize(manifest.manifest_offset(), '\0');
    bytes_ += manifest.Encode();
    manifest_offset_ = manifest.manifest_offset();
    Seal();
  }
  TestShard(const TestShard&) = delete;

  // Computes the checksums of the current stream.
  void Seal() {
    crcs_.clear();
    for (uint64_t at = 0; at < bytes_.size(); at += chunk_bytes_)
      crcs_.push_back(Crc32c(bytes_.data() + at, std::min<uint64_t>(chunk_bytes_, bytes_.size() - at)));
  }

  // `reads` counts the reads of each chunk.
  ShardStream Stream(std::vector<int>* reads = nullptr) const {
    ShardStream stream;
    stream.stream_bytes = bytes_.size();
    stream.chunk_bytes = chunk_bytes_;
    stream.crcs = crcs_;
    if (reads != nullptr) reads->assign(crcs_.size(), 0);
    stream.chunk = [this, reads](uint64_t index) {
      if (reads != nullptr) ++(*reads)[index];
      const uint64_t at = index * chunk_bytes_;
      return std::span(reinterpret_cast<const std::byte*>(bytes_.data()) + at,
                       std::min<uint64_t>(chunk_bytes_, bytes_.size() - at));
    };
    return stream;
  }

  std::string& bytes() { return bytes_; }
  const std::string& bytes() const { return bytes_; }
  const std::vector<StreamObject>& objects() const { return objects_; }
  uint64_t manifest_offset() const { return manifest_offset_; }
  uint64_t chunk_bytes() const { return chunk_bytes_; }

 private:
  const uint64_t chunk_bytes_;
  std::string bytes_;
  std::vector<StreamObject> objects_;
  std::vector<uint32_t> crcs_;
  uint64_t manifest_offset_ = 0;
};

inline std::string FileBytes(const FilePlan& file, uint64_t begin, uint64_t end, const ShardStream& stream) {
  std::string bytes;
  for (const Piece& piece : FilePieces(file, begin, end, stream))
    bytes.append(reinterpret_cast<const char*>(piece.data), piece.bytes);
  return bytes;
}
inline std::string FileBytes(const FilePlan& file, const ShardStream& stream) {
  return FileBytes(file, 0, file.bytes, stream);
}

// The entry in the step's manifest for a rank with these files.
inline RankEntry EntryOf(uint32_t rank, const TestShard& shard, const std::vector<FilePlan>& files) {
  RankEntry entry{rank, shard.bytes().size(), 0x0123456789abcdef, {}};
  for (const FilePlan& file : files) {
    const std::string bytes = FileBytes(file, shard.Stream());
    entry.files.push_back({file.path, file.bytes, Crc32c(bytes.data(), bytes.size()), file.head.size(),
                           Crc32c(file.head.data(), file.head.size())});
  }
  return entry;
}

// Rebuilds the stream from the files' bytes as a reader does: zeros, the pieces, and core's manifest of the
// objects.
inline std::string Rebuild(const RestorePlan& plan, const std::vector<std::string>& files) {
  std::string stream(plan.manifest_offset, '\0');
  for (const RestorePiece& piece : plan.pieces) {
    const std::string& source = piece.file == RestorePiece::kTexts ? plan.texts : files[piece.file];
    stream.replace(piece.stream_offset, piece.length, source, piece.source_offset, piece.length);
  }
  Manifest manifest;
  for (const StreamObject& object : plan.objects) {
    const Result<uint64_t> offset = manifest.Add(object.name, object.length);
    if (!offset.ok() || *offset != object.offset) return "core packs otherwise";
  }
  return stream + manifest.Encode();
}

inline std::string RandomBytes(std::mt19937_64* random, size_t length) {
  std::string bytes(length, '\0');
  for (char& c : bytes) c = static_cast<char>((*random)());
  return bytes;
}

}  // namespace ropeteam::storage

#endif  // ROPETEAM_TESTS_STORAGE_FORMAT_SHARD_BUILDER_H_
