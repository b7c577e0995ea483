// SPDX-License-Identifier: Apache-2.0
//
// The hold (lock) of storage: in all clusters, under any coordinator, only one node writes and deletes under the job's
// name. It is the keeper (storage_keeper.h); its driver takes the lock, renews it and watches other holders. This class
// only requests and releases it.
//
// A hold counts only once another member has read the lock: a keeper that sees another directory in the place of the
// store, an unmounted one perhaps, holds nothing. The lock's proof goes with each order to write (PersistOrder), so
// each writer reads it, too. A node that is left alone sees the store if it reads a step there that was announced to
// several nodes. Otherwise it waits for another node.

#ifndef ROPETEAM_CORE_ENGINE_STORAGE_HOLD_H_
#define ROPETEAM_CORE_ENGINE_STORAGE_HOLD_H_

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/engine/storage_keeper.h"

namespace ropeteam::engine {

class StorageHold {
 public:
  // `step_to_see`: what the keeper must read if no other member can be asked; {0, 0}: nothing; nullopt: it may not hold
  // storage alone.
  StorageHold(StorageKeeper* keeper, std::function<std::optional<StepId>()> step_to_see)
      : keeper_(*keeper), step_to_see_(std::move(step_to_see)) {}

  // kOk: the keeper holds storage now. kUnavailable: ask again later. kAlreadyExists: another node has it and is alive.
  // After any other failure, the next member is the keeper.
  using Then = std::function<void(const Status&)>;
  // Call this before every write or deletion: a hold may be lost at any time. Callers share one answer until a witness
  // has answered.
  void Confirm(Then then);
  void Begin();  // to lead, or no longer: each node lets go of storage by itself
  // This node has lost its lease. Waiting callers get no answer.
  void Release();
  // Of the last Confirm() that succeeded.
  const std::string& proof() const { return proof_; }
  // Why the driver has not answered yet; empty: it has answered, or the request is new.
  const std::string& trouble() const { return trouble_; }

 private:
  // The members that are asked at once whether they see the lock.
  static constexpr size_t kWitnessesMax = 8;

  void OnHeld(const Status& status, const StorageDone& done);
  void FindWitness(const std::string& proof);
  void LookAlone(const std::string& proof);
  void Count(const std::string& proof);  // the hold counts
  void Answer(const Status& status);

  StorageKeeper& keeper_;
  const std::function<std::optional<StepId>()> step_to_see_;
  bool asking_ = false;
  bool asked_ = false;    // requested since the last release: storage may be held
  uint64_t order_ = 0;    // of the request
  uint64_t request_ = 0;  // what witnesses say of an earlier one does not count
  std::vector<Then> waiting_;
  std::string proof_;
  size_t witnesses_failed_ = 0;  // since the last one that saw the lock: others are asked next
  std::string trouble_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORAGE_HOLD_H_
