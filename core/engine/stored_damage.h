// SPDX-License-Identifier: Apache-2.0
//
// Judges damage inside a shard on storage, which is found when the shard is loaded. One node's word may come from its bad
// memory: another node loads the shard then (Leader::OfferStored). Two nodes prove it; or two loads of one, where no
// other node sees the step. A good load ends the case. The leader passes a damaged step over (StoredSteps), and it is marked on
// storage, so that a later cluster passes it over at once.
//
// If marking fails for good, the next read finds the damage again.

#ifndef ROPETEAM_CORE_ENGINE_STORED_DAMAGE_H_
#define ROPETEAM_CORE_ENGINE_STORED_DAMAGE_H_

#include <map>
#include <set>
#include <string>

#include "core/engine/context.h"
#include "core/engine/storage_hold.h"
#include "core/engine/stored_steps.h"

namespace ropeteam::engine {

class StoredDamage {
 public:
  StoredDamage(Context* context, StorageKeeper* keeper, StorageHold* hold, StoredSteps* stored)
      : context_(*context), keeper_(*keeper), hold_(*hold), stored_(*stored) {}

  void Begin();           // to lead, or no longer
  void OnHoldReleased();  // because the lease has expired
  void OnRead(NodeId from, const StoredRead& read);
  // What one node has found in a shard of the step, and what an operator may do, as the end of a sentence. Empty: nothing,
  // or it was confirmed, or another node has read the shard well.
  std::string Found(const StepId& id) const;
  void OnTimer();
  TimeUs NextTimer() const;

 private:
  // Cases at a time. Another damaged step waits until it is read again.
  static constexpr size_t kCasesMax = 16;
  // The pause before a failed mark is repeated. A dead holder of storage is recognised after 15 s.
  static constexpr TimeUs kAgainUs = 5'000'000;
  static constexpr uint32_t kTriesMax = 120;  // ten minutes

  // Names of nodes, so that one that has restarted does not speak twice.
  struct Case {
    std::set<std::string> bad;
    std::set<std::string> not_here;
    size_t bad_loads = 0;
    std::string why;  // it is bad
  };
  struct Marking {
    std::string why;
    uint32_t tries = 0;
    TimeUs again_at = 0;  // kNever: waits for storage to answer
  };
  bool Proven(const Case& found) const;
  void Mark(const StepId& id, Marking* marking);
  void OnMarked(const StepId& id, const Status& status);

  Context& context_;
  StorageKeeper& keeper_;
  StorageHold& hold_;
  StoredSteps& stored_;
  uint64_t generation_ = 0;
  std::map<ShardId, Case> cases_;
  std::map<StepId, Marking> markings_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORED_DAMAGE_H_
