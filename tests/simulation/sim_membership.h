// SPDX-License-Identifier: Apache-2.0
//
// Membership's own state machines (membership/simulated) over the simulation's network and clock: a
// coordinator on a host of its own, that can die and return, and an agent for every daemon. Views reach their
// daemons some time after their agents, each at its own time.
//
// A second coordinator may be started on another host while the first one lives, as when an operator replaces a node that
// is merely out of reach: some hosts find the one at the coordinator's address, some the other.

#ifndef ROPETEAM_TESTS_SIMULATION_SIM_MEMBERSHIP_H_
#define ROPETEAM_TESTS_SIMULATION_SIM_MEMBERSHIP_H_

#include <functional>
#include <memory>
#include <string>

#include "core/base/status.h"
#include "core/base/view.h"
#include "tests/simulation/network.h"
#include "tests/simulation/random.h"
#include "tests/simulation/scheduler.h"

namespace ropeteam::simulation {

class SimMembership {
 public:
  // Both run later than the call that causes them.
  struct Listener {
    std::function<void(size_t host, NodeId instance, const View&)> on_view;
    std::function<void(size_t host, NodeId instance, const Status&)> on_refused;
    // True time until which the lease lasts; 0: no lease any more.
    std::function<void(size_t host, NodeId instance, TimeUs valid_until)> on_lease;
  };
  // What one daemon was started with, where that differs from the others.
  struct OwnSettings {
    JobSettings settings;
    bool named = false;  // by its user; else they are defaults
  };
  struct Config {
    JobSettings settings;
    uint64_t chunk_bytes = 4096;
    TimeUs view_lag_max_us = 10 * kMs;
  };

  SimMembership(const Config& config, Scheduler* scheduler, Network* network, Random* random,
                Listener listener);
  ~SimMembership();

  // The host's clock is faster than true time by that much. `epoch_known`: by its memory. `own` may be null.
  // `protocol`: the newest version that it speaks.
  void Join(size_t host, const Member& member, int drift_ppm, Epoch epoch_known, uint32_t protocol,
            const OwnSettings* own);
  // The daemon's process has ended. `reset`: its host lives and closes its connections.
  void Gone(NodeId instance, bool reset);
  // The daemon says that it leaves; Gone() follows.
  void Leave(NodeId instance);
  // The daemon's process is stopped (SIGSTOP), and goes on.
  void Pause(NodeId instance);
  void Resume(NodeId instance);
  void Suspect(NodeId reporter, NodeId suspect, const std::string& reason);

  // One of them, where there are two. All hosts look for the one that is left.
  void StopCoordinator();
  // Where one runs, a second.
  void StartCoordinator(int drift_ppm = 0);
  size_t coordinators() const;
  // The coordinator at its address dies, and one starts at another address, which no host knows.
  void MoveCoordinator();
  // What the instance's daemon is told (Membership::Relocate): the coordinator is where it has moved to.
  void TellMoved(NodeId instance);
  // From now on the host looks for that one, 0 or 1. Its daemon's connection is reset if `reset`, else it stays as long as
  // it works.
  void Route(size_t host, size_t coordinator, bool reset);

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_SIM_MEMBERSHIP_H_
