// SPDX-License-Identifier: Apache-2.0
//
// What the inventories say of each step. Knows nothing of time or messages.

#ifndef ROPETEAM_CORE_ENGINE_STEP_TABLE_H_
#define ROPETEAM_CORE_ENGINE_STEP_TABLE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "core/engine/messages.h"

namespace ropeteam::engine {

class StepTable {
 public:
  struct Copy {
    NodeId node = kNoNode;
    Role role = Role::kOwn;
    std::vector<uint32_t> bad;
  };
  struct RankState {
    std::vector<Copy> copies;
    uint64_t bytes = 0;
    uint32_t replicas = 0;
    bool producible = false;
    bool replicated = false;
    uint32_t good = 0;
  };
  struct StepState {
    uint32_t world_size = 0;
    std::vector<RankState> ranks;
    uint32_t ranks_producible = 0;
    uint32_t ranks_replicated = 0;
    bool committed = false;
    bool given_up = false;   // its copies are being released: it must not be committed any more
    bool evictable = false;  // its copies may go where memory is wanted: likewise
    bool producible() const { return ranks_producible == world_size; }
  };

  // Replaces what is known of the node's copies. Returns the steps that became committed by it.
  std::vector<StepId> Replace(NodeId node, const std::vector<CopyReport>& before,
                              const std::vector<CopyReport>& after);
  const std::map<StepId, StepState>& steps() const { return steps_; }
  const StepState* Find(const StepId& id) const;
  // Of this incarnation, or of all if `only` is 0.
  std::optional<StepId> NewestProducible(Incarnation only) const;
  std::vector<StepId> CommittedNewestFirst(size_t count) const;
  void GiveUp(const StepId& id);
  void AllowEviction(const StepId& id);
  // Grows whenever a shard gets the last copy it lacked.
  uint64_t replications() const { return replications_; }

 private:
  void Recount(StepState* step, Rank rank);
  std::map<StepId, StepState> steps_;
  uint64_t replications_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STEP_TABLE_H_
