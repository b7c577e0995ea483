// SPDX-License-Identifier: Apache-2.0
//
// Handles damage inside a file on storage, which is found when the file is read. The leader passes the step over from
// then on (StoredSteps). This class also marks the step on storage, so that a later cluster passes it over at once. The
// report of one node may come from that node's bad memory, so another node loads the shard again first.
//
// If marking fails for good, the next read finds the damage again.

#ifndef ROPETEAM_CORE_ENGINE_STORED_DAMAGE_H_
#define ROPETEAM_CORE_ENGINE_STORED_DAMAGE_H_

#include <map>
#include <set>
#include <string>

#include "core/engine/context.h"
#include "core/engine/storage_hold.h"
#include "core/engine/storage_works.h"

namespace ropeteam::engine {

class StoredDamage {
 public:
  StoredDamage(Context* context, StorageWorks* works, StorageHold* hold)
      : context_(*context), works_(*works), hold_(*hold) {}

  void Begin();           // to lead, or no longer
  void OnHoldReleased();  // because the lease has expired
  void OnBad(NodeId from, const StoredBad& bad);
  void OnChecked(NodeId from, const StoredChecked& checked);
  void OnTimer();
  TimeUs NextTimer() const;

 private:
  // Cases at a time. Another damaged step waits until it is read again.
  static constexpr size_t kCasesMax = 16;
  // The pause before an order or a failed mark is repeated. A dead holder of storage is recognised after 15 s.
  static constexpr TimeUs kAgainUs = 5'000'000;
  // Attempts, for orders and for marks each. A shard of 256 GiB takes 10 minutes at 0.5 GB/s, and every order may be
  // lost.
  static constexpr uint32_t kTriesMax = 120;

  struct Case {
    ShardId shard;
    uint64_t stream_bytes = 0;
    std::string why;
    NodeId accuser = kNoNode;
    NodeId checker = kNoNode;
    std::set<NodeId> could_not;  // nodes that could not check it
    bool confirmed = false;
    uint32_t tries = 0;
    TimeUs again_at = 0;  // kNever: waits for storage to answer
  };
  NodeId CheckerOf(const Case& found) const;
  void Confirm(Case* found);
  void Mark(const StepId& id, Case* found);
  void OnMarked(const StepId& id, const Status& status);

  Context& context_;
  StorageWorks& works_;
  StorageHold& hold_;
  uint64_t generation_ = 0;
  std::map<StepId, Case> cases_;
  std::set<StepId> closed_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORED_DAMAGE_H_
