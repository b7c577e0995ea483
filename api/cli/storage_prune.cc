// SPDX-License-Identifier: Apache-2.0
//
// ropeteam prune URL: deletes steps that no rule keeps (storage/steps/remove.h says how).

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <ctime>

#include "api/cli/commands.h"
#include "api/cli/storage_progress.h"
#include "api/cli/storage_steps.h"
#include "core/base/sizes.h"
#include "storage/audit/audit.h"
#include "storage/retention/retention.h"
#include "storage/steps/remove.h"

namespace ropeteam::cli {
namespace {

constexpr char kHelp[] =
    "ropeteam prune URL --dry-run|--yes RULES: removes the steps of a job that no rule keeps. What no rule "
    "can remove:\n"
    "the newest complete step and what is newer, and folders whose manifest is not a good one of this job "
    "and step.\n"
    "Run it when no job is restoring from an older step.\n"
    "  --dry-run                say what would be removed, and remove nothing\n"
    "  --yes                    remove it\n"
    "  --keep-on-storage N      keep the N newest complete steps\n"
    "  --keep-every M           keep complete steps whose number is a multiple of M\n"
    "  --keep-best KEY:max|min  keep the one whose user metadata have the largest or smallest number KEY\n"
    "  --keep-within DURATION   keep complete steps written less than so long ago: 90s, 30m, 12h, 7d, 2w\n"
    "  --audit-log FILE         append a JSON line there for each file that is removed\n"
    "  --unfinished             remove also folders without a manifest that were left behind: a later step "
    "was finished\n"
    "                           more than a day ago\n";

// A step that is being written has no manifest yet. No upload takes a day, and a job that is interrupted for
// longer continues with a new step.
constexpr uint64_t kUnfinishedSeconds = 86400;

struct Removal {
  StepReport report;
  uint64_t others = 0;  // files in the folder that are not the step's
};

class Prune {
 public:
  Prune(const StoragePlace& place, const StorageOptions& options, std::string job)
      : place_(place), options_(options), job_(std::move(job)) {}

  Status Run() {
    const Result<std::vector<storage::StepPlace>> steps = StepsOf(place_, job_);
    if (!steps.ok()) return steps.status();
    Result<std::vector<StepReport>> reports = ReportSteps(place_, job_, *steps);
    if (!reports.ok()) return reports.status();
    ROPETEAM_RETURN_IF_ERROR(MakePlan(&*reports));
    if (options_.dry_run) {
      Print("would be removed", removals_.size());
      return OkStatus();
    }
    size_t removed = 0;
    const Status status = RemoveAll(&removed);
    Print("removed", removed);
    return status;
  }

 private:
  Status MakePlan(std::vector<StepReport>* newest_first) {
    const auto now_s = static_cast<uint64_t>(std::time(nullptr));
    std::vector<storage::RetainedStep> steps;
    bool has_value = !options_.rules.keep_best.has_value();
    for (const StepReport& report : *newest_first) {
      if (!HasManifest(report)) continue;
      steps.push_back({report.name, report.head.time_s, report.head.user,
                       report.state == StepState::kComplete, /*being_read=*/false});
      has_value = has_value || (steps.back().good &&
                                storage::MetadataNumber(report.head.user, options_.rules.keep_best->key));
    }
    // This is probably a typing error, which would remove the step that should be kept.
    if (!has_value)
      return Error(
          Code::kInvalidArgument,
          "--keep-best: no complete step of job %s has a number \"%s\" in its user metadata; nothing was "
          "removed",
          job_.c_str(), options_.rules.keep_best->key.c_str());
    const std::vector<unsigned> kept = storage::ChooseKept(options_.rules, steps, now_s);
    size_t known = 0;
    // Whether a later step was finished more than a day ago. Steps are written one after the other, so then
    // nobody writes this one any more.
    bool left_behind = false;
    for (StepReport& report : *newest_first) {
      const bool finished = HasManifest(report);
      const bool old = finished && report.head.time_s + kUnfinishedSeconds < now_s;
      const std::string why = WhyKept(report, finished ? kept[known++] : storage::kKeptNot, left_behind);
      left_behind = left_behind || old;
      if (why.empty()) {
        removals_.push_back({std::move(report), 0});
        continue;
      }
      std::printf("stays    %s  %s\n", storage::StepPath(job_, report.name).c_str(), why.c_str());
      ++kept_;
    }
    std::reverse(removals_.begin(), removals_.end());
    return OkStatus();
  }

  // Empty: the step is removed.
  std::string WhyKept(const StepReport& report, unsigned kept, bool left_behind) const {
    if (HasManifest(report)) return storage::KeptText(kept);
    if (report.state == StepState::kUnreadable) return report.problem;
    if (!left_behind) return "unfinished, it may be being written";
    return options_.unfinished ? "" : "unfinished for more than a day, --unfinished removes it";
  }

  Status RemoveAll(size_t* removed) {
    uint64_t bytes = 0;
    for (const Removal& removal : removals_) bytes += removal.report.bytes;
    Progress progress("prune " + job_, bytes);
    for (Removal& removal : removals_) {
      ROPETEAM_RETURN_IF_ERROR(Remove(&removal));
      progress.Add(removal.report.bytes);
      ++*removed;
    }
    return OkStatus();
  }

  Status Remove(Removal* removal) {
    const Result<uint64_t> others = storage::RemoveStep(place_.sink.get(), job_, removal->report.name,
                                                        HasManifest(removal->report), place_.timeout);
    // The manifest was deleted meanwhile: another process removes the step.
    if (others.status().code() == Code::kNotFound) return OkStatus();
    if (others.ok()) removal->others = *others;
    return others.status();
  }

  // Prints the first `count` removals.
  void Print(const char* what, size_t count) const {
    uint64_t files = 0;
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) {
      const Removal& removal = removals_[i];
      std::printf("%s %s  %" PRIu64 " files, %s%s\n", options_.dry_run ? "would go" : "removed ",
                  storage::StepPath(job_, removal.report.name).c_str(), removal.report.files,
                  FormatSize(removal.report.bytes).c_str(),
                  removal.report.state == StepState::kUnfinished ? ", unfinished" : "");
      if (removal.others != 0)
        std::printf("         %" PRIu64 " files in it are not the step's and stay\n", removal.others);
      files += removal.report.files;
      bytes += removal.report.bytes;
    }
    std::printf("job %s: %zu steps %s, %" PRIu64 " files, %s; %" PRIu64 " stay\n", job_.c_str(), count, what,
                files, FormatSize(bytes).c_str(), kept_);
  }

  const StoragePlace& place_;
  const StorageOptions& options_;
  const std::string job_;
  std::vector<Removal> removals_;  // oldest first
  uint64_t kept_ = 0;
};

Status RunPrune(const StorageOptions& options) {
  Result<StoragePlace> place = OpenStorage(options.url, options.timeout);
  if (!place.ok()) return place.status();
  const Result<std::string> job = ChooseJob(*place, options.job);
  if (!job.ok()) return job.status();
  if (!options.audit_log.empty() && options.yes) {
    Result<std::shared_ptr<storage::AuditLog>> log =
        storage::AuditLog::Open(options.audit_log, *job, "prune");
    if (!log.ok()) return log.status();
    place->sink = storage::AuditedSink(std::move(place->sink), std::move(*log), "retention");
  }
  return Prune(*place, options, *job).Run();
}

}  // namespace

int StoragePruneCommand(const std::vector<std::string>& arguments) {
  const Result<StorageOptions> options = ParseStorageOptions(arguments, StorageCommand::kPrune);
  int code = 0;
  if (DoneWithOptions("prune", options, kHelp, &code)) return code;
  const Status status = RunPrune(*options);
  return status.ok() ? 0 : Fail("prune", status);
}

}  // namespace ropeteam::cli
