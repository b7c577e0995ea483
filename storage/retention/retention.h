// SPDX-License-Identifier: Apache-2.0
//
// Decides which of a job's steps on storage stay and which may be deleted. Pure functions: the steps and the time are
// arguments. Used by `ropeteam prune` and by the daemon that deletes for a running job.
//
// A step stays if any rule keeps it. Independent of the rules, these stay: all steps if there is no rule; the newest
// good step; steps newer than it; a step that is being read. So a wrong rule never deletes the last step that can be
// restored.
//
// Newest first means: by incarnation, then by step number, as everywhere in Ropeteam. The clock is used only for
// keep_within.

#ifndef ROPETEAM_STORAGE_RETENTION_RETENTION_H_
#define ROPETEAM_STORAGE_RETENTION_RETENTION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "storage/format/names.h"

namespace ropeteam::storage {

inline constexpr uint64_t kKeepNewestMax = 1'000'000;  // as many steps as a job's listing has room for
inline constexpr uint64_t kKeepWithinSecondsMax = 3'153'600'000;  // 100 years: beyond it is a typing error
inline constexpr size_t kMetadataKeyBytesMax = 255;

struct KeepBest {
  std::string key;   // of a number at the top level of the user metadata
  bool max = false;  // the largest value is the best; otherwise the smallest
  friend bool operator==(const KeepBest&, const KeepBest&) = default;
};

struct RetentionRules {
  uint64_t keep_newest = 0;           // this many of the newest good steps; 0: no such rule
  uint64_t keep_every = 0;            // good steps whose number is a multiple of this; 0: no such rule
  std::optional<KeepBest> keep_best;  // the good step with the best value; of equal ones the newest
  // Good steps written less than this long ago, or in the future; 0: no such rule.
  uint64_t keep_within_s = 0;
  bool Any() const { return keep_newest != 0 || keep_every != 0 || keep_best || keep_within_s != 0; }
};
// The flags for these rules: "--keep-on-storage 3 --keep-within 3600s"; "" if there is none.
std::string FlagsOf(const RetentionRules& rules);

// "loss:min", "accuracy:max". The last colon counts: a key may have colons. kInvalidArgument: anything else.
Result<KeepBest> ParseKeepBest(std::string_view text);
// "90s", "30m", "12h", "7d", "2w", in seconds. kInvalidArgument: no unit, not a whole number from 1 on, over
// kKeepWithinSecondsMax.
Result<uint64_t> ParseDuration(std::string_view text);

struct RetainedStep {
  StepName name;
  uint64_t time_s = 0;      // StepHead::time_s
  std::string user = "{}";  // StepHead::user
  bool good = true;         // its manifest is valid, and every file exists with the right size
  bool being_read = false;
};

// The reasons why a step stays; bits.
enum : unsigned {
  kKeptNot = 0,
  kKeptNewest = 1,
  kKeptEvery = 2,
  kKeptBest = 4,
  kKeptWithin = 8,
  kKeptLastGood = 16,   // the newest good one, or newer than it: always
  kKeptBeingRead = 32,  // always
  kKeptNoRule = 64,     // no rule was given
};
// "newest, best"; "" of kKeptNot.
std::string KeptText(unsigned kept);

// Why each of `steps` stays; kKeptNot: it may be deleted. `steps` may be in any order, but must have each step once.
std::vector<unsigned> ChooseKept(const RetentionRules& rules, const std::vector<RetainedStep>& steps,
                                 uint64_t now_s);

// The number under `key` in the user metadata; empty if it is missing or not a number, or if `user` is not JSON.
std::optional<double> MetadataNumber(const std::string& user, const std::string& key);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_RETENTION_RETENTION_H_
