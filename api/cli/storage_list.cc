// SPDX-License-Identifier: Apache-2.0
//
// ropeteam ls --storage URL: lists the steps there, without a daemon.

#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "api/cli/commands.h"
#include "api/cli/storage_steps.h"
#include "api/cli/text.h"
#include "core/base/sizes.h"

namespace ropeteam::cli {
namespace {

constexpr char kHelp[] =
    "ropeteam ls --storage URL: the steps that lie on storage, by job; a daemon is not asked\n"
    "  --storage URL      where\n"
    "  --json             as JSON\n";

struct JobReport {
  std::string job;
  std::vector<StepReport> steps;
};

std::string TimeText(uint64_t time_s) {
  const auto time = static_cast<std::time_t>(time_s);
  std::tm parts{};
  char text[64];
  if (gmtime_r(&time, &parts) == nullptr || std::strftime(text, sizeof(text), "%FT%TZ", &parts) == 0)
    return "";
  return text;
}

// Metadata on the step's line. If they are too long, only --json has them.
std::string MetadataText(const std::string& user) {
  constexpr size_t kShownBytes = 80;
  if (user == "{}") return "";
  return user.size() <= kShownBytes ? user : std::to_string(user.size()) + " bytes";
}

nlohmann::json ToJson(const std::string& url, const std::vector<JobReport>& jobs) {
  nlohmann::json json = {{"storage", url}, {"jobs", nlohmann::json::array()}};
  for (const JobReport& job : jobs) {
    nlohmann::json steps = nlohmann::json::array();
    for (const StepReport& step : job.steps) {
      nlohmann::json one = {{"step", step.name.step},
                            {"incarnation", step.name.incarnation},
                            {"folder", storage::StepPath(job.job, step.name)},
                            {"state", StateText(step.state)},
                            {"problem", step.problem},
                            {"files", step.files},
                            {"bytes", step.bytes}};
      if (HasManifest(step)) {
        one["world_size"] = step.head.world_size;
        one["time"] = TimeText(step.head.time_s);
        one["user"] = nlohmann::json::parse(step.head.user, nullptr, false);
      }
      steps.push_back(std::move(one));
    }
    json["jobs"].push_back({{"job", job.job}, {"steps", std::move(steps)}});
  }
  return json;
}

void Print(const std::string& url, const std::vector<JobReport>& jobs) {
  if (jobs.empty()) std::printf("no steps below %s\n", url.c_str());
  bool first = true;
  for (const JobReport& job : jobs) {
    std::printf("%sjob %s   storage %s\n\n", first ? "" : "\n", job.job.c_str(), url.c_str());
    first = false;
    Table table({"STEP", "INCARNATION", "<WRITTEN", "RANKS", "FILES", "BYTES", "<STATE", "<METADATA"});
    std::string problems;
    for (const StepReport& step : job.steps) {
      const bool known = HasManifest(step);
      const bool counted = step.state != StepState::kUnreadable;
      table.Add({std::to_string(step.name.step), std::to_string(step.name.incarnation),
                 known ? TimeText(step.head.time_s) : "-", known ? std::to_string(step.head.world_size) : "-",
                 counted ? std::to_string(step.files) : "-", counted ? FormatSize(step.bytes) : "-",
                 StateText(step.state), known ? MetadataText(step.head.user) : ""});
      if (!step.problem.empty()) problems += storage::StepFolder(step.name) + ": " + step.problem + "\n";
    }
    std::printf("%s%s%s", table.Render().c_str(), problems.empty() ? "" : "\n", problems.c_str());
  }
}

Result<std::vector<JobReport>> ReadJobs(const StoragePlace& place, const std::string& given) {
  std::vector<std::string> names = {given};
  if (given.empty()) {
    Result<std::vector<std::string>> found = storage::FindJobs(place.sink.get(), place.timeout);
    if (!found.ok()) return found.status();
    names = std::move(*found);
  }
  std::vector<JobReport> jobs;
  for (const std::string& name : names) {
    const Result<std::vector<storage::StepPlace>> steps = StepsOf(place, name);
    if (!steps.ok()) return steps.status();
    Result<std::vector<StepReport>> reports = ReportSteps(place, name, *steps);
    if (!reports.ok()) return reports.status();
    jobs.push_back({name, std::move(*reports)});
  }
  return jobs;
}

}  // namespace

int StorageListCommand(const std::vector<std::string>& arguments) {
  const Result<StorageOptions> options = ParseStorageOptions(arguments, StorageCommand::kList);
  int code = 0;
  if (DoneWithOptions("ls", options, kHelp, &code)) return code;
  const Result<StoragePlace> place = OpenStorage(options->url, options->timeout);
  if (!place.ok()) return Fail("ls", place.status());
  const Result<std::vector<JobReport>> jobs = ReadJobs(*place, options->job);
  if (!jobs.ok()) return Fail("ls", jobs.status());
  if (options->json)
    std::printf(
        "%s\n",
        ToJson(place->url, *jobs).dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  else
    Print(place->url, *jobs);
  return 0;
}

}  // namespace ropeteam::cli
