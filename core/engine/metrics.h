// SPDX-License-Identifier: Apache-2.0
//
// Counters of an engine in addition to NodeCounters (report.h), for `--metrics`. They stay on the node: no message has
// them, so they may change without another protocol version. Counters begin at the engine's start.

#ifndef ROPETEAM_CORE_ENGINE_METRICS_H_
#define ROPETEAM_CORE_ENGINE_METRICS_H_

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <variant>

#include "core/base/histogram.h"
#include "core/engine/report.h"
#include "core/engine/storage_work.h"

namespace ropeteam {

struct Flow {
  uint64_t bytes = 0;
  uint64_t chunks = 0;
};
// With one other node.
struct PeerTraffic {
  std::string name;
  Flow sent = {};     // put into its arena
  Flow held = {};     // that it put here, checked and sealed
  Flow fetched = {};  // read from its arena, and checked
};

struct LocalCounters {
  std::map<NodeId, PeerTraffic> peers;  // members of the view only
  // Repeated, because the first attempt failed or was not answered in time.
  uint64_t copies_retried = 0;     // a copy of a shard, on another node
  uint64_t chunks_put_again = 0;   // they did not match on the holder
  uint64_t reads_retried = 0;      // of a chunk
  uint64_t messages_repeated = 0;  // to the leader
  // Stalls; those for want of memory are NodeCounters::saves_refused.
  uint64_t leases_lost = 0;
  uint64_t links_lost = 0;
  uint64_t storage_stalls = 0;  // told once a minute while one lasts
  // Works on storage that have ended, by their kind (StorageWork's index).
  struct Works {
    uint64_t done = 0;
    uint64_t failed = 0;
  };
  std::array<Works, std::variant_size_v<StorageWork>> works{};
  Histogram fetches;  // whole shards brought here, from the first question to the seal
};

// Numbers that the engine keeps up to date: a snapshot costs the same with more steps.
struct EngineMetrics {
  NodeCounters counters;
  LocalCounters local;
  uint64_t chunk_bytes = 0;
  uint64_t chunks_total = 0;
  uint64_t chunks_free = 0;
  uint64_t bounce_chunks = 0;  // into which outgoing chunks are encrypted
  Store::Use own, replica, cache;
  // Queues: what waits or runs now.
  uint64_t puts_waiting = 0;  // of saves
  uint64_t background_waiting = 0;
  uint64_t gets_waiting = 0;
  uint64_t transfers_running = 0;
  uint64_t checks_running = 0;
  uint64_t storage_running = 0;
  uint64_t questions_open = 0;  // to the leader
  uint64_t saves_open = 0;
  uint64_t sessions = 0;
  bool leader = false;
  // Every kept step has all its copies. Known to the leader alone.
  bool redundant = false;
  bool has_committed = false;
  bool has_persisted = false;
  Step newest_committed = 0;  // that this node was told
  Step newest_persisted = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_METRICS_H_
