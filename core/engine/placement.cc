// SPDX-License-Identifier: Apache-2.0
#include "core/engine/placement.h"

#include <algorithm>
#include <map>

namespace ropeteam {
namespace {

// Members with the domains dealt out in turn, the largest domain first; launcher order within a domain.
std::vector<const Member*> DealtOrder(const View& view) {
  std::map<std::string, std::vector<const Member*>> by_domain;
  for (const Member& member : view.members) by_domain[member.domain].push_back(&member);
  std::vector<std::vector<const Member*>> piles;
  for (auto& [domain, pile] : by_domain) piles.push_back(std::move(pile));
  std::stable_sort(piles.begin(), piles.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  std::vector<const Member*> order;
  for (size_t round = 0; order.size() < view.members.size(); ++round)
    for (const auto& pile : piles)
      if (round < pile.size()) order.push_back(pile[round]);
  return order;
}

// [begin, end) of the ring that position `index` copies within: its group, or the ring of the remainder.
std::pair<size_t, size_t> RingOf(size_t index, size_t nodes, size_t group) {
  if (nodes <= group) return {0, nodes};
  const size_t whole_groups = nodes % group == 0 ? nodes / group : nodes / group - 1;
  if (index < whole_groups * group) return {index / group * group, index / group * group + group};
  return {whole_groups * group, nodes};
}

}  // namespace

std::vector<NodeId> HoldersOf(const View& view, NodeId node, uint32_t replicas) {
  const std::vector<const Member*> order = DealtOrder(view);
  const auto self = std::find_if(order.begin(), order.end(), [&](const Member* m) { return m->id == node; });
  if (self == order.end()) return {};
  const size_t index = static_cast<size_t>(self - order.begin());
  const auto [begin, end] = RingOf(index, order.size(), size_t{replicas} + 1);

  std::vector<const Member*> holders;
  for (size_t i = 1; i < end - begin; ++i)
    holders.push_back(order[begin + (index - begin + i) % (end - begin)]);
  // Stand-ins: who is not in the ring, in order after this node.
  for (size_t i = 1; i < order.size(); ++i) {
    const size_t other = (index + i) % order.size();
    if (other < begin || other >= end) holders.push_back(order[other]);
  }

  const std::string& domain = (*self)->domain;
  const size_t designated = std::min<size_t>(replicas, holders.size());
  const auto elsewhere = [&](const Member* member) { return member->domain != domain; };
  if (designated > 0 && std::none_of(holders.begin(), holders.begin() + designated, elsewhere)) {
    // Chosen by this node's position, so that the nodes of a large domain do not all turn to the same one
    // elsewhere.
    std::vector<size_t> outside;
    for (size_t i = designated; i < holders.size(); ++i)
      if (elsewhere(holders[i])) outside.push_back(i);
    if (!outside.empty()) {
      std::sort(outside.begin(), outside.end(),
                [&](size_t a, size_t b) { return holders[a]->id < holders[b]->id; });
      const auto chosen = holders.begin() + outside[index % outside.size()];
      std::rotate(holders.begin() + designated - 1, chosen, chosen + 1);
    }
  }
  std::vector<NodeId> ids;
  for (const Member* member : holders) ids.push_back(member->id);
  return ids;
}

}  // namespace ropeteam
