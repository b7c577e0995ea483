// SPDX-License-Identifier: Apache-2.0
#include "core/engine/storage_hold.h"

#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::engine {

void StorageHold::Confirm(Then then) {
  waiting_.push_back(std::move(then));
  if (!busy_) Ask();
}

void StorageHold::Ask() {
  ROPETEAM_CHECK(!busy_ && !release_);
  busy_ = asked_ = true;
  works_.Start(
      HoldStorage{},
      [this](const Status& status, const StorageDone&) {
        busy_ = false;
        trouble_.clear();
        if (release_) return LetGo();
        for (const Then& then : std::exchange(waiting_, {})) then(status);
      },
      [this] { OnStalled("taking hold of storage has made no progress for a minute"); });
}

void StorageHold::Release() {
  waiting_.clear();
  release_ = asked_;
  if (release_ && !busy_) LetGo();
}

void StorageHold::LetGo() {
  busy_ = true;
  release_ = asked_ = false;
  works_.Start(
      ReleaseStorage{},
      [this](const Status&, const StorageDone&) {
        busy_ = false;
        trouble_.clear();
        if (!waiting_.empty()) Ask();
      },
      [this] { OnStalled("releasing storage has made no progress for a minute"); });
}

void StorageHold::OnStalled(const char* what) {
  if (trouble_.empty()) LOG_WARNING("storage hangs: %s", what);
  trouble_ = what;
}

}  // namespace ropeteam::engine
