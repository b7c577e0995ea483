// SPDX-License-Identifier: Apache-2.0
//
// Counters of an engine in addition to NodeCounters (report.h), for `--metrics`. No message carries them, so they may
// change without a new protocol version. They count since the engine's start.

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
  Flow held = {};     // put here by it, checked and sealed
  Flow fetched = {};  // read from its arena, and checked
};

struct LocalCounters {
  std::map<NodeId, PeerTraffic> peers;  // members of the view only
  // Repeats after a failure or a timeout.
  uint64_t copies_retried = 0;     // a copy of a shard, on another node
  uint64_t chunks_put_again = 0;   // chunks that did not match on the holder
  uint64_t reads_retried = 0;      // of a chunk
  uint64_t messages_repeated = 0;  // to the leader
  // Stalls. NodeCounters::saves_refused counts those for lack of memory.
  uint64_t leases_lost = 0;
  uint64_t links_lost = 0;
  uint64_t storage_stalls = 0;  // reported once a minute while a stall lasts
  // Storage work that has ended, by kind (the index in StorageWork).
  struct Works {
    uint64_t done = 0;
    uint64_t failed = 0;
  };
  std::array<Works, std::variant_size_v<StorageWork>> works{};
  Histogram fetches;  // whole shards fetched, from the first question to the seal
};

// Values that the engine keeps up to date: a snapshot costs the same however many steps there are.
struct EngineMetrics {
  NodeCounters counters;
  LocalCounters local;
  uint64_t chunk_bytes = 0;
  uint64_t chunks_total = 0;
  uint64_t chunks_free = 0;
  uint64_t bounce_chunks = 0;  // for the encryption of outgoing chunks
  Store::Use own, replica, cache;
  // Queues: what is waiting or running now.
  uint64_t puts_waiting = 0;  // puts of saves
  uint64_t background_waiting = 0;
  uint64_t gets_waiting = 0;
  uint64_t transfers_running = 0;
  uint64_t checks_running = 0;
  uint64_t storage_running = 0;
  uint64_t questions_open = 0;  // to the leader
  uint64_t saves_open = 0;
  uint64_t sessions = 0;
  // Copies encrypted again with the first key since the start; those of other keys that are left; those whose key is
  // not here. The last two are at most a second old.
  uint64_t reencrypted = 0;
  uint64_t copies_of_other_keys = 0;
  uint64_t copies_unreadable = 0;
  bool leader = false;
  uint64_t lost_control = 0;  // members that do not answer this node
  uint64_t lost_data = 0;     // members that its data path has lost
  // Every kept step has all its copies. Only the leader has this value.
  bool redundant = false;
  bool has_committed = false;
  bool has_persisted = false;
  Step newest_committed = 0;  // the newest that this node has heard of
  Step newest_persisted = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_METRICS_H_
