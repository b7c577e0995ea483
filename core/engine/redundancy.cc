// SPDX-License-Identifier: Apache-2.0
#include "core/engine/redundancy.h"

#include <algorithm>

#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::engine {

void Redundancy::Clear() {
  orders_.clear();
  missed_at_.clear();
  late_.clear();
  load_.clear();
  apart_.clear();
  orphans_.clear();
  demoting_.clear();
}

void Redundancy::SetLostLinks(NodeId node, const std::vector<LostLinkReport>& links) {
  apart_.erase(node);
  for (const LostLinkReport& link : links) apart_[node].insert(link.peer);
}

size_t Redundancy::LoadOf(NodeId node) const {
  const auto load = load_.find(node);
  return load == load_.end() ? 0 : load->second;
}

void Redundancy::Count(const Order& order) {
  ROPETEAM_CHECK(order.source != order.target);
  for (const NodeId node : {order.source, order.target}) {
    const size_t load = ++load_[node];
    ROPETEAM_CHECK(load <= kOrdersPerNodeMax);
  }
}

void Redundancy::Uncount(const Order& order) {
  for (const NodeId node : {order.source, order.target}) {
    const auto load = load_.find(node);
    ROPETEAM_CHECK(load != load_.end() && load->second > 0);
    if (--load->second == 0) load_.erase(load);
  }
}

bool Redundancy::OnCopies(NodeId node, const std::vector<CopyReport>& copies) {
  if (orders_.empty()) return false;
  bool done = false;
  for (const CopyReport& copy : copies) {
    const auto orders = orders_.find(copy.id);
    if (orders == orders_.end() || !Counts(copy.role) || !copy.readable) continue;
    std::erase_if(orders->second, [&](const Order& order) {
      if (order.target != node) return false;
      Uncount(order);
      missed_at_.erase(node);
      late_.erase(copy.id);
      return done = true;
    });
    if (orders->second.empty()) orders_.erase(orders);
  }
  return done;
}

void Redundancy::ForgetLate() {
  for (auto& [shard, orders] : orders_) {
    const StepTable::StepState* step = table_.Find(StepOf(shard));
    std::erase_if(orders, [&, &shard = shard](const Order& order) {
      if (step != nullptr && shard.rank < step->world_size && order.until > context_.now &&
          context_.Contains(order.source) && context_.Contains(order.target))
        return false;
      Uncount(order);
      if (order.until <= context_.now) {
        missed_at_[order.target] = context_.now;
        late_.insert(shard);
      }
      return true;
    });
  }
  std::erase_if(orders_, [](const auto& entry) { return entry.second.empty(); });
  std::erase_if(missed_at_, [this](const auto& missed) { return !context_.Contains(missed.first); });
  std::erase_if(late_, [this](const ShardId& shard) {
    const StepTable::StepState* step = table_.Find(StepOf(shard));
    return step == nullptr || shard.rank >= step->world_size || !step->lacking.contains(shard.rank);
  });
}

std::vector<std::pair<StepId, const StepTable::StepState*>> Redundancy::InOrder(
    const std::set<StepId>& keep) const {
  std::vector<std::pair<StepId, const StepTable::StepState*>> steps;
  for (const StepId& id : keep) {
    const StepTable::StepState* step = table_.Find(id);
    if (step != nullptr && !step->lacking.empty()) steps.emplace_back(id, step);
  }
  std::sort(steps.begin(), steps.end(), [](const auto& a, const auto& b) {
    return a.second->complete != b.second->complete ? a.second->complete : b.first < a.first;
  });
  return steps;
}

const RankSet& Redundancy::ToRestore(const StepId& id, const StepTable::StepState& step,
                                     Incarnation current) const {
  return step.complete || id.incarnation != current ? step.lacking : step.orphans;
}

bool Redundancy::WaitsForOwner(const ShardId& shard) {
  const auto since = orphans_.try_emplace(shard, context_.now).first->second;
  return context_.now < since + kOrphanAfterUs;
}

void Redundancy::Restore(const std::set<StepId>& keep, Incarnation current) {
  ForgetLate();
  std::erase_if(orphans_, [this](const auto& orphan) {
    const StepTable::StepState* step = table_.Find(StepOf(orphan.first));
    return step == nullptr || step->complete || orphan.first.rank >= step->world_size ||
           !step->orphans.contains(orphan.first.rank);
  });
  const auto steps = InOrder(keep);
  for (const bool late : {false, true}) {
    if (late && late_.empty()) return;
    for (const auto& [id, step] : steps) {
      const RankSet& ranks = ToRestore(id, *step, current);
      ranks.ForEach([&, id = id, step = step](Rank rank) {
        const ShardId shard{id.incarnation, id.step, rank};
        if (late_.contains(shard) != late) return;
        if (&ranks == &step->orphans && WaitsForOwner(shard)) return;
        OrderCopies(shard, step->ranks[rank]);
      });
    }
  }
}

bool Redundancy::Apart(NodeId a, NodeId b) const {
  const auto reports = [this](NodeId node, NodeId peer) {
    const auto lost = apart_.find(node);
    return lost != apart_.end() && lost->second.contains(peer);
  };
  return reports(a, b) || reports(b, a);
}

TimeUs Redundancy::MissedAt(NodeId node) const {
  const auto missed = missed_at_.find(node);
  return missed == missed_at_.end() ? 0 : missed->second;
}

bool Redundancy::MayTake(const StepTable::RankState& state, const std::vector<Order>& orders,
                         NodeId target) const {
  if (LoadOf(target) >= kOrdersPerNodeMax || table_.leaving().contains(target)) return false;
  return std::none_of(
             state.copies.begin(), state.copies.end(),
             [&](const auto& copy) { return copy.node == target && copy.readable && Counts(copy.role); }) &&
         std::none_of(orders.begin(), orders.end(),
                      [&](const Order& order) { return order.target == target; });
}

NodeId Redundancy::SourceFor(const StepTable::RankState& state, NodeId target) const {
  NodeId source = kNoNode;
  for (const StepTable::Copy& copy : state.copies) {
    if (!copy.good() || copy.content != state.content || copy.node == target ||
        LoadOf(copy.node) >= kOrdersPerNodeMax || Apart(copy.node, target))
      continue;
    if (source == kNoNode || LoadOf(copy.node) < LoadOf(source)) source = copy.node;
  }
  return source;
}

size_t Redundancy::Tried(const Placement::Holders& holders, uint32_t replicas) {
  return std::min(holders.size(), kTargetsTriedMax + replicas);
}

void Redundancy::OrderCopies(const ShardId& shard, const StepTable::RankState& state) {
  ROPETEAM_CHECK(state.staying <= state.replicas);
  if (SourceFor(state, kNoNode) == kNoNode) return;  // all sources are busy
  const auto known = orders_.find(shard);
  std::vector<Order> orders = known == orders_.end() ? std::vector<Order>() : known->second;
  size_t missing = size_t{state.replicas} + 1 - state.staying;
  missing -= std::min(missing, orders.size());
  const auto order_copy = [&](NodeId target) {
    if (missing == 0 || !MayTake(state, orders, target)) return;
    const NodeId source = SourceFor(state, target);
    if (source == kNoNode) return;
    orders.push_back({source, target, context_.now + kOrderTimeoutUs});
    Count(orders.back());
    --missing;
    LOG_INFO("order a copy of %s from %s to %s", shard.ToString().c_str(), context_.NameOf(source).c_str(),
             context_.NameOf(target).c_str());
    context_.Send(source, CopyOrder{shard, target});
  };
  // Nodes that have the shard as a cache come first: it becomes a replica without a transfer.
  for (const StepTable::Copy& copy : state.copies)
    if (!Counts(copy.role) && copy.good() && copy.content == state.content) order_copy(copy.node);
  const Placement::Holders holders = context_.placement.HoldersOf(BaseOf(state), state.replicas);
  const size_t tried = Tried(holders, state.replicas);
  std::vector<NodeId> targets;
  for (size_t i = 0; i < tried; ++i) targets.push_back(holders[i]);
  // The node that took no copy most recently comes last. Otherwise a full one would be asked again and again.
  if (!missed_at_.empty())
    std::stable_sort(targets.begin(), targets.end(),
                     [this](NodeId a, NodeId b) { return MissedAt(a) < MissedAt(b); });
  for (const NodeId target : targets) order_copy(target);
  if (!orders.empty()) orders_[shard] = std::move(orders);
}

bool Redundancy::NeedsWork(const std::set<StepId>& keep, Incarnation current) const {
  return std::any_of(keep.begin(), keep.end(), [&](const StepId& id) {
    const StepTable::StepState* step = table_.Find(id);
    return step != nullptr && !ToRestore(id, *step, current).empty();
  });
}

void Redundancy::CountLeft(NodeId node, const std::set<StepId>& keep, Incarnation current,
                           DrainReply* reply) const {
  const size_t staying = context_.view.members.size() - table_.leaving().size();
  for (const StepId& id : keep) {
    const StepTable::StepState* step = table_.Find(id);
    if (step == nullptr) continue;
    ToRestore(id, *step, current).ForEach([&](Rank rank) {
      const StepTable::RankState& state = step->ranks[rank];
      if (std::none_of(state.copies.begin(), state.copies.end(),
                       [&](const auto& copy) { return copy.node == node; }))
        return;
      const size_t possible = std::min<size_t>(state.replicas + 1, staying);
      if (state.staying >= possible) {
        ++reply->shards_short;
      } else {
        ++reply->shards_left;
        reply->bytes_left += (possible - state.staying) * state.bytes;
      }
    });
  }
}

NodeId Redundancy::BaseOf(const StepTable::RankState& state) {
  const auto own = std::find_if(state.copies.begin(), state.copies.end(),
                                [](const auto& copy) { return copy.role == Role::kOwn; });
  ROPETEAM_CHECK(!state.copies.empty());
  return own == state.copies.end() ? state.copies.front().node : own->node;
}

// Copies stay on the holders that the shard's owner has chosen.
NodeId Redundancy::LeastWanted(const StepTable::RankState& state) const {
  const NodeId base = BaseOf(state);
  const Placement::Holders holders = context_.placement.HoldersOf(base, state.replicas);
  const size_t tried = Tried(holders, state.replicas);
  NodeId least = kNoNode;
  size_t least_place = 0;
  for (const StepTable::Copy& copy : state.copies) {
    if (copy.role != Role::kReplica || !copy.good() || copy.content != state.content) continue;
    size_t place = 0;  // in the placement's order; nodes beyond the tried ones are equal
    if (copy.node != base)
      for (place = 1; place <= tried && holders[place - 1] != copy.node;) ++place;
    if (least != kNoNode && place <= least_place) continue;
    least = copy.node;
    least_place = place;
  }
  return least;
}

void Redundancy::Trim(const std::set<StepId>& told, const std::function<uint64_t(NodeId)>& inventory_of) {
  std::erase_if(demoting_, [this](const auto& entry) {
    const StepTable::StepState* step = table_.Find(StepOf(entry.first));
    if (step == nullptr || entry.first.rank >= step->world_size) return true;
    const auto& copies = step->ranks[entry.first.rank].copies;
    return std::none_of(copies.begin(), copies.end(), [&](const auto& copy) {
      return copy.node == entry.second && copy.role == Role::kReplica;
    });
  });
  for (const StepId& id : told) {
    const StepTable::StepState* step = table_.Find(id);
    if (step == nullptr || step->surplus.empty()) continue;
    step->surplus.ForEach([&](Rank rank) {
      const ShardId shard{id.incarnation, id.step, rank};
      const NodeId node = demoting_.try_emplace(shard, LeastWanted(step->ranks[rank])).first->second;
      if (node == kNoNode) return;  // no copy can be demoted
      context_.Send(node, DemoteCopy{shard, step->ranks[rank].content, inventory_of(node)});
    });
  }
}

bool Redundancy::NeedsTrim(const std::set<StepId>& told) const {
  return std::any_of(told.begin(), told.end(), [this](const StepId& id) {
    const StepTable::StepState* step = table_.Find(id);
    return step != nullptr && !step->surplus.empty();
  });
}

}  // namespace ropeteam::engine
