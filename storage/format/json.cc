// SPDX-License-Identifier: Apache-2.0
#include "storage/format/json.h"

#include <cinttypes>
#include <cstdio>
#include <nlohmann/json.hpp>

namespace ropeteam::storage {
namespace {

using Json = nlohmann::json;

constexpr size_t kShownBytes = 64;

// nlohmann's parser calls these; returning false ends it.
class Walk : public nlohmann::json_sax<Json> {
 public:
  Walk(size_t depth_max, JsonEvents* events) : depth_max_(depth_max), events_(events) {}
  const Status& status() const { return status_; }

  bool null() override { return Tell({JsonKind::kNull, 0, "null"}); }
  bool boolean(bool value) override {
    return Tell(value ? JsonScalar{JsonKind::kTrue, 0, "true"} : JsonScalar{JsonKind::kFalse, 0, "false"});
  }
  bool number_integer(number_integer_t value) override {
    // The parser calls number_unsigned() for every number without a minus sign. Here it reports the others
    // and -0.
    return Tell({JsonKind::kNegative, 0, std::to_string(value)});
  }
  bool number_unsigned(number_unsigned_t value) override {
    return Tell({JsonKind::kUnsigned, value, std::to_string(value)});
  }
  bool number_float(number_float_t, const string_t& text) override {
    return Tell({JsonKind::kFloat, 0, text});
  }
  bool string(string_t& value) override { return Tell({JsonKind::kString, 0, value}); }
  bool binary(binary_t&) override { return false; }  // JSON has none

  bool start_object(size_t) override { return Open(false); }
  bool start_array(size_t) override { return Open(true); }
  bool key(string_t& value) override {
    path_.back().key = value;
    return true;
  }
  bool end_object() override { return Close(false); }
  bool end_array() override { return Close(true); }

  bool parse_error(size_t position, const std::string&, const Json::exception& error) override {
    status_ =
        Error(Code::kCorrupt, "not JSON at byte %zu: %s", position, Printable(ShortReason(error)).c_str());
    return false;
  }

 private:
  static std::string ShortReason(const Json::exception& error) {
    std::string_view what = error.what();
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error …"
    if (const size_t at = what.find(": "); at != std::string_view::npos) what.remove_prefix(at + 2);
    return std::string(what);
  }
  bool Keep(Status status) {
    if (status.ok()) return true;
    status_ = std::move(status);
    return false;
  }
  bool Tell(const JsonScalar& value) {
    if (!Keep(events_->Scalar(path_, value))) return false;
    Next();
    return true;
  }
  bool Open(bool array) {
    if (path_.size() >= depth_max_) {
      return Keep(
          Error(Code::kCorrupt, "%s is nested deeper than %zu levels", JsonPlace(path_).c_str(), depth_max_));
    }
    if (!Keep(events_->Begin(path_, array))) return false;
    path_.push_back({array, 0, {}});
    return true;
  }
  bool Close(bool array) {
    path_.pop_back();
    if (!Keep(events_->End(path_, array))) return false;
    Next();
    return true;
  }
  void Next() {
    if (!path_.empty() && path_.back().in_array) ++path_.back().index;
  }

  const size_t depth_max_;
  JsonEvents* const events_;
  JsonPath path_;
  Status status_;
};

}  // namespace

bool IsUtf8(std::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  for (size_t i = 0; i < text.size();) {
    const unsigned char lead = byte(i);
    if (lead < 0x80) {
      ++i;
      continue;
    }
    const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
    if (lead < 0xc2 || lead > 0xf4 || text.size() - i < length) return false;
    for (size_t k = 1; k < length; ++k)
      if ((byte(i + k) & 0xc0) != 0x80) return false;
    // Invalid: not the shortest form, a surrogate, or above U+10FFFF.
    const unsigned char second = byte(i + 1);
    if ((lead == 0xe0 && second < 0xa0) || (lead == 0xed && second > 0x9f) ||
        (lead == 0xf0 && second < 0x90) || (lead == 0xf4 && second > 0x8f))
      return false;
    i += length;
  }
  return true;
}

void AppendJsonString(std::string* out, std::string_view text) {
  out->push_back('"');
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out->push_back('\\');
      out->push_back(c);
    } else if (c == '\n') {
      out->append("\\n");
    } else if (static_cast<unsigned char>(c) < 0x20) {
      out->append("\\u00").append(Hex(static_cast<unsigned char>(c), 2));
    } else {
      out->push_back(c);
    }
  }
  out->push_back('"');
}

std::string Printable(std::string_view text) {
  std::string shown(text.substr(0, kShownBytes));
  for (char& c : shown)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
  return text.size() > kShownBytes ? shown + "…" : shown;
}

std::string Hex(uint64_t value, size_t digits) {
  std::string text(digits, '0');
  for (size_t i = digits; i-- > 0; value >>= 4) text[i] = "0123456789abcdef"[value & 15];
  return text;
}

bool ParseHex(std::string_view text, size_t digits, uint64_t* value) {
  if (text.size() != digits) return false;
  *value = 0;
  for (const char c : text) {
    const bool letter = c >= 'a' && c <= 'f';
    if (!letter && (c < '0' || c > '9')) return false;
    *value = *value << 4 | static_cast<uint64_t>(letter ? c - 'a' + 10 : c - '0');
  }
  return true;
}

std::string JsonPlace(const JsonPath& path) {
  std::string place;
  for (const JsonLevel& level : path) {
    if (level.in_array) {
      place.append("[").append(std::to_string(level.index)).append("]");
    } else {
      if (!place.empty()) place.push_back('.');
      place.append(Printable(level.key));
    }
  }
  return place.empty() ? "the text" : place;
}

Status WalkJson(std::string_view text, size_t depth_max, JsonEvents* events) {
  Walk walk(depth_max, events);
  if (Json::sax_parse(text.begin(), text.end(), &walk)) return OkStatus();
  if (walk.status().ok()) return Error(Code::kCorrupt, "not JSON");
  return walk.status();
}

void JsonCopy::Separate(const JsonPath& path) {
  if (!first_) out_->push_back(',');
  if (path.size() > depth_ && !path.back().in_array) {
    AppendJsonString(out_, path.back().key);
    out_->push_back(':');
  }
  first_ = false;
}

Status JsonCopy::Begin(const JsonPath& path, bool array) {
  Separate(path);
  out_->push_back(array ? '[' : '{');
  first_ = true;
  return OkStatus();
}

Status JsonCopy::End(const JsonPath&, bool array) {
  out_->push_back(array ? ']' : '}');
  first_ = false;
  return OkStatus();
}

Status JsonCopy::Scalar(const JsonPath& path, const JsonScalar& value) {
  Separate(path);
  if (value.kind == JsonKind::kString) {
    AppendJsonString(out_, value.text);
  } else {
    out_->append(value.text);
  }
  return OkStatus();
}

}  // namespace ropeteam::storage
