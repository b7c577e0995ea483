// SPDX-License-Identifier: Apache-2.0
//
// Chooses the nodes that hold the copies of each node's shards. It is a pure function of the view, so every node
// computes it without a message.
//
// Mixed placement as in Gemini (SOSP'23, section 4): groups of m = R + 1 nodes whose members hold each other's shards. If
// m does not divide N, the last m + N mod m nodes form a ring instead. With groups, N/m sets of m nodes lose data if they
// fail together; with a ring over all nodes, N sets do.
//
// Failure domains: before the groups are formed, nodes are taken from the domains round-robin, so neighbours are in
// different domains. If all of a group would still be in one domain although there are others, a node of another domain
// replaces its last holder.

#ifndef ROPETEAM_CORE_ENGINE_PLACEMENT_H_
#define ROPETEAM_CORE_ENGINE_PLACEMENT_H_

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/base/view.h"

namespace ropeteam {

// Computed once per view in O(N log N). It keeps no reference to the view.
class Placement {
 public:
  Placement() = default;
  explicit Placement(const View& view);

  // All other members, best first. The first `replicas` are the designated holders of a node's shards. The others
  // replace them, nearest in the order first. Each is computed on access, in O(log N).
  class Holders {
   public:
    size_t size() const { return size_; }  // 0 if the node is not in the view
    NodeId operator[](size_t i) const;

   private:
    friend class Placement;
    NodeId Plain(size_t i) const;  // before the node of another domain is moved to the front
    const Placement* placement_ = nullptr;
    size_t size_ = 0;
    size_t index_ = 0;  // of the node in the dealt order
    size_t begin_ = 0;  // the ring of nodes that it copies to
    size_t end_ = 0;
    // The holder at `moved_from_` of the plain order moves to `moved_to_`; equal: none moves.
    size_t moved_to_ = 0;
    size_t moved_from_ = 0;
  };
  // Valid as long as this Placement exists.
  Holders HoldersOf(NodeId node, uint32_t replicas) const;

 private:
  // The position in the dealt order of the k-th member, by id, outside this domain.
  size_t NthOutside(uint32_t domain, size_t k) const;
  std::vector<NodeId> order_;     // the dealt order
  std::vector<uint32_t> domain_;  // of each node in `order_`
  std::unordered_map<NodeId, uint32_t> index_;
  std::vector<uint32_t> by_id_;  // positions in `order_`, sorted by node id
  // For each domain: the positions of its members in `by_id_`, ascending.
  std::vector<std::vector<uint32_t>> domain_members_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_PLACEMENT_H_
