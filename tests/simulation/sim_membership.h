// SPDX-License-Identifier: Apache-2.0
//
// Membership's own state machines (membership/simulated) over the simulation's network and clock: a
// coordinator on its own host, which can die and return, and an agent for every daemon. A view reaches each
// daemon some time after its agent.
//
// A second coordinator may be started on another host while the first one runs, as when an operator replaces
// a node that is only unreachable. Then some hosts find the first at the coordinator's address, some the
// second.

#ifndef ROPETEAM_TESTS_SIMULATION_SIM_MEMBERSHIP_H_
#define ROPETEAM_TESTS_SIMULATION_SIM_MEMBERSHIP_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/view.h"
#include "tests/simulation/network.h"
#include "tests/simulation/random.h"
#include "tests/simulation/scheduler.h"

namespace ropeteam::simulation {

class SimMembership {
 public:
  // All run later than the call that causes them.
  struct Listener {
    std::function<void(size_t host, NodeId instance, const View&)> on_view;
    std::function<void(size_t host, NodeId instance, const Status&)> on_refused;
    // The lease lasts until this true time; 0: it has ended.
    std::function<void(size_t host, NodeId instance, TimeUs valid_until)> on_lease;
    std::function<void(size_t host, NodeId instance, const std::vector<NodeId>& members)> on_check;
  };
  // Settings of one daemon, if they differ from the others'.
  struct OwnSettings {
    JobSettings settings;
    bool named = false;  // set by its user; otherwise they are defaults
  };
  struct Config {
    JobSettings settings;
    uint64_t chunk_bytes = 4096;
    TimeUs view_lag_max_us = 10 * kMs;
  };

  SimMembership(const Config& config, Scheduler* scheduler, Network* network, Random* random,
                Listener listener);
  ~SimMembership();

  // The host's clock is faster than true time by `drift_ppm`. `epoch_known` is from its memory. `own` may be
  // null. `protocol`: the daemon's newest version.
  void Join(size_t host, const Member& member, int drift_ppm, Epoch epoch_known, uint32_t protocol,
            const OwnSettings* own);
  // The daemon's process has ended. `reset`: its host lives and closes its connections.
  void Gone(NodeId instance, bool reset);
  // The daemon says that it leaves; Gone() follows.
  void Leave(NodeId instance);
  // The daemon's process is stopped (SIGSTOP), and continues.
  void Pause(NodeId instance);
  void Resume(NodeId instance);
  void Suspect(NodeId reporter, NodeId suspect, const std::string& reason);
  void Reach(NodeId reporter, NodeId member, bool reached);

  // Stops the coordinator. If there are two, stops one of them, and all hosts look for the other.
  void StopCoordinator();
  // Starts a coordinator, or a second one.
  void StartCoordinator(int drift_ppm = 0);
  size_t coordinators() const;
  // The coordinator at its address dies, and one starts at another address, which no host knows.
  void MoveCoordinator();
  // Tells the instance's daemon the new address of the moved coordinator (Membership::Relocate).
  void TellMoved(NodeId instance);
  // From now on the host looks for this coordinator, 0 or 1. `reset`: its daemon's connection is reset;
  // otherwise it stays as long as it works.
  void Route(size_t host, size_t coordinator, bool reset);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_SIM_MEMBERSHIP_H_
