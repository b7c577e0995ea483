// SPDX-License-Identifier: Apache-2.0
//
// The messages between a node and the coordinator, as plain values. coordinator.h and agent.h take and return them.
// standalone/ sends them over gRPC, simulated/ over a test's network. A message is cheap to copy: its one large part, a
// view, is shared and immutable.

#ifndef ROPETEAM_MEMBERSHIP_MESSAGES_H_
#define ROPETEAM_MEMBERSHIP_MESSAGES_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <variant>
#include <vector>

#include "core/base/status.h"
#include "core/base/view.h"
#include "membership/membership.h"

namespace ropeteam {

// The number of a connection between a node and the coordinator, assigned by the coordinator's driver. It is never 0,
// and one instance of the coordinator never reuses it.
using ConnectionId = uint64_t;
inline constexpr ConnectionId kNoConnection = 0;

inline constexpr size_t kJobBytesMax = 255;           // a launcher's id and a prefix; it is in every log line
inline constexpr size_t kDataTransportBytesMax = 63;  // shown in messages only; longer values are cut
// Reason of a suspicion, shown in the log only; longer values are cut.
inline constexpr size_t kReasonBytesMax = 512;
// Members in one heartbeat that a node does not reach, or does reach. If it does not reach more than that, its own
// network has failed, and the others say so as well. 2 KiB on the wire.
inline constexpr size_t kReachMax = 256;
// A view contains the ids that left most recently, so that a restarted coordinator does not readmit one of them. Fewer
// nodes leave during the seconds of a restart. 512 bytes on the wire.
inline constexpr size_t kRemovedCarriedMax = 64;
// No coordinator reaches this by counting. A registrant that reports more is broken, and its number could make all
// epochs overflow.
inline constexpr Epoch kEpochMax = Epoch{1} << 62;
// Half of what fits into an Incarnation: 278 years in milliseconds.
inline constexpr Epoch kEpochKnownMax = Epoch{1} << 43;

// The longest lease, and the longest remaining lease that a view may announce.
inline constexpr TimeUs kLeaseUsMax = kQuarantineMsMin * TimeUs{1000};
inline constexpr TimeUs kSettleUsMax = WithDrift(WithDrift(kLeaseUsMax));

// A view, and what another coordinator needs in addition to continue from it.
struct ViewState {
  View view;
  std::vector<Epoch> joined;    // parallel to view.members: the epoch in which each joined
  std::vector<NodeId> removed;  // at most kRemovedCarriedMax, oldest first
  friend bool operator==(const ViewState&, const ViewState&) = default;
};
using ViewStatePtr = std::shared_ptr<const ViewState>;  // null if no view was seen yet

// The difference between two views, for a node that has seen the first. Members of both are unchanged.
struct ViewDelta {
  Epoch base = 0;            // the view it is from
  ViewState changed;         // the second view, with only the added members
  std::vector<NodeId> left;  // members of the first that are not in the second
  friend bool operator==(const ViewDelta&, const ViewDelta&) = default;
};
using ViewDeltaPtr = std::shared_ptr<const ViewDelta>;

std::set<NodeId> IdsOf(const View& view);
// Null if the whole view is smaller.
ViewDeltaPtr MakeViewDelta(const ViewState& base, const ViewState& state);
// Null if `base` is not the delta's base view, or the result is not valid.
ViewStatePtr ApplyViewDelta(const ViewState& base, const ViewDelta& delta);

// From node to coordinator. The first message on a connection is a Registration.
struct Registration {
  std::string job;
  uint32_t protocol_version = 0;  // MembershipConfig's
  uint32_t protocol_oldest = 0;
  uint64_t chunk_bytes = 0;
  std::string data_transport;
  JobSettings settings;  // only the named ones count
  NamedSettings named;
  Member member;
  ViewStatePtr seen;      // the last view that reached this process
  Epoch epoch_known = 0;  // MembershipConfig's
  // Counts the connections of this instance, so that registrations that overtake each other can be ordered.
  uint64_t attempt = 0;
  uint64_t beat = 0;  // as a heartbeat's
  // The longest lease that any coordinator has granted to this process. A returned coordinator with shorter leases must
  // know how long those of its predecessor may last.
  TimeUs lease_us_max = 0;
};
struct Heartbeat {
  // The epoch of the last view that reached the node. The coordinator sends a newer view if there is one.
  Epoch seen = 0;
  uint64_t beat = 0;   // numbers the registrations and heartbeats of one process, from 1
  bool whole = false;  // requests the whole view: the node lacks the base of a delta it received
  // Members that do not answer this node's control messages, and those of HeartbeatAnswer::check that do. At most
  // kReachMax each.
  std::vector<NodeId> unreached = {};
  std::vector<NodeId> reached = {};
};
struct ProbeAnswer {
  uint64_t nonce = 0;
};
struct Suspicion {
  NodeId member = kNoNode;
  std::string reason;
};
struct LeaveMessage {};  // the coordinator removes the node and then closes the connection
using NodeMessage = std::variant<Registration, Heartbeat, ProbeAnswer, Suspicion, LeaveMessage>;

// From coordinator to node.
// Answers a Heartbeat or an accepted Registration: the node is heard and registered. It is also sent later, when a
// lease can be granted that was not possible at the time of the heartbeat.
struct HeartbeatAnswer {
  uint64_t beat = 0;  // the number of the answered message
  // The lease lasts this long from the sending of that message; 0: no new lease. An earlier lease stays.
  TimeUs lease_us = 0;
  // The node is to find out whether these members answer it, until an answer has another list. At most kReachMax.
  std::vector<NodeId> check = {};
};
struct Probe {
  uint64_t nonce = 0;
};
struct Refusal {
  Status status;  // never OK; the codes are those of Membership::Callbacks::on_refused
};
using CoordinatorMessage = std::variant<HeartbeatAnswer, ViewStatePtr, Probe, Refusal, ViewDeltaPtr>;

// kInvalidArgument with the value and the limit.
Status ValidateMember(const Member& member);
Status ValidateConfig(const MembershipConfig& config);
Status ValidateCoordinatorAddress(const std::string& address);
// For decoded views, before any use: limits, order, unique ids, a leader among the members, epochs in range.
Status ValidateViewState(const ViewState& state);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_MESSAGES_H_
