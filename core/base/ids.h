// SPDX-License-Identifier: Apache-2.0
//
// The names of things, as values that every component and every message shares.

#ifndef ROPETEAM_CORE_BASE_IDS_H_
#define ROPETEAM_CORE_BASE_IDS_H_

#include <compare>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace ropeteam {

using Rank = uint32_t;         // one training process, 0 … world_size - 1
using Step = uint64_t;         // the training iteration a checkpoint belongs to
using Incarnation = uint64_t;  // one run of the world of ranks; 0 means none
using Epoch = uint64_t;        // the number of a membership view; 1 is the first, 0 means none
using TimeUs = uint64_t;       // microseconds on a clock that never goes back; its zero is arbitrary

// One run of one daemon: random, never 0, never used again. A node that restarts under its name has a new
// one, so a message or a completion meant for its former run can never be taken for the new one's.
using NodeId = uint64_t;
inline constexpr NodeId kNoNode = 0;

// An Incarnation's lower bits count the incarnations of the job, from 1: what people are shown. Its upper bits are
// the epoch in which it began. So a leader gives out numbers that no earlier leader can have given out, and that
// are higher, even if it sees no node that knows of the earlier incarnations. Standalone membership's epochs
// count milliseconds since 2025 at most; 44 bits of them last for five hundred years. A million incarnations
// carry into the epoch and are counted from 0 again.
inline constexpr int kIncarnationNumberBits = 20;
// Numbers from here on are no incarnation's. Epochs that count milliseconds get there after 278 years, so what names one
// is damaged; counting on from it would overflow. Checked wherever an incarnation comes in: in messages, in the arena, in
// names and manifests on storage.
inline constexpr Incarnation kIncarnationMax = Incarnation{1} << 63;
// As "%llu" takes it.
constexpr unsigned long long IncarnationNumber(Incarnation incarnation) {
  return incarnation & ((uint64_t{1} << kIncarnationNumberBits) - 1);
}
// In which it began, at the latest.
constexpr Epoch EpochOf(Incarnation incarnation) { return incarnation >> kIncarnationNumberBits; }
// Of the incarnation that begins in `epoch`; `newest` is the newest that its leader knows of.
constexpr Incarnation NextIncarnation(Incarnation newest, Epoch epoch) {
  const Incarnation counted = newest + 1;
  const Incarnation in_epoch = (epoch << kIncarnationNumberBits) | IncarnationNumber(counted);
  return counted > in_epoch ? counted : in_epoch;
}

// All that one rank saved at one step in one incarnation.
struct ShardId {
  Incarnation incarnation = 0;
  Step step = 0;
  Rank rank = 0;
  auto Fields() { return std::tie(incarnation, step, rank); }
  friend auto operator<=>(const ShardId&, const ShardId&) = default;
  std::string ToString() const;  // "step 12 rank 3 incarnation 1", by its IncarnationNumber()
};

// One checkpoint of the whole world. Ordered by lineage: a later incarnation's step is newer than any step of
// an earlier one, because the later one was restored from a step before it and what the earlier did after
// that is abandoned.
struct StepId {
  Incarnation incarnation = 0;
  Step step = 0;
  auto Fields() { return std::tie(incarnation, step); }
  friend auto operator<=>(const StepId&, const StepId&) = default;
  std::string ToString() const;
};
inline StepId StepOf(const ShardId& shard) { return {shard.incarnation, shard.step}; }

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_BASE_IDS_H_
