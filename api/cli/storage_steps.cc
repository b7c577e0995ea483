// SPDX-License-Identifier: Apache-2.0
#include "api/cli/storage_steps.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <system_error>
#include <tuple>
#include <unordered_set>

#include "api/cli/storage_progress.h"
#include "core/base/check.h"
#include "storage/sinks.h"
#include "storage/steps/damaged.h"
#include "storage/url.h"

namespace ropeteam::cli {
namespace {

constexpr size_t kAlignment = 4096;  // enough for O_DIRECT on every file system in use
// Each thread reads one manifest of up to 64 MiB.
constexpr size_t kReportThreads = 4;
constexpr size_t kJobsNamedMax = 20;

constexpr char kCommonHelp[] =
    "  --job JOB          only steps of this job [ls: of all jobs; else of the only one below the URL]\n"
    "  --timeout SECONDS  for one request to the store, with its retries [60]\n"
    "\n"
    "URL: a directory, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX, as ropeteamd's --storage has it.\n"
    "STEP: a number, which means its latest incarnation, or a folder's name "
    "(step-0000000100-i00000003).\n";

}  // namespace

RangeBuffer::RangeBuffer(uint64_t bytes)
    : data_(static_cast<std::byte*>(std::aligned_alloc(
          kAlignment, (std::max<uint64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment))) {
  ROPETEAM_CHECK(data_ != nullptr);
}

Result<StoragePlace> OpenStorage(const std::string& url, std::chrono::seconds timeout) {
  Result<std::unique_ptr<storage::Sink>> sink = storage::OpenSink(url);
  if (!sink.ok()) return sink.status();
  return StoragePlace{std::move(*sink), url, timeout};
}

Result<StoragePlace> OpenDestination(const std::string& url, std::chrono::seconds timeout) {
  Result<StoragePlace> place = OpenStorage(url, timeout);
  const Result<storage::Url> parsed = storage::ParseUrl(url);
  if (place.status().code() != Code::kNotFound || !parsed.ok()) return place;
  std::error_code error;
  std::filesystem::create_directories(parsed->path, error);
  if (error) return ErrnoError(error.value(), "mkdir %s", parsed->path.c_str());
  return OpenStorage(url, timeout);
}

Result<std::string> ChooseJob(const StoragePlace& place, const std::string& given) {
  if (!given.empty()) return given;
  Result<std::vector<std::string>> jobs = storage::FindJobs(place.sink.get(), place.timeout);
  if (!jobs.ok()) return jobs.status();
  if (jobs->empty()) return Error(Code::kNotFound, "%s has no steps below it", place.url.c_str());
  if (jobs->size() == 1) return jobs->front();
  std::string names;
  for (size_t i = 0; i < jobs->size() && i < kJobsNamedMax; ++i) names += (i == 0 ? "" : ", ") + (*jobs)[i];
  if (jobs->size() > kJobsNamedMax) names += ", …";
  return Error(Code::kInvalidArgument, "%s has steps of %zu jobs, say which with --job: %s",
               place.url.c_str(), jobs->size(), names.c_str());
}

Result<std::vector<storage::StepPlace>> StepsOf(const StoragePlace& place, const std::string& job) {
  Result<std::vector<storage::StepPlace>> steps = storage::ListSteps(place.sink.get(), job, place.timeout);
  if (!steps.ok()) return steps;
  if (steps->empty())
    return Error(Code::kNotFound, "%s has no step of job %s", place.url.c_str(), job.c_str());
  std::sort(steps->begin(), steps->end(), [](const storage::StepPlace& a, const storage::StepPlace& b) {
    return std::tie(a.name.incarnation, a.name.step) > std::tie(b.name.incarnation, b.name.step);
  });
  return steps;
}

Result<storage::StepName> ChooseStep(const std::vector<storage::StepPlace>& steps, const std::string& job,
                                     const std::string& text) {
  const std::optional<storage::StepName> folder = storage::ParseStepFolder(text);
  uint64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  const bool newest = text.empty() || text == kLatestStep;
  if (!newest && !folder && (error != std::errc() || end != text.data() + text.size()))
    return Error(Code::kInvalidArgument,
                 "step \"%.80s\" is neither a whole number nor a folder's name such as %s", text.c_str(),
                 storage::StepFolder({100, 3}).c_str());
  bool unfinished = false;
  for (const storage::StepPlace& step : steps) {
    if (!newest && !(folder ? step.name == *folder : step.name.step == number)) continue;
    if (step.has_manifest) return step.name;
    unfinished = true;
  }
  return Error(Code::kNotFound, "job %s has no step%s%s%s", job.c_str(), text.empty() ? "" : " ",
               text.c_str(), unfinished ? " that is finished: no manifest lies in its folder" : "");
}

Result<ChosenStep> FindStep(const StoragePlace& place, const std::string& job, const std::string& text) {
  Result<std::string> chosen = ChooseJob(place, job);
  if (!chosen.ok()) return chosen.status();
  const Result<std::vector<storage::StepPlace>> steps = StepsOf(place, *chosen);
  if (!steps.ok()) return steps.status();
  const Result<storage::StepName> name = ChooseStep(*steps, *chosen, text);
  if (!name.ok()) return name.status();
  return ChosenStep{std::move(*chosen), *name};
}

const char* StateText(StepState state) {
  switch (state) {
    case StepState::kComplete:
      return "complete";
    case StepState::kQuarantined:
      return "quarantined";
    case StepState::kDamaged:
      return "damaged";
    case StepState::kIncomplete:
      return "incomplete";
    case StepState::kUnreadable:
      return "unreadable";
    case StepState::kUnfinished:
      return "unfinished";
  }
  return "";
}

Result<StepReport> ReportStep(const StoragePlace& place, const std::string& job,
                              const storage::StepPlace& step) {
  StepReport report;
  report.name = step.name;
  const Result<storage::FileSizes> sizes =
      storage::ListFileSizes(place.sink.get(), job, step.name, place.timeout);
  if (!sizes.ok() && sizes.status().code() != Code::kCorrupt) return sizes.status();
  if (!sizes.ok()) {
    report.state = StepState::kUnreadable;
    report.problem = sizes.status().message();
    return report;
  }
  const Result<std::string> text =
      step.has_manifest ? storage::ReadManifestText(place.sink.get(), job, step.name, place.timeout)
                        : Result<std::string>(Error(Code::kNotFound, "no manifest"));
  if (!text.ok() && text.status().code() == Code::kNotFound) {
    report.files = sizes->size();
    for (const auto& [name, bytes] : *sizes) report.bytes += bytes;
    return report;
  }
  if (!text.ok() && text.status().code() != Code::kCorrupt) return text.status();
  const std::string folder = storage::StepPath(job, step.name);
  std::unordered_set<std::string> shared;
  uint64_t bad = 0;
  const auto add = [&](storage::RankEntry&& rank) {
    for (const storage::FileEntry& file : rank.files) {
      if (file.header_bytes == 0 && !shared.insert(file.path).second) continue;
      ++report.files;
      report.bytes += file.bytes;
      const Status status = storage::CheckFileSize(folder, *sizes, file);
      if (!status.ok() && bad++ == 0) report.problem = status.message();
    }
    return OkStatus();
  };
  Result<storage::StepHead> head = text.ok() ? storage::ParseManifestOf(job, step.name, *text, add)
                                             : Result<storage::StepHead>(text.status());
  if (!head.ok()) {
    report.state = StepState::kUnreadable;
    report.problem = head.status().message();
    report.files = report.bytes = 0;
    return report;
  }
  report.state = bad == 0 ? StepState::kComplete : StepState::kIncomplete;
  if (bad > 1) report.problem += ", and " + std::to_string(bad - 1) + " more files are wrong";
  const Result<std::string> damage =
      storage::DamageOf(place.sink.get(), job, step.name, *sizes, place.timeout);
  if (!damage.ok()) return damage.status();
  if (!damage->empty()) {
    report.state = StepState::kDamaged;
    report.problem = "marked as damaged: " + *damage;
  }
  const Result<storage::StepRestores> noted =
      storage::RestoresOf(place.sink.get(), job, step.name, *sizes, place.timeout);
  if (!noted.ok()) return noted.status();
  if (noted->quarantined && report.state == StepState::kComplete) report.state = StepState::kQuarantined;
  report.head = std::move(*head);
  return report;
}

Result<std::vector<StepReport>> ReportSteps(const StoragePlace& place, const std::string& job,
                                            const std::vector<storage::StepPlace>& steps) {
  std::vector<StepReport> reports(steps.size());
  Progress progress("read " + job, steps.size(), "steps");
  const Status status = RunParallel(steps.size(), kReportThreads, [&](size_t i, size_t) {
    Result<StepReport> report = ReportStep(place, job, steps[i]);
    if (!report.ok()) return report.status();
    reports[i] = std::move(*report);
    progress.Add(1);
    return OkStatus();
  });
  if (!status.ok()) return status;
  return reports;
}

Result<std::vector<storage::FileEntry>> FilesOf(const std::string& job, const storage::StepName& name,
                                                const std::string& manifest) {
  std::vector<storage::FileEntry> files;
  std::unordered_set<std::string> shared;
  const Result<storage::StepHead> head =
      storage::ParseManifestOf(job, name, manifest, [&](storage::RankEntry&& rank) {
        for (storage::FileEntry& file : rank.files)
          if (file.header_bytes != 0 || shared.insert(file.path).second) files.push_back(std::move(file));
        return OkStatus();
      });
  if (!head.ok())
    return Error(head.status().code(), "%s/%s: %s", storage::StepPath(job, name).c_str(),
                 std::string(storage::kManifestName).c_str(), head.status().message().c_str());
  return files;
}

std::string StepText(const std::string& job, const storage::StepName& name) {
  return "step " + std::to_string(name.step) + " incarnation " + std::to_string(name.incarnation) +
         " of job " + job;
}

bool DoneWithOptions(const char* command, const Result<StorageOptions>& options, const char* help,
                     int* code) {
  return DoneWithOptions(command, options, std::string(help) + kCommonHelp, code);
}

}  // namespace ropeteam::cli
