// SPDX-License-Identifier: Apache-2.0
//
// The messages between a node and the coordinator, as plain values: coordinator.h and agent.h take and
// return them, standalone/ carries them over gRPC, simulated/ over a test's network. Copying
// a message is cheap: the one large part, a view, is shared and immutable.

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

// One connection between a node and the coordinator, as the coordinator's driver numbers them: never 0, never
// reused by one instance of the coordinator.
using ConnectionId = uint64_t;
inline constexpr ConnectionId kNoConnection = 0;

inline constexpr size_t kJobBytesMax = 255;  // a launcher's id and a prefix; it stands in every log line
inline constexpr size_t kDataTransportBytesMax = 63;  // for messages only: longer is cut
inline constexpr size_t kReasonBytesMax = 512;  // a suspicion's reason, for the log only; cut, not refused
// A view carries the ids that left most recently, so that a restarted coordinator does not let one of them
// back in. More than leave in the seconds that a restart takes; 512 bytes on the wire.
inline constexpr size_t kRemovedCarriedMax = 64;
// No coordinator reaches it by counting. A registrant that reports more is broken, and adopting its number
// could overflow all epochs.
inline constexpr Epoch kEpochMax = Epoch{1} << 62;
// Half of what an Incarnation has room for: 278 years of milliseconds.
inline constexpr Epoch kEpochKnownMax = Epoch{1} << 43;

// No lease is longer, and no view says that one may last longer.
inline constexpr TimeUs kLeaseUsMax = kQuarantineMsMin * TimeUs{1000};
inline constexpr TimeUs kSettleUsMax = WithDrift(WithDrift(kLeaseUsMax));

// A view and what a coordinator must know beyond it to go on where another stopped.
struct ViewState {
  View view;
  std::vector<Epoch> joined;    // parallel to view.members: the epoch at which each entered; the lowest leads
  std::vector<NodeId> removed;  // at most kRemovedCarriedMax, oldest first
  friend bool operator==(const ViewState&, const ViewState&) = default;
};
using ViewStatePtr = std::shared_ptr<const ViewState>;  // null where no view was seen yet

// What changed between two views, for a node that has seen the first. The members of both have not changed.
struct ViewDelta {
  Epoch base = 0;            // the view it is from
  ViewState changed;         // the second view, with the added members only
  std::vector<NodeId> left;  // members of the first that are not in the second
  friend bool operator==(const ViewDelta&, const ViewDelta&) = default;
};
using ViewDeltaPtr = std::shared_ptr<const ViewDelta>;

std::set<NodeId> IdsOf(const View& view);
// Null where the whole view is smaller.
ViewDeltaPtr MakeViewDelta(const ViewState& base, const ViewState& state);
// Null where `base` is not the view that the delta is from, or the result is not valid.
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
  // Grows with every connection this instance opens; orders registrations that overtake
  uint64_t attempt = 0;
  uint64_t beat = 0;  // as a heartbeat's
  // The longest lease that any coordinator has granted to this process. A returned coordinator with shorter leases must
  // know how long those of its predecessor may last.
  TimeUs lease_us_max = 0;
};
struct Heartbeat {
  // Epoch of the last view that reached the node; the coordinator sends a newer one if there is
  Epoch seen = 0;
  uint64_t beat = 0;   // numbers the registrations and heartbeats of one process, from 1
  bool whole = false;  // asks for the whole view: the node was sent a delta from a view that it does not have
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
// To Heartbeat and to an accepted Registration: you are heard and registered. Also sent unasked, when a lease can be
// granted that could not be granted when the heartbeat came.
struct HeartbeatAnswer {
  uint64_t beat = 0;  // the number of the message that is answered
  // The lease lasts this long from the sending of that message; 0: no lease is granted now. An earlier one stays.
  TimeUs lease_us = 0;
};
struct Probe {
  uint64_t nonce = 0;
};
struct Refusal {
  Status status;  // never OK; the codes are those of Membership::Callbacks::on_refused
};
using CoordinatorMessage = std::variant<HeartbeatAnswer, ViewStatePtr, Probe, Refusal, ViewDeltaPtr>;

// kInvalidArgument naming the value and the limit.
Status ValidateMember(const Member& member);
Status ValidateConfig(const MembershipConfig& config);
Status ValidateCoordinatorAddress(const std::string& address);
// For views off the wire, before any use: limits, order, unique ids, a leader among the members, epochs in range.
Status ValidateViewState(const ViewState& state);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_MESSAGES_H_
