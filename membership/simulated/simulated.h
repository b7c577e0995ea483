// SPDX-License-Identifier: Apache-2.0
//
// A whole cluster's membership in one thread, over a network and a clock that the caller makes up: one
// Coordinator that can crash and restart, and an Agent per node. For tests; deterministic.
//
// To drive it:
//   1. Construct with a function that takes every Packet the moment it is sent. The caller's network holds it
//   back for
//      as long as it likes, and then gives it to Arrive() or drops it. Packets of one connection and
//      direction are delivered in order by TCP; keep that (a Closed packet included) unless disorder is what
//      is being tested.
//   2. RestartCoordinator(), AddNode() for each node, with a function that gets its views and refusals.
//   3. Let time pass to min(NextDeadline(), the network's next arrival); call Tick(now) or Arrive(now,
//   packet).
//   4. CrashNode(), CrashCoordinator(): with `reset`, the kernel survives the process and its peers get
//   Closed packets
//      (which may be lost like others); without, the host is gone and nothing is sent.
// A closed connection is told to the other side by a packet too, so that a partition also hides resets. To
// cut a node off, drop its packets in one or both directions.

#ifndef ROPETEAM_MEMBERSHIP_SIMULATED_SIMULATED_H_
#define ROPETEAM_MEMBERSHIP_SIMULATED_SIMULATED_H_

#include <functional>
#include <map>
#include <memory>
#include <utility>
#include <variant>

#include "membership/agent.h"
#include "membership/coordinator.h"

namespace ropeteam {

struct SimulatedPacket {
  struct Closed {};
  NodeId node = kNoNode;  // the node's side of the connection
  uint64_t attempt = 0;   // of that node's Agent
  bool to_coordinator = false;
  std::variant<Closed, NodeMessage, CoordinatorMessage> content;
};

class SimulatedMembership {
 public:
  using Send = std::function<void(const SimulatedPacket&)>;
  // As Membership::Callbacks. They run inside the call that caused them and may not call back into this
  // object.
  struct Listener {
    std::function<void(NodeId, const View&)> on_view;
    std::function<void(NodeId, const Status&)> on_refused;
  };

  SimulatedMembership(const MembershipConfig& config, Send send, Listener listener);

  void RestartCoordinator(
      TimeUs now);  // starts it, too; not while it runs. Epochs begin at `now` in milliseconds
  void CrashCoordinator(bool reset);
  void AddNode(TimeUs now, const Member& member);
  void CrashNode(NodeId node, bool reset);
  void LeaveNode(TimeUs now, NodeId node);
  // What ropeteamd does on kStale: the same process goes on as another instance.
  void RejoinNode(TimeUs now, NodeId node, const Member& member);
  void ReportSuspect(TimeUs now, NodeId reporter, NodeId suspect, const std::string& reason);

  void Arrive(TimeUs now, const SimulatedPacket& packet);
  void Tick(TimeUs now);
  TimeUs NextDeadline() const;

  // Null while it is down, or for a node that is not there.
  const Coordinator* coordinator() const { return coordinator_.get(); }
  const Agent* agent(NodeId node) const;

 private:
  using Endpoint = std::pair<NodeId, uint64_t>;

  void Perform(NodeId node, Agent::Outputs outputs);
  void Perform(Coordinator::Outputs outputs);
  void ToCoordinator(NodeId node, uint64_t attempt,
                     std::variant<SimulatedPacket::Closed, NodeMessage> content);

  const MembershipConfig config_;
  const Send send_;
  const Listener listener_;
  std::unique_ptr<Coordinator> coordinator_;
  std::map<NodeId, std::unique_ptr<Agent>> agents_;
  std::map<NodeId, uint64_t> open_;  // the attempt that each node has open
  // The coordinator's side: it numbers connections itself, in this life.
  std::map<Endpoint, ConnectionId> connections_;
  std::map<ConnectionId, Endpoint> endpoints_;
  ConnectionId connections_made_ = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_SIMULATED_SIMULATED_H_
