// SPDX-License-Identifier: Apache-2.0
//
// ropeteam-bench transport: puts and gets over one fabric by size and number of peers, latency and processor
// time. The baselines in the same run are the fabric's own tool and a plain socket.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <sstream>

#include "bench/bare_fi.h"
#include "bench/command.h"
#include "bench/measure.h"
#include "bench/transport_loop.h"
#include "bench/yardsticks.h"
#include "node/arena_memory.h"

namespace ropeteam::bench {
namespace {

struct TransportOptions {
  std::string fabric = "tcp";
  std::string provider;
  std::vector<std::string> devices;
  int gid_index = -1;
  std::vector<uint64_t> sizes = {4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20};
  std::vector<uint32_t> peers = {1, 2, 4, 8};
  uint64_t size = 1 << 20;  // of the comparison with the tool, and of the rows over peers
  uint32_t depth = 16;
  uint64_t mib = 0;    // moved by one pass; 0: PassMib()
  bool quick = false;  // only the comparison
  std::string shell;   // runs a command on the targets' machine; empty: they run here
  Remote remote;
};

constexpr uint64_t kRegionBytesMax = 256ull << 20;  // of each target
constexpr uint64_t kSmallOperationsMax = 20'000;    // a pass of small operations is bounded by their number
constexpr uint64_t kLatencyBytes = 8;
constexpr uint64_t kLatencyOperations = 1000;

// A pass is large, so that a cache does not serve it. But the sources and targets of this bench, the tool and
// the socket are in memory at the same time, and a small virtual machine has little memory.
uint64_t PassMib() {
  constexpr uint64_t kMib = 256;
  constexpr uint64_t kShareOfMemory = 16;
  std::string limited_by;
  return std::clamp<uint64_t>((AvailableMemory(&limited_by) >> 20) / kShareOfMemory, 1, kMib);
}

std::string SizeName(uint64_t bytes) {
  if (bytes >= 1 << 20 && bytes % (1 << 20) == 0) return std::to_string(bytes >> 20) + "M";
  if (bytes >= 1 << 10 && bytes % (1 << 10) == 0) return std::to_string(bytes >> 10) + "K";
  return std::to_string(bytes);
}

FabricConfig FabricOf(const TransportOptions& options) {
  FabricConfig fabric;
  fabric.listen_address = options.remote.here;
  fabric.transport = options.fabric;
  fabric.provider = options.provider;
  fabric.devices = options.devices;
  fabric.gid_index = options.gid_index;
  fabric.insecure = true;  // for as long as a measurement lasts; its memory holds nothing of anybody's
  return fabric;
}

// A measurement with the fabric's own tool; the tool's name is the baseline's name.
class Tool {
 public:
  Tool(const TransportOptions& options, uint64_t bytes) : options_(options), bytes_(bytes) {
    if (options.fabric == "verbs" || options.fabric == "ucx") return;
    BareFiOptions bare;
    if (!options.provider.empty()) bare.provider = options.provider;
    if (!options.devices.empty()) bare.device = options.devices.front();
    bare.bytes = bytes;
    bare.operation_bytes = options.size;
    bare.outstanding = options.depth;
    bare.remote = options.remote;
    if (const Status started = loop_.Start(bare); !started.ok()) throw BenchError(started.ToString());
  }
  std::string name() const {
    return options_.fabric == "verbs" ? "ib_write_bw"
           : options_.fabric == "ucx" ? "ucx_perftest"
                                      : "fi_write";
  }
  double Pass() {
    ToolOptions tool;
    if (!options_.devices.empty()) tool.device = options_.devices.front();
    tool.gid_index = options_.gid_index;
    tool.size = options_.size;
    tool.depth = options_.depth;
    tool.bytes = bytes_;
    tool.remote = options_.remote;
    const Result<double> pass = options_.fabric == "verbs" ? RunPerftest(tool)
                                : options_.fabric == "ucx" ? RunUcxPerftest(tool)
                                                           : loop_.Pass();
    if (!pass.ok()) throw BenchError(pass.status().ToString());
    return *pass / 1e9;
  }

 private:
  const TransportOptions& options_;
  const uint64_t bytes_;
  BareFiLoop loop_;
};

class Runner {
 public:
  Runner(Bench& bench, const TransportOptions& options)
      : options_(options),
        runs_(bench.runs),
        bytes_(options.mib << 20),
        loop_(LoopOf(1)),
        report_(Begin(bench)) {}

  void Run() {
    Compare();
    if (options_.quick) return;
    for (const bool get : {false, true}) OverSizes(get);
    OverPeers();
    Latency();
    Processor();
  }

 private:
  LoopOptions LoopOf(uint32_t peers) const {
    uint64_t largest = options_.size;
    if (!options_.quick)
      for (const uint64_t size : options_.sizes) largest = std::max(largest, size);
    return {FabricOf(options_), std::max(std::min(bytes_, kRegionBytesMax), largest), peers, options_.remote};
  }
  Report& Begin(Bench& bench) {
    return bench.Start("transport " + loop_.transport().Describe() + " size " + SizeName(options_.size) +
                       " depth " + std::to_string(options_.depth) + " pass " + std::to_string(options_.mib) +
                       " MiB runs " + std::to_string(runs_));
  }
  std::string Name(const std::string& what) const { return "transport/" + options_.fabric + "_" + what; }
  double Rate(TransportLoop& loop, bool get, uint64_t size, bool one_place = false) {
    const uint64_t bytes = std::max(size, std::min(bytes_, size * kSmallOperationsMax));
    return static_cast<double>(bytes / size * size) /
           loop.Pass(get, size, options_.depth, bytes, false, one_place).seconds / 1e9;
  }

  // Runs the transport, the fabric's own tool and a socket in turns. ib_write_bw and ucx_perftest write one
  // buffer repeatedly; if a processor copies, its cache holds that buffer. So against them the transport does
  // the same. The bare loop goes through the same region as the transport.
  void Compare() {
    Tool tool(options_, bytes_);
    SocketLoop socket;
    if (const Status started = socket.Start(bytes_, options_.remote); !started.ok())
      throw BenchError(started.ToString());
    const Buffer source(bytes_, 3, true);
    const auto figures =
        MeasureInTurns({{"put", [&] { return Rate(loop_, false, options_.size, tool.name() != "fi_write"); }},
                        {"tool", [&] { return tool.Pass(); }},
                        {"socket",
                         [&] {
                           const Result<double> pass = socket.Pass(source.data(), bytes_);
                           if (!pass.ok()) throw BenchError(pass.status().ToString());
                           return *pass / 1e9;
                         }}},
                       runs_);
    report_.Add({Name("put_vs_" + tool.name()), "GB/s", figures.at("put"), tool.name(), figures.at("tool")});
    report_.Add({Name("put_vs_socket"), "GB/s", figures.at("put"), "socket", figures.at("socket")});
  }

  void OverSizes(bool get) {
    std::vector<Candidate> candidates;
    for (const uint64_t size : options_.sizes)
      candidates.push_back({SizeName(size), [this, get, size] { return Rate(loop_, get, size); }});
    const auto figures = MeasureInTurns(candidates, runs_);
    for (const uint64_t size : options_.sizes)
      report_.Add(
          {Name((get ? "get_" : "put_") + SizeName(size)), "GB/s", figures.at(SizeName(size)), "", {}});
  }

  void OverPeers() {
    for (const uint32_t peers : options_.peers) {
      TransportLoop loop(LoopOf(peers));
      const auto figures = MeasureInTurns({{"put", [&] { return Rate(loop, false, options_.size); }}}, runs_);
      report_.Add({Name("put_peers_" + std::to_string(peers)), "GB/s", figures.at("put"), "", {}});
    }
  }

  // One operation at a time: the next one begins after its completion, when the bytes are at the target.
  void Latency() {
    const auto one = [&](bool get) {
      return loop_.Pass(get, kLatencyBytes, 1, kLatencyBytes * kLatencyOperations).seconds /
             kLatencyOperations * 1e6;
    };
    const auto figures =
        MeasureInTurns({{"put", [&] { return one(false); }}, {"get", [&] { return one(true); }}}, runs_);
    report_.Add({Name("put_latency_8"), "us", figures.at("put"), "", {}});
    report_.Add({Name("get_latency_8"), "us", figures.at("get"), "", {}});
  }

  // Processor time of both ends, which sleep when they have nothing to do, as daemons do.
  void Processor() {
    const auto figures = MeasureInTurns(
        {{"cpu",
          [&] {
            const LoopPass pass = loop_.Pass(false, options_.size, options_.depth, bytes_, true);
            return pass.processor_seconds / (static_cast<double>(bytes_) / (1ull << 30));
          }}},
        runs_);
    report_.Add({Name("put_cpu_seconds_per_gib"), "s/GiB", figures.at("cpu"), "", {}});
  }

  const TransportOptions& options_;
  const int runs_;
  const uint64_t bytes_;
  TransportLoop loop_;
  Report& report_;
};

}  // namespace

void AddTransportCommand(CLI::App& app, Bench& bench) {
  CLI::App* command = app.add_subcommand(
      "transport",
      "one fabric: puts and gets over sizes and peers, beside the fabric's own tool and a socket");
  const auto options = std::make_shared<TransportOptions>();
  command
      ->add_option("--fabric", options->fabric,
                   "verbs, ucx, ofi or tcp; tcp is compared with fi_write of tcp;ofi_rxm")
      ->check(CLI::IsMember({"verbs", "ucx", "ofi", "tcp"}))
      ->capture_default_str();
  command->add_option("--provider", options->provider, "of libfabric, for ofi");
  command->add_option("--device", options->devices, "devices, comma-separated")->delimiter(',');
  command->add_option("--gid-index", options->gid_index, "verbs, ucx: entry of the GID table")
      ->check(CLI::Range(0, 255));
  command->add_option("--size", options->size, "of the operations that are compared with the tool, bytes")
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--sizes", options->sizes, "of the operations over sizes, comma-separated")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false))
      ->check(CLI::Range(uint64_t{1}, uint64_t{1} << 30));
  command->add_option("--peers", options->peers, "numbers of targets, comma-separated")
      ->delimiter(',')
      ->check(CLI::Range(1, 64));
  command->add_option("--depth", options->depth, "operations outstanding")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--pass", options->mib, "MiB moved by one pass")
      ->check(CLI::Range(1, 1 << 20))
      ->default_str("256, or a sixteenth of the memory that is available");
  command->add_option(
      "--on", options->shell,
      "a command that runs a command on another machine, e.g. \"ssh host-b\": the targets run there");
  command->add_option("--on-program", options->remote.program,
                      "ropeteam-bench there; this one's path if not given");
  command->add_option("--on-address", options->remote.address, "the other machine's numeric IPv4 address")
      ->check(CLI::ValidIPV4);
  command->add_option("--address", options->remote.here, "this machine's, as the other one reaches it")
      ->check(CLI::ValidIPV4);
  command->add_flag("--quick", options->quick, "only the comparison with the tool");
  command->callback([&bench, options] {
    std::istringstream words(options->shell);
    for (std::string word; words >> word;) options->remote.shell.push_back(word);
    if (!options->remote.local() && options->remote.program == Remote().program)
      options->remote.program = std::filesystem::read_symlink(options->remote.program);
    if (options->mib == 0) options->mib = PassMib();
    Runner runner(bench, *options);
    runner.Run();
  });
}

}  // namespace ropeteam::bench
