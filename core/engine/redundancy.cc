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

// Where the shard's owner places its copies is where they stay.
NodeId Redundancy::LeastWanted(const StepTable::RankState& state) const {
  const auto own = std::find_if(state.copies.begin(), state.copies.end(),
                                [](const auto& copy) { return copy.role == Role::kOwn; });
  ROPETEAM_CHECK(!state.copies.empty());
  const NodeId base = own == state.copies.end() ? state.copies.front().node : own->node;
  const std::vector<NodeId> order = HoldersOf(context_.view, base, state.replicas);
  NodeId least = kNoNode;
  size_t least_place = 0;
  for (const StepTable::Copy& copy : state.copies) {
    if (copy.role != Role::kReplica || !copy.bad.empty() || copy.content != state.content) continue;
    const auto found = std::find(order.begin(), order.end(), copy.node);
    const size_t place = copy.node == base ? 0 : static_cast<size_t>(found - order.begin()) + 1;
    if (least != kNoNode && place <= least_place) continue;
    least = copy.node;
    least_place = place;
  }
  return least;
}

void Redundancy::Trim(const std::set<StepId>& marked) {
  std::erase_if(demoting_, [this](const auto& entry) {
    const StepTable::StepState* step = table_.Find(StepOf(entry.first));
    if (step == nullptr || entry.first.rank >= step->world_size) return true;
    const auto& copies = step->ranks[entry.first.rank].copies;
    return std::none_of(copies.begin(), copies.end(), [&](const auto& copy) {
      return copy.node == entry.second && copy.role == Role::kReplica;
    });
  });
  for (const StepId& id : marked) {
    const StepTable::StepState* step = table_.Find(id);
    if (step == nullptr || step->ranks_surplus == 0) continue;
    for (Rank rank = 0; rank < step->world_size; ++rank) {
      if (!step->ranks[rank].surplus) continue;
      const ShardId shard{id.incarnation, id.step, rank};
      const NodeId node = demoting_.try_emplace(shard, LeastWanted(step->ranks[rank])).first->second;
      if (node != kNoNode) context_.Send(node, DemoteCopy{{shard}, step->ranks[rank].content});
    }
  }
}

bool Redundancy::NeedsTrim(const std::set<StepId>& marked) const {
  return std::any_of(marked.begin(), marked.end(), [this](const StepId& id) {
    const StepTable::StepState* step = table_.Find(id);
    return step != nullptr && step->ranks_surplus != 0;
  });
}

}  // namespace ropeteam::engine
