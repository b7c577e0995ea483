// SPDX-License-Identifier: Apache-2.0
#include "core/engine/retention.h"

#include <algorithm>

#include "core/base/check.h"

namespace ropeteam::engine {
namespace {

using Steps = std::map<StepId, StepTable::StepState>;

bool Usable(const StepTable::StepState& step) { return step.producible() && !step.never_commits(); }

// Keeps the newest usable step, committed or not, and every committed step down to the K-th usable one. A short absence
// of a holder must not release a committed step.
void KeepNewest(const RetentionFacts& facts, RetentionPlan* plan) {
  const Steps& steps = facts.table.steps();
  const uint32_t count = facts.settings.keep_steps;
  size_t found = 0;
  bool newest = true;
  for (auto step = steps.rbegin(); step != steps.rend() && found < count; ++step) {
    const bool usable = Usable(step->second);
    // The steps that replace a quarantined step must stay. The quarantined step is released after a newer commit,
    // because the arena is planned for K steps.
    const bool quarantined = facts.quarantined.contains(step->first);
    if ((quarantined || facts.dropped.contains(step->first)) && found != 0) continue;
    if (step->second.complete || (usable && newest)) plan->keep.insert(step->first);
    if (quarantined) continue;
    newest = newest && !usable;
    if (!usable || !facts.told.contains(step->first)) continue;
    ROPETEAM_CHECK(step->second.complete);
    if (++found == 1) plan->release_before = step->first;
  }
  // Fewer than K steps are known to be committed at a job's start, or when the nodes that had the marks are lost. Then
  // older producible steps are kept in their place.
  for (auto step = steps.rbegin(); step != steps.rend() && found < count; ++step) {
    if (step->second.complete || !Usable(step->second) || !(step->first < plan->release_before)) continue;
    plan->keep.insert(step->first);
    ++found;
  }
}

bool MayBeEvicted(const RetentionFacts& facts, const StepId& id, const StepTable::StepState& step) {
  return facts.incarnation.has_pin() && facts.pin_told && id.incarnation < facts.incarnation.number &&
         !step.complete && facts.may_choose;
}

}  // namespace

// The pin is kept until the incarnation has a step of its own that every member has marked. Before the incarnation has
// chosen, the choice of the previous one is kept, unless a newer step is committed.
bool KeepsPin(const IncarnationState& incarnation, const StepId& newest_told, const StepId& release_before) {
  // Also if no node holds anything of the step yet: what is read of it from storage must stay.
  if (incarnation.pin == StepId()) return false;
  if (!incarnation.has_pin()) return !(incarnation.pin < release_before);
  return newest_told.incarnation != incarnation.number;
}

RetentionPlan PlanRetention(const RetentionFacts& facts) {
  RetentionPlan plan;
  KeepNewest(facts, &plan);
  const StepId newest_told = facts.told.empty() ? StepId() : *facts.told.rbegin();
  if (KeepsPin(facts.incarnation, newest_told, plan.release_before)) plan.keep.insert(facts.incarnation.pin);
  for (const StepId& id : facts.persisting) {
    const StepTable::StepState* step = facts.table.Find(id);
    if (step != nullptr && step->complete) plan.keep.insert(id);
  }
  for (const auto& [id, step] : facts.table.steps()) {
    if (plan.keep.contains(id)) continue;
    if (id < plan.release_before) {
      plan.released.insert(id);
    } else if (!step.complete && (step.released || facts.hopeless.contains(id))) {
      plan.dead.insert(id);
    } else if (MayBeEvicted(facts, id, step)) {
      plan.evictable.insert(id);
    }
  }
  // The newest step that is committed and producible is never released.
  ROPETEAM_CHECK(plan.release_before == StepId() || plan.keep.contains(plan.release_before));
  return plan;
}

}  // namespace ropeteam::engine
