// SPDX-License-Identifier: Apache-2.0
//
// Orders copies of shards of kept steps that have fewer than 1 + R good copies. Until the commit, the node that saved a
// shard makes its copies itself, as long as it is a member.
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
  // Members that `node` cannot reach: there are no orders to copy between it and them, in either direction.
  void SetLostLinks(NodeId node, const std::vector<LostLinkReport>& links);
  // The current copies of a node. Returns true if this completes an order, so its nodes have room for the next one.
  bool OnCopies(NodeId node, const std::vector<CopyReport>& copies);
  // Removes orders that are late or no longer needed, and orders the missing copies of the kept steps. Committed steps
  // come first, then newer before older; shards whose last order failed come last. `current`: the current incarnation.
  // It visits only shards that lack copies.
  void Restore(const std::set<StepId>& keep, Incarnation current);
  // Orders replicas to become caches where a shard has more than 1 + R copies, because memory is planned for 1 + R.
  // This happens when a node comes back after its copies were made again, or when a rank restores on another node. It
  // is limited to steps that every member has marked, because their copies need not be counted for a commit any more.
  // `inventory_of`: the sequence of a member's newest inventory.
  void Trim(const std::set<StepId>& told, const std::function<uint64_t(NodeId)>& inventory_of);
  // What the shards of this leaving node lack without it. Fills in the reply's numbers of shards and bytes.
  void CountLeft(NodeId node, const std::set<StepId>& keep, Incarnation current, DrainReply* reply) const;
  bool NeedsTrim(const std::set<StepId>& told) const;
  // Some kept step lacks copies that this class must order: call Restore() regularly.
  bool NeedsWork(const std::set<StepId>& keep, Incarnation current) const;

 private:
  // Outstanding orders per source or target. The slowest resource, a node's link, limits how fast redundancy is
  // restored.
  static constexpr size_t kOrdersPerNodeMax = 2;
  // At most this many nodes beyond the designated holders are tried for a copy. If all of them are busy, the next
  // Restore() tries again. So a shard does not cost a search of a large cluster.
  static constexpr size_t kTargetsTriedMax = 64;
  static size_t Tried(const Placement::Holders& holders, uint32_t replicas);

  struct Order {
    NodeId source = kNoNode;
    NodeId target = kNoNode;
    TimeUs until = 0;
  };
  // The node whose placement says where the copies belong: the owner, if it has one.
  static NodeId BaseOf(const StepTable::RankState& state);
  // The replica that is needed least; kNoNode: none can become a cache.
  NodeId LeastWanted(const StepTable::RankState& state) const;
  void ForgetLate();
  void Count(const Order& order);  // at its two nodes
  void Uncount(const Order& order);
  size_t LoadOf(NodeId node) const;    // orders outstanding at it
  TimeUs MissedAt(NodeId node) const;  // 0: never, or it has taken a copy since
  const RankSet& ToRestore(const StepId& id, const StepTable::StepState& step, Incarnation current) const;
  // The steps of `keep` that lack copies, in the order in which Restore() handles them.
  std::vector<std::pair<StepId, const StepTable::StepState*>> InOrder(const std::set<StepId>& keep) const;
  // Whether the owner's copy is probably only unreported yet. Orphans wait for a while.
  bool WaitsForOwner(const ShardId& shard);
  void OrderCopies(const ShardId& shard, const StepTable::RankState& state);
  bool Apart(NodeId a, NodeId b) const;
  // Whether the node lacks a copy that counts, and may be ordered to take one.
  bool MayTake(const StepTable::RankState& state, const std::vector<Order>& orders, NodeId target) const;
  // The least loaded node with a good copy that reaches the target, or any target if it is kNoNode. kNoNode: there is
  // none.
  NodeId SourceFor(const StepTable::RankState& state, NodeId target) const;

  Context& context_;
  const StepTable& table_;
  std::map<NodeId, std::set<NodeId>> apart_;  // by the node that reports it: the nodes it cannot reach
  std::map<ShardId, std::vector<Order>> orders_;
  // Targets whose last order came to nothing, most likely with full memory, and when it ended; and the shards of those
  // orders.
  std::map<NodeId, TimeUs> missed_at_;
  std::set<ShardId> late_;
  // Replicas that are becoming caches, one per shard. Each counts until its node has confirmed, and no other replica of
  // the shard may be demoted before.
  std::map<ShardId, NodeId> demoting_;
  std::unordered_map<NodeId, size_t> load_;
  // Orphans of uncommitted steps of the current incarnation, and since when.
  std::map<ShardId, TimeUs> orphans_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_REDUNDANCY_H_
