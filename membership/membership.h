// SPDX-License-Identifier: Apache-2.0
//
// Membership tells a node who is alive, who leads, and in which epoch. It knows nothing of bytes or checkpoints.
//
// Promises, whatever stands behind it (standalone/, later etcd/):
//  * Views reach one node in strictly increasing epochs; two nodes that see the same epoch see the same view. Epochs
//    go on growing when the coordinator restarts, because every node that registers says the last one it saw.
//  * A member that is silent for `dead_after_ms` leaves the view. A connection that resets, and ReportSuspect(), make
//    membership look at once: it probes, and a member that does not answer within `probe_ms` leaves the view then.
//  * A node that comes back under its name joins as a new instance (another NodeId); the older one leaves in the same
//    view, at once. A stale registration never blocks a new one. Joining takes nobody else out.
//  * The leader is the member that has been in the view longest; it changes only when it leaves.
//  * When the coordinator is gone, the last view stays in force; when it returns it first waits, up to dead_after_ms,
//    for the members of the last view that anyone who registers has seen, so that its return disturbs nobody.
//
// Failure detection: a member is declared dead if nothing was heard from it for dead_after_ms. Heartbeats go out every
// heartbeat_ms, at least four in that time, so that one lost message is not a death.

#ifndef ROPETEAM_MEMBERSHIP_MEMBERSHIP_H_
#define ROPETEAM_MEMBERSHIP_MEMBERSHIP_H_

#include <functional>
#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/base/view.h"

namespace ropeteam {

struct MembershipConfig {
  std::string job;                    // nodes of another job are refused, with both names in the message
  std::string coordinator_address;    // host:port to register with
  bool embed_coordinator = false;     // run the coordinator in this process, listening on coordinator_address
  uint32_t protocol_version = 0;      // of the control plane; a mismatch is refused with both numbers
  uint64_t chunk_bytes = 0;           // of the arena; all nodes of a job must agree, a mismatch is refused likewise
  uint32_t heartbeat_ms = 200;
  uint32_t dead_after_ms = 1000;
  uint32_t probe_ms = 250;
};
inline constexpr uint32_t kHeartbeatsPerDeath = 4;  // dead_after_ms / heartbeat_ms at least

class Membership {
 public:
  virtual ~Membership() = default;  // Stop()

  // Both are called from a thread of membership's own, one call at a time; they must not block.
  struct Callbacks {
    std::function<void(const View&)> on_view;
    // Registration was refused for good (another job, version, or chunk size); the message says what and whose.
    std::function<void(const Status&)> on_refused;
  };

  // Registers `self` and keeps it registered: it reconnects for as long as it runs, and says so in the log once per
  // loss. Returns once the first attempt is under way. kInvalidArgument for a bad config, kIo when the embedded
  // coordinator cannot listen.
  virtual Status Start(const Member& self, Callbacks callbacks) = 0;

  // The data path saw trouble with this member: look now. Cheap, any thread, at any time.
  virtual void ReportSuspect(NodeId member, const std::string& reason) = 0;

  // Leaves: the others see a view without this member at once. Idempotent. No callback runs after the return.
  virtual void Stop() = 0;
};

// membership/standalone: a gRPC coordinator embedded in one daemon, soft state only.
std::unique_ptr<Membership> CreateStandaloneMembership(const MembershipConfig& config);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_MEMBERSHIP_H_
