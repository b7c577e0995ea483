// SPDX-License-Identifier: Apache-2.0
//
// The yardstick for everything that moves bytes between nodes: a bare loop of fi_write or fi_read between two
// processes over the same provider, with nothing of Ropeteam's transport in it. Both processes poll, so no
// sleep is in the figure.
//
// The second process is this executable again, here or on another machine: main() hands over to
// BareFiTargetMain() when its first argument is kBareFiTargetCommand. Not thread-safe; one loop a thread.

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
  std::string device;             // libfabric's domain, where there are no IP addresses; empty: the first
  uint64_t bytes = 256ull << 20;  // moved by one pass
  uint64_t operation_bytes = 1 << 20;  // by one operation; the last of a pass may be shorter
  uint32_t outstanding = 16;           // operations in flight
  bool get = false;                    // fi_read instead of fi_write
  // Ask the target to acknowledge each write, as Ropeteam's transport must. Off: a write completes when it
  // has left, and a pass ends with a small read behind the writes, so that the bytes of a pass are there when
  // its clock stops.
  bool delivery_complete = false;
  uint32_t passes = 5;  // of RunBareFi(), after one that is not counted
  // Where the second process runs. Its addresses are numeric IPv4; the ports are the system's choice.
  Remote remote;
};

struct BareFiResult {
  double bytes_per_second = 0;  // median of the passes
  double bytes_per_second_min = 0, bytes_per_second_max = 0;
  uint32_t passes = 0;
};

// Set up once, then run pass by pass between passes of whatever is measured against it, so that a ratio comes
// from one run on one machine in one state. Between passes the target sleeps and uses no processor.
class BareFiLoop {
 public:
  BareFiLoop();
  ~BareFiLoop();  // Stop()
  BareFiLoop(const BareFiLoop&) = delete;
  BareFiLoop& operator=(const BareFiLoop&) = delete;

  // Starts the second process and connects; all memory is touched. kUnsupported without libfabric or the
  // provider, kIo otherwise. After an error the loop can be started again.
  Status Start(const BareFiOptions& options);
  // One pass: bytes per second. The first after Start() is slower than the rest.
  Result<double> Pass();
  void Stop();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Start(), one pass to warm up, options.passes passes, Stop().
Result<BareFiResult> RunBareFi(const BareFiOptions& options);

// The second process's main function; returns its exit code. `argv` is what follows kBareFiTargetCommand.
int BareFiTargetMain(int argc, char** argv);

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_BARE_FI_H_
