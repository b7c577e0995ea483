// SPDX-License-Identifier: Apache-2.0
//
// The leader's orders to copy shards of kept steps that have fewer than 1 + R good copies. Until the commit a
// shard's owner sees to its copies itself, if it lives.

#ifndef ROPETEAM_CORE_ENGINE_REDUNDANCY_H_
#define ROPETEAM_CORE_ENGINE_REDUNDANCY_H_

#include <cstddef>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/step_table.h"

namespace ropeteam::engine {

class Redundancy {
 public:
  Redundancy(Context* context, const StepTable* table) : context_(*context), table_(*table) {}

  void Clear() {
    demoting_.clear();
    orders_.clear();
    apart_.clear();
  }
  // Members that `node` cannot reach: it is not ordered to copy to them.
  void SetLostLinks(NodeId node, const std::vector<LostLinkReport>& links);
  // Forgets orders that are done, late or pointless, and orders what is missing of the kept steps, oldest
  // first. `current`: the world's incarnation.
  void Restore(const std::vector<StepKey>& keep, Incarnation current);
  // Has replicas become caches where a shard has more copies than 1 + R (a node came back after its copies were
  // made anew, a rank restored on another node): memory is paid for 1 + R. Only of steps that every member has
  // marked: what is counted for those has been counted.
  void Trim(const std::set<StepId>& marked);
  bool NeedsTrim(const std::set<StepId>& marked) const;
  // Some kept step lacks copies: Restore() is due now and then.
  bool NeedsWork(const std::vector<StepKey>& keep) const;

 private:
  // Orders outstanding at one source or target: restoring redundancy is paced by its slowest resource, a
  // node's link.
  static constexpr size_t kOrdersPerNodeMax = 2;

  struct Order {
    NodeId source = kNoNode;
    NodeId target = kNoNode;
    TimeUs until = 0;
  };
  using Load = std::map<NodeId, size_t>;  // orders outstanding
  void ForgetSettled();
  void OrderCopies(const StepId& id, const StepTable::StepState& step, Incarnation current, Load* load);

  // The replica that is wanted least; kNoNode: none can go.
  NodeId LeastWanted(const StepTable::RankState& state) const;
  std::vector<NodeId> TargetsOf(const StepTable::RankState& state, const StepTable::Copy& source) const;

  Context& context_;
  const StepTable& table_;
  std::set<std::pair<NodeId, NodeId>> apart_;  // the first does not reach the second
  std::map<ShardId, std::vector<Order>> orders_;
  // Replicas that are becoming caches, one a shard: until its node has said so it counts, and no other may go.
  std::map<ShardId, NodeId> demoting_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_REDUNDANCY_H_
