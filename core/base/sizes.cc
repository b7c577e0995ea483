// SPDX-License-Identifier: Apache-2.0
#include "core/base/sizes.h"

#include <cctype>
#include <charconv>
#include <cstdio>
#include <iterator>

namespace ropeteam {

bool ParseSize(std::string_view text, uint64_t* bytes) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end == text.data()) return false;
  std::string unit(end, text.data() + text.size());
  for (char& c : unit) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  if (unit.size() == 3 && unit.ends_with("ib")) unit.resize(1);
  int shift = 0;
  if (unit == "k") {
    shift = 10;
  } else if (unit == "m") {
    shift = 20;
  } else if (unit == "g") {
    shift = 30;
  } else if (unit == "t") {
    shift = 40;
  } else if (!unit.empty() && unit != "b") {
    return false;
  }
  if (value > (UINT64_MAX >> shift)) return false;
  *bytes = value << shift;
  return true;
}

std::string FormatSize(double bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  size_t unit = 0;
  while (bytes >= 1024 && unit + 1 < std::size(kUnits)) {
    bytes /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof(text), unit == 0 ? "%.0f %s" : "%.1f %s", bytes, kUnits[unit]);
  return text;
}

std::string SizeFlag(uint64_t bytes) {
  constexpr uint64_t kM = 1ull << 20;
  constexpr uint64_t kG = 1ull << 30;
  const bool in_g = bytes > 4 * kG - kM;
  const uint64_t unit = in_g ? kG : kM;
  return std::to_string(bytes / unit + (bytes % unit != 0)) + (in_g ? "G" : "M");
}

}  // namespace ropeteam
