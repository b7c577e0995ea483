// SPDX-License-Identifier: Apache-2.0
//
// A cluster of real daemons on this machine's loopback addresses, for end-to-end benchmarks. Every node is a
// ropeteamd process of its own; this process acts as the ranks, through libropeteam.so. Not thread-safe.

#ifndef ROPETEAM_BENCH_CLUSTER_H_
#define ROPETEAM_BENCH_CLUSTER_H_

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "api/client/local_protocol.h"
#include "api/include/ropeteam/ropeteam.h"

namespace CLI {
class App;
}

namespace ropeteam::bench {

// What a rank saves in one step.
struct ShardOptions {
  uint64_t size_mib = 256;
  uint64_t objects = 16;
};
// --size and --objects of a subcommand. `options` outlives it.
void AddShardOptions(CLI::App* command, ShardOptions* options);

struct ClusterOptions {
  uint32_t nodes = 2;
  uint32_t replicas = 1;
  uint64_t memory_bytes = 0;           // of each arena
  std::vector<std::string> arguments;  // further ones, for every daemon
};

// The resources that a process has used so far.
struct ProcessUse {
  uint64_t page_faults = 0;
  double cpu_seconds = 0;
  double memory_beyond_arena_mib = 0;  // resident anonymous and file pages; the arena is shared memory
};
ProcessUse UseOf(pid_t pid);

class Cluster {
 public:
  // Throws BenchError with the end of the daemon's log if a daemon does not become ready.
  explicit Cluster(const ClusterOptions& options);
  ~Cluster();  // ends the daemons and removes their arenas
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  pid_t pid(uint32_t node) const { return nodes_[node].pid; }
  const std::string& socket(uint32_t node) const { return nodes_[node].socket; }
  // Kills the daemon with SIGKILL and removes its arena.
  void Lose(uint32_t node);
  // Starts a new instance under the old name, with an empty arena; returns when it is ready.
  void Replace(uint32_t node);
  // The daemon's answer in JSON. May be called from any thread.
  Result<std::string> Ask(uint32_t node, local::AdminCommand command) const;
  // The number of memory regions that all daemons' transports have registered since their start.
  uint64_t Registrations() const;

 private:
  struct Node {
    pid_t pid = -1;
    std::string socket;
    std::string log;
    std::string arena;
  };
  void Start(uint32_t node);
  void Stop(uint32_t node, int signal);

  ClusterOptions options_;
  std::string job_;
  std::string directory_;
  std::string coordinator_;
  std::vector<Node> nodes_;
};

// A rank of a world. Throws BenchError with the library's message if a call fails.
class BenchRank {
 public:
  BenchRank(const std::string& socket, uint32_t rank, uint32_t world_size,
            const std::string& incarnation_token);
  ~BenchRank() { ropeteam_close(handle_); }
  BenchRank(const BenchRank&) = delete;
  BenchRank& operator=(const BenchRank&) = delete;

  // Saves [data, data + bytes) as `objects` objects of equal size. When it returns, the shard is LOCAL.
  void Save(uint64_t step, const void* data, uint64_t bytes, uint64_t objects);
  // The same bytes as one object of `parts` parts.
  void SaveInParts(uint64_t step, const void* data, uint64_t bytes, uint64_t parts);
  void Wait(uint64_t step, ropeteam_level_t level);
  // Whether the step has the level now; does not wait.
  bool Reached(uint64_t step, ropeteam_level_t level);
  void Persist(uint64_t step);
  // The newest step that can be loaded. Throws BenchError if no step can be loaded.
  uint64_t Latest();
  ropeteam_view_t* OpenView(uint64_t step, uint32_t rank);
  // Reads all objects into `data`, one after the other, and closes the view.
  void ReadAll(ropeteam_view_t* view, void* data);

 private:
  template <typename Put>
  void Save(uint64_t step, uint64_t bytes, uint64_t objects, Put&& put);

  ropeteam_t* handle_ = nullptr;
  std::vector<std::string> names_;
  std::vector<ropeteam_part_t> parts_;
};

// The number of calls of operator new in this thread so far, including the library's.
uint64_t AllocationsOfThisThread();

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_CLUSTER_H_
