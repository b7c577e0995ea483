// SPDX-License-Identifier: Apache-2.0
//
// Deletes steps on storage that no rule keeps, and unfinished uploads of killed daemons.

#include <algorithm>
#include <ctime>

#include "core/base/log.h"
#include "node/storage_workers.h"
#include "storage/steps/remove.h"
#include "storage/steps/steps.h"

namespace ropeteam {

static_assert(kKeepOnStorageMax == storage::kKeepNewestMax);

Result<StoredList> StorageWorkers::Prune(const PruneStored& prune, uint64_t releases) {
  StoredList gone;
  storage::RetentionRules rules = config_.rules;
  rules.keep_newest = std::max(rules.keep_newest, prune.keep_newest);
  if (!rules.Any()) return gone;
  const Result<StoredList> listed = List();
  if (!listed.ok()) return listed.status();
  std::vector<storage::RetainedStep> steps;
  for (const StepId& id : listed->steps) {
    const storage::StepName name{id.step, id.incarnation};
    storage::StepRestores restores;
    const Result<storage::StepHead> head = CheckStep(id, nullptr, &restores);
    const Code code = head.ok() ? Code::kOk : head.status().code();
    // If a step cannot be read now, nothing is deleted.
    if (!head.ok() && code != Code::kCorrupt && code != Code::kUnsupported) return head.status();
    const bool in_use = std::find(prune.in_use.begin(), prune.in_use.end(), id) != prune.in_use.end();
    steps.push_back({name, head.ok() ? head->time_s : 0, head.ok() ? head->user : "{}",
                     head.ok() && !restores.quarantined, in_use});
  }
  const std::vector<unsigned> kept =
      storage::ChooseKept(rules, steps, static_cast<uint64_t>(std::time(nullptr)));
  for (size_t i = 0; i < steps.size(); ++i) {
    if (kept[i] != storage::kKeptNot || !steps[i].good) continue;
    // After a release another leader may have other rules, even if this node holds the lock again.
    const Status held =
        releases_ == releases ? lock_->Check() : Error(Code::kUnavailable, "storage was let go of");
    if (!held.ok()) return gone.steps.empty() ? held : Result(gone);
    const Result<uint64_t> removed = storage::RemoveStep(config_.sink.get(), config_.job, steps[i].name,
                                                         /*finished=*/true, kCallTimeout);
    if (!removed.ok()) {
      LOG_WARNING("%s on storage is not deleted: %s", FolderOf(listed->steps[i]).c_str(),
                  removed.status().ToString().c_str());
      continue;
    }
    LOG_INFO("storage deleted %s", FolderOf(listed->steps[i]).c_str());
    gone.steps.push_back(listed->steps[i]);
  }
  return gone;
}

void StorageWorkers::AbortLeftovers() {
  const Result<uint64_t> aborted = config_.sink->AbortUploads(config_.job, kLeftoverAge, CallDeadline());
  if (!aborted.ok())
    LOG_INFO("unfinished uploads on storage are left: %s", aborted.status().ToString().c_str());
  else if (*aborted != 0)
    LOG_INFO("storage: aborted %llu unfinished uploads that were begun more than a day ago",
             static_cast<unsigned long long>(*aborted));
}

}  // namespace ropeteam
