// SPDX-License-Identifier: Apache-2.0
#include "core/engine/placement.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <random>
#include <set>

namespace ropeteam {
namespace {

std::vector<NodeId> HoldersOf(const View& view, NodeId node, uint32_t replicas) {
  const Placement placement(view);
  const Placement::Holders holders = placement.HoldersOf(node, replicas);
  std::vector<NodeId> ids;
  for (size_t i = 0; i < holders.size(); ++i) ids.push_back(holders[i]);
  return ids;
}

using ::testing::ElementsAre;

// Nodes have ids 100, 101, …, so that a test fails if positions and ids are mixed up.
View Nodes(size_t count, const std::vector<std::string>& domains = {}) {
  View view;
  view.epoch = 1;
  for (size_t i = 0; i < count; ++i) {
    Member member;
    member.id = 100 + i;
    member.name = "n" + std::to_string(i);
    member.ordinal = static_cast<uint32_t>(i);
    if (!domains.empty()) member.domain = domains[i];
    view.members.push_back(member);
  }
  return view;
}

std::vector<NodeId> Designated(const View& view, NodeId node, uint32_t replicas) {
  std::vector<NodeId> holders = HoldersOf(view, node, replicas);
  if (holders.size() > replicas) holders.resize(replicas);
  return holders;
}

// The sets of nodes whose loss together loses some node's shard.
std::set<std::set<NodeId>> LosingSets(const View& view, uint32_t replicas) {
  std::set<std::set<NodeId>> sets;
  for (const Member& member : view.members) {
    std::set<NodeId> set = {member.id};
    for (const NodeId holder : Designated(view, member.id, replicas)) set.insert(holder);
    sets.insert(set);
  }
  return sets;
}

TEST(Placement, PairsHoldEachOther) {
  const View view = Nodes(4);
  EXPECT_THAT(Designated(view, 100, 1), ElementsAre(101));
  EXPECT_THAT(Designated(view, 101, 1), ElementsAre(100));
  EXPECT_THAT(Designated(view, 102, 1), ElementsAre(103));
  EXPECT_THAT(Designated(view, 103, 1), ElementsAre(102));
}

TEST(Placement, DivisibleClustersHaveTheFewestLosingSets) {
  EXPECT_EQ(LosingSets(Nodes(12), 1).size(), 6u);
  EXPECT_EQ(LosingSets(Nodes(12), 2).size(), 4u);
  EXPECT_EQ(LosingSets(Nodes(12), 3).size(), 3u);
}

TEST(Placement, TheRemainderIsARing) {
  // 7 nodes in pairs: {0,1} {2,3}, then a ring of 3.
  const View view = Nodes(7);
  EXPECT_THAT(Designated(view, 103, 1), ElementsAre(102));
  EXPECT_THAT(Designated(view, 104, 1), ElementsAre(105));
  EXPECT_THAT(Designated(view, 105, 1), ElementsAre(106));
  EXPECT_THAT(Designated(view, 106, 1), ElementsAre(104));
}

TEST(Placement, EveryNodeHoldsAsMuchAsItGivesWithoutDomains) {
  for (size_t nodes = 2; nodes <= 17; ++nodes) {
    for (uint32_t replicas = 1; replicas < 4 && replicas < nodes; ++replicas) {
      const View view = Nodes(nodes);
      std::map<NodeId, uint32_t> held;
      for (const Member& member : view.members) {
        const std::vector<NodeId> holders = Designated(view, member.id, replicas);
        EXPECT_EQ(std::set<NodeId>(holders.begin(), holders.end()).size(), replicas);
        for (const NodeId holder : holders) {
          EXPECT_NE(holder, member.id);
          ++held[holder];
        }
      }
      for (const Member& member : view.members)
        EXPECT_EQ(held[member.id], replicas) << nodes << " nodes, " << replicas << " replicas";
    }
  }
}

TEST(Placement, EveryOtherNodeStandsInOnce) {
  for (const Member& member : Nodes(9).members) {
    std::vector<NodeId> holders = HoldersOf(Nodes(9), member.id, 2);
    EXPECT_EQ(holders.size(), 8u);
    std::sort(holders.begin(), holders.end());
    EXPECT_EQ(std::unique(holders.begin(), holders.end()), holders.end());
    EXPECT_FALSE(std::binary_search(holders.begin(), holders.end(), member.id));
  }
}

TEST(Placement, ACopyLeavesTheDomainWhenThereIsAnother) {
  const std::vector<std::vector<std::string>> clusters = {{"a", "a", "b", "b"},
                                                          {"a", "a", "a", "a", "a", "b"},
                                                          {"a", "a", "a", "b", "b", "c", "c"},
                                                          {"b", "a", "a", "a", "a", "a", "a", "a"}};
  for (const auto& domains : clusters) {
    for (uint32_t replicas = 1; replicas <= 2; ++replicas) {
      const View view = Nodes(domains.size(), domains);
      for (const Member& member : view.members) {
        const std::vector<NodeId> holders = Designated(view, member.id, replicas);
        EXPECT_TRUE(std::any_of(holders.begin(), holders.end(),
                                [&](NodeId holder) { return view.Find(holder)->domain != member.domain; }))
            << "node " << member.name << " of " << domains.size() << ", replicas " << replicas;
      }
    }
  }
}

// A plain implementation of the rules, which builds the whole list.
std::vector<NodeId> PlainHoldersOf(const View& view, NodeId node, uint32_t replicas) {
  std::map<std::string, std::vector<const Member*>> by_domain;
  for (const Member& member : view.members) by_domain[member.domain].push_back(&member);
  std::vector<std::vector<const Member*>> piles;
  for (auto& [domain, pile] : by_domain) piles.push_back(pile);
  std::stable_sort(piles.begin(), piles.end(),
                   [](const auto& a, const auto& b) { return a.size() > b.size(); });
  std::vector<const Member*> order;
  for (size_t round = 0; order.size() < view.members.size(); ++round)
    for (const auto& pile : piles)
      if (round < pile.size()) order.push_back(pile[round]);
  const size_t index = static_cast<size_t>(
      std::find_if(order.begin(), order.end(), [&](const Member* member) { return member->id == node; }) -
      order.begin());
  const size_t group = size_t{replicas} + 1;
  size_t begin = 0;
  size_t end = order.size();
  if (order.size() > group) {
    const size_t whole = order.size() % group == 0 ? order.size() / group : order.size() / group - 1;
    begin = index < whole * group ? index / group * group : whole * group;
    end = index < whole * group ? begin + group : order.size();
  }
  std::vector<const Member*> holders;
  for (size_t i = 1; i < end - begin; ++i)
    holders.push_back(order[begin + (index - begin + i) % (end - begin)]);
  for (size_t i = 1; i < order.size(); ++i)
    if (const size_t other = (index + i) % order.size(); other < begin || other >= end)
      holders.push_back(order[other]);
  const auto designated =
      holders.begin() + static_cast<ptrdiff_t>(std::min<size_t>(replicas, holders.size()));
  const auto elsewhere = [&](const Member* member) { return member->domain != order[index]->domain; };
  if (designated != holders.begin() && std::none_of(holders.begin(), designated, elsewhere)) {
    std::vector<const Member*> outside;
    std::copy_if(designated, holders.end(), std::back_inserter(outside), elsewhere);
    std::sort(outside.begin(), outside.end(), [](const Member* a, const Member* b) { return a->id < b->id; });
    if (!outside.empty()) {
      const auto chosen = std::find(designated, holders.end(), outside[index % outside.size()]);
      std::rotate(designated - 1, chosen, chosen + 1);
    }
  }
  std::vector<NodeId> ids;
  for (const Member* member : holders) ids.push_back(member->id);
  return ids;
}

TEST(Placement, WhatIsComputedOneByOneIsTheWholeList) {
  std::mt19937 random(1);
  for (int round = 0; round < 300; ++round) {
    View view = Nodes(1 + random() % 40);
    const size_t domains = 1 + random() % 5;
    for (Member& member : view.members) {
      member.id = 1 + random() % 1'000'000;
      member.domain = std::string(1, static_cast<char>('a' + random() % domains * (random() % 2)));
    }
    for (uint32_t replicas = 0; replicas <= 3; ++replicas)
      for (const Member& member : view.members)
        EXPECT_EQ(HoldersOf(view, member.id, replicas), PlainHoldersOf(view, member.id, replicas))
            << "round " << round << " replicas " << replicas;
  }
}

TEST(Placement, FewerNodesThanCopiesGivesWhatThereIs) {
  EXPECT_THAT(HoldersOf(Nodes(1), 100, 2), ElementsAre());
  EXPECT_THAT(HoldersOf(Nodes(2), 101, 2), ElementsAre(100));
  EXPECT_THAT(HoldersOf(Nodes(3), 77, 1), ElementsAre());
}

}  // namespace
}  // namespace ropeteam
