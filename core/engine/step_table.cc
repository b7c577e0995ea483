// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "core/base/log.h"
#include "core/engine/leader.h"

namespace ropeteam::engine {
namespace {

// Every chunk is good on some copy. Bad chunks are few and listed; a copy with too many of them is no copy.
bool Producible(const std::vector<StepTable::Copy>& copies) {
  const StepTable::Copy* first = nullptr;
  for (const StepTable::Copy& copy : copies) {
    if (copy.bad.size() > kBadListedMax) continue;
    if (copy.bad.empty()) return true;
    if (first == nullptr) first = &copy;
  }
  if (first == nullptr) return false;
  return std::all_of(first->bad.begin(), first->bad.end(), [&](uint32_t chunk) {
    return std::any_of(copies.begin(), copies.end(), [&](const StepTable::Copy& copy) {
      return copy.bad.size() <= kBadListedMax && !std::binary_search(copy.bad.begin(), copy.bad.end(), chunk);
    });
  });
}

}  // namespace

const StepTable::StepState* StepTable::Find(const StepId& id) const {
  const auto found = steps_.find(id);
  return found == steps_.end() ? nullptr : &found->second;
}

void StepTable::Recount(StepState* step, Rank rank) {
  RankState& state = step->ranks[rank];
  step->ranks_producible -= state.producible ? 1 : 0;
  const bool was_replicated = state.replicated;
  step->ranks_replicated -= was_replicated ? 1 : 0;
  state.good = static_cast<uint32_t>(std::count_if(state.copies.begin(), state.copies.end(),
                                                   [](const Copy& copy) { return copy.bad.empty(); }));
  state.producible = Producible(state.copies);
  state.replicated = state.good >= state.replicas + 1;
  step->ranks_producible += state.producible ? 1 : 0;
  step->ranks_replicated += state.replicated ? 1 : 0;
  replications_ += state.replicated && !was_replicated ? 1 : 0;
}

void StepTable::GiveUp(const StepId& id) {
  const auto found = steps_.find(id);
  if (found != steps_.end()) found->second.given_up = true;
}

std::vector<StepId> StepTable::Replace(NodeId node, const std::vector<CopyReport>& before,
                                       const std::vector<CopyReport>& after) {
  std::map<ShardId, const CopyReport*> old_copies;
  std::map<ShardId, const CopyReport*> new_copies;
  for (const CopyReport& copy : before) old_copies[copy.id] = &copy;
  for (const CopyReport& copy : after) new_copies[copy.id] = &copy;
  std::set<StepId> touched;

  for (const auto& [id, copy] : old_copies) {
    const auto kept = new_copies.find(id);
    if (kept != new_copies.end() && *kept->second == *copy) continue;
    const auto step = steps_.find(StepOf(id));
    if (step == steps_.end() || id.rank >= step->second.world_size) continue;
    std::erase_if(step->second.ranks[id.rank].copies, [node](const Copy& c) { return c.node == node; });
    Recount(&step->second, id.rank);
    touched.insert(step->first);
  }
  for (const auto& [id, copy] : new_copies) {
    const auto same = old_copies.find(id);
    if (same != old_copies.end() && *same->second == *copy) continue;
    StepState& step = steps_[StepOf(id)];
    if (step.world_size == 0) {
      step.world_size = copy->world_size;
      step.ranks.resize(copy->world_size);
    }
    if (step.world_size != copy->world_size || id.rank >= step.world_size) {
      LOG_ERROR("%s of a world of %u ignored: the step's world has %u", id.ToString().c_str(),
                copy->world_size, step.world_size);
      continue;
    }
    RankState& rank = step.ranks[id.rank];
    rank.copies.push_back({node, copy->role, copy->bad});
    rank.bytes = copy->stream_bytes;
    rank.replicas = copy->replicas;
    step.committed = step.committed || copy->committed;
    Recount(&step, id.rank);
    touched.insert(StepOf(id));
  }
  std::vector<StepId> committed;
  for (const StepId& id : touched) {
    const auto step = steps_.find(id);
    if (!step->second.committed && !step->second.given_up &&
        step->second.ranks_replicated == step->second.world_size) {
      step->second.committed = true;
      committed.push_back(id);
    }
    const bool empty = std::all_of(step->second.ranks.begin(), step->second.ranks.end(),
                                   [](const RankState& rank) { return rank.copies.empty(); });
    if (empty) steps_.erase(step);
  }
  return committed;
}

}  // namespace ropeteam::engine
