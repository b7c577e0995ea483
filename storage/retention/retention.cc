// SPDX-License-Identifier: Apache-2.0
#include "storage/retention/retention.h"

#include <algorithm>
#include <charconv>
#include <cinttypes>
#include <nlohmann/json.hpp>
#include <tuple>

namespace ropeteam::storage {
namespace {

bool Newer(const StepName& a, const StepName& b) {
  return std::tie(a.incarnation, a.step) > std::tie(b.incarnation, b.step);
}

// The index in `steps` of the good step with the best value.
std::optional<size_t> FindBest(const KeepBest& rule, const std::vector<RetainedStep>& steps,
                               const std::vector<size_t>& newest_first) {
  std::optional<size_t> best;
  double best_value = 0;
  for (const size_t i : newest_first) {
    if (!steps[i].good) continue;
    const std::optional<double> value = MetadataNumber(steps[i].user, rule.key);
    if (!value) continue;
    if (best && !(rule.max ? *value > best_value : *value < best_value)) continue;
    best = i;
    best_value = *value;
  }
  return best;
}

}  // namespace

std::string FlagsOf(const RetentionRules& rules) {
  std::string flags;
  const auto add = [&flags](const char* flag, const std::string& value) {
    flags += std::string(flags.empty() ? "" : " ") + flag + " " + value;
  };
  if (rules.keep_newest != 0) add("--keep-on-storage", std::to_string(rules.keep_newest));
  if (rules.keep_every != 0) add("--keep-every", std::to_string(rules.keep_every));
  if (rules.keep_best) add("--keep-best", rules.keep_best->key + (rules.keep_best->max ? ":max" : ":min"));
  if (rules.keep_within_s != 0) add("--keep-within", std::to_string(rules.keep_within_s) + "s");
  return flags;
}

Result<KeepBest> ParseKeepBest(std::string_view text) {
  const size_t colon = text.rfind(':');
  const std::string_view side = colon == std::string_view::npos ? "" : text.substr(colon + 1);
  if ((side != "max" && side != "min") || colon == 0 || colon > kMetadataKeyBytesMax)
    return Error(Code::kInvalidArgument,
                 "\"%.80s\" is not KEY:max or KEY:min, with a KEY of 1 to %zu bytes of the user metadata",
                 std::string(text).c_str(), kMetadataKeyBytesMax);
  return KeepBest{std::string(text.substr(0, colon)), side == "max"};
}

Result<uint64_t> ParseDuration(std::string_view text) {
  constexpr struct {
    char unit;
    uint64_t seconds;
  } kUnits[] = {{'s', 1}, {'m', 60}, {'h', 3600}, {'d', 86400}, {'w', 604800}};
  uint64_t count = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, count);
  for (const auto& [unit, seconds] : kUnits)
    if (error == std::errc() && end - stop == 1 && *stop == unit && count != 0 &&
        count <= kKeepWithinSecondsMax / seconds)
      return count * seconds;
  return Error(Code::kInvalidArgument,
               "\"%.80s\" is not a duration such as 90s, 30m, 12h, 7d or 2w, up to %" PRIu64 "s",
               std::string(text).c_str(), kKeepWithinSecondsMax);
}

std::string KeptText(unsigned kept) {
  constexpr struct {
    unsigned bit;
    const char* text;
  } kTexts[] = {{kKeptLastGood, "last good"}, {kKeptNewest, "newest"}, {kKeptEvery, "every"},
                {kKeptBest, "best"},          {kKeptWithin, "within"}, {kKeptBeingRead, "being read"},
                {kKeptNoRule, "no rule"}};
  std::string text;
  for (const auto& [bit, word] : kTexts)
    if ((kept & bit) != 0) text += (text.empty() ? "" : ", ") + std::string(word);
  return text;
}

std::vector<unsigned> ChooseKept(const RetentionRules& rules, const std::vector<RetainedStep>& steps,
                                 uint64_t now_s) {
  std::vector<unsigned> kept(steps.size(), rules.Any() ? kKeptNot : kKeptNoRule);
  std::vector<size_t> newest_first(steps.size());
  for (size_t i = 0; i < steps.size(); ++i) newest_first[i] = i;
  std::sort(newest_first.begin(), newest_first.end(),
            [&](size_t a, size_t b) { return Newer(steps[a].name, steps[b].name); });
  uint64_t good_before = 0;  // good steps newer than this one
  for (const size_t i : newest_first) {
    const RetainedStep& step = steps[i];
    if (step.being_read) kept[i] |= kKeptBeingRead;
    if (good_before == 0) kept[i] |= kKeptLastGood;
    if (!step.good) continue;
    if (good_before < rules.keep_newest) kept[i] |= kKeptNewest;
    if (rules.keep_every != 0 && step.name.step % rules.keep_every == 0) kept[i] |= kKeptEvery;
    // If the clock of this machine or of the writer is wrong, the age may be unknown. Then the step is kept.
    if (rules.keep_within_s != 0 && (step.time_s > now_s || now_s - step.time_s < rules.keep_within_s))
      kept[i] |= kKeptWithin;
    ++good_before;
  }
  if (rules.keep_best) {
    const std::optional<size_t> best = FindBest(*rules.keep_best, steps, newest_first);
    if (best) kept[*best] |= kKeptBest;
  }
  return kept;
}

std::optional<double> MetadataNumber(const std::string& user, const std::string& key) {
  const nlohmann::json json = nlohmann::json::parse(user, nullptr, false);
  if (!json.is_object()) return std::nullopt;
  const auto found = json.find(key);
  if (found == json.end() || !found->is_number()) return std::nullopt;
  return found->get<double>();
}

}  // namespace ropeteam::storage
