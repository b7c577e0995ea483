// SPDX-License-Identifier: Apache-2.0
//
// What a sealed copy counts for, and when it may be removed. docs/save-and-commit.md has the same table.
//
// clang-format off
//   role      made by                              counts towards   serves   may be evicted      is removed
//                                                  REPLICATED,      reads,   when memory
//                                                  COMMITTED        latest   is needed
//   -------   ----------------------------------   --------------   ------   -----------------   ---------------------
//   own       a rank's save                        yes              yes      only if announced   announced: released,
//                                                                            as evictable        or dead, or a loser
//   replica   a source's copy, checked here; a     yes              yes      the same            the same
//             fetch for a rank that sits here;
//             a cache, promoted
//   cache     a fetch, only to be read             no               yes      always              the same, or evicted
//
//   role      event                                                          becomes
//   -------   ------------------------------------------------------------   --------------------------------------
//   cache     a source asks for a copy of this shard and its seal matches     replica; the next inventory says so
//   own       -                                                              never anything else
//   replica   the leader finds more than 1 + R copies of a shard of a step    cache; the next inventory says so
//             that every member has marked (Redundancy::Trim)
// clang-format on
//
// A copy of any role that is encrypted with a key that its node lacks counts and serves as none (Context::Readable). It
// is kept like the others, since the key may come back, and its mark is known. A readable copy takes its place.
//
// "Announced" is the newest announcement of the leader of this node's epoch (Announcement). This node never evicts
// a copy that counts without the leader's order: the copy stays after its incarnation has ended, until this node
// knows of a newer commit, or the leader has found that no rank was told of its step (retention.h). A full arena
// refuses the new save instead.

#ifndef ROPETEAM_CORE_ENGINE_COPY_RULES_H_
#define ROPETEAM_CORE_ENGINE_COPY_RULES_H_

#include "core/base/check.h"
#include "core/engine/messages.h"
#include "core/store/store.h"

namespace ropeteam::engine {

// The leader's last announcement. It is in force only while `heard`: it came from the leader of this node's epoch,
// and that leader knew this node's incarnation.
struct Announcement : LeaderState {
  bool heard = false;
};

// Whether a copy of this role counts towards REPLICATED and COMMITTED.
constexpr bool Counts(Role role) { return role != Role::kCache; }

enum class CopyFate : uint8_t { kStays, kEvictable, kReleased };

// What becomes of a copy of `step` on a node that has heard `announced`.
inline CopyFate FateOf(Role role, const StepId& step, const Announcement& announced) {
  const bool kept = announced.keep.contains(step);
  ROPETEAM_CHECK(!kept || !announced.dead.contains(step));  // no step is both kept and dead
  if (announced.heard && !kept) {
    if (step < announced.release_before || announced.dead.contains(step)) return CopyFate::kReleased;
    if (announced.evictable.contains(step)) return CopyFate::kEvictable;
  }
  return Counts(role) ? CopyFate::kStays : CopyFate::kEvictable;
}

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_COPY_RULES_H_
