// SPDX-License-Identifier: Apache-2.0
#include "storage/sink.h"

#include <algorithm>

namespace ropeteam::storage {

Status CheckFileName(std::string_view name) {
  const auto refuse = [&](const char* why) {
    std::string shown(name.substr(0, 300));
    for (char& c : shown)
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = '?';
    return Error(Code::kInvalidArgument, "file name \"%s\" of %zu bytes: %s", shown.c_str(), name.size(),
                 why);
  };
  if (name.empty()) return refuse("empty");
  if (name.size() > kFileNameBytesMax) return refuse("longer than 900 bytes");
  if (name.front() == '/') return refuse("absolute");
  if (std::any_of(name.begin(), name.end(),
                  [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }))
    return refuse("has a control character in it");
  for (size_t begin = 0; begin <= name.size();) {
    const std::string_view part = name.substr(begin, name.find('/', begin) - begin);
    if (part.empty() || part == "." || part == "..") return refuse("a part of it is empty, \".\" or \"..\"");
    if (part.size() > kFileNamePartBytesMax) return refuse("a part of it is longer than 255 bytes");
    begin += part.size() + 1;
  }
  return OkStatus();
}

}  // namespace ropeteam::storage
