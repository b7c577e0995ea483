// SPDX-License-Identifier: Apache-2.0
#include "bench/transport_loop.h"

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "bench/command.h"
#include "transport/ofi/ofi_transport.h"

namespace ropeteam::bench {
namespace {

constexpr size_t kBatch = 64;

std::string JoinNames(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ",") + name;
  return text;
}

std::vector<std::string> SplitNames(const std::string& text) {
  std::vector<std::string> names;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    names.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

template <typename T>
T Must(Result<T> result, const char* what) {
  if (!result.ok()) throw BenchError(std::string(what) + ": " + result.status().ToString());
  return std::move(result).value();
}

void Must(const Status& status, const char* what) {
  if (!status.ok()) throw BenchError(std::string(what) + ": " + status.ToString());
}

double OwnProcessorSeconds() {
  rusage use{};
  getrusage(RUSAGE_SELF, &use);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) / 1e6;
  };
  return seconds(use.ru_utime) + seconds(use.ru_stime);
}

}  // namespace

TransportLoop::TransportLoop(const LoopOptions& options)
    : options_(options), memory_(options.bytes, 1, true) {
  SetOfiEnvironment();
  transport_ = std::move(Must(CreateFabric(options.fabric), "transport").transport);
  region_ = Must(transport_->RegisterRegion(memory_.data(), memory_.size()), "register");
  for (uint32_t i = 0; i < options.peers; ++i) {
    auto target = std::make_unique<Target>();
    Must(target->process.Start(OwnCommandOf(
             options.remote,
             {kTransportTargetCommand, options.fabric.transport, options.fabric.provider,
              JoinNames(options.fabric.devices), std::to_string(options.fabric.gid_index),
              std::to_string(options.bytes), ParentWord(options.remote), options.remote.address})),
         "target");
    const std::string address = FromHex(target->process.ReadLine());
    const std::string key = FromHex(target->process.ReadLine());
    if (address.empty() || key.empty()) throw BenchError("the target process did not start");
    target->peer = Must(transport_->Connect(address), "connect");
    target->region = Must(transport_->ImportRegion(target->peer, key), "import");
    targets_.push_back(std::move(target));
  }
}

TransportLoop::~TransportLoop() {
  for (const auto& target : targets_) transport_->Disconnect(target->peer);
  // Wait for the completion of every disconnect: a transport must not be destroyed while it has peers.
  for (size_t left = targets_.size(); left > 0;) {
    Completion batch[kBatch];
    const size_t count = transport_->Poll(batch, kBatch);
    left -= static_cast<size_t>(std::count_if(
        batch, batch + count, [](const Completion& c) { return c.kind == OperationKind::kDisconnect; }));
  }
}

double TransportLoop::ProcessorSeconds() const {
  double seconds = OwnProcessorSeconds();
  if (options_.remote.local())
    for (const auto& target : targets_) seconds += ProcessorSecondsOf(target->process.pid());
  return seconds;
}

LoopPass TransportLoop::Pass(bool get, uint64_t size, uint32_t depth, uint64_t bytes, bool sleep,
                             bool one_place) {
  const uint64_t operations = std::max<uint64_t>(1, bytes / size);
  const uint64_t slots = one_place ? 1 : std::max<uint64_t>(1, options_.bytes / size);
  const double processor_before = ProcessorSeconds();
  const double start = SecondsNow();
  uint64_t posted = 0, done = 0;
  while (done < operations) {
    while (posted < operations && posted - done < depth) {
      const Target& target = *targets_[posted % targets_.size()];
      const uint64_t offset = posted / targets_.size() % slots * size;
      Must(get ? transport_->Get(target.peer, region_, offset, target.region, offset, size, posted)
               : transport_->Put(target.peer, region_, offset, target.region, offset, size, posted),
           "post");
      ++posted;
    }
    Completion batch[kBatch];
    const size_t count = transport_->Poll(batch, kBatch);
    for (size_t i = 0; i < count; ++i)
      if (batch[i].code != Code::kOk)
        throw BenchError(std::string("an operation ended with ") + CodeName(batch[i].code));
    done += count;
    if (count == 0 && sleep) transport_->Wait(UINT64_MAX);
  }
  return {SecondsNow() - start, ProcessorSeconds() - processor_before};
}

int TransportTargetMain(int argc, char** argv) {
  if (argc != 7) return 2;
  if (!FollowParent(argv[5])) return 3;
  SetOfiEnvironment();
  FabricConfig config;
  config.transport = argv[0];
  config.provider = argv[1];
  config.devices = SplitNames(argv[2]);
  config.gid_index = std::atoi(argv[3]);
  config.listen_address = argv[6];
  config.insecure = true;  // as in the first process
  Result<FabricChoice> made = CreateFabric(config);
  if (!made.ok()) {
    std::fprintf(stderr, "transport target: %s\n", made.status().ToString().c_str());
    return 1;
  }
  Transport& transport = *made->transport;
  const Buffer memory(std::strtoull(argv[4], nullptr, 10), 2, true);
  const Result<RegionId> region = transport.RegisterRegion(memory.data(), memory.size());
  if (!region.ok()) {
    std::fprintf(stderr, "transport target: %s\n", region.status().ToString().c_str());
    return 1;
  }
  std::printf("%s\n%s\n", Hex(transport.LocalAddress()).c_str(),
              Hex(transport.ExportRegion(*region)).c_str());
  std::fflush(stdout);
  std::atomic<bool> ended{false};
  std::thread end_of_input([&] {
    while (std::getchar() != EOF) {
    }
    ended = true;
    transport.Wake();
  });
  // Sleep when there is nothing to do, as a daemon does.
  while (!ended) {
    Completion batch[kBatch];
    if (transport.Poll(batch, kBatch) == 0) transport.Wait(UINT64_MAX);
  }
  end_of_input.join();
  return 0;
}

}  // namespace ropeteam::bench
