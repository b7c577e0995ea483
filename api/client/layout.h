// SPDX-License-Identifier: Apache-2.0
//
// A Layout is the manifest of a save in progress. A rank saves the same objects step after step. As long as they come
// in the order, with the names and lengths of the previous save, its manifest is used again: nothing is allocated,
// hashed or encoded. At the first difference, a new manifest is begun with the objects that have matched so far.
//
// Not thread-safe.

#ifndef ROPETEAM_API_CLIENT_LAYOUT_H_
#define ROPETEAM_API_CLIENT_LAYOUT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/base/status.h"
#include "core/shard/manifest.h"

namespace ropeteam::client {

class Layout {
 public:
  // Ends a save: objects added from now on belong to the next one. It keeps a manifest of at most a few MiB.
  void Restart();

  // See Manifest::Add().
  Result<uint64_t> Add(std::string_view name, uint64_t length);
  // Makes the last object longer. kInvalidArgument: there is none, or it would end behind kStreamBytesMax.
  Status Extend(uint64_t length);
  // The name of what was added last; "" when nothing was.
  std::string_view last_name() const;
  size_t object_count() const { return repeating_ ? matched_ : manifest_.objects().size(); }
  uint64_t manifest_offset() const {
    return AlignObject((repeating_ ? data_end_ : manifest_.data_end()) + grown_);
  }
  uint64_t encoded_bytes() const;

  // The manifest of what was added; valid until the next Restart() or Add().
  const std::string& Encode();

 private:
  // Gives up the likeness, and enters what Extend() has added: from here on the manifest is this save's own.
  void Diverge();

  Manifest manifest_;    // this save's; while repeating_, the save's before
  std::string encoded_;  // manifest_'s; empty when it has not been encoded
  bool repeating_ = false;
  uint64_t grown_ = 0;  // bytes of the last object that manifest_ does not know of
  // While repeating_, of this save:
  size_t matched_ = 0;  // objects, the first of manifest_'s
  uint64_t data_end_ = 0;
  uint64_t names_bytes_ = 0;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_LAYOUT_H_
