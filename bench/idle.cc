// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-bench idle: the cost of two daemons that have done some saves and now have nothing to do:
// processor time, and memory beyond the arena.

#include <poll.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>

#include "bench/cluster.h"
#include "bench/command.h"
#include "bench/measure.h"

namespace ropeteam::bench {
namespace {

struct IdleOptions {
  int seconds = 20;  // a clock tick is 10 ms: 20 s resolve 0.05 %
  uint64_t size_mib = 64;
};

void Run(Bench& bench, const IdleOptions& options) {
  const uint64_t bytes = options.size_mib << 20;
  Report& report = bench.Start("size " + std::to_string(options.size_mib) + " MiB nodes 2 seconds " +
                               std::to_string(options.seconds));
  const Buffer source(bytes, 1, false);
  ClusterOptions cluster_options;
  cluster_options.memory_bytes = 5 * bytes + (64ull << 20);
  Cluster cluster(cluster_options);
  BenchRank rank(cluster.socket(0), 0, 1, "bench-idle");
  for (uint64_t step = 1; step <= 3; ++step) {
    rank.Save(step, source.data(), bytes, 4);
    rank.Wait(step, ROPETEAM_COMMITTED);
  }
  poll(nullptr, 0, 1000);  // until the work after a save (spinning, acknowledgements) has ended
  Samples cpu, memory;
  const double begin = SecondsNow();
  const ProcessUse before[2] = {UseOf(cluster.pid(0)), UseOf(cluster.pid(1))};
  poll(nullptr, 0, options.seconds * 1000);
  const double seconds = SecondsNow() - begin;
  for (uint32_t node = 0; node < 2; ++node) {
    const ProcessUse after = UseOf(cluster.pid(node));
    cpu.push_back((after.cpu_seconds - before[node].cpu_seconds) / seconds * 100);
    memory.push_back(after.memory_beyond_arena_mib);
  }
  // One sample per daemon; the first daemon is also the coordinator and the leader.
  report.Add({"idle/cpu_percent", "% of a core", cpu, "", {}});
  report.Add({"idle/memory_beyond_arena_mib", "MiB", memory, "", {}});
}

}  // namespace

void AddIdleCommand(CLI::App& app, Bench& bench) {
  CLI::App* command = app.add_subcommand("idle", "what two daemons with nothing to do cost");
  const auto options = std::make_shared<IdleOptions>();
  command->add_option("--seconds", options->seconds, "to watch them")
      ->check(CLI::Range(1, 3600))
      ->capture_default_str();
  command->add_option("--size", options->size_mib, "of the shards saved before, MiB")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->callback([&bench, options] { Run(bench, *options); });
}

}  // namespace ropeteam::bench
