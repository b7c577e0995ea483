// SPDX-License-Identifier: Apache-2.0
//
// The leader's hold (lock) of storage: in all clusters, under any coordinator, only one node writes and deletes under the
// job's name. The driver takes the lock, renews it and watches another holder; this class only requests and releases it.

#ifndef ROPETEAM_CORE_ENGINE_STORAGE_HOLD_H_
#define ROPETEAM_CORE_ENGINE_STORAGE_HOLD_H_

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/storage_works.h"

namespace ropeteam::engine {

class StorageHold {
 public:
  explicit StorageHold(StorageWorks* works) : works_(*works) {}

  // kOk: this node holds storage now. kUnavailable: ask again later. kAlreadyExists: another node has it and is alive.
  using Then = std::function<void(const Status&)>;
  // Every write or deletion asks first, each time: a hold may be lost at any time. Callers that ask while the driver is
  // being asked share its answer.
  void Confirm(Then then);
  // This node leads no longer, or has lost its lease. Waiting callers get no answer.
  void Release();
  // Why the driver has not answered yet; empty: it has, or has only just been asked.
  const std::string& trouble() const { return trouble_; }

 private:
  void Ask();
  void LetGo();

  StorageWorks& works_;
  // One work at a time: a release that overtakes the request before it would leave storage held for ever.
  bool busy_ = false;
  bool asked_ = false;  // since the last release: storage may be held
  bool release_ = false;
  std::vector<Then> waiting_;
  std::string trouble_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORAGE_HOLD_H_
