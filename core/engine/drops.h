// SPDX-License-Identifier: Apache-2.0
//
// The leader's part in ropeteam_drop() and `ropeteam drop`. It decides which steps a rank or an operator may release
// before retention would. It also decides when no copy of them is left.
//
// clang-format off
//   a step is                                                            a drop of it
//   ------------------------------------------------------------------   -------------------------------------------------
//   what the incarnation was restored from, and retention keeps it       is refused
//   older than the base: the newest step that is committed, marked by    is carried out: retention keeps it no longer, while
//   every member and producible                                          there is a base after it
//   the base, or the newest committed step                               is refused
//   committed, between the two; or there is no base now                  waits
//   not committed, newer than the base, no node is missing (roster.h)    is carried out: the step is released for good
//   not committed, newer than the base, a node is missing                waits: the node may know that it is committed
//   not committed, and no step is committed                              is refused
// clang-format on
//
// So a drop never removes the base. PlanRetention() decides again for each announcement. If the base is lost before the
// release of a dropped step was announced, the newest dropped step is kept like any other step.
//
// All of this is in the leader's memory only. The leader answers when no member has a copy any more, so a new leader
// needs no record of the drop. A new leader may still see a copy on a node that was away. It belongs to a committed
// step that is not the newest one, or to a step that can never be complete because every node has released the other
// shards.

#ifndef ROPETEAM_CORE_ENGINE_DROPS_H_
#define ROPETEAM_CORE_ENGINE_DROPS_H_

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/base/view.h"
#include "core/engine/limits.h"
#include "core/engine/messages.h"
#include "core/engine/step_table.h"

namespace ropeteam::engine {

struct DropFacts {
  const StepTable& table;
  const IncarnationState& incarnation;
  // Of the last announcement:
  StepId base;          // RetentionPlan::release_before
  StepId newest_told;   // by every member
  std::string missing;  // nodes of the roster that are not here; empty: none
};

// The first protocol version that has the question.
inline constexpr uint32_t kDropSince = 9;

class Drops {
 public:
  void Begin();  // to lead: forgets everything
  // Drops all steps of this number, of all incarnations, or none of them. A repeat changes nothing. Errors:
  // kInvalidArgument if it is refused; kUnavailable if it is not possible now; kNotFound if there is no such step.
  Status Request(const DropQuestion& asked, const DropFacts& facts);
  // The announcement of this sequence keeps these steps.
  void OnAnnounced(uint64_t sequence, const std::set<StepId>& kept);
  // True if no member has a copy of these steps, and none is sealing one. `acked`: the newest announcement that every
  // member has acknowledged. `all_here`: no node of the roster is missing. One that left after the decision may hold
  // every shard of a step that was not committed, and under another leader the step would be committed.
  bool Done(Step step, const StepTable& table, uint64_t acked, bool all_here) const;

  std::set<StepId> steps() const;
  // The dropped steps that were not committed. Nodes release a copy of them even if the leader has not heard of it.
  std::set<StepId> never_committed() const;
  std::vector<DroppedStep> notes() const;  // by step, at most kDroppedMax
  // Grows whenever a step is dropped.
  uint64_t version() const { return version_; }

 private:
  struct Drop {
    Rank by = 0;
    bool never_committed = false;
    uint64_t released_by = 0;  // the first announcement that does not keep the step; 0: it is still kept
  };
  std::map<StepId, Drop> drops_;
  uint64_t version_ = 0;
};

// For log and error messages.
std::string Explain(const DroppedStep& dropped);

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_DROPS_H_
