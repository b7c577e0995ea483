// SPDX-License-Identifier: Apache-2.0
//
// The names on storage: a step's folder, its manifest, its ranks' files, and which of a program's
// objects become files under their own names. docs/format-on-storage.md is the page for users. Pure functions.

#ifndef ROPETEAM_STORAGE_FORMAT_NAMES_H_
#define ROPETEAM_STORAGE_FORMAT_NAMES_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace ropeteam::storage {

// The commit marker: written last, deleted first. A folder without it is not a step.
inline constexpr std::string_view kManifestName = "ropeteam-manifest.json";
// In a step's folder: it is damaged, and why.
inline constexpr std::string_view kDamagedName = "ropeteam-damaged.txt";
// In a step's folder: how often it was restored, and whether it is quarantined.
inline constexpr std::string_view kRestoredName = "ropeteam-restored.txt";
// Beside a job's steps: which allocation writes there (storage/lock).
inline constexpr std::string_view kLockFolder = "ropeteam-lock";

struct StepName {
  uint64_t step = 0;
  uint64_t incarnation = 0;
  friend bool operator==(const StepName&, const StepName&) = default;
};
// "step-0000000100-i00000003": 10 digits and 8, more where the number has more. Names sort as steps do within an
// incarnation, up to step 9,999,999,999.
std::string StepFolder(const StepName& name);
// Nothing unless StepFolder() prints exactly this, of an incarnation below kIncarnationMax.
std::optional<StepName> ParseStepFolder(std::string_view folder);

// "rank-00003.safetensors": the objects of a rank that are not files. 5 digits, more where the rank has more.
std::string RankFileName(uint32_t rank);
// "rank-00003/NAME": where a rank's file goes when a lower rank has a file of that name with other bytes.
std::string RankFolderPath(uint32_t rank, std::string_view name);
// The name of the object that is this file of `rank`: the inverse of RankFolderPath().
std::string_view ObjectNameOfPath(uint32_t rank, std::string_view path);

// Whether an object of this name is a file by its name: the last part is ".metadata" or ends in .distcp, .safetensors,
// .pt or .json, and the name is valid UTF-8, passes CheckFileName() and is not reserved. Reserved are parts that begin with
// "ropeteam-" or have ".ropeteam" in them (the posix sink's unfinished files do), and names whose first part is "rank-" and
// five digits or more, with or without ".safetensors".
bool IsFileName(std::string_view name);
// The second half of that: a name that a program's file can never have.
bool IsReservedName(std::string_view name);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_FORMAT_NAMES_H_
