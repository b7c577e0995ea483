// SPDX-License-Identifier: Apache-2.0
//
// The outcome of a drain (core/engine/drainer.h) as text, JSON and exit code. Pure functions.

#ifndef ROPETEAM_NODE_DRAIN_H_
#define ROPETEAM_NODE_DRAIN_H_

#include <string>

#include "core/engine/report.h"

namespace ropeteam {

// Exit codes of a drained daemon and of `ropeteam drain`; docs/operations.md has them. 0: everything is safe.
inline constexpr int kExitDrainedPartly = 5;  // the newest committed step is safe, but something is missing
inline constexpr int kExitDrainedUnsafe =
    6;  // that step cannot be restored without this node, or this is unknown

// The code if the node left now.
int DrainExitCode(const DrainReport& report);
// The same as one sentence.
std::string DrainText(const DrainReport& report);
// Both, with the report's numbers. `left`: the node leaves now.
std::string DrainJson(const DrainReport& report, bool left);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_DRAIN_H_
