// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-bench save: a rank's shard reaches LOCAL and REPLICATED over two real daemons. The baseline is a
// bare fi_write loop of libfabric over TCP. It also counts page faults, allocations and registrations per
// save in the steady state. With --encrypt-replicas it also measures daemons that encrypt, in turns with
// those that do not, and the first read at the holder, which decrypts. A second rank copies with one thread
// only, for comparison. The rank that is not measured saves only a few bytes of each step.

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>

#include "bench/bare_fi.h"
#include "bench/cluster.h"
#include "bench/command.h"
#include "bench/measure.h"
#include "core/base/checksum.h"

namespace ropeteam::bench {
namespace {

struct SaveOptions : ShardOptions {
  bool encrypt = false;
};

constexpr int kSteadySaves = 10;

constexpr const char* kToken = "bench-save";
constexpr const char* kThreadsVariable = "ROPETEAM_COPY_THREADS";

std::unique_ptr<BenchRank> OpenWithOneThread(const std::string& socket, uint32_t rank, uint32_t world_size) {
  const char* set = std::getenv(kThreadsVariable);
  const std::string before = set != nullptr ? set : "";
  setenv(kThreadsVariable, "1", 1);
  auto opened = std::make_unique<BenchRank>(socket, rank, world_size, kToken);
  setenv(kThreadsVariable, before.c_str(), 1);  // an empty value counts as not set
  return opened;
}

void SaveFewBytes(BenchRank& rank, uint64_t step, const Buffer& source) {
  rank.Save(step, source.data(), 64, 1);
}

void MeasureSteadyState(Report& report, Cluster& cluster, BenchRank& rank, BenchRank& other,
                        const Buffer& source, uint64_t objects, uint64_t step) {
  Samples rank_faults, daemon_faults, allocations, registrations;
  const auto daemons = [&] { return UseOf(cluster.pid(0)).page_faults + UseOf(cluster.pid(1)).page_faults; };
  for (int i = 0; i <= kSteadySaves; ++i, ++step) {
    SaveFewBytes(other, step, source);
    const uint64_t registered = cluster.Registrations();
    const uint64_t faults_of_daemons = daemons();
    const uint64_t faults = UseOf(getpid()).page_faults;
    const uint64_t allocated = AllocationsOfThisThread();
    rank.Save(step, source.data(), source.size(), objects);
    const uint64_t allocated_after = AllocationsOfThisThread();
    rank.Wait(step, ROPETEAM_REPLICATED);
    const uint64_t faults_after = UseOf(getpid()).page_faults;
    rank.Wait(step, ROPETEAM_COMMITTED);
    const uint64_t faults_of_daemons_after = daemons();
    if (i == 0) continue;  // the first pass loads the counters' own code and memory
    allocations.push_back(static_cast<double>(allocated_after - allocated));
    rank_faults.push_back(static_cast<double>(faults_after - faults));
    daemon_faults.push_back(static_cast<double>(faults_of_daemons_after - faults_of_daemons));
    registrations.push_back(static_cast<double>(cluster.Registrations() - registered));
  }
  report.Add({"save/steady_page_faults", "per save", rank_faults, "", {}});
  report.Add({"save/steady_page_faults_of_daemons", "per save", daemon_faults, "", {}});
  report.Add({"save/steady_allocations", "per save", allocations, "", {}});
  report.Add({"save/steady_registrations", "per save", registrations, "", {}});
}

void Run(Bench& bench, const SaveOptions& options) {
  const uint64_t bytes = options.size_mib << 20;
  Report& report =
      bench.Start("size " + std::to_string(options.size_mib) + " MiB objects " +
                  std::to_string(options.objects) + " replicas 1 nodes 2 runs " + std::to_string(bench.runs));
  const Buffer source(bytes, 1, true);
  const Buffer target(bytes, 2, true);
  ClusterOptions cluster_options;
  cluster_options.memory_bytes = 5 * bytes + (64ull << 20);  // two steps kept, two in progress, and tables
  Cluster cluster(cluster_options);
  BenchRank rank(cluster.socket(0), 0, 2, kToken);
  const std::unique_ptr<BenchRank> one_thread = OpenWithOneThread(cluster.socket(0), 1, 2);
  std::unique_ptr<Cluster> encrypted;
  std::unique_ptr<BenchRank> encrypting, reading;  // `reading` is on the node that holds the copy
  if (options.encrypt) {
    cluster_options.memory_bytes += bytes;  // decrypting a shard needs its chunks twice
    cluster_options.arguments = {"--encrypt-replicas"};
    encrypted = std::make_unique<Cluster>(cluster_options);
    encrypting = std::make_unique<BenchRank>(encrypted->socket(0), 0, 2, kToken);
    reading = std::make_unique<BenchRank>(encrypted->socket(1), 1, 2, kToken);
  }

  BareFiLoop loop;
  BareFiOptions bare;
  bare.bytes = bytes;
  if (const Status started = loop.Start(bare); !started.ok()) throw BenchError(started.ToString());

  uint64_t step = 0;
  const auto save = [&](BenchRank& by, ropeteam_level_t level, bool in_parts = false) {
    BenchRank& other = &by == encrypting.get() ? *reading : &by == &rank ? *one_thread : rank;
    SaveFewBytes(other, step + 1, source);
    const double begin = SecondsNow();
    if (in_parts) {
      by.SaveInParts(++step, source.data(), bytes, options.objects);
    } else {
      by.Save(++step, source.data(), bytes, options.objects);
    }
    if (level != ROPETEAM_LOCAL) by.Wait(step, level);
    const double seconds = SecondsNow() - begin;
    by.Wait(step, ROPETEAM_COMMITTED);  // not measured: the next pass begins with an idle cluster
    return Bandwidth(bytes, seconds);
  };
  // Measures the first open of the copy on the node that holds it.
  const auto open = [&] {
    save(*encrypting, ROPETEAM_REPLICATED);
    const double begin = SecondsNow();
    ropeteam_view_t* view = reading->OpenView(step, 0);
    const double seconds = SecondsNow() - begin;
    ropeteam_view_close(view);
    return Bandwidth(bytes, seconds);
  };
  std::vector<Candidate> measured = {
      {"local", [&] { return save(rank, ROPETEAM_LOCAL); }},
      {"local_one_thread", [&] { return save(*one_thread, ROPETEAM_LOCAL); }},
      {"local_parts", [&] { return save(rank, ROPETEAM_LOCAL, true); }},
      {"replicated", [&] { return save(rank, ROPETEAM_REPLICATED); }},
      {"fi_write",
       [&] {
         Result<double> pass = loop.Pass();
         if (!pass.ok()) throw BenchError(pass.status().ToString());
         return *pass / 1e9;
       }},
      BandwidthOf("fused_copy", bytes, [&] { CopyCrc32c(target.data(), source.data(), bytes); })};
  if (options.encrypt) {
    measured.push_back({"encrypted", [&] { return save(*encrypting, ROPETEAM_REPLICATED); }});
    measured.push_back({"decrypted", [&] { return open(); }});
  }
  const auto figures = MeasureInTurns(measured, bench.runs);
  loop.Stop();
  report.Add({"save/local", "GB/s", figures.at("local"), "fused_copy", figures.at("fused_copy")});
  report.Add({"save/local_one_thread", "GB/s", figures.at("local_one_thread"), "fused_copy",
              figures.at("fused_copy")});
  report.Add(
      {"save/local_in_parts", "GB/s", figures.at("local_parts"), "fused_copy", figures.at("fused_copy")});
  report.Add(
      {"save/replicated_vs_fi_write", "GB/s", figures.at("replicated"), "fi_write", figures.at("fi_write")});
  if (options.encrypt) {
    report.Add({"save/replicated_encrypted_vs_in_clear", "GB/s", figures.at("encrypted"), "in_clear",
                figures.at("replicated")});
    report.Add({"save/first_open_at_holder_encrypted", "GB/s", figures.at("decrypted"), "fused_copy",
                figures.at("fused_copy")});
  }
  MeasureSteadyState(report, cluster, rank, *one_thread, source, options.objects, step + 1);
}

}  // namespace

void AddSaveCommand(CLI::App& app, Bench& bench) {
  CLI::App* command =
      app.add_subcommand("save", "rank to LOCAL and to REPLICATED, beside a bare fi_write loop");
  const auto options = std::make_shared<SaveOptions>();
  AddShardOptions(command, options.get());
  command->add_flag("--encrypt-replicas", options->encrypt, "over daemons that encrypt, too");
  command->callback([&bench, options] { Run(bench, *options); });
}

}  // namespace ropeteam::bench
