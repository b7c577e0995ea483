// SPDX-License-Identifier: Apache-2.0
#include "membership/simulated/simulated.h"

#include <algorithm>
#include <limits>

namespace ropeteam {
namespace {

constexpr TimeUs kNever = std::numeric_limits<TimeUs>::max();

}  // namespace

SimulatedMembership::SimulatedMembership(const MembershipConfig& config, Send send, Listener listener,
                                         Route route)
    : config_(config), send_(std::move(send)), listener_(std::move(listener)), route_(std::move(route)) {}

TimeUs SimulatedMembership::Clock::Local(TimeUs now) const {
  return static_cast<TimeUs>(static_cast<int64_t>(now) + static_cast<int64_t>(now) / 1'000'000 * drift_ppm +
                             static_cast<int64_t>(now) % 1'000'000 * drift_ppm / 1'000'000);
}

TimeUs SimulatedMembership::Clock::Global(TimeUs local) const {
  if (drift_ppm == 0 || local == kNever) return local;
  const double rate = 1.0 + drift_ppm / 1e6;
  auto global = static_cast<TimeUs>(static_cast<double>(local) / rate);
  while (Local(global) < local) ++global;
  while (global > 0 && Local(global - 1) >= local) --global;
  return global;
}

void SimulatedMembership::RestartCoordinator(TimeUs now, int drift_ppm, size_t which) {
  Running& running = coordinators_.at(which);
  ROPETEAM_CHECK(running.machine == nullptr);
  running.clock = Clock{drift_ppm};
  running.machine = std::make_unique<Coordinator>(config_, running.clock.Local(now), now / 1000 + 1);
}

void SimulatedMembership::CrashCoordinator(bool reset, size_t which) {
  Running& running = coordinators_.at(which);
  running.machine.reset();
  running.endpoints.clear();
  const auto connections = std::exchange(running.connections, {});
  if (!reset) return;
  for (const auto& [endpoint, id] : connections) ToNode(which, endpoint, SimulatedPacket::Closed{});
}

void SimulatedMembership::ResetConnection(NodeId node, bool told) {
  const auto open = open_.find(node);
  if (open == open_.end()) return;
  const Connection connection = open->second;
  if (told) ToCoordinator(node, connection, SimulatedPacket::Closed{});
  ToNode(connection.coordinator, {node, connection.attempt}, SimulatedPacket::Closed{});
}

void SimulatedMembership::AddNode(TimeUs now, const Member& member, int drift_ppm,
                                  const MembershipConfig* config) {
  const auto [added, fresh] = nodes_.emplace(member.id, Node{});
  ROPETEAM_CHECK(fresh);
  now_ = now;
  added->second.agent = std::make_unique<Agent>(config == nullptr ? config_ : *config, member);
  added->second.clock = Clock{drift_ppm};
  added->second.listen = (config == nullptr ? config_ : *config).coordinator_listen;
  Perform(member.id, added->second.agent->Start(added->second.clock.Local(now)));
}

void SimulatedMembership::StopNode(NodeId node) {
  if (const auto found = nodes_.find(node); found != nodes_.end()) found->second.stopped = true;
}

void SimulatedMembership::ContinueNode(TimeUs now, NodeId node) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end() || !found->second.stopped) return;
  found->second.stopped = false;
  for (const SimulatedPacket& packet : std::exchange(found->second.waiting, {})) Arrive(now, packet);
}

void SimulatedMembership::CrashNode(NodeId node, bool reset) {
  nodes_.erase(node);
  const auto open = open_.find(node);
  if (open == open_.end()) return;
  const Connection connection = open->second;
  open_.erase(open);
  if (reset) ToCoordinator(node, connection, SimulatedPacket::Closed{});
}

void SimulatedMembership::LeaveNode(TimeUs now, NodeId node) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end() || found->second.stopped) return;
  Perform(node, found->second.agent->Leave(found->second.clock.Local(now)));
}

void SimulatedMembership::RejoinNode(TimeUs now, NodeId node, const Member& member) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end() || found->second.stopped) return;
  if (const auto open = open_.find(node); open != open_.end()) {
    const Connection connection = open->second;
    open_.erase(open);
    ToCoordinator(node, connection, SimulatedPacket::Closed{});
  }
  Node process = std::move(found->second);
  nodes_.erase(found);
  const auto [moved, fresh] = nodes_.emplace(member.id, std::move(process));
  ROPETEAM_CHECK(fresh);
  now_ = now;
  Perform(member.id, moved->second.agent->Rejoin(moved->second.clock.Local(now), member));
}

void SimulatedMembership::Relocate(TimeUs now, NodeId node, const Place& place, bool move) {
  const auto found = nodes_.find(node);
  if (found == nodes_.end() || found->second.stopped) return;
  now_ = now;
  Perform(node, found->second.agent->Relocate(found->second.clock.Local(now), place, move));
}

void SimulatedMembership::ReportSuspect(TimeUs now, NodeId reporter, NodeId suspect,
                                        const std::string& reason) {
  const auto found = nodes_.find(reporter);
  if (found == nodes_.end() || found->second.stopped) return;
  Perform(reporter, found->second.agent->Suspect(found->second.clock.Local(now), suspect, reason));
}

void SimulatedMembership::ReportReach(TimeUs now, NodeId reporter, NodeId member, bool reached) {
  const auto found = nodes_.find(reporter);
  if (found == nodes_.end() || found->second.stopped) return;
  Perform(reporter, found->second.agent->Reach(found->second.clock.Local(now), member, reached));
}

void SimulatedMembership::Arrive(TimeUs now, const SimulatedPacket& packet) {
  now_ = now;
  if (packet.to_coordinator) return ArriveAtCoordinator(now, packet);
  const auto found = nodes_.find(packet.node);
  if (found == nodes_.end()) return;
  if (found->second.stopped) return found->second.waiting.push_back(packet);
  Agent& agent = *found->second.agent;
  const TimeUs local = found->second.clock.Local(now);
  if (const auto* message = std::get_if<CoordinatorMessage>(&packet.content))
    return Perform(packet.node, agent.Received(local, packet.attempt, *message));
  if (const auto open = open_.find(packet.node);
      open != open_.end() && open->second.attempt == packet.attempt)
    open_.erase(open);
  Perform(packet.node, agent.Broken(local, packet.attempt, "connection reset"));
}

void SimulatedMembership::ArriveAtCoordinator(TimeUs now, const SimulatedPacket& packet) {
  Running& running = coordinators_.at(packet.coordinator);
  const Endpoint endpoint{packet.node, packet.attempt};
  if (running.machine == nullptr) {
    // No process listens: the host answers with a reset.
    if (std::holds_alternative<NodeMessage>(packet.content))
      ToNode(packet.coordinator, endpoint, SimulatedPacket::Closed{});
    return;
  }
  const TimeUs at = running.clock.Local(now);
  auto known = running.connections.find(endpoint);
  const auto* message = std::get_if<NodeMessage>(&packet.content);
  if (message == nullptr) {
    if (known == running.connections.end()) return;
    const ConnectionId id = known->second;
    running.endpoints.erase(id);
    running.connections.erase(known);
    Perform(packet.coordinator, running.machine->Closed(at, id));
    return;
  }
  if (known == running.connections.end()) {
    known = running.connections.emplace(endpoint, ++running.connections_made).first;
    running.endpoints.emplace(known->second, endpoint);
    Perform(packet.coordinator, running.machine->Opened(at, known->second));
    known = running.connections.find(endpoint);
    if (known == running.connections.end()) return;
  }
  // The wire lets no other view through.
  const auto* registration = std::get_if<Registration>(message);
  if (registration != nullptr && registration->seen != nullptr)
    ROPETEAM_CHECK(ValidateViewState(*registration->seen).ok());
  Perform(packet.coordinator, running.machine->Received(at, known->second, *message));
}

void SimulatedMembership::Tick(TimeUs now) {
  now_ = now;
  for (size_t which = 0; which < coordinators_.size(); ++which) {
    Running& running = coordinators_[which];
    if (running.machine == nullptr) continue;
    const TimeUs at = running.clock.Local(now);
    if (at >= running.machine->NextDeadline()) Perform(which, running.machine->Tick(at));
  }
  std::vector<NodeId> due;
  for (const auto& [id, node] : nodes_)
    if (!node.stopped && node.clock.Local(now) >= node.agent->NextDeadline()) due.push_back(id);
  for (const NodeId id : due)
    if (const auto found = nodes_.find(id); found != nodes_.end())
      Perform(id, found->second.agent->Tick(found->second.clock.Local(now)));
}

TimeUs SimulatedMembership::NextDeadline() const {
  TimeUs next = kNever;
  for (const Running& running : coordinators_)
    if (running.machine != nullptr)
      next = std::min(next, running.clock.Global(running.machine->NextDeadline()));
  for (const auto& [id, node] : nodes_)
    if (!node.stopped) next = std::min(next, node.clock.Global(node.agent->NextDeadline()));
  return next;
}

const Agent* SimulatedMembership::agent(NodeId node) const {
  const auto found = nodes_.find(node);
  return found != nodes_.end() ? found->second.agent.get() : nullptr;
}

void SimulatedMembership::ToCoordinator(NodeId node, const Connection& connection,
                                        std::variant<SimulatedPacket::Closed, NodeMessage> content) {
  SimulatedPacket packet{node, connection.attempt, true, SimulatedPacket::Closed{}, connection.coordinator};
  if (auto* message = std::get_if<NodeMessage>(&content)) packet.content = std::move(*message);
  send_(packet);
}

void SimulatedMembership::ToNode(size_t which, const Endpoint& endpoint,
                                 std::variant<SimulatedPacket::Closed, CoordinatorMessage> content) {
  SimulatedPacket packet{endpoint.first, endpoint.second, false, SimulatedPacket::Closed{}, which};
  if (auto* message = std::get_if<CoordinatorMessage>(&content)) packet.content = std::move(*message);
  send_(packet);
}

void SimulatedMembership::OpenConnection(NodeId node, const Agent::Open& open) {
  if (const auto old = open_.find(node); old != open_.end())
    ToCoordinator(node, old->second, SimulatedPacket::Closed{});
  const Node& process = nodes_.at(node);
  if (!process.listen.empty()) {
    const size_t own = route_(node, process.listen);
    if (open.address != process.listen) {
      CrashCoordinator(true, own);
    } else if (coordinators_.at(own).machine == nullptr) {
      RestartCoordinator(now_, process.clock.drift_ppm, own);
    }
  }
  open_[node] = {open.attempt, route_(node, open.address)};
}

void SimulatedMembership::Perform(NodeId node, Agent::Outputs outputs) {
  for (Agent::Output& output : outputs) {
    if (const auto* open = std::get_if<Agent::Open>(&output)) {
      OpenConnection(node, *open);
    } else if (auto* send = std::get_if<Agent::Send>(&output)) {
      const auto open_now = open_.find(node);
      ROPETEAM_CHECK(open_now != open_.end() && open_now->second.attempt == send->attempt);
      ToCoordinator(node, open_now->second, std::move(send->message));
    } else if (const auto* close = std::get_if<Agent::Close>(&output)) {
      if (const auto old = open_.find(node); old != open_.end() && old->second.attempt == close->attempt) {
        const Connection connection = old->second;
        open_.erase(old);
        ToCoordinator(node, connection, SimulatedPacket::Closed{});
      }
    } else if (const auto* view = std::get_if<View>(&output)) {
      listener_.on_view(node, *view);
    } else if (const auto* lease = std::get_if<Agent::Lease>(&output)) {
      if (listener_.on_lease)
        listener_.on_lease(node,
                           lease->valid_until == 0 ? 0 : nodes_.at(node).clock.Global(lease->valid_until));
    } else if (const auto* contact = std::get_if<Contact>(&output)) {
      if (listener_.on_contact) listener_.on_contact(node, *contact);
    } else if (const auto* check = std::get_if<Agent::Check>(&output)) {
      if (listener_.on_check) listener_.on_check(node, check->members);
    } else {
      listener_.on_refused(node, std::get<Status>(output));
    }
  }
}

void SimulatedMembership::Perform(size_t which, Coordinator::Outputs outputs) {
  Running& running = coordinators_[which];
  for (Coordinator::Output& output : outputs) {
    if (auto* send = std::get_if<Coordinator::Send>(&output)) {
      const auto endpoint = running.endpoints.find(send->connection);
      if (endpoint != running.endpoints.end()) ToNode(which, endpoint->second, std::move(send->message));
    } else if (const auto* close = std::get_if<Coordinator::Close>(&output)) {
      const auto endpoint = running.endpoints.find(close->connection);
      if (endpoint == running.endpoints.end()) continue;
      ToNode(which, endpoint->second, SimulatedPacket::Closed{});
      running.connections.erase(endpoint->second);
      running.endpoints.erase(endpoint);
    }
  }
}

}  // namespace ropeteam
