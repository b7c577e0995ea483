// SPDX-License-Identifier: Apache-2.0
//
// A cluster's membership on a network of probabilities, for the stories (all zero: every packet takes 1 ms)
// and for the seeded test. It checks the promises of membership.h: about views at every view of any node,
// about leases at every instant.

#ifndef ROPETEAM_TESTS_MEMBERSHIP_SIMULATED_CLUSTER_H_
#define ROPETEAM_TESTS_MEMBERSHIP_SIMULATED_CLUSTER_H_

#include <functional>
#include <map>
#include <queue>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "membership/simulated/simulated.h"

namespace ropeteam {

inline constexpr TimeUs kMs = 1000;

struct Network {
  double loss = 0;      // of each packet
  double disorder = 0;  // of each packet: it may be overtaken on its own connection
  TimeUs delay_min_us = 1 * kMs;
  TimeUs delay_max_us = 1 * kMs;
  int drift_ppm_max = 0;  // of the clocks of nodes and coordinators that start from now on
};

// "n" and 7 give "n7". (GCC 12 mistakes an operator+ of a literal and a temporary for an overlapping copy and
// warns.)
inline std::string Numbered(const char* prefix, uint64_t number) {
  std::string name = prefix;
  name += std::to_string(number);
  return name;
}

inline constexpr char kFirstAddress[] = "10.0.0.1:7400";
inline constexpr char kSecondAddress[] = "10.0.0.2:7400";

inline MembershipConfig DefaultConfig() {
  MembershipConfig config;
  config.job = "run-7";
  config.coordinator_addresses = {kFirstAddress};
  config.protocol_version = 3;
  config.chunk_bytes = 4u << 20;
  config.data_transport = "verbs";
  return config;
}

class SimulatedCluster {
 public:
  explicit SimulatedCluster(uint64_t seed = 1, const MembershipConfig& config = DefaultConfig());

  Member MakeMember(const std::string& name, uint32_t ordinal);
  // Each returns the new instance's id.
  NodeId Add(const std::string& name, uint32_t ordinal);
  // `config` null: the cluster's.
  NodeId Add(const Member& member, const MembershipConfig* config = nullptr);
  void Crash(NodeId node, bool reset);
  void Leave(NodeId node);
  NodeId Rejoin(NodeId node);
  // The first is at kFirstAddress, the second at kSecondAddress.
  void CrashCoordinator(bool reset = true, size_t which = 0) { membership_.CrashCoordinator(reset, which); }
  void RestartCoordinator(size_t which = 0) { membership_.RestartCoordinator(now_, Drift(), which); }
  void Relocate(NodeId node, const std::string& address, bool move) {
    membership_.Relocate(now_, node, {address}, move);
  }
  void Suspect(NodeId reporter, NodeId suspect) {
    membership_.ReportSuspect(now_, reporter, suspect, "put failed");
  }

  // SIGSTOP and SIGCONT.
  void Stop(NodeId node) { membership_.StopNode(node); }
  void Continue(NodeId node) { membership_.ContinueNode(now_, node); }

  // Drops what this node sends, or what is sent to it.
  void CutOutgoing(NodeId node, bool cut) {
    cut ? (void)cut_outgoing_.insert(node) : (void)cut_outgoing_.erase(node);
  }
  void CutIncoming(NodeId node, bool cut) {
    cut ? (void)cut_incoming_.insert(node) : (void)cut_incoming_.erase(node);
  }
  void Cut(NodeId node, bool cut) {
    CutOutgoing(node, cut);
    CutIncoming(node, cut);
  }
  void HealAll() {
    cut_outgoing_.clear();
    cut_incoming_.clear();
  }

  void RunFor(uint64_t ms);
  // Stops as soon as `condition` holds; false if it has not after `ms`.
  bool RunUntil(const std::function<bool()>& condition, uint64_t ms);

  // Time passes and nothing runs: packets wait, and deadlines pass unnoticed.
  void Pause(uint64_t ms) { PassTo(now_ + ms * kMs); }

  TimeUs now() const { return now_; }
  Network& network() { return network_; }
  std::mt19937_64& random() { return random_; }
  SimulatedMembership& membership() { return membership_; }
  const std::map<NodeId, Member>& alive() const { return alive_; }

  const std::vector<View>& Views(NodeId node) { return views_[node]; }
  std::vector<std::string> Names(NodeId node);  // in its last view
  Epoch EpochOf(NodeId node) { return views_[node].empty() ? 0 : views_[node].back().epoch; }
  NodeId LeaderOf(NodeId node) { return views_[node].empty() ? kNoNode : views_[node].back().leader; }
  bool Sees(NodeId node, NodeId other) {
    return !views_[node].empty() && views_[node].back().Contains(other);
  }
  // When its lease ends, possibly in the past; 0: no lease.
  TimeUs LeaseUntil(NodeId node) const {
    const auto found = leases_.find(node);
    return found != leases_.end() ? found->second : 0;
  }
  // Its last known contact.
  const Contact& ContactOf(NodeId node) { return contacts_[node]; }
  bool HasLease(NodeId node) const { return LeaseUntil(node) > now_; }
  const std::vector<Status>& Refusals(NodeId node) { return refusals_[node]; }
  // Whether every living node has the same view of exactly the living nodes.
  bool Converged();
  // The first broken promise; empty: none.
  const std::string& broken() const { return broken_; }

 private:
  struct Flight {
    TimeUs at;
    uint64_t order;
    SimulatedPacket packet;
    friend bool operator>(const Flight& a, const Flight& b) {
      return std::tie(a.at, a.order) > std::tie(b.at, b.order);
    }
  };

  void OnSend(const SimulatedPacket& packet);
  void OnView(NodeId node, const View& view);
  // Lets time pass without events, and checks the leases in it.
  void PassTo(TimeUs when);
  int Drift();
  void Break(const std::string& what);
  double Chance() { return std::uniform_real_distribution<double>(0, 1)(random_); }

  std::mt19937_64 random_;
  Network network_;
  TimeUs now_ = 1'000'000;
  uint64_t sent_ = 0;
  NodeId next_id_ = 0x100;
  std::priority_queue<Flight, std::vector<Flight>, std::greater<>> flights_;
  std::map<std::tuple<NodeId, uint64_t, bool>, TimeUs>
      last_at_;  // per connection and direction: order is kept
  std::set<NodeId> cut_outgoing_;
  std::set<NodeId> cut_incoming_;
  std::map<NodeId, Member> alive_;
  std::map<NodeId, std::vector<View>> views_;
  std::map<NodeId, std::vector<Status>> refusals_;
  std::map<NodeId, Contact> contacts_;
  std::map<Epoch, View> by_epoch_;
  std::vector<View> given_;  // by all coordinators, in order of time
  // Per process: the ids that left a view it saw, and the time from which it acts on that.
  std::map<NodeId, std::map<NodeId, TimeUs>> seen_leave_;
  std::map<NodeId, TimeUs> leases_;  // of living nodes
  std::string broken_;
  SimulatedMembership membership_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_MEMBERSHIP_SIMULATED_CLUSTER_H_
