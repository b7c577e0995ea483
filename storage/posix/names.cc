// SPDX-License-Identifier: Apache-2.0
#include "storage/posix/names.h"

#include <sys/random.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <cstdio>

namespace ropeteam::storage::posix {
namespace {

constexpr std::string_view kMark = ".ropeteam-";
constexpr size_t kIdDigits = 16;
constexpr size_t kBaseBytesMax = 200;  // "." + 200 + kMark + 16 + ".part-00007": 238 of NAME_MAX's 255 bytes

// The end of a name of a hidden file: "0123456789abcdef.part"; empty: it is not such a name.
std::string_view TailOf(std::string_view base) {
  if (!base.starts_with('.')) return {};
  const size_t mark = base.rfind(kMark);
  if (mark == std::string_view::npos || mark == 0) return {};
  const std::string_view tail = base.substr(mark + kMark.size());
  if (tail.size() <= kIdDigits || tail[kIdDigits] != '.') return {};
  const std::string_view id = tail.substr(0, kIdDigits);
  return id.find_first_not_of("0123456789abcdef") == std::string_view::npos ? tail : std::string_view();
}

std::string Made(std::string_view base, uint64_t id, const char* end) {
  size_t bytes = std::min(base.size(), kBaseBytesMax);
  // The cut must not be inside a UTF-8 character: some file systems refuse an incomplete one.
  while (bytes > 0 && bytes < base.size() && (static_cast<unsigned char>(base[bytes]) & 0xc0) == 0x80)
    --bytes;
  char digits[kIdDigits + 1];
  std::snprintf(digits, sizeof digits, "%016llx", static_cast<unsigned long long>(id));
  return "." + std::string(base.substr(0, bytes)) + std::string(kMark) + digits + end;
}

}  // namespace

NameKind KindOf(std::string_view base) {
  std::string_view tail = TailOf(base);
  if (tail.empty()) return NameKind::kFile;
  tail.remove_prefix(kIdDigits);
  if (tail == ".part") return NameKind::kUpload;
  if (tail == ".writing") return NameKind::kMarker;
  return tail.starts_with(".part-") ? NameKind::kPart : NameKind::kFile;
}

uint64_t IdOf(std::string_view base) {
  const std::string_view tail = TailOf(base);
  uint64_t id = 0;
  std::from_chars(tail.data(), tail.data() + std::min(tail.size(), kIdDigits), id, 16);
  return id;
}

std::string UploadName(std::string_view base, uint64_t id) { return Made(base, id, ".part"); }

std::string PartName(const std::string& upload, uint32_t index) {
  char number[8];
  std::snprintf(number, sizeof number, "-%05u", index % 100000u);
  return upload + number;
}

std::string MarkerName(std::string_view base) { return Made(base, HashOf(base), ".writing"); }

std::string HiddenBy(std::string_view marker) {
  const std::string name(marker.substr(1, marker.size() - TailOf(marker).size() - kMark.size() - 1));
  return MarkerName(name) == marker ? name : std::string();
}

uint64_t HashOf(std::string_view text) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
  return hash;
}

uint64_t RandomId() {
  uint64_t id = 0;
  if (getrandom(&id, sizeof id, GRND_NONBLOCK) == static_cast<ssize_t>(sizeof id)) return id;
  // Early after boot there is no entropy. Names are created with O_EXCL, so a collision is noticed.
  static std::atomic<uint64_t> count{0};
  return HashOf(std::to_string(std::chrono::steady_clock::now().time_since_epoch().count()) + " " +
                std::to_string(getpid()) + " " + std::to_string(++count));
}

std::string_view FolderOf(std::string_view name) {
  const size_t slash = name.rfind('/');
  return slash == std::string_view::npos ? std::string_view() : name.substr(0, slash);
}

std::string_view BaseOf(std::string_view name) { return name.substr(name.rfind('/') + 1); }

std::string Joined(const std::string& folder, std::string_view base) {
  return folder.empty() ? std::string(base) : folder + "/" + std::string(base);
}

}  // namespace ropeteam::storage::posix
