// SPDX-License-Identifier: Apache-2.0
//
// Which waits a silent world must end.
#include <algorithm>

#include "tests/simulation/checker.h"

namespace ropeteam::simulation {

bool Checker::MustEnd(const OpenWait& wait) const {
  const StepId step = StepOf(wait.shard);
  if (Find(wait.shard) == nullptr) return false;
  if (Committed(step)) return true;
  // An incomplete step may stay open: whatever daemons knew of it, or of ranks that disagree, restarts may have lost.
  if (wait.level <= Level::kReplicated || Complete(step)) return true;
  const bool newer_committed = !committed_.empty() && committed_.rbegin()->first > step;
  const bool newer_incarnation = !restores_.empty() && restores_.rbegin()->first > step.incarnation;
  return newer_committed || newer_incarnation;
}

bool Checker::Complete(const StepId& step) const {
  const uint32_t world = WorldOf(step);
  for (Rank rank = 0; rank < world; ++rank) {
    const Shard* shard = Find({step.incarnation, step.step, rank});
    if (shard == nullptr || std::none_of(shard->copies.begin(), shard->copies.end(),
                                         [](const auto& copy) { return copy.second.counted(); }))
      return false;
  }
  return world != 0;
}

}  // namespace ropeteam::simulation
