// SPDX-License-Identifier: Apache-2.0
#include "storage/format/rank_file.h"

#include <charconv>

#include "storage/format/json.h"
#include "storage/format/stream.h"

namespace ropeteam::storage {
namespace {

bool IsPlain(char c) { return c >= ' ' && c <= '~' && c != '%' && c != '"' && c != '\\'; }

}  // namespace

bool NeedsMapping(std::string_view name) {
  return name == "__metadata__" || name.starts_with("ropeteam.") || !IsUtf8(name);
}

std::string MappedName(uint64_t object) { return "ropeteam.object." + std::to_string(object); }

std::string EscapeName(std::string_view name) {
  std::string escaped;
  for (const char c : name) {
    if (IsPlain(c)) {
      escaped += c;
    } else {
      escaped += '%';
      escaped += Hex(static_cast<unsigned char>(c), 2);
    }
  }
  return escaped;
}

std::optional<std::string> UnescapeName(std::string_view escaped) {
  std::string name;
  for (size_t i = 0; i < escaped.size(); ++i) {
    uint64_t value = static_cast<unsigned char>(escaped[i]);
    if (escaped[i] == '%') {
      if (escaped.size() - i < 3 || !ParseHex(escaped.substr(i + 1, 2), 2, &value)) return std::nullopt;
      i += 2;
    }
    name += static_cast<char>(value);
  }
  if (EscapeName(name) != escaped) return std::nullopt;
  return name;
}

void OrderWriter::Add(char kind) {
  if (kind != kind_) Flush();
  kind_ = kind;
  ++count_;
}

void OrderWriter::Flush() {
  if (count_ == 0) return;
  if (!text_.empty()) text_ += ' ';
  text_ += kind_;
  text_ += std::to_string(count_);
  count_ = 0;
}

std::string OrderWriter::Take() {
  Flush();
  return std::move(text_);
}

char OrderReader::Next() {
  if (!ok_) return 0;
  if (left_ == 0) {
    if (rest_.empty()) return 0;
    const std::string_view run = rest_.substr(0, rest_.find(' '));
    const char before = kind_;
    kind_ = run.empty() ? '\0' : run[0];
    const auto [end, error] =
        std::from_chars(run.data() + (run.empty() ? 0 : 1), run.data() + run.size(), left_);
    // Runs must be as long as possible, without leading zeros, so that each order has exactly one text.
    ok_ = (kind_ == kTensorKind || kind_ == kTextKind || kind_ == kFileKind) && kind_ != before &&
          error == std::errc() && end == run.data() + run.size() && run[1] != '0' &&
          left_ <= kStreamObjectsMax;
    rest_.remove_prefix(run.size());
    if (rest_.size() == 1) ok_ = false;  // a space at the end
    if (!rest_.empty()) rest_.remove_prefix(1);
    if (!ok_) return 0;
  }
  --left_;
  return kind_;
}

}  // namespace ropeteam::storage
