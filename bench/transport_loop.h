// SPDX-License-Identifier: Apache-2.0
//
// Puts and gets through Ropeteam's transport between this process and target processes. It measures the
// transport alone, without store, checksums and protocol.
//
// A target is this executable again: main() calls TransportTargetMain() if its first argument is
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
  uint64_t bytes = 256ull << 20;  // size of the local region, and of each target's
  uint32_t peers = 1;
  Remote remote;  // where the targets run
};

struct LoopPass {
  double seconds = 0;
  double processor_seconds = 0;  // of this process and of all targets on this machine
};

class TransportLoop {
 public:
  // Touches and registers all memory and connects the peers. Throws BenchError.
  explicit TransportLoop(const LoopOptions& options);
  ~TransportLoop();
  TransportLoop(const TransportLoop&) = delete;
  TransportLoop& operator=(const TransportLoop&) = delete;

  // Moves `bytes` in operations of `size`, with the peers in round-robin and at most `depth` outstanding. It
  // goes through the whole region repeatedly, or with `one_place` always uses the same bytes and the same
  // place. With `sleep` it waits as a daemon does; without it, it polls.
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

// A target's main function; returns its exit code. `argv`: the arguments after kTransportTargetCommand.
int TransportTargetMain(int argc, char** argv);

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_TRANSPORT_LOOP_H_
