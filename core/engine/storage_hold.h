// SPDX-License-Identifier: Apache-2.0
//
// The leader's hold (lock) of storage: in all clusters, under any coordinator, only one node writes and deletes under
// the job's name. The driver takes the lock, renews it and watches other holders. This class only requests and releases
// it.

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
  // Call this before every write or deletion: a hold may be lost at any time. Callers share one answer while a request
  // to the driver is open.
  void Confirm(Then then);
  // This node no longer leads, or has lost its lease. Waiting callers get no answer.
  void Release();
  // Why the driver has not answered yet; empty: it has answered, or the request is new.
  const std::string& trouble() const { return trouble_; }

 private:
  void Ask();
  void LetGo();
  void OnStalled(const char* what);

  StorageWorks& works_;
  // One work at a time: if a release overtook the request before it, storage would be held for ever.
  bool busy_ = false;
  bool asked_ = false;  // requested since the last release: storage may be held
  bool release_ = false;
  std::vector<Then> waiting_;
  std::string trouble_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORAGE_HOLD_H_
