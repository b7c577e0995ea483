// SPDX-License-Identifier: Apache-2.0
#include "membership/simulated/simulated.h"

#include <algorithm>
#include <limits>

namespace ropeteam {

SimulatedMembership::SimulatedMembership(const MembershipConfig& config, Send send, Listener listener)
    : config_(config), send_(std::move(send)), listener_(std::move(listener)) {}

void SimulatedMembership::RestartCoordinator(TimeUs now) {
  ROPETEAM_CHECK(coordinator_ == nullptr);
  coordinator_ = std::make_unique<Coordinator>(config_, now, now / 1000 + 1);
}

void SimulatedMembership::CrashCoordinator(bool reset) {
  coordinator_.reset();
  endpoints_.clear();
  const auto connections = std::exchange(connections_, {});
  if (!reset) return;
  for (const auto& [endpoint, id] : connections)
    send_({endpoint.first, endpoint.second, false, SimulatedPacket::Closed{}});
}

void SimulatedMembership::AddNode(TimeUs now, const Member& member) {
  auto agent = std::make_unique<Agent>(config_, member);
  Agent* started = agent.get();
  ROPETEAM_CHECK(agents_.emplace(member.id, std::move(agent)).second);
  Perform(member.id, started->Start(now));
}

void SimulatedMembership::CrashNode(NodeId node, bool reset) {
  agents_.erase(node);
  const auto open = open_.find(node);
  if (open == open_.end()) return;
  const uint64_t attempt = open->second;
  open_.erase(open);
  if (reset) ToCoordinator(node, attempt, SimulatedPacket::Closed{});
}

void SimulatedMembership::LeaveNode(TimeUs now, NodeId node) {
  if (const auto found = agents_.find(node); found != agents_.end()) Perform(node, found->second->Leave(now));
}

void SimulatedMembership::RejoinNode(TimeUs now, NodeId node, const Member& member) {
  const auto found = agents_.find(node);
  if (found == agents_.end()) return;
  if (const auto open = open_.find(node); open != open_.end()) {
    const uint64_t attempt = open->second;
    open_.erase(open);
    ToCoordinator(node, attempt, SimulatedPacket::Closed{});
  }
  std::unique_ptr<Agent> agent = std::move(found->second);
  agents_.erase(found);
  Agent* rejoining = agent.get();
  ROPETEAM_CHECK(agents_.emplace(member.id, std::move(agent)).second);
  Perform(member.id, rejoining->Rejoin(now, member));
}

void SimulatedMembership::ReportSuspect(TimeUs now, NodeId reporter, NodeId suspect,
                                        const std::string& reason) {
  const auto found = agents_.find(reporter);
  if (found != agents_.end()) Perform(reporter, found->second->Suspect(now, suspect, reason));
}

void SimulatedMembership::Arrive(TimeUs now, const SimulatedPacket& packet) {
  if (!packet.to_coordinator) {
    const auto found = agents_.find(packet.node);
    if (found == agents_.end()) return;
    if (const auto* message = std::get_if<CoordinatorMessage>(&packet.content)) {
      Perform(packet.node, found->second->Received(now, packet.attempt, *message));
      return;
    }
    if (const auto open = open_.find(packet.node); open != open_.end() && open->second == packet.attempt)
      open_.erase(open);
    Perform(packet.node, found->second->Broken(now, packet.attempt, "connection reset"));
    return;
  }
  const Endpoint endpoint{packet.node, packet.attempt};
  if (coordinator_ == nullptr) {
    // Nobody listens: the host answers with a reset.
    if (std::holds_alternative<NodeMessage>(packet.content))
      send_({packet.node, packet.attempt, false, SimulatedPacket::Closed{}});
    return;
  }
  auto known = connections_.find(endpoint);
  const auto* message = std::get_if<NodeMessage>(&packet.content);
  if (message == nullptr) {
    if (known == connections_.end()) return;
    const ConnectionId id = known->second;
    endpoints_.erase(id);
    connections_.erase(known);
    Perform(coordinator_->Closed(now, id));
    return;
  }
  if (known == connections_.end()) {
    known = connections_.emplace(endpoint, ++connections_made_).first;
    endpoints_.emplace(known->second, endpoint);
    Perform(coordinator_->Opened(now, known->second));
    known = connections_.find(endpoint);
    if (known == connections_.end()) return;
  }
  Perform(coordinator_->Received(now, known->second, *message));
}

void SimulatedMembership::Tick(TimeUs now) {
  if (coordinator_ != nullptr && now >= coordinator_->NextDeadline()) Perform(coordinator_->Tick(now));
  std::vector<NodeId> due;
  for (const auto& [id, agent] : agents_)
    if (now >= agent->NextDeadline()) due.push_back(id);
  for (const NodeId id : due)
    if (const auto found = agents_.find(id); found != agents_.end()) Perform(id, found->second->Tick(now));
}

TimeUs SimulatedMembership::NextDeadline() const {
  TimeUs next = coordinator_ != nullptr ? coordinator_->NextDeadline() : std::numeric_limits<TimeUs>::max();
  for (const auto& [id, agent] : agents_) next = std::min(next, agent->NextDeadline());
  return next;
}

const Agent* SimulatedMembership::agent(NodeId node) const {
  const auto found = agents_.find(node);
  return found != agents_.end() ? found->second.get() : nullptr;
}

void SimulatedMembership::ToCoordinator(NodeId node, uint64_t attempt,
                                        std::variant<SimulatedPacket::Closed, NodeMessage> content) {
  SimulatedPacket packet{node, attempt, true, SimulatedPacket::Closed{}};
  if (auto* message = std::get_if<NodeMessage>(&content)) packet.content = std::move(*message);
  send_(packet);
}

void SimulatedMembership::Perform(NodeId node, Agent::Outputs outputs) {
  for (Agent::Output& output : outputs) {
    if (const auto* open = std::get_if<Agent::Open>(&output)) {
      if (const auto old = open_.find(node); old != open_.end())
        ToCoordinator(node, old->second, SimulatedPacket::Closed{});
      open_[node] = open->attempt;
    } else if (auto* send = std::get_if<Agent::Send>(&output)) {
      ToCoordinator(node, send->attempt, std::move(send->message));
    } else if (const auto* close = std::get_if<Agent::Close>(&output)) {
      if (const auto old = open_.find(node); old != open_.end() && old->second == close->attempt) {
        open_.erase(old);
        ToCoordinator(node, close->attempt, SimulatedPacket::Closed{});
      }
    } else if (const auto* view = std::get_if<View>(&output)) {
      listener_.on_view(node, *view);
    } else {
      listener_.on_refused(node, std::get<Status>(output));
    }
  }
}

void SimulatedMembership::Perform(Coordinator::Outputs outputs) {
  for (Coordinator::Output& output : outputs) {
    if (auto* send = std::get_if<Coordinator::Send>(&output)) {
      const auto endpoint = endpoints_.find(send->connection);
      if (endpoint == endpoints_.end()) continue;
      SimulatedPacket packet{endpoint->second.first, endpoint->second.second, false,
                             SimulatedPacket::Closed{}};
      packet.content = std::move(send->message);
      send_(packet);
    } else {
      const auto endpoint = endpoints_.find(std::get<Coordinator::Close>(output).connection);
      if (endpoint == endpoints_.end()) continue;
      send_({endpoint->second.first, endpoint->second.second, false, SimulatedPacket::Closed{}});
      connections_.erase(endpoint->second);
      endpoints_.erase(endpoint);
    }
  }
}

}  // namespace ropeteam
