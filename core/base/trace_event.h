// SPDX-License-Identifier: Apache-2.0
//
// What a node notes of what happens to its shards, for `ropeteam trace`. A value, by core/base/bytes.h.

#ifndef ROPETEAM_CORE_BASE_TRACE_EVENT_H_
#define ROPETEAM_CORE_BASE_TRACE_EVENT_H_

#include <cstddef>
#include <cstdint>
#include <tuple>

#include "core/base/ids.h"

namespace ropeteam {

struct TraceEvent {
  // Append-only: nodes of other versions send them.
  enum class What : uint8_t {
    kBegin = 1,   // of the save
    kFilled = 2,  // chunks that the rank has announced as final
    kPut = 3,     // a chunk into the arena of `peer`, from the moment at which it was queued
    kCheck = 4,   // a chunk that came from `peer`
    kHeld = 5,    // the copy that came from `peer` is sealed here
    kAck = 6,     // `peer` has checked and sealed its copy
    kLevel = 7,   // the rank's shard reached the level `first`; kNoRank: the step did
    kFetch = 8,   // a chunk was read from `peer`, and checked
    kAbort = 9,   // of the save
  };
  static constexpr Rank kNoRank = UINT32_MAX;

  TimeUs at = 0;  // its beginning, on the node's clock
  uint32_t duration_us = 0;
  What what = What::kBegin;
  ShardId shard;
  uint32_t first = 0;  // chunk
  uint32_t count = 0;  // of chunks
  NodeId peer = kNoNode;
  bool failed = false;
  auto Fields() {
    return std::tie(at, duration_us, what, shard.incarnation, shard.step, shard.rank, first, count, peer,
                    failed);
  }
};

// A node keeps so many of the newest: four of a chunk, and with 8 ranks that save 1 GiB each a step has 2,048 chunks of its
// own. 1 MiB of memory; an answer that has all of them is below a frame of the local protocol.
inline constexpr size_t kTraceEventsMax = 16'384;
inline constexpr size_t kTraceEventBytes = 50;  // encoded

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_BASE_TRACE_EVENT_H_
