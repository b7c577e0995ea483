// SPDX-License-Identifier: Apache-2.0
#include "core/engine/redundancy.h"

#include <algorithm>

#include "core/base/check.h"
#include "core/base/log.h"
#include "core/engine/placement.h"

namespace ropeteam::engine {

void Redundancy::ForgetSettled() {
  for (auto& [shard, orders] : orders_) {
    const StepTable::StepState* step = table_.Find(StepOf(shard));
    std::erase_if(orders, [&](const Order& order) {
      if (step == nullptr || shard.rank >= step->world_size || order.until <= context_.now ||
          !context_.view.Contains(order.source) || !context_.view.Contains(order.target))
        return true;
      const auto& copies = step->ranks[shard.rank].copies;
      return std::any_of(copies.begin(), copies.end(),
                         [&](const auto& copy) { return copy.node == order.target && Counts(copy.role); });
    });
  }
  std::erase_if(orders_, [](const auto& entry) { return entry.second.empty(); });
}

void Redundancy::Restore(const std::vector<StepKey>& keep, Incarnation current) {
  ForgetSettled();
  Load load;
  for (const auto& [shard, orders] : orders_) {
    for (const Order& order : orders) {
      ++load[order.source];
      ++load[order.target];
    }
  }
  for (auto key = keep.rbegin(); key != keep.rend(); ++key)
    if (const StepTable::StepState* step = table_.Find(key->id)) OrderCopies(key->id, *step, current, &load);
}

// Nodes that have the shard as a cache first: there not a byte need move to make it a replica.
std::vector<NodeId> Redundancy::TargetsOf(const StepTable::RankState& state,
                                          const StepTable::Copy& source) const {
  std::vector<NodeId> targets;
  for (const StepTable::Copy& copy : state.copies)
    if (!Counts(copy.role) && copy.bad.empty() && copy.content == state.content && copy.node != source.node)
      targets.push_back(copy.node);
  const std::vector<NodeId> holders = HoldersOf(context_.view, source.node, state.replicas);
  targets.insert(targets.end(), holders.begin(), holders.end());
  std::erase_if(targets, [&](NodeId target) { return apart_.contains({source.node, target}); });
  return targets;
}

void Redundancy::SetLostLinks(NodeId node, const std::vector<LostLinkReport>& links) {
  std::erase_if(apart_, [node](const auto& pair) { return pair.first == node; });
  for (const LostLinkReport& link : links) apart_.insert({node, link.peer});
}

void Redundancy::OrderCopies(const StepId& id, const StepTable::StepState& step, Incarnation current,
                             Load* load) {
  for (Rank rank = 0; rank < step.world_size; ++rank) {
    const StepTable::RankState& state = step.ranks[rank];
    if (state.replicated || state.copies.empty()) continue;
    const ShardId shard{id.incarnation, id.step, rank};
    const StepTable::Copy* source = nullptr;
    bool owner_lives = false;
    for (const StepTable::Copy& copy : state.copies) {
      owner_lives = owner_lives || copy.role == Role::kOwn;
      if (!copy.bad.empty() || copy.content != state.content) continue;
      if (source == nullptr || (*load)[copy.node] < (*load)[source->node]) source = &copy;
    }
    // Before the commit the owner sees to the copies itself.
    if (owner_lives && !step.committed && id.incarnation == current) continue;
    if (source == nullptr) continue;
    std::vector<Order>& orders = orders_[shard];
    ROPETEAM_CHECK(state.good <= state.replicas);
    size_t missing = size_t{state.replicas} + 1 - state.good;
    missing -= std::min(missing, orders.size());
    for (const NodeId target : TargetsOf(state, *source)) {
      if (missing == 0 || (*load)[source->node] >= kOrdersPerNodeMax) break;
      const bool has = std::any_of(state.copies.begin(), state.copies.end(), [&](const auto& copy) {
        return copy.node == target && Counts(copy.role);
      });
      const bool ordered = std::any_of(orders.begin(), orders.end(),
                                       [&](const Order& order) { return order.target == target; });
      if (has || ordered || (*load)[target] >= kOrdersPerNodeMax) continue;
      ROPETEAM_CHECK(target != source->node);
      orders.push_back({source->node, target, context_.now + kOrderTimeoutUs});
      ++(*load)[source->node];
      ++(*load)[target];
      --missing;
      LOG_INFO("order a copy of %s from %s to %s", shard.ToString().c_str(),
               context_.NameOf(source->node).c_str(), context_.NameOf(target).c_str());
      context_.Send(source->node, CopyOrder{{shard}, target});
    }
  }
}

bool Redundancy::NeedsWork(const std::vector<StepKey>& keep) const {
  return std::any_of(keep.begin(), keep.end(), [this](const StepKey& key) {
    const StepTable::StepState* step = table_.Find(key.id);
    return step != nullptr && step->ranks_replicated != step->world_size;
  });
}

}  // namespace ropeteam::engine
