// SPDX-License-Identifier: Apache-2.0
//
// The JSON functions of this folder. Text is written by hand, so that every build writes the same bytes. It is read as
// a sequence of values with their places, so that a text of many megabytes is never a tree in memory. Internal to
// storage/format.
//
// Not thread-safe; no state outside the arguments.

#ifndef ROPETEAM_STORAGE_FORMAT_JSON_H_
#define ROPETEAM_STORAGE_FORMAT_JSON_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::storage {

bool IsUtf8(std::string_view text);
// In quotes; escapes only what JSON requires. `text` must be valid UTF-8.
void AppendJsonString(std::string* out, std::string_view text);
// For messages: at most 64 bytes, and without bytes that would break a log line.
std::string Printable(std::string_view text);

// Lowercase hexadecimal of exactly `digits` digits, as checksums are written.
std::string Hex(uint64_t value, size_t digits);
bool ParseHex(std::string_view text, size_t digits, uint64_t* value);

// The place of a value in the array or object around it.
struct JsonLevel {
  bool in_array = false;
  uint64_t index = 0;  // in an array
  std::string key;     // in an object
};
// From the outside to the value itself; empty for the text's outermost value.
using JsonPath = std::vector<JsonLevel>;
// "ranks[17].files[2].bytes"; keys are made printable.
std::string JsonPlace(const JsonPath& path);

enum class JsonKind : uint8_t { kNull, kFalse, kTrue, kUnsigned, kNegative, kFloat, kString };
struct JsonScalar {
  JsonKind kind = JsonKind::kNull;
  uint64_t number = 0;    // of kUnsigned
  std::string_view text;  // of a string its value, of any other kind its JSON; valid during the call only
};

// A visitor of every value in the order of the text. A status that is not OK ends the walk and is its result.
class JsonEvents {
 public:
  virtual ~JsonEvents() = default;
  virtual Status Begin(const JsonPath& path, bool array) = 0;  // of an array or object at `path`
  virtual Status End(const JsonPath& path, bool array) = 0;
  virtual Status Scalar(const JsonPath& path, const JsonScalar& value) = 0;
};
// kCorrupt: not JSON (RFC 8259, with valid UTF-8), or nested deeper than `depth_max`; the message has the place or the
// byte. A repeated key is visited again.
Status WalkJson(std::string_view text, size_t depth_max, JsonEvents* events);

// A visitor that writes a value as compact JSON, without spaces. `depth` is the length of the path of the copied value;
// its own key is not written.
class JsonCopy : public JsonEvents {
 public:
  JsonCopy(std::string* out, size_t depth) : out_(out), depth_(depth) {}
  Status Begin(const JsonPath& path, bool array) override;
  Status End(const JsonPath& path, bool array) override;
  Status Scalar(const JsonPath& path, const JsonScalar& value) override;

 private:
  void Separate(const JsonPath& path);
  std::string* const out_;
  const size_t depth_;
  bool first_ = true;  // nothing stands before the next value in its array or object
};

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_JSON_H_
