// SPDX-License-Identifier: Apache-2.0
//
// Membership tells a node which nodes are alive, which one leads, and in which epoch. It knows nothing of bytes or
// checkpoints.
//
// Promises of every implementation (standalone/, etcd/):
//  * Views reach one node in strictly increasing epochs; two nodes that see the same epoch see the same view. Epochs
//    go on growing when the coordinator restarts, because every node that registers says the last one it saw.
//  * A member that is silent for `dead_after_ms` leaves the view. A connection that resets, and ReportSuspect(), make
//    membership look at once: it probes, and a member that does not answer within `probe_ms` leaves the view then.
//  * A node that comes back under its name joins as a new instance (another NodeId); the older one leaves in the same
//    view, at once. A stale registration never blocks a new one. Joining removes no other member.
//  * An instance that left a view never comes back into one: the others have fenced its NodeId. If it is still alive,
//    it is told (on_refused) and may Rejoin() under another NodeId.
//  * The leader is the member that has been in the view longest; it changes only when it leaves. (For members that a
//    coordinator takes back after its return, see below, the leader may change: that of the view they join stays.)
//  * At any time a member has a lease or has none (on_lease). A lease that the coordinator has granted to an instance
//    runs out before any member acts on that instance's absence: either it has run out when the view without the
//    instance is given out, or the view says how long it may still last (View::settle_us). A node that the coordinator
//    does not hear, or that does not hear the coordinator, has no lease after lease_ms.
//  * All members of a view have the job's settings (View::settings). A node that named other values is refused.
//  * When the coordinator is gone, the last view stays in force; when it returns it first waits, up to dead_after_ms,
//    for the members of the newest view that any registrant has seen, so that its return causes no change: if all
//    of them come, that view stays in force and none is sent. It cannot know whether it is the first coordinator, so
//    the very first view of a job is held back likewise, until `nodes_expected` have registered.
//  * If no node with an earlier view reaches a returned coordinator in time, its first view has the nodes that came.
//    When the members of the earlier view reach it later, it waits for all of them in the same way and accepts them
//    as the same instances (coordinator_hold.cc says when that is safe).
//
// Failure detection: a member is declared dead if nothing was heard from it for dead_after_ms. Heartbeats are sent
// every heartbeat_ms, at least four in that time, so that one lost message does not remove a member.
//
// Leases and clocks: a lease counts from the moment at which the node sent the heartbeat that is answered, silence from
// the moment at which the coordinator received it. So a lease of lease_ms ends before dead_after_ms of silence do, if
// neither clock is off by more than kClockDriftPpm. All times are on CLOCK_BOOTTIME: while a machine is suspended or a
// process is stopped, its lease runs out. A virtual machine that is paused with its clock is not covered: only a fabric
// that fences protects against it.

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

// The quarantine of memory that a departed node may still write to (EngineConfig::quarantine_us) is no shorter. No
// lease is longer than kLeasePercent of it, however long dead_after_ms is.
inline constexpr uint32_t kQuarantineMsMin = 5000;
// The rate of every node's clock is within this of true time. Crystals are within 100 ppm; ntpd and chrony slew by at
// most 500 ppm and 1000 ppm on top, a virtual machine's clock may be worse.
inline constexpr uint32_t kClockDriftPpm = 5000;
// lease_ms is this much of dead_after_ms. A node may notice the end of its lease late by the remaining 40 %: the time
// from looking at the clock to the last byte of the transfer that it started then.
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
// How long one confirmation of the coordinator role lasts if an outside store assigns it (etcd/). No lease of this
// coordinator lasts longer than that after the confirmation was requested, so its successor waits as long. It is not
// shorter than a lease, or every lease would be cut.
constexpr uint32_t TermMs(uint32_t dead_after_ms) {
  const uint32_t longest = kQuarantineMsMin * kLeasePercent / 100;
  return dead_after_ms < longest ? dead_after_ms : longest;
}
// How much a fast clock may show while a slow one shows `duration`.
constexpr TimeUs WithDrift(TimeUs duration) {
  return duration * (1'000'000 + kClockDriftPpm) / (1'000'000 - kClockDriftPpm) + 1;
}

static_assert(WithDrift(LeaseMs(kDeadAfterMsDefault) * TimeUs{1000}) < kDeadAfterMsDefault * TimeUs{1000});
static_assert(kDeadAfterMsDefault < kQuarantineMsMin);
static_assert(ProbeMs(kDeadAfterMsMin) > 0);
static_assert(LeaseMs(kDeadAfterMsDefault) <= TermMs(kDeadAfterMsDefault));

// Which of JobSettings the user named, by a flag, a variable or a config file. The others are defaults.
struct NamedSettings {
  bool replicas = false;
  bool keep_steps = false;
  bool nodes = false;
  bool storage = false;
  bool persist_every = false;
  bool restore_from = false;
  friend bool operator==(const NamedSettings&, const NamedSettings&) = default;
};

struct MembershipConfig {
  std::string job;  // nodes of another job are refused, with both names in the message
  // The credentials of connections; null: they are not encrypted, and everyone who connects may register.
  std::shared_ptr<const Credentials> credentials = nullptr;
  // host:port where a coordinator may be, in the order in which they are tried; at most kCoordinatorsMax. Empty: the node
  // waits for Relocate().
  std::vector<std::string> coordinator_addresses;
  // host:port where this process runs a coordinator, and nowhere else; empty: it never does. If other addresses are given,
  // they are asked first: see Agent.
  std::string coordinator_listen;
  // The newest version of the engines' protocol that this node speaks, and the oldest; 0: the newest alone. A node that
  // has none in common with all others is refused, with both ranges.
  uint32_t protocol_version = 0;
  uint32_t protocol_oldest = 0;
  uint64_t chunk_bytes = 0;    // of the arena; all nodes of a job must agree, a mismatch is refused likewise
  std::string data_transport;  // how bytes move, "verbs", "ofi/efa"; must agree likewise
  uint32_t heartbeat_ms = 200;
  uint32_t dead_after_ms = kDeadAfterMsDefault;
  uint32_t probe_ms = kProbeMsDefault;
  // How many nodes the launcher starts, 0 when unknown. The embedded coordinator gives its first view out as
  // soon as that many have registered, and after dead_after_ms at the latest. Any number may come and go
  // later.
  uint32_t nodes_expected = 0;
  // The embedded coordinator's settings are the job's, unless members of an earlier view report others, which then count.
  // A node that named other values than the job's is refused. It takes the settings that it did not name from
  // View::settings.
  JobSettings settings;
  NamedSettings named;
  // The highest epoch that this node's memory knows from former runs (EpochOf() of its newest incarnation); 0: none. The
  // coordinator's views go on above it, so that their leaders use incarnation numbers that were never used.
  Epoch epoch_known = 0;
  // The node that embeds the coordinator, for messages. Start() sets it.
  std::string coordinator_node;
};
// Addresses of one list, so that a round over them stays short: each costs up to half of dead_after_ms.
inline constexpr size_t kCoordinatorsMax = 8;

// Where a coordinator is. `order` tells which of two places is the newer one; 0 where nothing orders them (standalone).
struct Place {
  std::string address;
  uint64_t order = 0;
};

// A connection to a coordinator that was made or lost, for status and for the search for another coordinator.
struct Contact {
  std::string address;       // empty: none is known yet
  bool registered = false;   // the coordinator there answers this node
  TimeUs since = 0;          // when `registered` last changed, at any address
  std::string reason;        // why the address does not answer; empty if it does
  std::string trouble = {};  // what keeps the coordinator from its work, in a sentence (etcd); empty: nothing
};

class Membership {
 public:
  virtual ~Membership() = default;  // Stop()

  // All are called from a thread of membership's own, one call at a time; they must not block, nor call
  // Stop().
  struct Callbacks {
    // A view that contains this node, of a higher epoch than any before.
    std::function<void(const View&)> on_view;
    // This instance is out; membership tries no more until Rejoin(). The message names the reason and the nodes.
    // By code:
    //  kStale            declared dead while alive (the others no longer heard it): Rejoin() as a new instance.
    //  kAlreadyExists    another instance with this node's name has replaced it: end the process, or the two would go
    //                    on replacing each other.
    //  kInvalidArgument  another job, chunk size, data transport or setting, or a name or address over its limit.
    //  kUnsupported      no protocol version in common with the others.
    //  kNoSpace          the job has kNodesMax nodes.
    std::function<void(const Status&)> on_refused;
    // This instance has a lease until then, on CLOCK_BOOTTIME in microseconds; 0: no lease (refused, left). Each call
    // replaces the one before, several times per lease_ms. There is no call when a lease runs out. Before on_refused()
    // there is a call with 0.
    std::function<void(TimeUs valid_until)> on_lease = {};
    // A coordinator answers now, or no longer answers, or another address was tried without success. Each change once.
    std::function<void(const Contact&)> on_contact = {};
  };

  // Registers `self` and keeps it registered: it reconnects for as long as it runs, and says so in the log
  // once per loss. Returns once the first attempt is under way. kInvalidArgument for a bad config, kIo when
  // coordinator_listen cannot be listened on.
  virtual Status Start(const Member& self, Callbacks callbacks) = 0;

  // Registers as a new instance: `self` has a NodeId that was never used before. For after
  // on_refused(kStale); if this instance is registered all the same, the new one replaces it. The embedded
  // coordinator goes on undisturbed. Any thread, also from a callback; does not block. kInvalidArgument for a
  // bad member, kAborted before Start() and after Stop().
  virtual Status Rejoin(const Member& self) = 0;

  // The data path had an error with this member: probe it now. Cheap, any thread, at any time.
  virtual void ReportSuspect(NodeId member, const std::string& reason) = 0;

  // A report that a coordinator is at `place`. The address is added to the list. A node that is not registered tries it at
  // once. A registered one goes there only if `now` is set (an operator's order), or if `place` has a higher order than any
  // before; a place of a lower order is ignored. If a coordinator runs in this process, it ends when its node goes elsewhere.
  // Any thread, also from a callback; does not block. An address that is not host:port is ignored.
  virtual void Relocate(const Place& place, bool now) = 0;

  // Leaves: the others see a view without this member at once. Idempotent. No callback runs after the return.
  // With an embedded coordinator the others keep that view until they find another one.
  virtual void Stop() = 0;
};

// membership/standalone: a gRPC coordinator embedded in one daemon, soft state only.
std::unique_ptr<Membership> CreateStandaloneMembership(const MembershipConfig& config);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_MEMBERSHIP_H_
