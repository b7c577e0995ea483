// SPDX-License-Identifier: Apache-2.0
#include "core/engine/placement.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "core/base/check.h"

namespace ropeteam {
namespace {

// [begin, end) of the ring in which the node at `index` has its holders: its group, or the ring of the remainder.
std::pair<size_t, size_t> RingOf(size_t index, size_t nodes, size_t group) {
  if (nodes <= group) return {0, nodes};
  const size_t whole_groups = nodes % group == 0 ? nodes / group : nodes / group - 1;
  if (index < whole_groups * group) return {index / group * group, index / group * group + group};
  return {whole_groups * group, nodes};
}

}  // namespace

Placement::Placement(const View& view) {
  std::map<std::string, std::vector<const Member*>> by_domain;
  for (const Member& member : view.members) by_domain[member.domain].push_back(&member);
  std::vector<std::vector<const Member*>> piles;
  for (auto& [domain, pile] : by_domain) piles.push_back(std::move(pile));
  // Deals the members out of the domains round-robin, the largest domain first; launcher order within a domain.
  std::stable_sort(piles.begin(), piles.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  size_t dealing = piles.size();  // piles with members left are in front
  for (size_t round = 0; order_.size() < view.members.size(); ++round) {
    while (dealing > 0 && piles[dealing - 1].size() <= round) --dealing;
    ROPETEAM_CHECK(dealing > 0);
    for (uint32_t pile = 0; pile < dealing; ++pile) {
      order_.push_back(piles[pile][round]->id);
      domain_.push_back(pile);
    }
  }
  for (uint32_t i = 0; i < order_.size(); ++i) index_.emplace(order_[i], i);
  ROPETEAM_CHECK(index_.size() == view.members.size());  // ids are unique
  by_id_.resize(order_.size());
  std::iota(by_id_.begin(), by_id_.end(), 0);
  std::sort(by_id_.begin(), by_id_.end(), [this](uint32_t a, uint32_t b) { return order_[a] < order_[b]; });
  domain_members_.resize(piles.size());
  for (uint32_t i = 0; i < by_id_.size(); ++i) domain_members_[domain_[by_id_[i]]].push_back(i);
}

size_t Placement::NthOutside(uint32_t domain, size_t k) const {
  const std::vector<uint32_t>& inside = domain_members_[domain];
  // Before the j-th member inside, there are inside[j] - j outside.
  size_t low = 0;
  size_t high = inside.size();
  while (low < high) {
    const size_t middle = (low + high) / 2;
    if (inside[middle] - middle <= k) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  ROPETEAM_CHECK(k + low < by_id_.size() && domain_[by_id_[k + low]] != domain);
  return by_id_[k + low];
}

Placement::Holders Placement::HoldersOf(NodeId node, uint32_t replicas) const {
  Holders holders;
  holders.placement_ = this;
  const auto self = index_.find(node);
  if (self == index_.end()) return holders;
  const size_t nodes = order_.size();
  const size_t index = self->second;
  holders.index_ = index;
  holders.size_ = nodes - 1;
  std::tie(holders.begin_, holders.end_) = RingOf(index, nodes, size_t{replicas} + 1);
  const size_t designated = std::min<size_t>(replicas, holders.size_);
  const uint32_t domain = domain_[index];
  const size_t outside = nodes - domain_members_[domain].size();
  if (designated == 0 || outside == 0) return holders;
  for (size_t i = 0; i < designated; ++i)
    if (domain_[index_.at(holders.Plain(i))] != domain) return holders;
  // Depends on this node's position, so that the nodes of a large domain do not all choose the same node of another
  // domain.
  const size_t chosen = NthOutside(domain, index % outside);
  const size_t ring = holders.end_ - holders.begin_;
  holders.moved_to_ = designated - 1;
  holders.moved_from_ = chosen >= holders.begin_ && chosen < holders.end_
                            ? (chosen + ring - index) % ring - 1
                            : ring - 1 + (chosen + nodes - holders.end_) % nodes;
  ROPETEAM_CHECK(holders.Plain(holders.moved_from_) == order_[chosen]);
  return holders;
}

NodeId Placement::Holders::Plain(size_t i) const {
  const std::vector<NodeId>& order = placement_->order_;
  const size_t ring = end_ - begin_;
  if (i < ring - 1) return order[begin_ + (index_ - begin_ + 1 + i) % ring];
  // Substitutes: the nodes outside the ring, in the order after it.
  return order[(end_ + i - (ring - 1)) % order.size()];
}

NodeId Placement::Holders::operator[](size_t i) const {
  ROPETEAM_CHECK(i < size_);
  if (moved_to_ == moved_from_ || i < moved_to_ || i > moved_from_) return Plain(i);
  return i == moved_to_ ? Plain(moved_from_) : Plain(i - 1);
}

}  // namespace ropeteam
