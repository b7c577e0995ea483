// SPDX-License-Identifier: Apache-2.0
#include "core/shard/manifest.h"

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <functional>

#include "core/base/checksum.h"

namespace ropeteam {
namespace {

struct Header {
  uint32_t magic;
  uint32_t version;
  uint32_t object_count;
  uint32_t names_bytes;
  uint64_t data_bytes;
};
struct Entry {
  uint64_t offset;
  uint64_t length;
  uint32_t name_begin;
  uint32_t name_length;
};
using Trailer = uint32_t;  // the CRC

// Both are copied as stored.
static_assert(sizeof(Header) == kManifestHeaderBytes);
static_assert(sizeof(Entry) == kManifestEntryBytes);
// names_bytes and name_begin are 32 bits wide.
static_assert(kObjectsMax * kNameBytesMax < UINT32_MAX);
// The stream's end must not overflow, whatever the objects' lengths.
static_assert(kStreamBytesMax < UINT64_MAX / 2);

// See EstimateBytes(): above the longest parameter names of common models
constexpr uint64_t kNameBytesEstimate = 64;
constexpr uint32_t kNoIndex = UINT32_MAX;
static_assert(kObjectsMax < kNoIndex);
constexpr size_t kIndexSlotsMin = 16;

template <typename T>
void Append(std::string* out, const T& value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof(value));
}

template <typename T>
T ReadAt(std::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof(value));
  return value;
}

// A name for a message: shortened, and without bytes that would break a log line.
std::string Printable(std::string_view name) {
  constexpr size_t kShown = 64;
  std::string text(name.substr(0, kShown));
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20) c = '?';
  }
  return name.size() > kShown ? text + "…" : text;
}

}  // namespace

size_t Manifest::IndexSlot(std::string_view name) const {
  const size_t mask = index_.size() - 1;
  size_t slot = std::hash<std::string_view>{}(name)&mask;
  while (index_[slot] != kNoIndex && objects_[index_[slot]].name != name) slot = (slot + 1) & mask;
  return slot;
}

void Manifest::GrowIndex() {
  const size_t slots = std::max(kIndexSlotsMin, index_.size() * 2);
  index_.assign(slots, kNoIndex);
  for (uint32_t i = 0; i < objects_.size(); ++i) index_[IndexSlot(objects_[i].name)] = i;
}

Result<uint64_t> Manifest::Add(std::string_view name, uint64_t length) {
  if (name.empty()) return Error(Code::kInvalidArgument, "object name is empty");
  if (name.size() > kNameBytesMax) {
    return Error(Code::kInvalidArgument, "object name of %zu bytes, limit %zu: %s", name.size(),
                 kNameBytesMax, Printable(name).c_str());
  }
  // The C API ends names with a zero byte: with one inside, two names could look the same there.
  if (name.find('\0') != std::string_view::npos) {
    return Error(Code::kInvalidArgument, "object name with a zero byte: %s", Printable(name).c_str());
  }
  if (objects_.size() >= kObjectsMax) {
    return Error(Code::kInvalidArgument, "object %s is number %zu of the shard, limit %" PRIu64,
                 Printable(name).c_str(), objects_.size() + 1, kObjectsMax);
  }
  const uint64_t offset = AlignObject(data_end_);
  if (length > kStreamBytesMax - offset) {
    return Error(Code::kInvalidArgument,
                 "object %s of %" PRIu64 " bytes at offset %" PRIu64
                 " ends behind a shard's limit of %" PRIu64 " bytes",
                 Printable(name).c_str(), length, offset, kStreamBytesMax);
  }
  // At most half full, so that a probe ends after a slot or two.
  if ((objects_.size() + 1) * 2 > index_.size()) GrowIndex();
  const size_t slot = IndexSlot(name);
  if (index_[slot] != kNoIndex) {
    return Error(Code::kInvalidArgument, "object name used twice in the shard: %s", Printable(name).c_str());
  }
  index_[slot] = static_cast<uint32_t>(objects_.size());
  objects_.push_back({std::string(name), offset, length});
  data_end_ = offset + length;
  names_bytes_ += name.size();
  return offset;
}

const Object* Manifest::Find(std::string_view name) const {
  if (index_.empty()) return nullptr;
  const uint32_t index = index_[IndexSlot(name)];
  return index == kNoIndex ? nullptr : &objects_[index];
}

uint64_t Manifest::encoded_bytes() const {
  return sizeof(Header) + objects_.size() * sizeof(Entry) + names_bytes_ + sizeof(Trailer);
}

std::string Manifest::Encode() const {
  std::string bytes;
  bytes.reserve(encoded_bytes());
  Append(&bytes, Header{kManifestMagic, kManifestVersion, static_cast<uint32_t>(objects_.size()),
                        static_cast<uint32_t>(names_bytes_), manifest_offset()});
  uint32_t name_begin = 0;
  for (const Object& object : objects_) {
    const auto name_length = static_cast<uint32_t>(object.name.size());
    Append(&bytes, Entry{object.offset, object.length, name_begin, name_length});
    name_begin += name_length;
  }
  for (const Object& object : objects_) bytes += object.name;
  Append(&bytes, Trailer{Crc32c(bytes.data(), bytes.size())});
  ROPETEAM_CHECK(bytes.size() == encoded_bytes());
  return bytes;
}

Result<Manifest> Manifest::Parse(std::string_view bytes, uint64_t manifest_offset) {
  if (bytes.size() < sizeof(Header) + sizeof(Trailer)) {
    return Error(Code::kCorrupt, "manifest of %zu bytes, the least is %zu", bytes.size(),
                 sizeof(Header) + sizeof(Trailer));
  }
  const auto header = ReadAt<Header>(bytes, 0);
  if (header.magic != kManifestMagic) {
    return Error(Code::kCorrupt, "manifest begins with 0x%08x, not 0x%08x", header.magic, kManifestMagic);
  }
  // Every version ends with this checksum, so that a broken manifest is never taken for a newer one.
  const size_t checked_bytes = bytes.size() - sizeof(Trailer);
  const auto crc = ReadAt<Trailer>(bytes, checked_bytes);
  const uint32_t computed = Crc32c(bytes.data(), checked_bytes);
  if (crc != computed) {
    return Error(Code::kCorrupt, "manifest's checksum is 0x%08x, its %zu bytes have 0x%08x", crc,
                 checked_bytes, computed);
  }
  if (header.version != kManifestVersion) {
    return Error(Code::kUnsupported, "manifest of format version %u, this build reads %u", header.version,
                 kManifestVersion);
  }
  if (header.object_count > kObjectsMax) {
    return Error(Code::kCorrupt, "manifest of %u objects, limit %" PRIu64, header.object_count, kObjectsMax);
  }
  const uint64_t names_at = sizeof(Header) + uint64_t{header.object_count} * sizeof(Entry);
  if (names_at + header.names_bytes != checked_bytes) {
    return Error(Code::kCorrupt, "manifest of %zu bytes announces %u objects with names of %u bytes",
                 bytes.size(), header.object_count, header.names_bytes);
  }
  return ParseEntries(bytes.substr(0, checked_bytes), manifest_offset);
}

Result<Manifest> Manifest::ParseEntries(std::string_view bytes, uint64_t manifest_offset) {
  const auto header = ReadAt<Header>(bytes, 0);
  const std::string_view names = bytes.substr(sizeof(Header) + uint64_t{header.object_count} * sizeof(Entry));
  Manifest manifest;
  manifest.objects_.reserve(header.object_count);
  for (uint32_t i = 0; i < header.object_count; ++i) {
    const auto entry = ReadAt<Entry>(bytes, sizeof(Header) + i * sizeof(Entry));
    if (entry.name_begin != manifest.names_bytes_ || entry.name_length > names.size() - entry.name_begin) {
      return Error(Code::kCorrupt,
                   "manifest's object %u has its name at %u+%u of %zu bytes of names, expected at %" PRIu64,
                   i, entry.name_begin, entry.name_length, names.size(), manifest.names_bytes_);
    }
    // Add() applies the rules for names and limits and packs in the same way as the writer. So its result must equal
    // the stored offset.
    const Result<uint64_t> offset =
        manifest.Add(names.substr(entry.name_begin, entry.name_length), entry.length);
    if (!offset.ok())
      return Error(Code::kCorrupt, "manifest's object %u: %s", i, offset.status().message().c_str());
    if (entry.offset != *offset) {
      return Error(Code::kCorrupt, "manifest's object %u is at offset %" PRIu64 ", expected at %" PRIu64, i,
                   entry.offset, *offset);
    }
  }
  if (manifest.names_bytes_ != names.size()) {
    return Error(Code::kCorrupt, "manifest has %zu bytes of names, its objects use %" PRIu64, names.size(),
                 manifest.names_bytes_);
  }
  if (header.data_bytes != manifest_offset || manifest.manifest_offset() != manifest_offset) {
    return Error(Code::kCorrupt,
                 "manifest at offset %" PRIu64 " says that it is at %" PRIu64 ", its objects end at %" PRIu64,
                 manifest_offset, header.data_bytes, manifest.data_end());
  }
  return manifest;
}

uint64_t Manifest::EstimateBytes(uint64_t objects) {
  return sizeof(Header) + std::min(objects, kObjectsMax) * (sizeof(Entry) + kNameBytesEstimate) +
         sizeof(Trailer);
}

}  // namespace ropeteam
