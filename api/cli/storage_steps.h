// SPDX-License-Identifier: Apache-2.0
//
// What the commands on storage share: opening a URL, choosing job and step, the state of a step, parallel work.

#ifndef ROPETEAM_API_CLI_STORAGE_STEPS_H_
#define ROPETEAM_API_CLI_STORAGE_STEPS_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "api/cli/storage_options.h"
#include "api/cli/text.h"
#include "core/base/status.h"
#include "storage/parallel.h"
#include "storage/sink.h"
#include "storage/steps/steps.h"

namespace ropeteam::cli {

using storage::kStorageThreads;
using storage::RunParallel;
// A file is read in ranges of this size. With kStorageThreads of them 64 MiB are in memory.
inline constexpr uint64_t kStorageRangeBytes = 8ull << 20;

// Memory for one range of a file, aligned as O_DIRECT wants it.
class RangeBuffer {
 public:
  explicit RangeBuffer(uint64_t bytes);
  std::byte* data() const { return data_.get(); }

 private:
  struct Free {
    void operator()(std::byte* data) const { std::free(data); }
  };
  std::unique_ptr<std::byte[], Free> data_;
};

// A URL that is open, and how its steps are looked for.
struct StoragePlace {
  std::shared_ptr<storage::Sink> sink;
  std::string url;
  std::chrono::seconds timeout{0};
  storage::Deadline CallDeadline() const { return std::chrono::steady_clock::now() + timeout; }
};
Result<StoragePlace> OpenStorage(const std::string& url, std::chrono::seconds timeout);
// The same for a place to write to: makes the directory if it is missing.
Result<StoragePlace> OpenDestination(const std::string& url, std::chrono::seconds timeout);

// The job that was given, or the only one there. kNotFound: there is none; kInvalidArgument: several, which are named.
Result<std::string> ChooseJob(const StoragePlace& place, const std::string& given);
// Of this job, newest first. kNotFound: nothing lies there.
Result<std::vector<storage::StepPlace>> StepsOf(const StoragePlace& place, const std::string& job);
// `text`: a number, of which the latest incarnation is taken; a folder's name; empty or "latest" for the newest. Folders without a
// manifest are not steps. kNotFound: there is no such step; kInvalidArgument: `text` is neither.
Result<storage::StepName> ChooseStep(const std::vector<storage::StepPlace>& steps, const std::string& job,
                                     const std::string& text);

// ChooseJob() and ChooseStep() in one.
struct ChosenStep {
  std::string job;
  storage::StepName name;
};
Result<ChosenStep> FindStep(const StoragePlace& place, const std::string& job, const std::string& text);

enum class StepState {
  kComplete,     // the manifest is good, and each of its files is there in its size
  kQuarantined,  // the same, and daemons offer an older one
  kDamaged,      // the manifest is good, and the step is marked: a reader found damage in it
  kIncomplete,   // the manifest is good, a file is missing or has another size
  kUnreadable,   // the manifest is damaged, of another job or step, or of a newer version
  kUnfinished,   // there is no manifest: a step being written, one that was given up, or what a deletion left
};
const char* StateText(StepState state);

struct StepReport {
  storage::StepName name;
  StepState state = StepState::kUnfinished;
  std::string problem;     // one line; empty where there is none
  storage::StepHead head;  // where the manifest is good
  // What a good manifest says, what lies there of kUnfinished. Without the manifest itself.
  uint64_t files = 0;
  uint64_t bytes = 0;
};
// Reads manifest and file sizes. Only a store that cannot be asked is an error.
inline bool HasManifest(const StepReport& step) {
  return step.state != StepState::kUnreadable && step.state != StepState::kUnfinished;
}
Result<StepReport> ReportStep(const StoragePlace& place, const std::string& job,
                              const storage::StepPlace& step);
// Of all `steps`, in parallel, with progress.
Result<std::vector<StepReport>> ReportSteps(const StoragePlace& place, const std::string& job,
                                            const std::vector<storage::StepPlace>& steps);

// The files of a step by their paths, each once: ranks share some. Fails as ParseManifestOf().
Result<std::vector<storage::FileEntry>> FilesOf(const std::string& job, const storage::StepName& name,
                                                const std::string& manifest);

// "step 100 incarnation 3 of job train".
std::string StepText(const std::string& job, const storage::StepName& name);

// As of text.h, with the options of all commands on storage behind `help`.
bool DoneWithOptions(const char* command, const Result<StorageOptions>& options, const char* help, int* code);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_STORAGE_STEPS_H_
