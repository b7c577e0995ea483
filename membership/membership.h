// SPDX-License-Identifier: Apache-2.0
//
// Membership reports to a node which nodes are alive, which one leads, and the epoch. It does not deal with bytes or
// checkpoints.
//
// Promises of every implementation (standalone/, etcd/):
// * Views reach a node in strictly increasing epochs. Two nodes with the same epoch have the same view. Epochs also
//   grow after a restart of the coordinator, because every node that registers reports the last one it saw.
// * A member that is silent for `dead_after_ms` leaves the view. After a connection reset or ReportSuspect(),
//   membership probes the member at once. If the member does not answer within `probe_ms`, it leaves the view.
// * A node that returns under its name joins as a new instance (another NodeId); the older one leaves in the same view,
//   at once. A stale registration never blocks a new one. A join removes no other member.
// * An instance that left a view never returns to one: the others have fenced its NodeId. If it is still alive, it gets
//   on_refused() and may Rejoin() under another NodeId.
// * The leader is the member that has been in the view longest when the former one leaves. It stays the leader until it
//   leaves, or until another member reaches more of the members that the coordinator hears (ReportReach();
//   coordinator_leader.cc has the rule). When a returned coordinator takes members back (see below), the leader of the
//   view they join stays.
// * At any time a member has a lease or has none (on_lease). A lease granted to an instance expires before any member
//   acts on that instance's absence. Either it has expired when the view without the instance is given out, or that
//   view says how long it may still last (View::settle_us). If the coordinator does not hear a node, or the node does
//   not hear the coordinator, the node's lease ends within lease_ms.
// * All members of a view have the job's settings (View::settings). A node with other named values is refused.
// * When the coordinator is gone, the last view stays in force. A returned coordinator first waits, up to
//   dead_after_ms, for the members of the newest view that any registrant has seen. If all of them come, that view
//   stays in force and no new one is sent. A coordinator cannot tell whether it is the job's first, so the first view
//   of a job is also held back, until `nodes_expected` have registered.
// * If no node with an earlier view reaches a returned coordinator in time, its first view has the nodes that came. If
//   the members of the earlier view reach it later, it waits for all of them in the same way and accepts them as the
//   same instances (coordinator_hold.cc says when that is safe).
//
// Failure detection: a member is declared dead if nothing was heard from it for dead_after_ms. Heartbeats are sent
// every heartbeat_ms, at least four in that time, so that one lost message does not remove a member.
//
// Leases and clocks: a lease counts from the moment when the node sent the answered heartbeat; silence counts from the
// moment when the coordinator received it. So a lease of lease_ms ends before dead_after_ms of silence, if neither
// clock is off by more than kClockDriftPpm. All times are on CLOCK_BOOTTIME: a lease also expires while a machine is
// suspended or a process is stopped. A virtual machine that is paused with its clock is not covered: only a fabric that
// fences protects against it.

#ifndef ROPETEAM_MEMBERSHIP_MEMBERSHIP_H_
#define ROPETEAM_MEMBERSHIP_MEMBERSHIP_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/view.h"

namespace ropeteam {

class Credentials;

// The quarantine of memory that a departed node may still write to (EngineConfig::quarantine_us) is at least this long.
// No lease is longer than kLeasePercent of it, however long dead_after_ms is.
inline constexpr uint32_t kQuarantineMsMin = 5000;
// Every node's clock rate is within this of true time. Crystals are within 100 ppm. ntpd adds at most 500 ppm and
// chrony 1000 ppm when they slew. The clock of a virtual machine may be worse.
inline constexpr uint32_t kClockDriftPpm = 5000;
// lease_ms is this part of dead_after_ms. The remaining 40 % are for a node that notices the end of its lease late.
// They cover the time from its look at the clock to the last byte of a transfer started then.
inline constexpr uint32_t kLeasePercent = 60;
inline constexpr uint32_t kDeadAfterMsDefault = 1000;
inline constexpr uint32_t kDeadAfterMsMin = 40;      // below it, delays of the scheduler look like deaths
inline constexpr uint32_t kDeadAfterMsMax = 600000;  // ten minutes: longer is of no use
inline constexpr uint32_t kHeartbeatsPerDeath = 4;   // dead_after_ms / heartbeat_ms at least
inline constexpr uint32_t kProbeMsDefault = 250;     // far above a round trip on a busy host

constexpr uint32_t LeaseMs(uint32_t dead_after_ms) {
  const uint32_t bound = dead_after_ms < kQuarantineMsMin ? dead_after_ms : kQuarantineMsMin;
  return bound * kLeasePercent / 100;
}
// A daemon's probe_ms: the default, or less where a node is declared dead sooner.
constexpr uint32_t ProbeMs(uint32_t dead_after_ms) {
  const uint32_t bound = dead_after_ms / kHeartbeatsPerDeath;
  return bound < kProbeMsDefault ? bound : kProbeMsDefault;
}
// How long one confirmation of the coordinator role lasts if an outside store assigns the role (etcd/). No lease of
// this coordinator lasts longer than that after the confirmation was requested, so its successor waits as long. It is
// at least a lease, because otherwise every lease would be cut short.
constexpr uint32_t TermMs(uint32_t dead_after_ms) {
  const uint32_t longest = kQuarantineMsMin * kLeasePercent / 100;
  return dead_after_ms < longest ? dead_after_ms : longest;
}
// The most that a fast clock may show while a slow one shows `duration`.
constexpr TimeUs WithDrift(TimeUs duration) {
  return duration * (1'000'000 + kClockDriftPpm) / (1'000'000 - kClockDriftPpm) + 1;
}

static_assert(WithDrift(LeaseMs(kDeadAfterMsDefault) * TimeUs{1000}) < kDeadAfterMsDefault * TimeUs{1000});
static_assert(kDeadAfterMsDefault < kQuarantineMsMin);
static_assert(ProbeMs(kDeadAfterMsMin) > 0);
static_assert(LeaseMs(kDeadAfterMsDefault) <= TermMs(kDeadAfterMsDefault));

// Which of JobSettings the user set by a flag, a variable or a config file. The others are defaults.
struct NamedSettings {
  bool replicas = false;
  bool keep_steps = false;
  bool nodes = false;
  bool storage = false;
  bool persist_every = false;
  bool restore_from = false;
  bool wait_for_missing = false;
  friend bool operator==(const NamedSettings&, const NamedSettings&) = default;
};

struct MembershipConfig {
  std::string job;  // a node of another job is refused; the message has both names
  // The credentials of connections; null: they are not encrypted, and everyone who connects may register.
  std::shared_ptr<const Credentials> credentials = nullptr;
  // host:port where a coordinator may be, in the order of the attempts; at most kCoordinatorsMax. Empty: the node waits
  // for Relocate().
  std::vector<std::string> coordinator_addresses;
  // host:port where this process may run a coordinator; empty: it never does. If there are other addresses, they are
  // tried first: see Agent.
  std::string coordinator_listen;
  // No other node joins: the coordinator here has no port, and coordinator_listen is only a name for messages.
  bool alone = false;
  // The newest and the oldest version of the engines' protocol that this node speaks; oldest 0: only the newest. A node
  // that has no version in common with all others is refused; the message has both ranges.
  uint32_t protocol_version = 0;
  uint32_t protocol_oldest = 0;
  uint64_t chunk_bytes = 0;    // of the arena; all nodes of a job must have the same
  std::string data_transport;  // how bytes move: "verbs", "ofi/efa"; all nodes of a job must have the same
  uint32_t heartbeat_ms = 200;
  uint32_t dead_after_ms = kDeadAfterMsDefault;
  uint32_t probe_ms = kProbeMsDefault;
  // How many nodes the launcher starts; 0: unknown. The embedded coordinator gives out its first view as soon as that
  // many have registered, and after dead_after_ms at the latest. Any number may join and leave later.
  uint32_t nodes_expected = 0;
  // The embedded coordinator's settings are the job's, unless members of an earlier view report others; then those are.
  // A node with other named values is refused. It takes the settings that it did not name from View::settings.
  JobSettings settings;
  NamedSettings named;
  // The highest epoch known from this node's memory of former runs (EpochOf() of its newest incarnation); 0: none. The
  // coordinator's views continue above it, so that their leaders use new incarnation numbers.
  Epoch epoch_known = 0;
  // The node that embeds the coordinator, for messages. Start() sets it.
  std::string coordinator_node;
};
// Addresses in one list. Each costs up to half of dead_after_ms, so this keeps a round over them short.
inline constexpr size_t kCoordinatorsMax = 8;

// Where a coordinator is. A higher `order` means a newer place; 0: without order (standalone).
struct Place {
  std::string address;
  uint64_t order = 0;
};

// The state of the connection to a coordinator, for status and for the search for another coordinator.
struct Contact {
  std::string address;       // empty: none is known yet
  bool registered = false;   // the coordinator there answers this node
  TimeUs since = 0;          // when `registered` last changed, at any address
  std::string reason;        // why the address does not answer; empty if it does
  std::string trouble = {};  // what prevents the coordinator's work, as a sentence (etcd); empty: nothing
};

class Membership {
 public:
  virtual ~Membership() = default;  // Stop()

  // All are called from a thread of membership, one call at a time. They must not block or call Stop().
  struct Callbacks {
    // A view that contains this node, of a higher epoch than any before.
    std::function<void(const View&)> on_view;
    // This instance is out. Membership stops trying until Rejoin(). The message has the reason and the nodes. By code:
    //   kStale            declared dead while alive, because the others did not hear it: Rejoin() as a new instance.
    //   kAlreadyExists    another instance with this node's name has replaced it: end the process, or the two would replace
    //                     each other again and again.
    //  kInvalidArgument  another job, chunk size, data transport or setting, or a name or address over its limit.
    //  kUnsupported      no protocol version in common with the others.
    //  kNoSpace          the job has kNodesMax nodes.
    std::function<void(const Status&)> on_refused;
    // This instance has a lease until `valid_until`, on CLOCK_BOOTTIME in microseconds; 0: no lease (refused, left).
    // Each call replaces the previous one, several times per lease_ms. The expiry of a lease causes no call. A call
    // with 0 precedes on_refused().
    std::function<void(TimeUs valid_until)> on_lease = {};
    // The node is to find out whether these members answer it, and to call ReportReach(), until the next call.
    std::function<void(const std::vector<NodeId>& members)> on_check = {};
    // A coordinator answers, or no longer answers, or an attempt at another address failed. Called once per change.
    std::function<void(const Contact&)> on_contact = {};
  };

  // Registers `self` and keeps it registered: it reconnects as long as it runs, and logs each loss once. Returns when
  // the first attempt has begun. kInvalidArgument: invalid config. kIo: it cannot listen on coordinator_listen.
  virtual Status Start(const Member& self, Callbacks callbacks) = 0;

  // Registers as a new instance, for use after on_refused(kStale): `self` has a NodeId that was never used before. If
  // this instance is still registered, the new one replaces it. The embedded coordinator is not disturbed. Any thread,
  // also from a callback; does not block. kInvalidArgument: invalid member. kAborted: before Start() or after Stop().
  virtual Status Rejoin(const Member& self) = 0;

  // The data path had an error with this member: membership probes it now. Cheap, any thread, at any time.
  virtual void ReportSuspect(NodeId member, const std::string& reason) = 0;

  // This member does not answer the node's control messages, or answers them (again). The coordinator moves the lead
  // away from a member that others do not reach. Any thread, at any time.
  virtual void ReportReach(NodeId member, bool reached) = 0;

  // A report that a coordinator is at `place`. The address is added to the list. A node that is not registered tries it
  // at once. A registered node goes there only if `now` is set (an operator's order), or if `place` has a higher order
  // than any before. A place with a lower order is ignored. If a coordinator runs in this process, it ends when its
  // node goes elsewhere. Any thread, also from a callback; does not block. An address that is not host:port is ignored.
  virtual void Relocate(const Place& place, bool now) = 0;

  // Leaves: the others get a view without this member at once. Idempotent. No callback runs after the return. If this
  // process embeds the coordinator, the others keep that view until they find another coordinator.
  virtual void Stop() = 0;
};

// membership/standalone: a gRPC coordinator embedded in one daemon, soft state only.
std::unique_ptr<Membership> CreateStandaloneMembership(const MembershipConfig& config);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_MEMBERSHIP_H_
