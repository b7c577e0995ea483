// SPDX-License-Identifier: Apache-2.0
#include "api/client/layout.h"

#include <utility>

#include "core/base/check.h"

namespace ropeteam::client {
namespace {

// Larger manifests are not kept for the next save, to bound a node's memory. A manifest takes a few times its
// encoding in memory, and a handle has up to four. A save of more than some 100,000 objects builds its
// manifest each time.
constexpr size_t kKeptBytesMax = 4u << 20;
constexpr uint64_t kManifestCrcBytes = 4;

}  // namespace

void Layout::Restart() {
  if (manifest_.encoded_bytes() > kKeptBytesMax) {
    manifest_ = Manifest();
    encoded_ = std::string();
  }
  repeating_ = true;
  grown_ = 0;
  matched_ = 0;
  data_end_ = 0;
  names_bytes_ = 0;
}

uint64_t Layout::encoded_bytes() const {
  if (!repeating_) return manifest_.encoded_bytes();
  return kManifestHeaderBytes + matched_ * kManifestEntryBytes + names_bytes_ + kManifestCrcBytes;
}

Result<uint64_t> Layout::Add(std::string_view name, uint64_t length) {
  if (repeating_ && grown_ == 0 && matched_ < manifest_.objects().size()) {
    const Object& next = manifest_.objects()[matched_];
    if (next.length == length && next.name == name) {
      ++matched_;
      data_end_ = next.offset + length;
      names_bytes_ += name.size();
      return next.offset;
    }
  }
  if (repeating_ || grown_ > 0) Diverge();
  return manifest_.Add(name, length);
}

Status Layout::Extend(uint64_t length) {
  if (object_count() == 0) {
    return Error(Code::kInvalidArgument, "an append of %llu bytes to a shard without objects",
                 static_cast<unsigned long long>(length));
  }
  if (length > kStreamBytesMax - manifest_offset()) {
    return Error(Code::kInvalidArgument, "an append of %llu bytes to a shard of %llu, limit %llu",
                 static_cast<unsigned long long>(length), static_cast<unsigned long long>(manifest_offset()),
                 static_cast<unsigned long long>(kStreamBytesMax));
  }
  grown_ += length;
  return OkStatus();
}

std::string_view Layout::last_name() const {
  return object_count() == 0 ? std::string_view() : manifest_.objects()[object_count() - 1].name;
}

const std::string& Layout::Encode() {
  if (grown_ > 0 || (repeating_ && matched_ != manifest_.objects().size())) Diverge();
  if (encoded_.empty()) encoded_ = manifest_.Encode();
  return encoded_;
}

void Layout::Diverge() {
  Manifest own;
  const size_t count = object_count();
  for (size_t i = 0; i < count; ++i) {
    const Object& object = manifest_.objects()[i];
    // One manifest has accepted these objects, so another one does too. Extend() has checked the rest.
    ROPETEAM_CHECK(own.Add(object.name, object.length + (i + 1 == count ? grown_ : 0)).ok());
  }
  manifest_ = std::move(own);
  encoded_.clear();
  repeating_ = false;
  grown_ = 0;
}

}  // namespace ropeteam::client
