// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-bench read: reads the shard of another node's rank into this rank's memory. The baseline is a bare
// fi_read loop.
// ropeteam-bench recover: a node is lost with its memory. Its replacement fetches its rank's shard from one
// holder, or from two. The baseline is the same loop.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <memory>

#include "bench/bare_fi.h"
#include "bench/cluster.h"
#include "bench/command.h"
#include "bench/measure.h"

namespace ropeteam::bench {
namespace {

// A recovery starts a daemon with its arena, which takes some seconds.
constexpr int kRecoverRunsMax = 5;

class ReadLoop {
 public:
  explicit ReadLoop(uint64_t bytes) {
    BareFiOptions bare;
    bare.bytes = bytes;
    bare.get = true;
    if (const Status started = loop_.Start(bare); !started.ok()) throw BenchError(started.ToString());
  }
  double Pass() {
    Result<double> pass = loop_.Pass();
    if (!pass.ok()) throw BenchError(pass.status().ToString());
    return *pass / 1e9;
  }

 private:
  BareFiLoop loop_;
};

void CheckSame(const Buffer& source, const Buffer& target) {
  if (std::memcmp(source.data(), target.data(), source.size()) != 0)
    throw BenchError("other bytes came back");
}

void RunRead(Bench& bench, const ShardOptions& options) {
  const uint64_t bytes = options.size_mib << 20;
  Report& report =
      bench.Start("size " + std::to_string(options.size_mib) + " MiB objects " +
                  std::to_string(options.objects) + " nodes 2 runs " + std::to_string(bench.runs));
  const Buffer source(bytes, 1, true);
  const Buffer target(bytes, 2, true);
  ClusterOptions cluster_options;
  cluster_options.replicas = 0;
  cluster_options.memory_bytes = 5 * bytes + (64ull << 20);
  Cluster cluster(cluster_options);
  BenchRank writer(cluster.socket(0), 0, 2, "bench-read");
  BenchRank reader(cluster.socket(1), 1, 2, "bench-read");
  ReadLoop loop(bytes);

  uint64_t step = 0;
  Samples fetched, read, baseline;
  for (int run = 0; run <= bench.runs; ++run) {
    // Each pass has a new step: the reader's node would already have the shard of an old one.
    writer.Save(++step, source.data(), bytes, options.objects);
    reader.Save(step, source.data(), 64, 1);
    writer.Wait(step, ROPETEAM_COMMITTED);
    const double begin = SecondsNow();
    ropeteam_view_t* view = reader.OpenView(step, 0);
    const double there = SecondsNow();
    reader.ReadAll(view, target.data());
    const double end = SecondsNow();
    CheckSame(source, target);
    const double bare = loop.Pass();
    if (run == 0) continue;
    fetched.push_back(Bandwidth(bytes, there - begin));
    read.push_back(Bandwidth(bytes, end - begin));
    baseline.push_back(bare);
  }
  report.Add({"read/fetch_vs_fi_read", "GB/s", fetched, "fi_read", baseline});
  report.Add({"read/remote_vs_fi_read", "GB/s", read, "fi_read", baseline});
}

struct Recovery {
  Samples bandwidth;
  Samples milliseconds;
  Samples baseline;
};

Recovery Recover(const ShardOptions& options, uint32_t nodes, int runs, const Buffer& source,
                 const Buffer& target, ReadLoop* loop) {
  constexpr uint32_t kLost = 1;  // never the node with the coordinator
  const uint64_t bytes = source.size();
  ClusterOptions cluster_options;
  cluster_options.nodes = nodes;
  cluster_options.replicas = nodes - 1;
  cluster_options.memory_bytes = 4 * bytes + (64ull << 20);
  Cluster cluster(cluster_options);
  Recovery recovery;
  uint64_t step = 0;
  for (int run = 0; run <= runs; ++run) {
    {
      BenchRank before(cluster.socket(kLost), 0, 1, "before-" + std::to_string(run));
      before.Save(++step, source.data(), bytes, options.objects);
      before.Wait(step, ROPETEAM_COMMITTED);
    }
    cluster.Lose(kLost);
    cluster.Replace(kLost);
    BenchRank after(cluster.socket(kLost), 0, 1, "after-" + std::to_string(run));
    if (after.Latest() != step) throw BenchError("the committed step is not the latest");
    const double begin = SecondsNow();
    ropeteam_view_t* view = after.OpenView(step, 0);
    const double seconds = SecondsNow() - begin;
    after.ReadAll(view, target.data());
    CheckSame(source, target);
    const double bare = loop->Pass();
    if (run == 0) continue;
    recovery.bandwidth.push_back(Bandwidth(bytes, seconds));
    recovery.milliseconds.push_back(seconds * 1e3);
    recovery.baseline.push_back(bare);
  }
  return recovery;
}

void RunRecover(Bench& bench, const ShardOptions& options) {
  const uint64_t bytes = options.size_mib << 20;
  const int runs = std::min(bench.runs, kRecoverRunsMax);
  Report& report = bench.Start("size " + std::to_string(options.size_mib) + " MiB objects " +
                               std::to_string(options.objects) + " runs " + std::to_string(runs));
  const Buffer source(bytes, 1, true);
  const Buffer target(bytes, 2, true);
  ReadLoop loop(bytes);
  const Recovery one = Recover(options, 2, runs, source, target, &loop);
  report.Add({"recover/pull_vs_fi_read", "GB/s", one.bandwidth, "fi_read", one.baseline});
  report.Add({"recover/pull_ms", "ms", one.milliseconds, "", {}});
  const Recovery two = Recover(options, 3, runs, source, target, &loop);
  report.Add({"recover/pull_two_holders_vs_fi_read", "GB/s", two.bandwidth, "fi_read", two.baseline});
}

void AddOptions(CLI::App* command, const std::shared_ptr<ShardOptions>& options) {
  AddShardOptions(command, options.get());
}

}  // namespace

void AddReadCommand(CLI::App& app, Bench& bench) {
  const auto options = std::make_shared<ShardOptions>();
  CLI::App* command = app.add_subcommand("read", "another node's shard, beside a bare fi_read loop");
  AddOptions(command, options);
  command->callback([&bench, options] { RunRead(bench, *options); });
}

void AddRecoverCommand(CLI::App& app, Bench& bench) {
  const auto options = std::make_shared<ShardOptions>();
  CLI::App* command =
      app.add_subcommand("recover", "a lost node's shard onto its replacement, beside a bare fi_read loop");
  AddOptions(command, options);
  command->callback([&bench, options] { RunRecover(bench, *options); });
}

}  // namespace ropeteam::bench
