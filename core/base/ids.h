// SPDX-License-Identifier: Apache-2.0
//
// The names of things, as values that every house and every message shares.

#ifndef ROPETEAM_CORE_BASE_IDS_H_
#define ROPETEAM_CORE_BASE_IDS_H_

#include <compare>
#include <cstdint>
#include <string>
#include <vector>

namespace ropeteam {

using Rank = uint32_t;         // one training process, 0 … world_size - 1
using Step = uint64_t;         // the training iteration a checkpoint belongs to
using Incarnation = uint64_t;  // one life of the world of ranks; 1 is the first, 0 means none
using Epoch = uint64_t;        // the number of a membership view; 1 is the first, 0 means none
using TimeUs = uint64_t;       // microseconds on a clock that never goes back; its zero is arbitrary

// One life of one daemon: random, never 0, never used again. A node that restarts under its name has a new one, so a
// message or a completion meant for its former life can never be taken for the new one's.
using NodeId = uint64_t;
inline constexpr NodeId kNoNode = 0;

// All that one rank saved at one step in one life of the world.
struct ShardId {
  Incarnation incarnation = 0;
  Step step = 0;
  Rank rank = 0;
  friend auto operator<=>(const ShardId&, const ShardId&) = default;
  std::string ToString() const;  // "step 12 rank 3 incarnation 1"
};

// One checkpoint of the whole world. Ordered by lineage: a later incarnation's step is newer than any step of an
// earlier one, because the later one was restored from a step before it and what the earlier did after that is
// abandoned.
struct StepId {
  Incarnation incarnation = 0;
  Step step = 0;
  friend auto operator<=>(const StepId&, const StepId&) = default;
  std::string ToString() const;
};
inline StepId StepOf(const ShardId& shard) { return {shard.incarnation, shard.step}; }

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_BASE_IDS_H_
