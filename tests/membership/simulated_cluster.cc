// SPDX-License-Identifier: Apache-2.0
#include "tests/membership/simulated_cluster.h"

#include <algorithm>
#include <tuple>

namespace ropeteam {

SimulatedCluster::SimulatedCluster(uint64_t seed, const MembershipConfig& config)
    : random_(seed),
      membership_(config, [this](const SimulatedPacket& packet) { OnSend(packet); },
                  {[this](NodeId node, const View& view) { OnView(node, view); },
                   [this](NodeId node, const Status& status) { refusals_[node].push_back(status); }}) {}

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

NodeId SimulatedCluster::Add(const Member& member) {
  alive_[member.id] = member;
  membership_.AddNode(now_, member);
  return member.id;
}

void SimulatedCluster::Crash(NodeId node, bool reset) {
  membership_.CrashNode(node, reset);
  alive_.erase(node);
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
  views_[member.id] = views_[node];  // the process goes on, and with it the promise of growing epochs
  seen_leave_[member.id] = seen_leave_[node];
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
      now_ = end;
      return condition();
    }
    now_ = std::max(now_, next);
    if (!flights_.empty() && flights_.top().at <= now_) {
      const SimulatedPacket packet = flights_.top().packet;
      flights_.pop();
      const auto& cut = packet.to_coordinator ? cut_outgoing_ : cut_incoming_;
      if (!cut.contains(packet.node)) membership_.Arrive(now_, packet);
    } else {
      membership_.Tick(now_);
    }
  }
  return true;
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
    for (const Member& member : mine.back().members)
      if (!view.Contains(member.id)) seen_leave_[node].insert(member.id);
    // Whoever was declared dead may come from another history than those who stayed: two coordinators' views,
    // each with a leader of its own, cannot both keep it when they meet.
    const bool stayed = mine.back().Contains(node);
    if (stayed && view.Contains(mine.back().leader) && view.leader != mine.back().leader)
      Break(epoch + " changes a leader that is still there");
  }
  mine.push_back(view);
}

}  // namespace ropeteam
