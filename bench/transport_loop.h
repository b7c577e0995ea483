// SPDX-License-Identifier: Apache-2.0
//
// Puts and gets through Ropeteam's transport between this process and targets in processes of their own: what
// the transport alone can do, with no store, no checksum and no protocol above it.
//
// A target is this executable again: main() hands over to TransportTargetMain() when its first argument is
// kTransportTargetCommand. Not thread-safe.

#ifndef ROPETEAM_BENCH_TRANSPORT_LOOP_H_
#define ROPETEAM_BENCH_TRANSPORT_LOOP_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/child.h"
#include "bench/measure.h"
#include "bench/remote.h"
#include "core/base/status.h"
#include "transport/fabrics.h"

namespace ropeteam::bench {

inline constexpr const char* kTransportTargetCommand = "transport-target";

struct LoopOptions {
  FabricConfig fabric;
  uint64_t bytes = 256ull << 20;  // of the local region, and of each target's
  uint32_t peers = 1;
  Remote remote;  // where the targets run
};

struct LoopPass {
  double seconds = 0;
  double processor_seconds = 0;  // of this process and of all targets on this machine
};

class TransportLoop {
 public:
  // Throws BenchError. All memory is touched and registered, the peers are connected.
  explicit TransportLoop(const LoopOptions& options);
  ~TransportLoop();
  TransportLoop(const TransportLoop&) = delete;
  TransportLoop& operator=(const TransportLoop&) = delete;

  // Moves `bytes` in operations of `size` over the peers in turn, at most `depth` outstanding, through the
  // whole region again and again, or with `one_place` always the same bytes to the same place. With `sleep`
  // it waits as a daemon does, else it polls all the time.
  LoopPass Pass(bool get, uint64_t size, uint32_t depth, uint64_t bytes, bool sleep = false,
                bool one_place = false);
  const Transport& transport() const { return *transport_; }

 private:
  struct Target {
    Child process;
    PeerId peer = 0;
    RemoteRegionId region = 0;
  };
  double ProcessorSeconds() const;

  const LoopOptions options_;
  Buffer memory_;
  std::unique_ptr<Transport> transport_;
  RegionId region_ = 0;
  std::vector<std::unique_ptr<Target>> targets_;
};

// A target's main function; returns its exit code. `argv` is what follows kTransportTargetCommand.
int TransportTargetMain(int argc, char** argv);

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_TRANSPORT_LOOP_H_
