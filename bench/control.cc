// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-bench control: the cost of the control plane as the cluster grows. The leader is a real engine,
// and all messages are real; the other nodes are models that send what a node with 8 ranks would send.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "bench/command.h"
#include "bench/control_cluster.h"
#include "core/base/log.h"

namespace ropeteam::bench {
namespace {

struct ControlCommandOptions {
  std::vector<uint32_t> nodes = {16, 64, 256, 1024, 4096, 16384};
};

// At this size, models and real engines are both run, to compare the bytes that they send.
constexpr uint32_t kNodesCompared = 16;

struct ControlSamples {
  Samples cpu_us, bytes, cpu_us_degraded, view_change_us, core_percent;
};

Samples BytesOfEngines(uint32_t nodes, int runs) {
  ControlOptions options;
  options.nodes = nodes;
  options.engines = true;
  ControlCluster cluster(options);
  Samples bytes;
  for (int run = -2; run < runs; ++run) {
    const StepCost cost = cluster.RunStep();
    if (run >= 0) bytes.push_back(static_cast<double>(cost.leader_bytes) / nodes);
  }
  return bytes;
}

ControlSamples Measure(uint32_t nodes, int runs) {
  ControlOptions options;
  options.nodes = nodes;
  ControlCluster cluster(options);
  ControlSamples samples;
  // The first steps warm the caches and fill the leader's table with as many steps as retention keeps.
  for (int run = -3; run < runs; ++run) {
    const StepCost cost = cluster.RunStep();
    if (run < 0) continue;
    samples.cpu_us.push_back(cost.leader_cpu_s * 1e6 / nodes);
    samples.bytes.push_back(static_cast<double>(cost.leader_bytes) / nodes);
    samples.core_percent.push_back(cost.leader_cpu_s * 100 / (static_cast<double>(kControlStepUs) * 1e-6));
  }
  // With one replica, two groups of shards lack a copy in every kept step: the lost node's own, and those
  // that it held for another node. This lasts until two steps of the next incarnation are committed.
  while (samples.cpu_us_degraded.size() < static_cast<size_t>(runs)) {
    samples.view_change_us.push_back(cluster.LoseNode().leader_cpu_s * 1e6 / (nodes - 1));
    for (int step = 0; step < 2; ++step)
      samples.cpu_us_degraded.push_back(cluster.RunStep().leader_cpu_s * 1e6 / (nodes - 1));
    cluster.ReturnNode();
    cluster.RunStep();
    cluster.RunStep();
  }
  return samples;
}

void Run(Bench& bench, const ControlCommandOptions& options) {
  SetLogSink(nullptr, LogLevel::kError);
  Report& report = bench.Start(
      "ranks per node " + std::to_string(kRanksPerNode) + " replicas " + std::to_string(kControlReplicas) +
      " step " + std::to_string(kControlStepUs / 1'000'000) + " s runs " + std::to_string(bench.runs));
  for (const uint32_t nodes : options.nodes) {
    const std::string at = "@" + std::to_string(nodes);
    const ControlSamples samples = Measure(nodes, bench.runs);
    report.Add({"control/leader_us_per_node_commit" + at, "us", samples.cpu_us, "", {}});
    Row bytes{"control/bytes_per_node_commit" + at, "bytes", samples.bytes, "", {}};
    if (nodes == kNodesCompared) {
      bytes.baseline_name = "real_engines";
      bytes.baseline = BytesOfEngines(nodes, bench.runs);
    }
    report.Add(bytes);
    report.Add({"control/leader_us_per_node_commit_degraded" + at, "us", samples.cpu_us_degraded, "", {}});
    report.Add({"control/leader_us_per_node_view_change" + at, "us", samples.view_change_us, "", {}});
    report.Add({"control/leader_core_percent" + at, "% of a core", samples.core_percent, "", {}});
  }
}

}  // namespace

void AddControlCommand(CLI::App& app, Bench& bench) {
  CLI::App* command = app.add_subcommand("control", "what the leader costs as the cluster grows");
  const auto options = std::make_shared<ControlCommandOptions>();
  command->add_option("--nodes", options->nodes, "cluster sizes, each measured by itself")
      ->delimiter(',')
      ->check(CLI::Range(3u, 16384u))
      ->capture_default_str();
  command->callback([&bench, options] { Run(bench, *options); });
}

}  // namespace ropeteam::bench
