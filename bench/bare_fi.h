// SPDX-License-Identifier: Apache-2.0
//
// The baseline for everything that moves bytes between nodes: a bare loop of fi_write or fi_read between two
// processes over the same provider, without Ropeteam's transport. Both processes poll, so the figure contains
// no sleep.
//
// The second process is this executable again, here or on another machine: main() calls BareFiTargetMain() if
// its first argument is kBareFiTargetCommand. Not thread-safe; one loop per thread.

#ifndef ROPETEAM_BENCH_BARE_FI_H_
#define ROPETEAM_BENCH_BARE_FI_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/remote.h"
#include "core/base/status.h"

namespace ropeteam::bench {

inline constexpr const char* kBareFiTargetCommand = "bare-fi-target";

struct BareFiOptions {
  std::string provider = "tcp;ofi_rxm";
  std::string device;             // libfabric's domain, for providers without IP addresses; empty: the first
  uint64_t bytes = 256ull << 20;  // moved by one pass
  uint64_t operation_bytes = 1 << 20;  // by one operation; the last of a pass may be shorter
  uint32_t outstanding = 16;           // operations in flight
  bool get = false;                    // fi_read instead of fi_write
  // Ask the target to acknowledge each write, as Ropeteam's transport must. Off: a write completes when it
  // has left. The pass then ends with a small read after the writes, so that all bytes have arrived when the
  // clock stops.
  bool delivery_complete = false;
  uint32_t passes = 5;  // of RunBareFi(), after one that is not counted
  // Where the second process runs. The addresses are numeric IPv4; the system chooses the ports.
  Remote remote;
};

struct BareFiResult {
  double bytes_per_second = 0;  // median of the passes
  double bytes_per_second_min = 0, bytes_per_second_max = 0;
  uint32_t passes = 0;
};

// The loop is set up once. Its passes then alternate with those of the candidate, so that a ratio comes from
// one run on one machine in one state. Between passes the target sleeps and uses no processor time.
class BareFiLoop {
 public:
  BareFiLoop();
  ~BareFiLoop();  // Stop()
  BareFiLoop(const BareFiLoop&) = delete;
  BareFiLoop& operator=(const BareFiLoop&) = delete;

  // Starts the second process, connects, and touches all memory. kUnsupported without libfabric or the
  // provider, kIo for other errors. After an error the loop can be started again.
  Status Start(const BareFiOptions& options);
  // Runs one pass and returns bytes per second. The first pass after Start() is slower than the others.
  Result<double> Pass();
  void Stop();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Start(), one pass to warm up, options.passes passes, Stop().
Result<BareFiResult> RunBareFi(const BareFiOptions& options);

// The second process's main function; returns its exit code. `argv`: the arguments after
// kBareFiTargetCommand.
int BareFiTargetMain(int argc, char** argv);

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_BARE_FI_H_
