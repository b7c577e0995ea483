// SPDX-License-Identifier: Apache-2.0
#include "tests/membership/simulated_cluster.h"

#include <algorithm>
#include <tuple>

namespace ropeteam {

SimulatedCluster::SimulatedCluster(uint64_t seed, const MembershipConfig& config)
    : random_(seed),
      membership_(
          config, [this](const SimulatedPacket& packet) { OnSend(packet); },
          {[this](NodeId node, const View& view) { OnView(node, view); },
           [this](NodeId node, const Status& status) { refusals_[node].push_back(status); },
           [this](NodeId node, TimeUs valid_until) { leases_[node] = valid_until; },
           [this](NodeId node, const Contact& contact) { contacts_[node] = contact; }},
          [](NodeId, const std::string& address) { return address == kSecondAddress ? 1 : 0; }) {}

int SimulatedCluster::Drift() {
  return std::uniform_int_distribution<int>(-network_.drift_ppm_max, network_.drift_ppm_max)(random_);
}

Member SimulatedCluster::MakeMember(const std::string& name, uint32_t ordinal) {
  Member member;
  member.id = ++next_id_;
  member.name = name;
  member.ordinal = ordinal;
  member.control_address = Numbered("10.0.1.", ordinal) + ":7000";
  member.data_address = "endpoint of " + name;
  return member;
}

NodeId SimulatedCluster::Add(const std::string& name, uint32_t ordinal) {
  return Add(MakeMember(name, ordinal));
}

NodeId SimulatedCluster::Add(const Member& member, const MembershipConfig* config) {
  alive_[member.id] = member;
  membership_.AddNode(now_, member, network_.drift_ppm_max == 0 ? 0 : Drift(), config);
  return member.id;
}

void SimulatedCluster::Crash(NodeId node, bool reset) {
  membership_.CrashNode(node, reset);
  alive_.erase(node);
  leases_.erase(node);
}

void SimulatedCluster::Leave(NodeId node) {
  membership_.LeaveNode(now_, node);
  alive_.erase(node);
}

NodeId SimulatedCluster::Rejoin(NodeId node) {
  Member member = alive_.at(node);
  member.id = ++next_id_;
  alive_.erase(node);
  alive_[member.id] = member;
  views_[member.id] = views_[node];  // the process goes on, so epochs must still grow
  seen_leave_[member.id] = seen_leave_[node];
  leases_.erase(node);
  membership_.RejoinNode(now_, node, member);
  return member.id;
}

void SimulatedCluster::OnSend(const SimulatedPacket& packet) {
  const uint64_t order = ++sent_;
  if (network_.loss > 0 && Chance() < network_.loss) return;
  TimeUs at =
      now_ + std::uniform_int_distribution<TimeUs>(network_.delay_min_us, network_.delay_max_us)(random_);
  TimeUs& last = last_at_[{packet.node, packet.attempt, packet.to_coordinator}];
  if (network_.disorder == 0 || Chance() >= network_.disorder) at = std::max(at, last);
  last = std::max(last, at);
  flights_.push({at, order, packet});
}

bool SimulatedCluster::RunUntil(const std::function<bool()>& condition, uint64_t ms) {
  const TimeUs end = now_ + ms * kMs;
  while (!condition()) {
    TimeUs next = membership_.NextDeadline();
    if (!flights_.empty()) next = std::min(next, flights_.top().at);
    if (next > end) {
      PassTo(end);
      return condition();
    }
    PassTo(std::max(now_, next));
    if (!flights_.empty() && flights_.top().at <= now_) {
      const SimulatedPacket packet = flights_.top().packet;
      flights_.pop();
      const auto& cut = packet.to_coordinator ? cut_outgoing_ : cut_incoming_;
      if (!cut.contains(packet.node)) membership_.Arrive(now_, packet);
    } else {
      membership_.Tick(now_);
    }
    for (size_t which = 0; which < kSimulatedCoordinators; ++which) {
      if (membership_.coordinator(which) == nullptr || membership_.coordinator(which)->view() == nullptr)
        continue;
      const View& given = membership_.coordinator(which)->view()->view;
      if (given_.empty() || given_.back().epoch != given.epoch) given_.push_back(given);
    }
  }
  return true;
}

void SimulatedCluster::PassTo(TimeUs when) {
  // If one instance has seen another one leave its view, the two must never act at the same time.
  for (const auto& [node, until] : leases_) {
    if (until <= now_) continue;
    const auto left = seen_leave_.find(node);
    if (left == seen_leave_.end()) continue;
    for (const auto& [other, acts_from] : left->second) {
      const TimeUs both_from = std::max(now_, acts_from);
      if (both_from <= when && both_from < until && both_from < LeaseUntil(other))
        Break(Numbered("instance ", other) + " holds a lease that " + Numbered("instance ", node) +
              " takes for ended");
    }
  }
  now_ = when;
}

void SimulatedCluster::RunFor(uint64_t ms) {
  RunUntil([] { return false; }, ms);
}

std::vector<std::string> SimulatedCluster::Names(NodeId node) {
  std::vector<std::string> names;
  if (views_[node].empty()) return names;
  for (const Member& member : views_[node].back().members) names.push_back(member.name);
  return names;
}

bool SimulatedCluster::Converged() {
  const View* first = nullptr;
  for (const auto& [id, member] : alive_) {
    if (views_[id].empty() || membership_.agent(id) == nullptr || !membership_.agent(id)->registered())
      return false;
    const View& view = views_[id].back();
    if (view.members.size() != alive_.size() || !view.Contains(id)) return false;
    if (first == nullptr) first = &view;
    if (view != *first) return false;
  }
  return true;
}

void SimulatedCluster::Break(const std::string& what) {
  if (broken_.empty()) broken_ = what + ", at " + std::to_string(now_) + " us";
}

void SimulatedCluster::OnView(NodeId node, const View& view) {
  const std::string epoch = Numbered("epoch ", view.epoch);
  std::vector<View>& mine = views_[node];
  if (!mine.empty() && view.epoch <= mine.back().epoch)
    Break(epoch + " after " + std::to_string(mine.back().epoch));
  if (!view.Contains(node)) Break(epoch + " without the node it was given to");
  if (!view.Contains(view.leader)) Break(epoch + " led by a node that is not in it");
  const auto [at, fresh] = by_epoch_.emplace(view.epoch, view);
  if (!fresh && at->second != view) Break(epoch + " was given out as two views");
  std::set<std::string> names;
  const Member* previous = nullptr;
  for (const Member& member : view.members) {
    if (!names.insert(member.name).second) Break(epoch + " has two instances of " + member.name);
    if (previous != nullptr &&
        std::tie(member.ordinal, member.name) <= std::tie(previous->ordinal, previous->name))
      Break(epoch + " is not ordered");
    previous = &member;
    if (seen_leave_[node].contains(member.id)) Break(epoch + " brings an instance back that had left");
  }
  if (!mine.empty()) {
    // The settling time is on the node's own clock, which may be fast.
    const TimeUs settle_us = view.settle_us - view.settle_us * kClockDriftPpm / 1'000'000;
    for (const Member& member : mine.back().members)
      if (!view.Contains(member.id)) seen_leave_[node].emplace(member.id, now_ + settle_us);
    // When nodes with the views of two coordinators meet, only one of the two leaders can stay. So a node may
    // find another leader if a view was announced without it and it is readmitted.
    const bool stayed = mine.back().Contains(node);
    bool merged = false;
    for (auto at = given_.rbegin(); at != given_.rend() && at->epoch != mine.back().epoch; ++at)
      merged |= !at->Contains(node);
    if (stayed && !merged && view.Contains(mine.back().leader) && view.leader != mine.back().leader)
      Break(epoch + " changes a leader that is still there");
  }
  mine.push_back(view);
}

}  // namespace ropeteam
