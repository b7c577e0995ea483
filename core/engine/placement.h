// SPDX-License-Identifier: Apache-2.0
//
// Which nodes hold the copies of a node's shards. A pure function of the view, so every node can compute it
// without asking another.
//
// Mixed placement after Gemini (SOSP'23, section 4): groups of m = R + 1 nodes whose members hold each
// other's shards when m divides N, and a ring over the last m + N mod m nodes for the remainder. With groups
// N/m sets of m nodes lose data when they fail together; with a ring over all nodes N sets would.
//
// Failure domains: before groups are formed, nodes are taken from the domains round-robin, so that neighbours come
// from different domains. If a group would still be inside one domain although there are others, its last
// holder is replaced by a node of another domain.

#ifndef ROPETEAM_CORE_ENGINE_PLACEMENT_H_
#define ROPETEAM_CORE_ENGINE_PLACEMENT_H_

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/base/view.h"

namespace ropeteam {

// Made once for a view, in O(N log N). It keeps nothing of the view.
class Placement {
 public:
  Placement() = default;
  explicit Placement(const View& view);

  // Every other member, best first. The first `replicas` are the designated holders of a node's shards; the others
  // replace them, nearest in the order first. Each is computed when it is requested, in O(log N).
  class Holders {
   public:
    size_t size() const { return size_; }  // 0 when the node is not in the view
    NodeId operator[](size_t i) const;

   private:
    friend class Placement;
    NodeId Plain(size_t i) const;  // before one of another domain is moved to the front
    const Placement* placement_ = nullptr;
    size_t size_ = 0;
    size_t index_ = 0;  // of the node in the dealt order
    size_t begin_ = 0;  // the ring that it copies within
    size_t end_ = 0;
    // The holder at `moved_from_` of the plain order comes at `moved_to_`; equal: none is moved.
    size_t moved_to_ = 0;
    size_t moved_from_ = 0;
  };
  // Valid as long as this Placement.
  Holders HoldersOf(NodeId node, uint32_t replicas) const;

 private:
  // The k-th member outside of this domain, by id; its place in the dealt order.
  size_t NthOutside(uint32_t domain, size_t k) const;
  std::vector<NodeId> order_;     // the dealt order
  std::vector<uint32_t> domain_;  // of each in it
  std::unordered_map<NodeId, uint32_t> index_;
  std::vector<uint32_t> by_id_;  // places in the order, by node id
  // Of each domain, where its members are in `by_id_`, ascending.
  std::vector<std::vector<uint32_t>> domain_members_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_PLACEMENT_H_
