// SPDX-License-Identifier: Apache-2.0
#include "storage/format/manifest_check.h"

#include <algorithm>
#include <bit>
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <functional>
#include <tuple>

#include "storage/format/json.h"
#include "storage/format/names.h"
#include "storage/format/safetensors.h"
#include "storage/format/stream.h"
#include "storage/sink.h"

namespace ropeteam::storage {
namespace {

constexpr uint64_t kManifestChunkBytesMax = 1ull << 30;  // kChunkBytesMax of core/shard/extent.h

Status CheckFile(const RankEntry& rank, size_t number, std::string_view rank_file) {
  const FileEntry& file = rank.files[number];
  const auto wrong = [&](const char* field, const std::string& what) {
    return Error(Code::kCorrupt, ".files[%zu].%s %s", number, field, what.c_str());
  };
  const Status name = CheckFileName(file.path);
  if (!name.ok()) return wrong("path", "is refused: " + name.message());
  if (!IsUtf8(file.path)) return wrong("path", "is not UTF-8: " + Printable(file.path));
  if ((file.path == rank_file) != (file.header_bytes != 0) || (file.path == rank_file && number != 0))
    return wrong("path", "is " + Printable(file.path) + ": only the first file of a rank may be " +
                             std::string(rank_file) + ", and that one has a header");
  if (file.path == rank_file) {
    if (file.header_bytes % kSafetensorsAlignmentBytes != 0 || file.header_bytes > file.bytes)
      return wrong("header_bytes", "is " + std::to_string(file.header_bytes) + " of " +
                                       std::to_string(file.bytes) + ", not a multiple of " +
                                       std::to_string(kSafetensorsAlignmentBytes));
    return OkStatus();
  }
  if (IsReservedName(ObjectNameOfPath(rank.rank, file.path)))
    return wrong("path", "is " + Printable(file.path) + ", which is not a name for a program's file");
  return OkStatus();
}

bool ParseDigits(std::string_view text, unsigned* value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
  return error == std::errc() && end == text.data() + text.size();
}

}  // namespace

Status CheckHead(const StepHead& head) {
  if (head.job.empty() || head.job.size() > kJobNameBytesMax || !IsUtf8(head.job)) {
    return Error(Code::kCorrupt, "job is \"%s\" of %zu bytes, limit %zu, valid UTF-8",
                 Printable(head.job).c_str(), head.job.size(), kJobNameBytesMax);
  }
  if (head.world_size == 0 || head.world_size > kStepRanksMax) {
    return Error(Code::kCorrupt, "world_size is %" PRIu32 ", at least 1, limit %" PRIu32, head.world_size,
                 kStepRanksMax);
  }
  if (!std::has_single_bit(head.chunk_bytes) || head.chunk_bytes < kStreamAlignmentBytes ||
      head.chunk_bytes > kManifestChunkBytesMax) {
    return Error(Code::kCorrupt, "chunk_bytes is %" PRIu64 ", not a power of two up to %" PRIu64,
                 head.chunk_bytes, kManifestChunkBytesMax);
  }
  if (head.user.size() > kUserMetadataBytesMax) {
    return Error(Code::kCorrupt, "user has %zu bytes, limit %" PRIu64, head.user.size(),
                 kUserMetadataBytesMax);
  }
  if (head.time_s > kTimeMax) {
    return Error(Code::kCorrupt, "time is %" PRIu64 " s, limit %" PRIu64, head.time_s, kTimeMax);
  }
  return OkStatus();
}

Status CheckRank(const RankEntry& rank) {
  if (rank.stream_bytes == 0 || rank.stream_bytes > kStreamSizeMax) {
    return Error(Code::kCorrupt, ".stream_bytes is %" PRIu64 ", at least 1, limit %" PRIu64,
                 rank.stream_bytes, kStreamSizeMax);
  }
  if (rank.files.size() > kStreamObjectsMax + 1)
    return Error(Code::kCorrupt, ".files has %zu entries, limit %" PRIu64, rank.files.size(),
                 kStreamObjectsMax + 1);
  const std::string rank_file = RankFileName(rank.rank);
  uint64_t bytes = 0;
  for (size_t i = 0; i < rank.files.size(); ++i) {
    ROPETEAM_RETURN_IF_ERROR(CheckFile(rank, i, rank_file));
    const uint64_t of_stream = rank.files[i].bytes - rank.files[i].header_bytes;
    // The files must leave some bytes for the shard's own manifest.
    if (of_stream >= rank.stream_bytes - bytes) {
      return Error(Code::kCorrupt,
                   ".files[%zu].bytes is %" PRIu64 ", more than what is left of a stream of %" PRIu64, i,
                   rank.files[i].bytes, rank.stream_bytes);
    }
    bytes += of_stream;
  }
  return OkStatus();
}

std::string PrintTime(uint64_t time_s) {
  const std::chrono::sys_seconds time{std::chrono::seconds(time_s)};
  const auto day = std::chrono::floor<std::chrono::days>(time);
  const std::chrono::year_month_day date(day);
  const std::chrono::hh_mm_ss clock(time - day);
  char text[64];
  std::snprintf(text, sizeof(text), "%04d-%02u-%02uT%02d:%02d:%02dZ", static_cast<int>(date.year()),
                static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day()),
                static_cast<int>(clock.hours().count()), static_cast<int>(clock.minutes().count()),
                static_cast<int>(clock.seconds().count()));
  return text;
}

bool ParseTime(std::string_view text, uint64_t* time_s) {
  unsigned year = 0, month = 0, day = 0, hour = 0, minute = 0, second = 0;
  if (text.size() != 20 || !ParseDigits(text.substr(0, 4), &year) ||
      !ParseDigits(text.substr(5, 2), &month) || !ParseDigits(text.substr(8, 2), &day) ||
      !ParseDigits(text.substr(11, 2), &hour) || !ParseDigits(text.substr(14, 2), &minute) ||
      !ParseDigits(text.substr(17, 2), &second) || year < 1970)
    return false;
  const std::chrono::year_month_day date{std::chrono::year(static_cast<int>(year)), std::chrono::month(month),
                                         std::chrono::day(day)};
  if (!date.ok()) return false;
  const auto days = std::chrono::sys_days(date).time_since_epoch().count();
  const uint64_t time = static_cast<uint64_t>(days) * 86400 + hour * 3600 + minute * 60 + second;
  // The time must print as it was written: 23:60:00 is invalid.
  if (time > kTimeMax || PrintTime(time) != text) return false;
  *time_s = time;
  return true;
}

void SharedFiles::Add(const RankEntry& rank) {
  for (uint32_t i = rank.HasRankFile() ? 1 : 0; i < rank.files.size(); ++i) {
    const FileEntry& file = rank.files[i];
    files_.push_back({std::hash<std::string>{}(file.path), file.bytes, file.crc32c, rank.rank, i});
  }
}

Status SharedFiles::Check() {
  std::sort(files_.begin(), files_.end(), [](const File& a, const File& b) {
    return std::tie(a.path_hash, a.rank, a.number) < std::tie(b.path_hash, b.rank, b.number);
  });
  for (size_t i = 1; i < files_.size(); ++i) {
    const File& a = files_[i - 1];
    const File& b = files_[i];
    if (a.path_hash != b.path_hash || (a.rank != b.rank && a.bytes == b.bytes && a.crc32c == b.crc32c))
      continue;
    return Error(Code::kCorrupt,
                 "ranks[%" PRIu32 "].files[%" PRIu32 "] has the path of ranks[%" PRIu32 "].files[%" PRIu32
                 "], and %s",
                 b.rank, b.number, a.rank, a.number,
                 a.rank == b.rank ? "a rank may use a path only once" : "other bytes");
  }
  return OkStatus();
}

}  // namespace ropeteam::storage
