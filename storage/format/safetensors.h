// SPDX-License-Identifier: Apache-2.0
//
// The header of a rank's safetensors file: 8 bytes of length, little-endian, then JSON, padded with spaces:
//
//     {"__metadata__": {KEY: TEXT, …}, NAME: {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …}
//
// The library that reads such files refuses a whole file for one entry that it does not support. So only features are used
// that every version since 0.4.2 supports: entries in the order of their data, without gaps, and the
// dtypes below. Pure functions, internal to storage/format except for the bounds, the dtypes
// and the writer.

#ifndef ROPETEAM_STORAGE_FORMAT_SAFETENSORS_H_
#define ROPETEAM_STORAGE_FORMAT_SAFETENSORS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::storage {

// The library's own limit of the JSON, padding included.
inline constexpr uint64_t kSafetensorsJsonBytesMax = 100000000;
// The data begin at a multiple of this: O_DIRECT and mmap want their offsets so on every file system in use.
inline constexpr uint64_t kSafetensorsAlignmentBytes = 4096;
// torch's own limit of a tensor's dimensions.
inline constexpr size_t kDimensionsMax = 64;

// "bfloat16" → "BF16"; null for a dtype that not every reader knows, which is then written as bytes.
const char* SafetensorsDtype(std::string_view torch_dtype);
// Of one element: "BF16" → 2; 0 for a dtype that is not in the table.
uint64_t SafetensorsItemBytes(std::string_view dtype);
// Whether a tensor of this dtype ("BF16") and shape has this many bytes, and no reader's arithmetic overflows over it.
bool FitsShape(std::string_view dtype, const std::vector<uint64_t>& shape, uint64_t bytes);

class SafetensorsWriter {
 public:
  // All metadata before the first tensor. `key`, `value` and `name` must be valid UTF-8. kInvalidArgument: the header would
  // be longer than its limit, named in the message.
  Status AddMetadata(std::string_view key, std::string_view value);
  // The next tensor in the data, of `bytes` bytes, which must fit dtype and shape. Fails as AddMetadata().
  Status AddTensor(std::string_view name, std::string_view dtype, const std::vector<uint64_t>& shape,
                   uint64_t bytes);
  // The file's bytes up to its data; the writer is used up. Fails as AddMetadata().
  Result<std::string> Finish();
  uint64_t data_bytes() const { return data_bytes_; }

 private:
  Status CheckSize() const;
  std::string text_ = std::string(8, '\0') + "{";  // the length is filled in at the end
  bool in_metadata_ = false;
  uint64_t tensors_ = 0;
  uint64_t data_bytes_ = 0;
};

struct SafetensorsEntry {
  std::string name;
  uint64_t begin = 0;  // in the data
  uint64_t length = 0;
};
struct SafetensorsHeader {
  std::vector<std::pair<std::string, std::string>> metadata;  // in the order of the text
  std::vector<SafetensorsEntry> tensors;                      // in the order of the text, which is the data's
  uint64_t data_bytes = 0;
};
// `head` is a file's bytes up to its data. kCorrupt, with the place: not a header as written here. Checked: the length,
// JSON, every field once and of its kind, known dtypes, sizes that fit, no holes or overlaps. Not checked: names that
// occur twice.
Result<SafetensorsHeader> ParseSafetensors(std::string_view head);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_SAFETENSORS_H_
