// SPDX-License-Identifier: Apache-2.0
//
// The leader's orders to copy shards of kept steps that have fewer than 1 + R good copies. Until the commit
// the node that saved a shard makes its copies, while it is a member.
//
// Copies on nodes that leave (drainer.h) are not counted, and such nodes get no copies.

#ifndef ROPETEAM_CORE_ENGINE_REDUNDANCY_H_
#define ROPETEAM_CORE_ENGINE_REDUNDANCY_H_

#include <cstddef>
#include <functional>
#include <map>
#include <set>
#include <unordered_map>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/step_table.h"

namespace ropeteam::engine {

class Redundancy {
 public:
  Redundancy(Context* context, const StepTable* table) : context_(*context), table_(*table) {}

  void Clear();
  // Members that `node` cannot reach: it is not ordered to copy to them.
  void SetLostLinks(NodeId node, const std::vector<LostLinkReport>& links);
  // Copies that a node has now. True when an order is done by one: its nodes have room for the next.
  bool OnCopies(NodeId node, const std::vector<CopyReport>& copies);
  // Forgets orders that are late or no longer needed, and orders the missing copies of the kept steps: committed steps
  // first, newer ones first; shards whose last order failed come after all others. `current`: the current incarnation.
  // Looks only at shards that lack copies.
  void Restore(const std::vector<StepKey>& keep, Incarnation current);
  // Has replicas become caches where a shard has more copies than 1 + R (a node came back after its copies were
  // made again, a rank restored on another node): memory is paid for 1 + R. Only of steps that every member has
  // marked: what is counted for those has been counted.
  // `inventories`: the number of each member's newest.
  void Trim(const std::set<StepId>& marked, const std::function<uint64_t(NodeId)>& inventory_of);
  // What the shards that this (leaving) node has lack without it. Fills in the reply's numbers of shards and bytes.
  void CountLeft(NodeId node, const std::vector<StepKey>& keep, Incarnation current, DrainReply* reply) const;
  bool NeedsTrim(const std::set<StepId>& marked) const;
  // Some kept step lacks copies that this class must order: call Restore() from time to time.
  bool NeedsWork(const std::vector<StepKey>& keep, Incarnation current) const;

 private:
  // Orders outstanding at one source or target: restoring redundancy is paced by its slowest resource, a
  // node's link.
  static constexpr size_t kOrdersPerNodeMax = 2;
  // At most this many nodes beyond the designated holders are tried for a copy. If all of them are busy, the
  // next Restore() tries again. A large cluster is not searched for each shard.
  static constexpr size_t kTargetsTriedMax = 64;
  static size_t Tried(const Placement::Holders& holders, uint32_t replicas);

  struct Order {
    NodeId source = kNoNode;
    NodeId target = kNoNode;
    TimeUs until = 0;
  };
  // The replica that is needed least; kNoNode: no replica can be demoted.
  NodeId LeastWanted(const StepTable::RankState& state) const;
  void ForgetLate();
  void Count(const Order& order);  // at its two nodes
  void Uncount(const Order& order);
  size_t LoadOf(NodeId node) const;  // orders outstanding at it
  const RankSet& ToRestore(const StepId& id, const StepTable::StepState& step, Incarnation current) const;
  // The steps of `keep` that lack copies, in the order of Restore().
  std::vector<std::pair<StepId, const StepTable::StepState*>> InOrder(const std::vector<StepKey>& keep) const;
  // An own copy that has not been reported yet is probably on its way: orphans wait for a while.
  bool WaitsForOwner(const ShardId& shard);
  void OrderCopies(const ShardId& shard, const StepTable::RankState& state);
  bool MayTake(const StepTable::RankState& state, const std::vector<Order>& orders, NodeId source,
               NodeId target) const;

  Context& context_;
  const StepTable& table_;
  std::map<NodeId, std::set<NodeId>> apart_;  // the first does not reach these
  std::map<ShardId, std::vector<Order>> orders_;
  // Targets of orders that failed, most likely because their memory is full, with the time until which they get no other;
  // and the shards of those orders.
  std::map<NodeId, TimeUs> avoid_until_;
  std::set<ShardId> late_;
  // Replicas that are becoming caches, one a shard: until its node has said so it counts, and no other may go.
  std::map<ShardId, NodeId> demoting_;
  std::unordered_map<NodeId, size_t> load_;
  std::map<ShardId, TimeUs> orphans_;  // of uncommitted steps of the current incarnation, since when
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_REDUNDANCY_H_
