// SPDX-License-Identifier: Apache-2.0
//
// The membership of a whole cluster in one thread, over a simulated network and clock of the caller: one Coordinator
// that can crash and restart, or two at a time, and an Agent per node. For tests; deterministic.
//
// To drive it:
//   1. Construct it with a function that receives every Packet when it is sent. The caller's network delays it as it
//      likes, and then passes it to Arrive() or drops it. TCP delivers the packets of one connection and direction in
//      order; keep that order (Closed packets included) unless the test is about disorder.
//   2. RestartCoordinator(). AddNode() for each node. The listener receives the nodes' views and refusals.
//   3. Let time pass to min(NextDeadline(), the network's next arrival); call Tick(now) or Arrive(now, packet).
//   4. CrashNode(), CrashCoordinator(): with `reset`, the kernel survives the process and its peers get Closed packets,
//      which may be lost like others. Without it, the host is gone and nothing is sent.
// A packet also reports a closed connection to the other side, so that a partition also hides resets. To cut a node
// off, drop its packets in one or both directions.
//
// There are two coordinators if another one is started while the first is merely unreachable. Route decides which of
// them a node connects to next; an open connection stays. A node whose config has coordinator_listen starts and ends
// the coordinator there as its Agent says. To crash such a node, also crash its coordinator.

#ifndef ROPETEAM_MEMBERSHIP_SIMULATED_SIMULATED_H_
#define ROPETEAM_MEMBERSHIP_SIMULATED_SIMULATED_H_

#include <array>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "membership/agent.h"
#include "membership/coordinator.h"

namespace ropeteam {

inline constexpr size_t kSimulatedCoordinators = 2;

struct SimulatedPacket {
  struct Closed {};
  NodeId node = kNoNode;  // the node's side of the connection
  uint64_t attempt = 0;   // of that node's Agent
  bool to_coordinator = false;
  std::variant<Closed, NodeMessage, CoordinatorMessage> content;
  size_t coordinator = 0;  // the connection's other side
};

class SimulatedMembership {
 public:
  using Send = std::function<void(const SimulatedPacket&)>;
  // As in Membership::Callbacks. They run inside the call that caused them and may not call this object.
  struct Listener {
    std::function<void(NodeId, const View&)> on_view;
    std::function<void(NodeId, const Status&)> on_refused;
    std::function<void(NodeId, TimeUs valid_until)> on_lease = {};  // on the caller's clock; may be empty
    std::function<void(NodeId, const Contact&)> on_contact = {};    // may be empty
    std::function<void(NodeId, const std::vector<NodeId>& members)> on_check = {};  // may be empty
  };

  // The coordinator that the node reaches at an address.
  using Route = std::function<size_t(NodeId, const std::string& address)>;

  SimulatedMembership(
      const MembershipConfig& config, Send send, Listener listener,
      Route route = [](NodeId, const std::string&) { return 0; });

  // Also starts it; not while it runs. Epochs begin at `now` in milliseconds.
  void RestartCoordinator(TimeUs now, int drift_ppm = 0, size_t which = 0);
  void CrashCoordinator(bool reset, size_t which = 0);
  // Loses what is on the node's connection and resets the node, as when the coordinator's address has moved. The
  // coordinator also gets a reset if `told`.
  void ResetConnection(NodeId node, bool told);
  // The node's clock is faster than the caller's by drift_ppm, as long as the process runs, Rejoin included. `config`
  // null: as for all others.
  void AddNode(TimeUs now, const Member& member, int drift_ppm = 0, const MembershipConfig* config = nullptr);
  // SIGSTOP: the process does nothing until ContinueNode(), and packets for it wait in its kernel. Time passes, and its
  // lease may expire. Other calls for it are carried out when it continues, or never.
  void StopNode(NodeId node);
  void ContinueNode(TimeUs now, NodeId node);
  void CrashNode(NodeId node, bool reset);
  void LeaveNode(TimeUs now, NodeId node);
  // What ropeteamd does on kStale: the same process continues as another instance.
  void RejoinNode(TimeUs now, NodeId node, const Member& member);
  void Relocate(TimeUs now, NodeId node, const Place& place, bool move);
  void ReportReach(TimeUs now, NodeId reporter, NodeId member, bool reached);
  void ReportSuspect(TimeUs now, NodeId reporter, NodeId suspect, const std::string& reason);

  void Arrive(TimeUs now, const SimulatedPacket& packet);
  void Tick(TimeUs now);
  TimeUs NextDeadline() const;

  // Null while it is down, or for an unknown node.
  const Coordinator* coordinator(size_t which = 0) const { return coordinators_[which].machine.get(); }
  const Agent* agent(NodeId node) const;

 private:
  using Endpoint = std::pair<NodeId, uint64_t>;
  // A clock that is off by drift_ppm. Zero drift is the caller's own time.
  struct Clock {
    int drift_ppm = 0;
    TimeUs Local(TimeUs now) const;
    TimeUs Global(TimeUs local) const;  // the first instant at which Local() has reached `local`
  };
  struct Node {
    std::unique_ptr<Agent> agent;
    Clock clock;
    std::string listen;  // where it runs a coordinator; empty: it never does
    bool stopped = false;
    std::deque<SimulatedPacket> waiting;  // while stopped
  };

  // A coordinator's side: it numbers the connections of this run itself.
  struct Running {
    std::unique_ptr<Coordinator> machine;
    Clock clock;
    std::map<Endpoint, ConnectionId> connections;
    std::map<ConnectionId, Endpoint> endpoints;
    ConnectionId connections_made = 0;
  };
  struct Connection {
    uint64_t attempt = 0;
    size_t coordinator = 0;
  };

  void Perform(NodeId node, Agent::Outputs outputs);
  void Perform(size_t which, Coordinator::Outputs outputs);
  void OpenConnection(NodeId node, const Agent::Open& open);
  void ArriveAtCoordinator(TimeUs now, const SimulatedPacket& packet);
  void ToCoordinator(NodeId node, const Connection& connection,
                     std::variant<SimulatedPacket::Closed, NodeMessage> content);
  void ToNode(size_t which, const Endpoint& endpoint,
              std::variant<SimulatedPacket::Closed, CoordinatorMessage> content);

  TimeUs now_ = 0;  // of the last call with a time
  const MembershipConfig config_;
  const Send send_;
  const Listener listener_;
  const Route route_;
  std::array<Running, kSimulatedCoordinators> coordinators_;
  std::map<NodeId, Node> nodes_;
  std::map<NodeId, Connection> open_;  // that each node has open
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_SIMULATED_SIMULATED_H_
