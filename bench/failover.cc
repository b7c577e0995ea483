// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-bench failover: kills a node with its memory. It measures the time until another node has read the
// lost rank's shard, until the cluster's view is without the node, until a new incarnation's ranks know the
// newest step, and until every shard has all its copies again. All times begin at kill(), and a pass has one
// kill.

#include <poll.h>
#include <signal.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstring>
#include <future>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "bench/cluster.h"
#include "bench/command.h"
#include "bench/measure.h"

namespace ropeteam::bench {
namespace {

// A pass starts a daemon with its arena, which takes some seconds.
constexpr int kRunsMax = 9;
constexpr uint32_t kNodes = 4;
constexpr uint32_t kReplicas = 1;
constexpr uint32_t kLost = 1;  // never the node with the coordinator
constexpr int kLookEveryMs = 1;
constexpr double kGiveUpAfterS = 60;

using Json = nlohmann::json;

// The leader's status of the cluster; null if it does not answer.
Json Status(const Cluster& cluster) {
  const Result<std::string> text = cluster.Ask(0, local::AdminCommand::kStatus);
  return text.ok() ? Json::parse(*text) : Json();
}

std::string NameOf(uint32_t node) { return "node-" + std::to_string(node); }

// All nodes are members, and every shard of the newest step has its copies.
bool Whole(const Json& status, uint64_t step, size_t nodes) {
  if (status.is_null() || status["nodes"].size() != nodes) return false;
  return std::any_of(status["steps"].begin(), status["steps"].end(), [&](const Json& each) {
    return each["step"] == step && each["copies_min"].get<uint32_t>() >= 1 + kReplicas;
  });
}

// `reader`: a surviving node without a copy of the lost rank's shard. `stand_in`: another one, where the lost
// rank continues.
struct Survivors {
  uint32_t reader = 0;
  uint32_t stand_in = 0;
};
Survivors Choose(const Json& status, uint64_t step) {
  for (const Json& node : status["nodes"]) {
    const auto holds = [&](const Json& copy) {
      return copy["id"]["step"] == step && copy["id"]["rank"] == kLost;
    };
    if (std::any_of(node["copies"].begin(), node["copies"].end(), holds)) continue;
    for (uint32_t i = 0; i < kNodes; ++i)
      if (node["name"] == NameOf(i)) return {i, i == kNodes - 1 ? kNodes - 2 : kNodes - 1};
  }
  throw BenchError("every node has a copy of rank " + std::to_string(kLost) + "'s shard");
}

// Milliseconds since the kill.
struct Times {
  double first_read = 0;
  double view = 0;
  double latest = 0;
  double redundancy = 0;
};

// Reads the leader's status until the step has all its copies on the surviving nodes.
void WatchCluster(const Cluster& cluster, uint64_t step, double killed, Times* times) {
  for (std::optional<double> view;;) {
    const Json status = Status(cluster);
    const double now = SecondsNow() - killed;
    if (!view && !status.is_null() &&
        std::none_of(status["nodes"].begin(), status["nodes"].end(),
                     [](const Json& node) { return node["name"] == NameOf(kLost); }))
      times->view = 1e3 * *(view = now);
    if (view && Whole(status, step, kNodes - 1)) {
      times->redundancy = 1e3 * now;
      return;
    }
    if (now > kGiveUpAfterS) throw BenchError("the copies are not restored: " + status.dump());
    poll(nullptr, 0, kLookEveryMs);
  }
}

using Ranks = std::vector<std::unique_ptr<BenchRank>>;
Ranks Open(const Cluster& cluster, const std::string& incarnation_token,
           const std::optional<uint32_t>& stand_in) {
  Ranks ranks;
  for (uint32_t rank = 0; rank < kNodes; ++rank)
    ranks.push_back(std::make_unique<BenchRank>(
        cluster.socket(rank == kLost ? stand_in.value_or(rank) : rank), rank, kNodes, incarnation_token));
  return ranks;
}

Times FailOver(Cluster* cluster, uint64_t step, int run, uint64_t objects, const Buffer& source,
               const Buffer& target) {
  Ranks before = Open(*cluster, "before-" + std::to_string(run), std::nullopt);
  for (const auto& rank : before) rank->Save(step, source.data(), source.size(), objects);
  for (const auto& rank : before) rank->Wait(step, ROPETEAM_COMMITTED);
  Json status;
  const double wait_until = SecondsNow() + kGiveUpAfterS;
  while (!Whole(status = Status(*cluster), step, kNodes)) {
    if (SecondsNow() > wait_until) throw BenchError("the cluster is not whole: " + status.dump());
    poll(nullptr, 0, kLookEveryMs);
  }
  const Survivors survivors = Choose(status, step);
  std::memset(target.data(), 0, target.size());

  Times times;
  const double killed = SecondsNow();
  kill(cluster->pid(kLost), SIGKILL);  // its arena is removed later, outside the measured time
  std::future<void> watched =
      std::async(std::launch::async, [&] { WatchCluster(*cluster, step, killed, &times); });
  BenchRank& reader = *before[survivors.reader];
  reader.ReadAll(reader.OpenView(step, kLost), target.data());
  times.first_read = 1e3 * (SecondsNow() - killed);
  if (std::memcmp(source.data(), target.data(), source.size()) != 0)
    throw BenchError("other bytes came back");
  before.clear();
  const Ranks after = Open(*cluster, "after-" + std::to_string(run), survivors.stand_in);
  for (const auto& rank : after)
    if (rank->Latest() != step) throw BenchError("the committed step is not the latest");
  times.latest = 1e3 * (SecondsNow() - killed);
  watched.get();
  cluster->Lose(kLost);
  return times;
}

void RunFailover(Bench& bench, const ShardOptions& options) {
  const uint64_t bytes = options.size_mib << 20;
  const int runs = std::min(bench.runs, kRunsMax);
  Report& report = bench.Start("size " + std::to_string(options.size_mib) + " MiB objects " +
                               std::to_string(options.objects) + " nodes " + std::to_string(kNodes) +
                               " replicas " + std::to_string(kReplicas) + " runs " + std::to_string(runs));
  const Buffer source(bytes, 1, true);
  const Buffer target(bytes, 2, true);
  ClusterOptions cluster_options;
  cluster_options.nodes = kNodes;
  cluster_options.replicas = kReplicas;
  // Four shards each of the previous and the new step: the node's own, the copy that it holds, and up to two
  // that it copies or reads because of the lost node.
  cluster_options.memory_bytes = 2 * 4 * bytes + (128ull << 20);
  cluster_options.arguments = {"--keep-steps", "1"};
  Cluster cluster(cluster_options);
  Samples first_read, view, latest, redundancy;
  for (int run = 0; run <= runs; ++run) {
    const Times times =
        FailOver(&cluster, static_cast<uint64_t>(run) + 1, run, options.objects, source, target);
    cluster.Replace(kLost);
    if (run == 0) continue;
    first_read.push_back(times.first_read);
    view.push_back(times.view);
    latest.push_back(times.latest);
    redundancy.push_back(times.redundancy);
  }
  report.Add({"failover/first_read_ms", "ms", first_read, "", {}});
  report.Add({"failover/view_ms", "ms", view, "", {}});
  report.Add({"failover/latest_ms", "ms", latest, "", {}});
  report.Add({"failover/full_redundancy_ms", "ms", redundancy, "", {}});
}

}  // namespace

void AddFailoverCommand(CLI::App& app, Bench& bench) {
  const auto options = std::make_shared<ShardOptions>();
  options->size_mib = 64;
  CLI::App* command = app.add_subcommand(
      "failover", "from a node's kill to the first read, the view, latest, full redundancy");
  AddShardOptions(command, options.get());
  command->callback([&bench, options] { RunFailover(bench, *options); });
}

}  // namespace ropeteam::bench
