// SPDX-License-Identifier: Apache-2.0
//
// The steps below a sink's URL: JOB/step-…-i…/ with files and a manifest. Finds jobs and steps, reads a
// manifest, and compares it with the files that are there. Nothing here reads a file's data, writes or deletes.
//
// All calls block; each call of the sink has `call_timeout`, and what these calls return is the sink's status unless
// said otherwise. They keep no state: any thread, many at a time. `job` must pass CheckFileName(); the sink refuses it
// otherwise. Or it is empty: the sink's URL is a job's folder, and its steps are taken as they are, whatever the job's name.

#ifndef ROPETEAM_STORAGE_STEPS_STEPS_H_
#define ROPETEAM_STORAGE_STEPS_STEPS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/base/status.h"
#include "storage/format/manifest.h"
#include "storage/format/names.h"
#include "storage/sink.h"

namespace ropeteam::storage {

// Steps of one job. One every ten minutes for 19 years; a reader holds 24 MB of them.
inline constexpr size_t kStepsListedMax = 1'000'000;
// Files of one step: those of the largest job with 4 files for each rank, the manifest, the mark and the note. Without a
// bound a damaged or hostile folder would fill the reader's memory.
inline constexpr size_t kStepFilesListedMax = 4 * kStepRanksMax + 3;
// Folders within a step's folder, which a program's file names make.
inline constexpr int kFolderDepthMax = 32;
// A job's name may have slashes in it. Jobs whose names have more parts than this are found by name only.
inline constexpr int kJobPartsMax = 4;
// Folders that FindJobs() looks into. A URL with more folders is not one of Ropeteam's.
inline constexpr size_t kFoldersSearchedMax = 10'000;

// "URL[@STEP]": a job's folder and one of its steps, for those who begin from another job's.
struct StepSource {
  std::string url;
  std::optional<uint64_t> step;  // by its number; nothing: the newest
};
// What is behind the last "@" is a step where it is a whole number, else part of the URL. kInvalidArgument: ParseUrl() refuses
// the URL, or the number is over 2^64 - 1.
Result<StepSource> ParseStepSource(const std::string& text);

// "JOB/step-0000000100-i00000003".
std::string StepPath(const std::string& job, const StepName& name);

// "JOB/step-0000000100-i00000003/ropeteam-manifest.json".
std::string ManifestPath(const std::string& job, const StepName& name);

// The folders of this job that are named as steps are, in no particular order. kCorrupt: more than kStepsListedMax.
Result<std::vector<StepName>> ListStepNames(Sink* sink, const std::string& job,
                                            std::chrono::seconds call_timeout);
struct StepPlace {
  StepName name;
  bool has_manifest = false;  // without one this is not a step (yet, or any more)
};
// The same, with a look into each.
Result<std::vector<StepPlace>> ListSteps(Sink* sink, const std::string& job,
                                         std::chrono::seconds call_timeout);

// Names of the jobs that have at least one folder named as a step is, sorted. kInvalidArgument: the URL itself has such
// folders, so it is a job's and not the one above; more than kFoldersSearchedMax folders. A folder that cannot
// be listed, for example for want of permission, is passed over with a warning in the log.
Result<std::vector<std::string>> FindJobs(Sink* sink, std::chrono::seconds call_timeout);

// The manifest's text, not yet parsed. kNotFound: there is none. kCorrupt: it is empty, or over kStepManifestBytesMax.
Result<std::string> ReadManifestText(Sink* sink, const std::string& job, const StepName& name,
                                     std::chrono::seconds call_timeout);

// ParseStepManifest(), and kCorrupt where the manifest is of another job (unless `job` is empty) or step than the folder
// that it lies in.
Result<StepHead> ParseManifestOf(const std::string& job, const StepName& name, std::string_view text,
                                 const std::function<Status(RankEntry&&)>& each);

// Every file in the step's folder and the folders in it, with its size; names below that folder, sorted, the manifest
// among them. kCorrupt: more than kStepFilesListedMax.
using FileSizes = std::vector<std::pair<std::string, uint64_t>>;
Result<FileSizes> ListFileSizes(Sink* sink, const std::string& job, const StepName& name,
                                std::chrono::seconds call_timeout);

// kCorrupt: `folder` (for the message) lacks this file, or its size is not the manifest's.
Status CheckFileSize(const std::string& folder, const FileSizes& sizes, const FileEntry& file);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_STEPS_STEPS_H_
