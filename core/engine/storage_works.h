// SPDX-License-Identifier: Apache-2.0
//
// Sends storage work to the driver, and passes the results to the callers.

#ifndef ROPETEAM_CORE_ENGINE_STORAGE_WORKS_H_
#define ROPETEAM_CORE_ENGINE_STORAGE_WORKS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <utility>

#include "core/engine/context.h"

namespace ropeteam::engine {

class StorageWorks {
 public:
  explicit StorageWorks(Context* context) : context_(*context) {}

  using Done = std::function<void(const Status&, const StorageDone&)>;
  // `stalled` is called each time the work has made no progress for over a minute. `done` still follows.
  void Start(StorageWork work, Done done, std::function<void()> stalled = {}) {
    StartStorage& start = context_.out.storage.emplace_back();
    start.tag = next_tag_;
    start.work = std::move(work);
    running_.emplace(next_tag_++, Running{start.work.index(), std::move(done), std::move(stalled)});
  }
  void OnStalled(uint64_t tag) {
    const auto found = running_.find(tag);
    if (found == running_.end()) return;
    ++context_.local.storage_stalls;
    if (found->second.stalled) found->second.stalled();
  }
  void OnDone(uint64_t tag, const Status& status, const StorageDone& result) {
    const auto found = running_.find(tag);
    ROPETEAM_CHECK(found != running_.end());
    LocalCounters::Works& works = context_.local.works[found->second.kind];
    ++(status.ok() ? works.done : works.failed);
    const Done done = std::move(found->second.done);
    running_.erase(found);
    done(status, result);
  }
  size_t running() const { return running_.size(); }

 private:
  struct Running {
    size_t kind;  // StorageWork's index
    Done done;
    std::function<void()> stalled;
  };
  Context& context_;
  uint64_t next_tag_ = 1;
  std::map<uint64_t, Running> running_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORAGE_WORKS_H_
