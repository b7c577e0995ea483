// SPDX-License-Identifier: Apache-2.0
//
// Injects the faults of one run: at random times, one of the kinds that its seed enables, until Stop().

#ifndef ROPETEAM_TESTS_SIMULATION_FAULTS_H_
#define ROPETEAM_TESTS_SIMULATION_FAULTS_H_

#include <array>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "tests/simulation/cluster.h"
#include "tests/simulation/rank.h"

namespace ropeteam::simulation {

class Faults {
 public:
  Faults(Cluster* cluster, Launcher* launcher)
      : cluster_(*cluster), launcher_(*launcher), options_(cluster->options().faults) {}

  void Start();
  void Stop() { stopped_ = true; }
  const std::array<uint64_t, kFaultKinds>& counts() const { return counts_; }

 private:
  void Next();
  void Strike(Fault fault);
  void StopHost(size_t host, bool keep_memory);
  void TroubleLink(Fault fault);
  void TroubleHost(Fault fault, TimeUs until);
  void Flip();
  void Partition();
  // `group`: each place with its group. Places of different groups cannot reach each other.
  void CutBetween(const std::vector<std::pair<size_t, uint64_t>>& group, TimeUs until);
  void Replace(size_t host);
  void TakeAway();
  void PartPair();
  void TroubleStorage(Fault fault, size_t host);
  void LoseEverything();
  void LoseLeader();
  void StopCoordinator();
  void StartSecondCoordinator();
  void MoveHosts(TimeUs until);
  void Ask();
  // The next step of docs/security.md's replacement of the job's key, on this host.
  void ReplaceKey(size_t step, size_t host);
  bool HasCopiesOf(KeyId key) const;

  Cluster& cluster_;
  Launcher& launcher_;
  const FaultOptions& options_;
  bool stopped_ = false;
  KeyId key_ = kFirstKey;  // that is or was used last
  std::array<uint64_t, kFaultKinds> counts_{};
  std::vector<std::unique_ptr<Client>> people_;  // of the whole run, because answers may still come
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_FAULTS_H_
