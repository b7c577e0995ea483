// SPDX-License-Identifier: Apache-2.0
//
// Lists the steps on storage for programs that request it.

#include <algorithm>

#include "node/storage_workers.h"
#include "storage/steps/steps.h"

namespace ropeteam {

void StorageWorkers::ListNewest(uint32_t steps_max, std::chrono::microseconds timeout, ListDone done) {
  const storage::Deadline deadline = std::chrono::steady_clock::now() + timeout;
  lists_->Submit([this, steps_max, deadline, done = std::move(done)] {
    Result<local::StorageListReply> reply = Newest(steps_max, deadline);
    const Status status = reply.status();
    done(status, status.ok() ? std::move(*reply) : local::StorageListReply());
  });
}

Result<local::StorageListReply> StorageWorkers::Newest(uint32_t steps_max, storage::Deadline deadline) {
  local::StorageListReply reply;
  const auto late = [&] { return std::chrono::steady_clock::now() >= deadline; };
  const Status too_late = Error(Code::kDeadlineExceeded, "storage was not listed within the timeout");
  if (late()) return too_late;
  if (own_.sink == nullptr) return Error(Code::kUnsupported, "this job has no storage");
  Result<std::vector<storage::StepName>> names =
      storage::ListStepNames(own_.sink.get(), own_.job, kCallTimeout);
  if (!names.ok()) return names.status();
  std::sort(names->begin(), names->end(), [](const storage::StepName& a, const storage::StepName& b) {
    return StepId{a.incarnation, a.step} > StepId{b.incarnation, b.step};
  });
  for (const storage::StepName& name : *names) {
    if (reply.steps.size() == steps_max) break;
    if (late()) return too_late;
    const StepId id{name.incarnation, name.step};
    std::vector<StoredRank> ranks;
    const Result<storage::StepHead> head = CheckStep(id, &ranks);
    const Code code = head.status().code();
    if (code == Code::kNotFound) continue;  // the manifest is not written yet, or was deleted
    if (!head.ok() && code != Code::kCorrupt && code != Code::kUnsupported) return head.status();
    local::ListedStep& step = reply.steps.emplace_back();
    step.step = id.step;
    step.incarnation = id.incarnation;
    step.folder = storage::StepFolder(name);
    if (!head.ok()) {
      step.problem = head.status().message().substr(0, local::kListedProblemBytesMax);
      continue;
    }
    step.world_size = head->world_size;
    step.time_s = head->time_s;
    for (const StoredRank& rank : ranks) step.bytes += rank.stream_bytes;
    if (head->user.size() <= kStepMetadataBytesMax) step.metadata = head->user;
  }
  return reply;
}

}  // namespace ropeteam
