// SPDX-License-Identifier: Apache-2.0
//
// The metadata of a rank's safetensors file besides the program's JSON values. With them the stream can be put
// together again. Shared by layout.cc, which writes them, and restore.cc. Pure functions, internal to storage/format.
//
//     ropeteam.version   "1"
//     ropeteam.order     "t120 f2 j1": the kinds of the stream's objects in its order, run by run: t the next tensor of
//                        this file, j the next JSON value of this metadata, f the next of the program's files in the
//                        step's manifest
//     ropeteam.names     a JSON object: the names that could not stand as they are, {"ropeteam.object.17": "w%FF"}; the
//                        number is the object's place in the stream. Absent where there are none
//     ropeteam.dtypes    a JSON object: what the tensors are that are written as bytes because their dtype is not in the
//                        table, {"z": {"dtype": "complex64", "shape": [2]}}. For readers; absent where there are none

#ifndef ROPETEAM_STORAGE_FORMAT_RANK_FILE_H_
#define ROPETEAM_STORAGE_FORMAT_RANK_FILE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ropeteam::storage {

inline constexpr std::string_view kRankFileVersion = "1";
inline constexpr std::string_view kVersionKey = "ropeteam.version";
inline constexpr std::string_view kOrderKey = "ropeteam.order";
inline constexpr std::string_view kNamesKey = "ropeteam.names";
inline constexpr std::string_view kDtypesKey = "ropeteam.dtypes";

// Kinds in ropeteam.order.
inline constexpr char kTensorKind = 't';
inline constexpr char kTextKind = 'j';
inline constexpr char kFileKind = 'f';

// Not valid UTF-8, "__metadata__", or beginning with "ropeteam.".
bool NeedsMapping(std::string_view name);
std::string MappedName(uint64_t object);  // "ropeteam.object.17"
// Bytes outside of ' ' to '~', and %, " and \, as %XX.
std::string EscapeName(std::string_view name);
// Nothing unless EscapeName() writes exactly this.
std::optional<std::string> UnescapeName(std::string_view escaped);

// Writes ropeteam.order.
class OrderWriter {
 public:
  void Add(char kind);
  std::string Take();

 private:
  void Flush();
  std::string text_;
  char kind_ = 0;
  uint64_t count_ = 0;
};

// Reads it again, kind by kind.
class OrderReader {
 public:
  explicit OrderReader(std::string_view text) : rest_(text) {}
  // The next object's kind; 0 at the end, and where the text is not what OrderWriter writes.
  char Next();
  bool done() const { return ok_ && rest_.empty() && left_ == 0; }

 private:
  std::string_view rest_;
  char kind_ = 0;
  uint64_t left_ = 0;
  bool ok_ = true;
};

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_RANK_FILE_H_
