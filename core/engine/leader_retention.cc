// SPDX-License-Identifier: Apache-2.0
#include "core/engine/leader_retention.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"

namespace ropeteam::engine {
namespace {

void DecideKept(const RetentionInput& input, RetentionDecision* decision) {
  const auto& steps = input.table.steps();
  std::set<StepId>& keep = decision->keep;
  StepId& release_before = decision->release_before;
  // Kept are the newest producible step, committed or not, and every committed step down to the K-th that is
  // producible: a committed step whose holder is away for a moment is not given up for an older one.
  size_t producible_committed = 0;
  bool newest = true;
  for (auto step = steps.rbegin(); step != steps.rend() && producible_committed < input.keep_steps; ++step) {
    const bool producible = step->second.producible() && !step->second.given_up;
    if (step->second.committed || (producible && newest)) keep.insert(step->first);
    if (!producible) continue;
    newest = false;
    if (!step->second.committed) continue;
    if (++producible_committed == 1) release_before = step->first;
  }
  ROPETEAM_CHECK(release_before == StepId() || keep.contains(release_before));
  // Fewer than that are known to be committed at a job's beginning, or when what knew of the others is lost:
  // then older steps that can be produced are kept in their place.
  for (auto step = steps.rbegin(); step != steps.rend() && producible_committed < input.keep_steps; ++step) {
    if (step->second.committed || step->second.given_up || !step->second.producible() ||
        !(step->first < release_before))
      continue;
    keep.insert(step->first);
    ++producible_committed;
  }
  const Life& life = input.life;
  if (life.pin == StepId() || input.table.Find(life.pin) == nullptr) return;
  // The step this incarnation was restored from is protected until the incarnation has a committed step of its
  // own. While this one has not chosen, the choice of the one before still holds, unless a newer step is
  // committed.
  const std::vector<StepId> committed = input.table.CommittedNewestFirst(1);
  const bool own = !committed.empty() && committed.front().incarnation == life.incarnation;
  const bool surpassed = life.has_pin ? own : life.pin < release_before;
  if (!surpassed) keep.insert(life.pin);
}

std::set<StepId> DeadSteps(const RetentionInput& input) {
  std::set<StepId> dead;
  const auto& steps = input.table.steps();
  std::vector<std::pair<StepId, const StepTable::StepState*>> open_steps;  // that may still become committed
  for (auto step = steps.lower_bound({input.life.incarnation, 0}); step != steps.end(); ++step)
    if (!step->second.committed) open_steps.emplace_back(step->first, &step->second);
  for (const SessionReport* session : input.sessions) {
    if (open_steps.empty()) break;
    if (session->incarnation != input.life.incarnation || !session->has_ended) continue;
    const StepId passed{session->incarnation, session->newest_ended};
    for (const auto& [id, step] : open_steps) {
      if (!(id < passed)) break;
      const bool open = std::find(session->open_steps.begin(), session->open_steps.end(), id.step) !=
                        session->open_steps.end();
      if (!open && session->rank < step->world_size && step->ranks[session->rank].copies.empty())
        dead.insert(id);
    }
  }
  for (const auto& [id, step] : steps)
    if (step.given_up) dead.insert(id);
  return dead;
}

}  // namespace

RetentionDecision DecideRetention(const RetentionInput& input) {
  RetentionDecision decision;
  DecideKept(input, &decision);
  const auto released = [&](const StepId& id) {
    return id < decision.release_before && !decision.keep.contains(id);
  };
  for (const auto& [id, step] : input.table.steps()) {
    if (step.committed) continue;
    if (released(id) && !step.given_up) decision.give_up.push_back(id);
    if (id.incarnation < input.life.incarnation && !decision.keep.contains(id))
      decision.evictable.push_back(id);
  }
  decision.dead = DeadSteps(input);
  std::erase_if(decision.dead, released);
  for (const StepId& id : decision.dead)
    ROPETEAM_CHECK(input.table.Find(id) != nullptr && !input.table.Find(id)->committed);
  return decision;
}

}  // namespace ropeteam::engine
