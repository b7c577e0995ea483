// SPDX-License-Identifier: Apache-2.0
//
// What a leader lets the nodes keep, release and evict: a pure function of its state. FateOf() (copy_rules.h) decides
// what a node then does with each copy.
//
// clang-format off
//   a step is      when                                                            its copies
//   ------------   -------------------------------------------------------------   ------------------------------------
//   kept           committed, down to the K-th that is producible and marked by    stay; missing ones are made again
//                  every member; or the newest producible one; or the pin, until
//                  its incarnation has a committed step; or a substitute for an
//                  unknown committed step; or committed and being persisted.
//                  A quarantined or dropped step counts for none of the K,
//                  and is kept only until a newer one is marked by every
//                  member and producible
//   released       older than the newest step that is committed, marked by every   are released by every node; the step
//                  member and producible, and not kept                             is never committed any more
//   dead           it can never be complete (a rank has passed it), its ranks do   are released by every node
//                  not agree, it was released for lack of memory, or it was
//                  dropped before it was committed
//   evictable      of a former incarnation, not committed and not kept, while      may be evicted; the step is never
//                  the current incarnation has been told what it restores and      committed any more
//                  the members know of every commit (roster.h)
//   other          otherwise                                                       stay
// clang-format on
//
// Why no rank was told that an evictable step is committed: before a rank is told, every member has marked its copies,
// 1 + R copies of every shard are on different nodes, and all of them are in the roster. At most R nodes of the roster are
// missing, so some present copy has the mark, and the step counts as committed.

#ifndef ROPETEAM_CORE_ENGINE_RETENTION_H_
#define ROPETEAM_CORE_ENGINE_RETENTION_H_

#include <set>

#include "core/base/view.h"
#include "core/engine/step_table.h"

namespace ropeteam::engine {

struct RetentionPlan {
  std::set<StepId> keep;
  StepId release_before;      // older steps that are not kept are released
  std::set<StepId> released;  // the released steps that are in the table
  std::set<StepId> dead;      // without steps that are already released
  std::set<StepId> evictable;
};

struct RetentionFacts {
  const StepTable& table;
  const IncarnationState& incarnation;
  const std::set<StepId>& hopeless;  // uncommitted steps that some rank has passed without saving its shard
  const std::set<StepId>& told;      // complete steps that every member has marked
  const std::set<StepId>& persisting;
  JobSettings settings;
  bool may_choose = false;  // the members know of every step that ranks were told is committed (roster.h)
  bool pin_told = false;  // some rank may have been told what this incarnation restores: the choice is final
  std::set<StepId> quarantined = {};  // passed over by the next choice (restores.h)
  std::set<StepId> dropped = {};      // by a rank or an operator (drops.h)
};

// Whether the step that an incarnation was restored from is kept. `newest_told`: of RetentionFacts::told; {0, 0}:
// none.
bool KeepsPin(const IncarnationState& incarnation, const StepId& newest_told, const StepId& release_before);

RetentionPlan PlanRetention(const RetentionFacts& facts);

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_RETENTION_H_
