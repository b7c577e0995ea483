// SPDX-License-Identifier: Apache-2.0
//
// Reads the steps of another job, from which this job begins. Nothing is written there.

#include <algorithm>
#include <cinttypes>

#include "core/base/log.h"
#include "node/storage_reads.h"
#include "node/storage_workers.h"
#include "storage/sinks.h"
#include "storage/steps/steps.h"

namespace ropeteam {

// Opens the source when it is first needed: it may be gone once the job has steps of its own.
Result<const StorageWorkers::Place*> StorageWorkers::Source() {
  const std::lock_guard lock(source_mutex_);
  if (source_.sink != nullptr) return &source_;
  const Result<storage::StepSource> parsed = storage::ParseStepSource(config_.restore_from);
  if (!parsed.ok()) return parsed.status();
  Result<std::unique_ptr<storage::Sink>> sink = storage::OpenSink(parsed->url);
  // A directory that is missing here, or credentials that are, say nothing about the steps.
  if (!sink.ok()) return Error(Code::kIo, "%s", sink.status().message().c_str());
  LOG_INFO("restores from %s", (*sink)->Describe().c_str());
  source_.sink = SinkForReads(watch_.Watched(std::move(*sink)));
  return &source_;
}

Result<std::vector<StepId>> StorageWorkers::ListSource() {
  const auto fail = [this](Code code, const std::string& why) {
    return Error(code, "--restore-from %s: %s", config_.restore_from.c_str(), why.c_str());
  };
  const Result<const Place*> source = Source();
  if (!source.ok()) return fail(source.status().code(), source.status().message());
  const Result<std::vector<storage::StepPlace>> places =
      storage::ListSteps((*source)->sink.get(), (*source)->job, kCallTimeout);
  if (!places.ok()) return fail(places.status().code(), places.status().message());
  const std::optional<uint64_t> wanted = storage::ParseStepSource(config_.restore_from)->step;
  std::vector<StepId> all;
  std::vector<StepId> steps;
  for (const storage::StepPlace& place : *places) {
    if (!place.has_manifest) continue;
    all.push_back({place.name.incarnation, place.name.step});
    if (!wanted || *wanted == place.name.step) steps.push_back(all.back());
  }
  if (all.empty())
    return fail(Code::kNotFound,
                "there is no step in this folder: it must be a job's, …/JOB, in which step-… lie");
  if (steps.empty())
    return fail(Code::kNotFound, "there is no such step, the newest is " +
                                     std::to_string(std::max_element(all.begin(), all.end())->step));
  return steps;
}

Result<std::string> StorageWorkers::ReadManifestText(const StepId& step, const Place** place) {
  const storage::StepName name{step.step, step.incarnation};
  Result<std::string> text = Error(Code::kNotFound, "%s is not on storage", step.ToString().c_str());
  if (own_.sink != nullptr) {
    *place = &own_;
    text = storage::ReadManifestText(own_.sink.get(), own_.job, name, kCallTimeout);
  }
  if (config_.restore_from.empty() || text.status().code() != Code::kNotFound) return text;
  const Result<const Place*> source = Source();
  if (!source.ok()) return source.status();
  *place = *source;
  return storage::ReadManifestText(source_.sink.get(), source_.job, name, kCallTimeout);
}

}  // namespace ropeteam
