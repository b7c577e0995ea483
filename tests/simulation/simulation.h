// SPDX-License-Identifier: Apache-2.0
//
// One run from one seed. First there are faults, and no promise may be broken. Then everything heals, and the
// cluster must make progress within a bounded time.

#ifndef ROPETEAM_TESTS_SIMULATION_SIMULATION_H_
#define ROPETEAM_TESTS_SIMULATION_SIMULATION_H_

#include <cstdint>
#include <deque>
#include <string>

#include "tests/simulation/checker.h"
#include "tests/simulation/options.h"

namespace ropeteam::simulation {

struct Outcome {
  std::string failure;  // empty: all promises were kept
  Checker::Statistics statistics;
  std::array<uint64_t, kFaultKinds> faults{};
  uint64_t launches = 0;
  uint64_t inputs = 0;  // given to engines
  uint64_t events = 0;
  uint64_t digest = 0;  // of everything sent and answered
  TimeUs virtual_us = 0;
  std::deque<std::string> trace;  // the last lines, when kept
};

Outcome RunSimulation(const Options& options, size_t trace_lines = 0);

// The trace of the running cluster, or null. For a process that dies inside RunSimulation().
const std::deque<std::string>* TraceOfRunning();

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_SIMULATION_H_
