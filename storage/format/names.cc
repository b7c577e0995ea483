// SPDX-License-Identifier: Apache-2.0
#include "storage/format/names.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cinttypes>
#include <cstdio>

#include "core/base/ids.h"
#include "storage/format/json.h"
#include "storage/sink.h"

namespace ropeteam::storage {
namespace {

constexpr size_t kRankDigitsMin = 5;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }

// All of `digits` as a number. No value: it is not a number, or it overflows.
std::optional<uint64_t> ParseNumber(std::string_view digits) {
  uint64_t value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (digits.empty() || error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

bool IsRankName(std::string_view first_part) {
  if (!first_part.starts_with("rank-")) return false;
  first_part.remove_prefix(5);
  if (first_part.ends_with(".safetensors")) first_part.remove_suffix(12);
  return first_part.size() >= kRankDigitsMin && std::all_of(first_part.begin(), first_part.end(), IsDigit);
}

}  // namespace

std::string StepFolder(const StepName& name) {
  char text[64];
  std::snprintf(text, sizeof(text), "step-%010" PRIu64 "-i%08" PRIu64, name.step, name.incarnation);
  return text;
}

std::optional<StepName> ParseStepFolder(std::string_view folder) {
  if (!folder.starts_with("step-")) return std::nullopt;
  const size_t dash = folder.find("-i", 5);
  if (dash == std::string_view::npos) return std::nullopt;
  const std::optional<uint64_t> step = ParseNumber(folder.substr(5, dash - 5));
  const std::optional<uint64_t> incarnation = ParseNumber(folder.substr(dash + 2));
  if (!step || !incarnation || *incarnation >= kIncarnationMax) return std::nullopt;
  const StepName name{*step, *incarnation};
  if (StepFolder(name) != folder) return std::nullopt;
  return name;
}

std::string RankFileName(uint32_t rank) {
  char text[64];
  std::snprintf(text, sizeof(text), "rank-%05" PRIu32 ".safetensors", rank);
  return text;
}

std::string RankFolderPath(uint32_t rank, std::string_view name) {
  char text[32];
  std::snprintf(text, sizeof(text), "rank-%05" PRIu32 "/", rank);
  return std::string(text).append(name);
}

std::string_view ObjectNameOfPath(uint32_t rank, std::string_view path) {
  const std::string folder = RankFolderPath(rank, "");
  if (path.starts_with(folder)) path.remove_prefix(folder.size());
  return path;
}

bool IsReservedName(std::string_view name) {
  if (IsRankName(name.substr(0, name.find('/')))) return true;
  for (size_t begin = 0; begin <= name.size();) {
    const std::string_view part = name.substr(begin, name.find('/', begin) - begin);
    if (part.starts_with("ropeteam-") || part.find(".ropeteam") != std::string_view::npos) return true;
    begin += part.size() + 1;
  }
  return false;
}

bool IsFileName(std::string_view name) {
  constexpr std::array<std::string_view, 4> kEndings = {".distcp", ".safetensors", ".pt", ".json"};
  const std::string_view last = name.substr(name.rfind('/') + 1);  // npos + 1 is 0: the whole name
  const bool named =
      last == ".metadata" || std::any_of(kEndings.begin(), kEndings.end(),
                                         [&](std::string_view ending) { return last.ends_with(ending); });
  return named && CheckFileName(name).ok() && IsUtf8(name) && !IsReservedName(name);
}

}  // namespace ropeteam::storage
