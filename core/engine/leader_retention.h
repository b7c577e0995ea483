// SPDX-License-Identifier: Apache-2.0
//
// Which steps the members keep, release and may evict: a pure function of the step table, the incarnation and
// the members' sessions.

#ifndef ROPETEAM_CORE_ENGINE_LEADER_RETENTION_H_
#define ROPETEAM_CORE_ENGINE_LEADER_RETENTION_H_

#include <set>
#include <vector>

#include "core/engine/messages.h"
#include "core/engine/step_table.h"

namespace ropeteam::engine {

struct RetentionInput {
  const StepTable& table;
  const Life& life;
  uint32_t keep_steps;
  std::vector<const SessionReport*> sessions;  // of all members
};

struct RetentionDecision {
  std::set<StepId> keep;
  StepId release_before;  // older steps that are not in `keep` are released
  // Steps of the current incarnation that some rank has passed without a shard of them, and steps that were
  // given up; without those that `release_before` releases.
  std::set<StepId> dead;
  // Not committed so far, and never to be from now on, even if their last copies arrive: members may be
  // releasing them already,
  std::vector<StepId> give_up;
  // or evicting them, because they are of a former incarnation and not kept.
  std::vector<StepId> evictable;
};
RetentionDecision DecideRetention(const RetentionInput& input);

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_LEADER_RETENTION_H_
