// SPDX-License-Identifier: Apache-2.0
//
// Failure stories about one link: two members do not reach each other, and both reach the coordinator and the others.
#include <algorithm>

#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

// The time from a cut to the first commit after it: the members notice, the leader moves, and its predecessor's lease
// runs out.
constexpr TimeUs kGoesOnWithin = 10 * kSecond;

class OneLink : public Story {
 protected:
  void Start(uint32_t nodes) {
    StartNodes(nodes);
    StartWorld(1);
    SaveEverywhere(1, 10);
    ASSERT_EQ(LeaderHost(), 0u);
  }
  void CutOneWay(size_t from, size_t to) {
    cluster_->network().Cut(from, to, cluster_->now() + 600 * kSecond);
  }
  void CutPair(size_t a, size_t b) {
    CutOneWay(a, b);
    CutOneWay(b, a);
  }
  bool CommitsWithin(Step step, TimeUs time) {
    const std::vector<Rank> ranks = RanksOf(1);
    for (const Rank rank : ranks) EXPECT_TRUE(Save(1, step, rank).ok()) << Trouble();
    return std::all_of(ranks.begin(), ranks.end(),
                       [&](Rank rank) { return Wait(1, step, rank, Level::kCommitted, time).ok(); });
  }
  // A new incarnation opens, agrees on what to restore, and reads it.
  void Reopens(Step step) {
    StopWorld(1);
    StartWorld(2);
    RestoreEverywhere(2, step);
  }
  const std::vector<LostLinkReport> LostBy(size_t host) {
    return cluster_->host(host).engine->Report().lost_links;
  }
};

TEST_F(OneLink, TheLeaderAndAMemberDoNotReachEachOtherAndAnotherLeads) {
  Start(3);
  CutPair(0, 2);
  EXPECT_TRUE(CommitsWithin(20, kGoesOnWithin)) << Trouble();
  EXPECT_EQ(LeaderHost(), 1u);
  ASSERT_TRUE(Until([&] { return LostBy(0).size() == 1 && LostBy(2).size() == 1; }, 5 * kSecond))
      << Trouble();
  EXPECT_TRUE(LostBy(0).front().control);
  EXPECT_EQ(LostBy(0).front().peer, cluster_->host(2).id);
  Reopens(20);
}

// Requests arrive and answers are lost, or the other way round. Both ends notice.
TEST_F(OneLink, OneDirectionIsEnough) {
  for (const bool from_leader : {true, false}) {
    Start(4);
    from_leader ? CutOneWay(0, 3) : CutOneWay(3, 0);
    EXPECT_TRUE(CommitsWithin(20, kGoesOnWithin)) << Trouble();
    EXPECT_NE(LeaderHost(), 0u);
    clients_.clear();
  }
}

TEST_F(OneLink, AfterHealingTheLeaderStaysAndTheFaultIsOver) {
  Start(3);
  CutPair(0, 2);
  ASSERT_TRUE(Until([&] { return LeaderHost() == 1; }));
  cluster_->network().HealLinks();
  ASSERT_TRUE(Until([&] { return LostBy(0).empty() && LostBy(2).empty(); })) << Trouble();
  const Epoch epoch = cluster_->host(1).view.epoch;
  EXPECT_TRUE(CommitsWithin(20, 5 * kSecond)) << Trouble();
  cluster_->RunFor(60 * kSecond);
  EXPECT_EQ(LeaderHost(), 1u);
  EXPECT_EQ(cluster_->host(1).view.epoch, epoch);
  Reopens(20);
}

// No member reaches host 3, so no other leader is better. The leader stays, and the job waits for the network.
TEST_F(OneLink, AMemberThatNobodyReachesDoesNotMoveTheLeader) {
  Start(4);
  const Epoch epoch = cluster_->host(0).view.epoch;
  for (const size_t host : {0, 1, 2}) CutPair(host, 3);
  cluster_->RunFor(60 * kSecond);
  EXPECT_EQ(LeaderHost(), 0u);
  EXPECT_EQ(cluster_->host(0).view.epoch, epoch);
  EXPECT_EQ(LostBy(0).size(), 1u);
  cluster_->network().HealLinks();
  EXPECT_TRUE(CommitsWithin(20, kGoesOnWithin)) << Trouble();
}

// The candidate that is asked first does not reach the member either.
TEST_F(OneLink, TheOneMemberThatReachesEverybodyLeads) {
  Start(5);
  for (const size_t host : {0, 1, 2}) CutPair(host, 4);
  EXPECT_TRUE(CommitsWithin(20, kGoesOnWithin)) << Trouble();
  EXPECT_EQ(LeaderHost(), 3u);
}

TEST_F(OneLink, OfTwoNodesNeitherLeadsBothAndTheFaultIsNamed) {
  Start(2);
  const Epoch epoch = cluster_->host(0).view.epoch;
  CutPair(0, 1);
  ASSERT_TRUE(Until([&] { return !LostBy(0).empty() && !LostBy(1).empty(); }, 8 * kSecond)) << Trouble();
  cluster_->RunFor(60 * kSecond);
  EXPECT_EQ(cluster_->host(0).view.epoch, epoch);
  EXPECT_FALSE(CommitsWithin(20, 5 * kSecond));
  cluster_->network().HealLinks();
  EXPECT_TRUE(CommitsWithin(30, 5 * kSecond)) << Trouble();
}

// The link fails again and again. The leader has moved away from it, so nothing else moves.
TEST_F(OneLink, ALinkThatComesAndGoesMovesTheLeaderOnce) {
  Start(3);
  std::vector<size_t> leaders;
  for (int round = 0; round < 10; ++round) {
    CutPair(0, 2);
    cluster_->RunFor(6 * kSecond);
    cluster_->network().HealLinks();
    cluster_->RunFor(6 * kSecond);
    leaders.push_back(LeaderHost());
  }
  EXPECT_EQ(std::count(leaders.begin(), leaders.end(), 1u), 10);
  EXPECT_TRUE(CommitsWithin(20, 5 * kSecond)) << Trouble();
}

TEST_F(OneLink, TheFormerLeaderMayLeadAgainWhenItsSuccessorIsLost) {
  Start(4);
  CutPair(0, 3);
  EXPECT_TRUE(CommitsWithin(20, kGoesOnWithin)) << Trouble();
  cluster_->network().HealLinks();
  LoseHost(1);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 3; }));
  EXPECT_EQ(LeaderHost(), 0u);
  StopWorld(1);
  StartWorld(2, {0, 2, 3, 0});
  RestoreEverywhere(2, 20);
}

}  // namespace
}  // namespace ropeteam::simulation
