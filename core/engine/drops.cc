// SPDX-License-Identifier: Apache-2.0
#include "core/engine/drops.h"

#include <algorithm>
#include <iterator>

#include "core/base/log.h"
#include "core/engine/retention.h"

namespace ropeteam::engine {
namespace {

// `step`: null if the leader has not heard of it.
Status MayDrop(const StepId& id, const StepTable::StepState* step, const DropFacts& facts) {
  const std::string name = id.ToString();
  if (facts.incarnation.pin == id && KeepsPin(facts.incarnation, facts.newest_told, facts.base))
    return Error(Code::kInvalidArgument,
                 "%s is not dropped: this incarnation was restored from it and has no committed step yet",
                 name.c_str());
  if (id < facts.base || (step != nullptr && (step->released || step->evictable))) return OkStatus();
  const std::vector<StepId> committed = facts.table.CompleteNewestFirst(1);
  if (committed.empty())
    return Error(Code::kInvalidArgument, "%s is not dropped: no step is committed, and a restart may need it",
                 name.c_str());
  if (id == facts.base || id == committed.front())
    return Error(Code::kInvalidArgument, "%s is not dropped: a restart needs the newest committed step",
                 name.c_str());
  if (facts.base == StepId() || (step != nullptr && step->complete))
    return Error(Code::kUnavailable,
                 "%s is not dropped yet: the newest committed %s cannot be produced now, or some node has "
                 "not marked it",
                 name.c_str(), committed.front().ToString().c_str());
  if (!facts.missing.empty())
    return Error(Code::kUnavailable, "%s is not dropped yet: %s may know that it is committed", name.c_str(),
                 facts.missing.c_str());
  return OkStatus();
}

}  // namespace

void Drops::Begin() {
  drops_.clear();
  ++version_;
}

Status Drops::Request(const DropQuestion& asked, const DropFacts& facts) {
  std::set<StepId> found;
  if (asked.saved) found.insert({asked.incarnation, asked.step});
  for (const auto& [id, state] : facts.table.steps())
    if (id.step == asked.step) found.insert(id);
  bool known = false;
  for (const auto& [id, drop] : drops_) {
    known = known || id.step == asked.step;
    found.erase(id);
  }
  if (found.empty() && !known)
    return Error(Code::kNotFound, "no node holds a shard of step %llu",
                 static_cast<unsigned long long>(asked.step));
  for (const StepId& id : found) ROPETEAM_RETURN_IF_ERROR(MayDrop(id, facts.table.Find(id), facts));
  // Removes completed drops to make room.
  for (auto drop = drops_.begin(); drop != drops_.end() && drops_.size() + found.size() > kDroppedMax;)
    drop = facts.table.Find(drop->first) == nullptr ? drops_.erase(drop) : std::next(drop);
  if (drops_.size() + found.size() > kDroppedMax)
    return Error(Code::kUnavailable, "%zu steps are being released, limit %zu", drops_.size(), kDroppedMax);
  for (const StepId& id : found) {
    LOG_INFO("%s", Explain(DroppedStep{{id}, asked.rank}).c_str());
    const StepTable::StepState* step = facts.table.Find(id);
    drops_[id] = {asked.rank, step == nullptr || !step->complete, 0};
    ++version_;
  }
  return OkStatus();
}

void Drops::OnAnnounced(uint64_t sequence, const std::set<StepId>& kept) {
  for (auto& [id, drop] : drops_) {
    if (kept.contains(id)) {
      drop.released_by = 0;
    } else if (drop.released_by == 0) {
      drop.released_by = sequence;
    }
  }
}

bool Drops::Done(Step step, const StepTable& table, uint64_t acked, bool all_here) const {
  return std::none_of(drops_.begin(), drops_.end(), [&](const auto& each) {
    const auto& [id, drop] = each;
    const bool released = table.Find(id) == nullptr && drop.released_by != 0 && drop.released_by <= acked;
    return id.step == step && (!released || (drop.never_committed && !all_here));
  });
}

std::set<StepId> Drops::steps() const {
  std::set<StepId> steps;
  for (const auto& [id, drop] : drops_) steps.insert(id);
  return steps;
}

std::set<StepId> Drops::never_committed() const {
  std::set<StepId> steps;
  for (const auto& [id, drop] : drops_)
    if (drop.never_committed) steps.insert(id);
  return steps;
}

std::vector<DroppedStep> Drops::notes() const {
  std::vector<DroppedStep> notes;
  for (const auto& [id, drop] : drops_) notes.push_back({{id}, drop.by});
  return notes;
}

std::string Explain(const DroppedStep& dropped) {
  return dropped.step.ToString() + " was dropped by " +
         (dropped.by == DroppedStep::kOperator ? "an operator" : "rank " + std::to_string(dropped.by));
}

}  // namespace ropeteam::engine
