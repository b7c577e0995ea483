// SPDX-License-Identifier: Apache-2.0
//
// The index object of the Python package, which describes a shard's objects:
//
//     {"version": 2, "objects": {"w": {"kind": "tensor", "dtype": "bfloat16", "shape": [2, 3]}, "d": {"kind": "json"}}}
//
// An entry without an object is of a tensor that another rank saved; see api/python/ropeteam/_values.py for all fields.
// Pure functions, internal to storage/format.

#ifndef ROPETEAM_STORAGE_FORMAT_INDEX_H_
#define ROPETEAM_STORAGE_FORMAT_INDEX_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace ropeteam::storage {

struct IndexEntry {
  bool json = false;  // else a tensor
  std::string dtype;  // as torch names it
  std::vector<uint64_t> shape;
};
using Index = std::unordered_map<std::string, IndexEntry>;

// Entries of other kinds, and tensors without a usable dtype or shape, are left out: such objects are plain bytes. If
// the index is not JSON, or has another version, all objects of the shard are plain bytes: a program may use the
// object's name for anything.
Index ParseIndex(std::string_view text);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_INDEX_H_
