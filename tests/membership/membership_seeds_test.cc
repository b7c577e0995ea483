// SPDX-License-Identifier: Apache-2.0
//
// Coordinator and agents on a bad network, from a seed. Packets are lost, late and out of order. Nodes crash
// with and without a reset, restart, leave, and are cut off in one direction. The coordinator crashes and
// returns. The promises about views are checked at every view (SimulatedCluster::OnView). Then the network
// heals, and all living nodes must end up in one view.
//
//   ROPETEAM_SEED=17 replays one seed, ROPETEAM_SEEDS=100000 runs that many.
#include <gtest/gtest.h>

#include <cstdlib>

#include "core/base/log.h"

#include "tests/membership/simulated_cluster.h"

namespace ropeteam {
namespace {

constexpr uint64_t kSeedsDefault = 400;
constexpr int kEvents = 60;

uint64_t FromEnvironment(const char* name, uint64_t otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr ? std::strtoull(text, nullptr, 10) : otherwise;
}

class SeededRun {
 public:
  explicit SeededRun(uint64_t seed) : cluster_(seed, Config(seed)) {
    Network& network = cluster_.network();
    network.loss = Pick(0, 1) != 0 ? 0 : Draw() * 0.2;
    network.disorder = Pick(0, 1) != 0 ? 0 : Draw() * 0.3;
    network.delay_max_us = Pick(1, 80) * kMs;
    network.drift_ppm_max = Pick(0, 1) != 0 ? 0 : static_cast<int>(kClockDriftPpm);
  }

  std::string Run() {
    coordinator_up_ = Pick(0, 3) != 0;
    if (coordinator_up_) cluster_.RestartCoordinator();
    for (uint64_t i = Pick(1, 9); i > 0; --i) AddFresh();
    for (int event = 0; event < kEvents && cluster_.broken().empty(); ++event) {
      OneEvent();
      cluster_.RunFor(Pick(0, 2) == 0 ? Pick(0, 2000) : Pick(0, 100));
      RejoinRefused();
    }
    cluster_.network().loss = cluster_.network().disorder = 0;
    cluster_.HealAll();
    if (!coordinator_up_) cluster_.RestartCoordinator();
    const bool healed = cluster_.RunUntil(
        [&] {
          RejoinRefused();
          return cluster_.Converged();
        },
        5000);
    if (!cluster_.broken().empty()) return cluster_.broken();
    if (!healed) return "not all living nodes are in one view 5 s after healing";
    // This must last, even when the last packets of dead nodes arrive and their silence is noticed.
    cluster_.RunUntil(
        [&] {
          RejoinRefused();
          return false;
        },
        3000);
    if (!cluster_.Converged()) return "the living nodes' one view did not last";
    const size_t views =
        cluster_.alive().empty() ? 0 : cluster_.Views(cluster_.alive().begin()->first).size();
    cluster_.RunFor(5000);
    if (views != 0 && cluster_.Views(cluster_.alive().begin()->first).size() != views)
      return "a view changes though nothing happens";
    return cluster_.broken();
  }

 private:
  static MembershipConfig Config(uint64_t seed) {
    MembershipConfig config = DefaultConfig();
    config.nodes_expected = static_cast<uint32_t>(seed % 5);
    return config;
  }
  uint64_t Pick(uint64_t from, uint64_t to) {
    return std::uniform_int_distribution<uint64_t>(from, to)(cluster_.random());
  }
  double Draw() { return std::uniform_real_distribution<double>(0, 1)(cluster_.random()); }
  NodeId AnyAlive() {
    if (cluster_.alive().empty()) return kNoNode;
    auto at = cluster_.alive().begin();
    std::advance(at, static_cast<long>(Pick(0, cluster_.alive().size() - 1)));
    return at->first;
  }
  void AddFresh() {
    const uint64_t number = ++names_;
    // Never 0: nodes_expected is not the number of nodes here, so no start may count as that of the whole
    // job.
    cluster_.Add(Numbered("n", number), static_cast<uint32_t>(Pick(1, 6)));
  }
  void Restart(const Member& dead) { cluster_.Add(dead.name, dead.ordinal); }

  void OneEvent() {
    const NodeId node = AnyAlive();
    const uint64_t event = Pick(0, 17);
    if (event == 0 || node == kNoNode) {
      if (cluster_.alive().size() < 12) AddFresh();
    } else if (event <= 3) {
      const Member member = cluster_.alive().at(node);
      cluster_.Crash(node, Pick(0, 1) != 0);
      if (Pick(0, 1) != 0) {
        cluster_.RunFor(Pick(0, 400));
        Restart(member);
      }
    } else if (event == 4) {
      cluster_.Leave(node);
    } else if (event <= 6) {
      cluster_.CutIncoming(node, Pick(0, 2) == 0);
    } else if (event <= 8) {
      cluster_.CutOutgoing(node, Pick(0, 2) == 0);
    } else if (event == 9) {
      cluster_.HealAll();
    } else if (event <= 11) {
      cluster_.Suspect(AnyAlive(), node);
    } else if (event == 12) {
      cluster_.Pause(Pick(0, 3000));
    } else if (event <= 14) {
      // A second instance with the name of a living one, which may be cut off: one of the two becomes a
      // zombie.
      const Member member = cluster_.alive().at(node);
      if (Pick(0, 1) != 0) cluster_.Cut(node, true);
      Restart(member);
    } else if (coordinator_up_) {
      cluster_.CrashCoordinator(Pick(0, 1) != 0);
      coordinator_up_ = false;
    } else {
      cluster_.RestartCoordinator();
      coordinator_up_ = true;
    }
  }

  // As ropeteamd does: a node that was declared dead returns as another instance; a replaced node ends.
  void RejoinRefused() {
    std::vector<NodeId> refused;
    for (const auto& [id, member] : cluster_.alive())
      if (!cluster_.Refusals(id).empty()) refused.push_back(id);
    for (const NodeId id : refused) {
      if (cluster_.Refusals(id)[0].code() == Code::kStale) {
        cluster_.Rejoin(id);
      } else {
        cluster_.Crash(id, true);
      }
    }
  }

  SimulatedCluster cluster_;
  bool coordinator_up_ = false;
  uint64_t names_ = 0;
};

TEST(MembershipSeeds, PromisesHoldOnABadNetworkAndAllMeetAfterHealing) {
  SetLogLevel(LogLevel::kError);
  if (const uint64_t seed = FromEnvironment("ROPETEAM_SEED", 0); seed != 0) {
    SetLogLevel(LogLevel::kInfo);
    EXPECT_EQ(SeededRun(seed).Run(), "") << "seed " << seed;
    return;
  }
  const uint64_t seeds = FromEnvironment("ROPETEAM_SEEDS", kSeedsDefault);
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    const std::string broken = SeededRun(seed).Run();
    ASSERT_EQ(broken, "") << "replay with ROPETEAM_SEED=" << seed;
  }
}

}  // namespace
}  // namespace ropeteam
