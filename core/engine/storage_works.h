// SPDX-License-Identifier: Apache-2.0
//
// Where work on storage leaves the engine and its results come back.

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
  void Start(StorageWork work, Done done) {
    context_.out.storage.push_back({next_tag_, std::move(work)});
    running_.emplace(next_tag_++, std::move(done));
  }
  void OnDone(uint64_t tag, const Status& status, const StorageDone& result) {
    const auto found = running_.find(tag);
    ROPETEAM_CHECK(found != running_.end());
    const Done done = std::move(found->second);
    running_.erase(found);
    done(status, result);
  }

 private:
  Context& context_;
  uint64_t next_tag_ = 1;
  std::map<uint64_t, Done> running_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORAGE_WORKS_H_
