// SPDX-License-Identifier: Apache-2.0
//
// Which nodes hold the copies of a node's shards. A pure function of the view, so every node can compute it
// and nobody has to be asked.
//
// Mixed placement after Gemini (SOSP'23, section 4): groups of m = R + 1 nodes whose members hold each
// other's shards when m divides N, and a ring over the last m + N mod m nodes for the remainder. With groups
// N/m sets of m nodes lose data when they fail together; with a ring over all nodes N sets would.
//
// Failure domains: the order in which groups are cut deals the domains out in turn, so that neighbours come
// from different ones; where a group would still lie inside one domain although there are others, its last
// holder is replaced by a node of another domain.

#ifndef ROPETEAM_CORE_ENGINE_PLACEMENT_H_
#define ROPETEAM_CORE_ENGINE_PLACEMENT_H_

#include <cstdint>
#include <vector>

#include "core/base/view.h"

namespace ropeteam {

// Every other member, best first: the first `replicas` are the designated holders of `node`'s shards, the
// others stand in for them, nearest in the order first. Empty when `node` is not in the view.
std::vector<NodeId> HoldersOf(const View& view, NodeId node, uint32_t replicas);

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_PLACEMENT_H_
