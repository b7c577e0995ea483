// SPDX-License-Identifier: Apache-2.0
//
// A coordinator that moves: the Agent's list of addresses, and stories of a few nodes. Every packet takes 1
// ms; times are virtual.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <set>

#include "tests/membership/simulated_cluster.h"

namespace ropeteam {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Member SelfOf(const std::string& name) {
  Member self;
  self.id = 1;
  self.name = name;
  return self;
}

MembershipConfig ListConfig(const std::string& own = {}) {
  MembershipConfig config = DefaultConfig();
  config.coordinator_addresses = {kFirstAddress, kSecondAddress};
  config.coordinator_listen = own;
  return config;
}

const Agent::Open* OpenIn(const Agent::Outputs& outputs) {
  const Agent::Open* open = nullptr;
  for (const Agent::Output& output : outputs)
    if (const auto* found = std::get_if<Agent::Open>(&output)) open = found;
  return open;
}

// The addresses that an agent opens within `for_us` if each attempt is refused at once.
std::vector<std::string> OpenedWhenRefused(Agent* agent, TimeUs* now, TimeUs for_us) {
  std::vector<std::string> opened;
  const TimeUs end = *now + for_us;
  Agent::Outputs outputs = agent->Start(*now);
  for (;;) {
    while (const Agent::Open* open = OpenIn(outputs)) {
      opened.push_back(open->address);
      outputs = agent->Broken(*now, open->attempt, "connection refused");
    }
    if (agent->NextDeadline() > end) return opened;
    *now = std::max(*now, agent->NextDeadline());
    outputs = agent->Tick(*now);
  }
}

TEST(AgentListTest, ARoundOverTheListHasNoPauseInIt) {
  Agent agent(ListConfig(), SelfOf("a"));
  TimeUs now = 1000;
  EXPECT_THAT(OpenedWhenRefused(&agent, &now, kReconnectPauseMinUs),
              ElementsAre(kFirstAddress, kSecondAddress, kFirstAddress, kSecondAddress));
}

TEST(AgentListTest, AnEmbedderOpensItsOwnAddressAfterAsManyRoundsAsItsPlaceInTheList) {
  TimeUs now = 1000;
  Agent first(ListConfig(kFirstAddress), SelfOf("a"));
  const std::vector<std::string> opened = OpenedWhenRefused(&first, &now, kReconnectPauseMinUs);
  ASSERT_GE(opened.size(), 2u);
  EXPECT_EQ(opened[0], kSecondAddress);
  EXPECT_EQ(opened[1], kFirstAddress);

  now = 1000;
  Agent second(ListConfig(kSecondAddress), SelfOf("b"));
  const TimeUs dead_after = DefaultConfig().dead_after_ms * kMs;
  EXPECT_THAT(OpenedWhenRefused(&second, &now, dead_after / 2), ElementsAre(kFirstAddress));
  Agent again(ListConfig(kSecondAddress), SelfOf("b"));
  now = 1000;
  const auto both = OpenedWhenRefused(&again, &now, dead_after + kMs);
  ASSERT_GE(both.size(), 3u);
  EXPECT_EQ(both[1], kFirstAddress);
  EXPECT_EQ(both[2], kSecondAddress);
}

TEST(AgentListTest, AnEmbedderThatWasRegisteredElsewhereNeverOpensItsOwnAddress) {
  Agent agent(ListConfig(kFirstAddress), SelfOf("a"));
  const Agent::Open* open = nullptr;
  Agent::Outputs outputs = agent.Start(1000);
  open = OpenIn(outputs);
  ASSERT_EQ(open->address, kSecondAddress);
  agent.Received(2000, open->attempt, HeartbeatAnswer{});
  ASSERT_TRUE(agent.registered());
  outputs = agent.Broken(50'000, open->attempt, "connection reset");
  TimeUs now = 50'000;
  for (int i = 0; i < 50; ++i) {
    // Addresses from other nodes that have lost the coordinator too change nothing.
    if (i % 10 == 5) outputs = agent.Relocate(now += kReconnectPauseMinUs, {"10.0.0.9:1"}, false);
    while ((open = OpenIn(outputs)) != nullptr) {
      EXPECT_NE(open->address, kFirstAddress);
      outputs = agent.Broken(now, open->attempt, "connection refused");
    }
    now = std::max(now, agent.NextDeadline());
    outputs = agent.Tick(now);
  }
}

TEST(AgentListTest, HearsayMovesOnlyANodeThatIsNotRegistered) {
  Agent agent(DefaultConfig(), SelfOf("a"));
  Agent::Outputs outputs = agent.Start(1000);
  const uint64_t first = OpenIn(outputs)->attempt;
  agent.Received(2000, first, HeartbeatAnswer{});
  EXPECT_EQ(OpenIn(agent.Relocate(3000, {"10.0.0.9:1"}, false)), nullptr);
  EXPECT_TRUE(agent.registered());
  // It remembers the address from then on.
  outputs = agent.Broken(100'000, first, "connection reset");
  outputs = agent.Broken(100'000, OpenIn(outputs)->attempt, "connection refused");
  ASSERT_NE(OpenIn(outputs), nullptr);
  EXPECT_EQ(OpenIn(outputs)->address, "10.0.0.9:1");
  EXPECT_EQ(OpenIn(agent.Relocate(100'500, {"10.0.0.8:1"}, false)), nullptr) << "not at any pace";
  outputs = agent.Relocate(100'000 + kReconnectPauseMinUs, {"10.0.0.8:1"}, false);
  ASSERT_NE(OpenIn(outputs), nullptr);
  EXPECT_EQ(OpenIn(outputs)->address, "10.0.0.8:1");
  agent.Received(130'000, OpenIn(outputs)->attempt, HeartbeatAnswer{});
  outputs = agent.Relocate(132'000, {kFirstAddress}, true);
  ASSERT_NE(OpenIn(outputs), nullptr) << "an operator says so";
  EXPECT_EQ(OpenIn(outputs)->address, kFirstAddress);
  EXPECT_EQ(OpenIn(agent.Relocate(133'000, {"no port"}, true)), nullptr);
}

TEST(AgentListTest, OfOrderedPlacesTheNewestIsTheOnlyOne) {
  MembershipConfig config = DefaultConfig();
  config.coordinator_addresses.clear();
  Agent agent(config, SelfOf("a"));
  EXPECT_EQ(OpenIn(agent.Start(1000)), nullptr) << "it waits";
  EXPECT_EQ(agent.NextDeadline(), std::numeric_limits<TimeUs>::max());
  Agent::Outputs outputs = agent.Relocate(2000, {"10.0.0.1:1", 7}, true);
  ASSERT_NE(OpenIn(outputs), nullptr);
  agent.Received(3000, OpenIn(outputs)->attempt, HeartbeatAnswer{});
  EXPECT_EQ(OpenIn(agent.Relocate(4000, {"10.0.0.2:1", 6}, true)), nullptr) << "late news";
  outputs = agent.Relocate(5000, {"10.0.0.2:1", 8}, false);
  ASSERT_NE(OpenIn(outputs), nullptr);
  TimeUs now = 5000;
  for (int i = 0; i < 8; ++i) {
    while (const Agent::Open* open = OpenIn(outputs)) {
      EXPECT_EQ(open->address, "10.0.0.2:1");
      outputs = agent.Broken(now, open->attempt, "connection refused");
    }
    now = std::max(now, agent.NextDeadline());
    outputs = agent.Tick(now);
  }
}

TEST(AgentListTest, WhatItWasToldIsBounded) {
  Agent agent(DefaultConfig(), SelfOf("a"));
  agent.Start(1000);
  for (int i = 0; i < 100; ++i) agent.Relocate(2000, {Numbered("10.1.0.", i % 250) + ":1"}, false);
  std::set<std::string> opened;
  TimeUs now = 2000;
  Agent::Outputs outputs = agent.Relocate(2000, {"10.2.0.1:1"}, false);
  for (int i = 0; i < 30; ++i) {
    while (const Agent::Open* open = OpenIn(outputs)) {
      opened.insert(open->address);
      outputs = agent.Broken(now, open->attempt, "connection refused");
    }
    now = std::max(now, agent.NextDeadline());
    outputs = agent.Tick(now);
  }
  EXPECT_EQ(opened.size(), kCoordinatorsMax + 1);
  EXPECT_TRUE(opened.contains(kFirstAddress)) << "what was configured stays";
}

TEST(AgentListTest, ContactIsToldOncePerChangeWithTheReason) {
  Agent agent(ListConfig(), SelfOf("a"));
  std::vector<Contact> told;
  const auto note = [&told](const Agent::Outputs& outputs) {
    for (const Agent::Output& output : outputs)
      if (const auto* contact = std::get_if<Contact>(&output)) told.push_back(*contact);
    return OpenIn(outputs) == nullptr ? 0 : OpenIn(outputs)->attempt;
  };
  uint64_t attempt = note(agent.Start(1000));
  for (int i = 0; i < 4; ++i) {
    const uint64_t next = note(agent.Broken(1000, attempt, "connection refused"));
    attempt = next != 0 ? next : note(agent.Tick(agent.NextDeadline()));
  }
  ASSERT_EQ(told.size(), 2u) << "one per address";
  EXPECT_FALSE(told[0].registered);
  EXPECT_EQ(told[0].address, kFirstAddress);
  EXPECT_EQ(told[0].reason, "connection refused");
  EXPECT_EQ(told[1].address, kSecondAddress);
  EXPECT_EQ(told[1].since, 1000u);
  note(agent.Received(60'000, attempt, HeartbeatAnswer{}));
  ASSERT_EQ(told.size(), 3u);
  EXPECT_TRUE(told[2].registered);
  EXPECT_EQ(told[2].since, 60'000u);
}

class MovedCoordinator : public ::testing::Test {
 protected:
  MovedCoordinator() : cluster_(1, Config()) {}
  static MembershipConfig Config() {
    MembershipConfig config = ListConfig();
    config.nodes_expected = 3;
    return config;
  }
  NodeId AddEmbedder(const std::string& name, uint32_t ordinal, const char* own) {
    MembershipConfig config = Config();
    config.coordinator_listen = own;
    return cluster_.Add(cluster_.MakeMember(name, ordinal), &config);
  }
  void StartThree() {
    a_ = AddEmbedder("a", 0, kFirstAddress);
    b_ = cluster_.Add("b", 1);
    c_ = cluster_.Add("c", 2);
    ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 2000));
    ASSERT_NE(cluster_.membership().coordinator(0), nullptr);
  }
  void LoseFirst(bool reset) {
    cluster_.CrashCoordinator(reset);
    cluster_.Crash(a_, reset);
  }
  void TearDown() override { EXPECT_EQ(cluster_.broken(), ""); }

  SimulatedCluster cluster_;
  NodeId a_ = 0, b_ = 0, c_ = 0;
};

TEST_F(MovedCoordinator, TheListLeadsToAReplacementAtAnotherAddress) {
  for (const bool reset : {true, false}) {
    SCOPED_TRACE(reset);
    StartThree();
    const Epoch before = cluster_.EpochOf(b_);
    LoseFirst(reset);
    cluster_.RunFor(3000);
    EXPECT_FALSE(cluster_.HasLease(b_));
    EXPECT_EQ(cluster_.EpochOf(b_), before) << "the last view stays in force";
    const NodeId a2 = AddEmbedder("a", 0, kSecondAddress);
    ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 5000));
    EXPECT_NE(cluster_.membership().coordinator(1), nullptr);
    EXPECT_GT(cluster_.EpochOf(b_), before);
    EXPECT_THAT(cluster_.Names(b_), ElementsAre("a", "b", "c"));
    EXPECT_TRUE(cluster_.Sees(a2, b_)) << "the same instance";
    EXPECT_TRUE(cluster_.RunUntil([&] { return cluster_.HasLease(b_) && cluster_.HasLease(a2); }, 2000));
    EXPECT_EQ(cluster_.ContactOf(c_).address, kSecondAddress);
    for (const NodeId node : {a2, b_, c_}) cluster_.Crash(node, true);
    cluster_.CrashCoordinator(true, 1);
    cluster_.RunFor(10);
  }
}

TEST_F(MovedCoordinator, TheReturningHostJoinsTheMovedCoordinator) {
  StartThree();
  LoseFirst(true);
  cluster_.RunFor(500);
  const NodeId a2 = AddEmbedder("a", 0, kSecondAddress);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 5000));
  const NodeId d = AddEmbedder("d", 3, kFirstAddress);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 2000));
  EXPECT_EQ(cluster_.membership().coordinator(0), nullptr);
  EXPECT_THAT(cluster_.Names(a2), ElementsAre("a", "b", "c", "d"));
  // Nor does it become coordinator when the current one is gone.
  cluster_.Crash(a2, true);
  cluster_.CrashCoordinator(true, 1);
  cluster_.RunFor(20'000);
  EXPECT_EQ(cluster_.membership().coordinator(0), nullptr);
  EXPECT_TRUE(cluster_.Sees(d, a2));
}

TEST_F(MovedCoordinator, OneThatIsToldByAnOperatorIsFollowedByWhomItTells) {
  // As Daemon does it: `ropeteam rejoin` tells one node the address, and that node tells the others.
  MembershipConfig config = Config();
  config.coordinator_addresses = {kFirstAddress};
  cluster_.RestartCoordinator(0);
  for (const char* name : {"a", "b", "c"}) {
    Member member = cluster_.MakeMember(name, static_cast<uint32_t>(name[0] - 'a'));
    const NodeId id = cluster_.Add(member, &config);
    (name[0] == 'a' ? a_ : name[0] == 'b' ? b_ : c_) = id;
  }
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 2000));
  LoseFirst(false);
  cluster_.RunFor(3000);
  config.coordinator_addresses = {kSecondAddress};
  config.coordinator_listen = kSecondAddress;
  const NodeId a2 = cluster_.Add(cluster_.MakeMember("a", 0), &config);
  cluster_.RunFor(3000);
  EXPECT_EQ(cluster_.Names(a2).size(), 1u) << "nobody knows of it";
  cluster_.Relocate(b_, kSecondAddress, false);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.ContactOf(b_).registered; }, 500));
  cluster_.Relocate(c_, kSecondAddress, false);
  ASSERT_TRUE(cluster_.RunUntil([&] { return cluster_.Converged(); }, 5000));
  EXPECT_THAT(cluster_.Names(c_), ElementsAre("a", "b", "c"));
  EXPECT_TRUE(cluster_.Sees(a2, b_) && cluster_.Sees(a2, c_)) << "the same instances";
}

// Two nodes that may become coordinator start at different offsets. Around the instants at which one of them
// asks or begins to listen, every millisecond is tried.
TEST(TwoEmbedders, EndUnderOneCoordinator) {
  const int64_t dead_after_ms = DefaultConfig().dead_after_ms;
  std::vector<int64_t> offsets;  // from the first one's start to the second one's
  for (int64_t at = -2 * dead_after_ms; at <= 2 * dead_after_ms; at += 130) offsets.push_back(at);
  for (const int64_t instant : {-dead_after_ms, int64_t{0}, dead_after_ms})
    for (int64_t near = -6; near <= 6; ++near) offsets.push_back(instant + near);
  int missed = 0;
  for (const int64_t offset : offsets) {
    SCOPED_TRACE(offset);
    MembershipConfig config = ListConfig();
    config.nodes_expected = 2;
    SimulatedCluster cluster(1, config);
    const auto start = [&](const char* name, uint32_t ordinal, const char* own) {
      config.coordinator_listen = own;
      return cluster.Add(cluster.MakeMember(name, ordinal), &config);
    };
    NodeId a = 0;
    NodeId b = 0;
    if (offset >= 0) {
      a = start("a", 0, kFirstAddress);
      cluster.RunFor(static_cast<uint64_t>(offset));
      b = start("b", 1, kSecondAddress);
    } else {
      b = start("b", 1, kSecondAddress);
      cluster.RunFor(static_cast<uint64_t>(-offset));
      a = start("a", 0, kFirstAddress);
    }
    cluster.RunUntil(
        [&] {
          return cluster.membership().coordinator(0) != nullptr &&
                 cluster.membership().coordinator(1) != nullptr;
        },
        2000)
        ? ++missed
        : 0;
    EXPECT_TRUE(cluster.RunUntil(
        [&] {
          return cluster.Converged() && (cluster.membership().coordinator(0) == nullptr) !=
                                            (cluster.membership().coordinator(1) == nullptr);
        },
        10'000));
    EXPECT_TRUE(cluster.Sees(a, b));
    EXPECT_EQ(cluster.broken(), "");
  }
  EXPECT_GT(missed, 0) << "no offset showed the race that this test is for";
}

}  // namespace
}  // namespace ropeteam
