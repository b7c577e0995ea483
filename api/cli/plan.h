// SPDX-License-Identifier: Apache-2.0
//
// What a job would survive, cost and wait for: the figures of `ropeteam plan`. Pure functions of their input; every
// figure of a cluster comes from the placement that the daemons run (core/engine/placement.h).
//
// Memory alone recovers when each node's shards have one copy left, their own or one of R, on a node that lives. The
// lost nodes must be replaced, or be R at most (ARCHITECTURE.md, leases).

#ifndef ROPETEAM_API_CLI_PLAN_H_
#define ROPETEAM_API_CLI_PLAN_H_

#include <cstdint>
#include <vector>

#include "membership/membership.h"

namespace ropeteam::cli {

// The probability that memory alone recovers when `failures` nodes, any of them alike, are lost together: Gemini
// (SOSP'23), section 4, corollary 1, with m = replicas + 1. The number of losing sets of theorem 1's mixed placement
// stands for its N/m, so that N need not be a multiple of m. Exact where no two losing sets can be lost at once: up to
// 2m - 1 failures of groups, m of a ring. Beyond that a lower bound. Failure domains are not in it.
double GeminiProbability(uint32_t nodes, uint32_t replicas, uint32_t failures);

// The copies of all nodes of a job, placed, and nodes that are lost one after the other.
class PlacedCopies {
 public:
  // `domains`: how many nodes each failure domain has, in the order of the nodes; empty: none is known.
  PlacedCopies(uint32_t nodes, uint32_t replicas, const std::vector<uint32_t>& domains);

  // `node` from 0, each once until Reset(). False: it had the last copy of some node's shards.
  bool Lose(uint32_t node);
  void Reset();

  uint64_t losing_sets() const {
    return losing_sets_;
  }                                                // sets of R + 1 nodes that hold all copies of a shard
  uint32_t held_max() const { return held_max_; }  // nodes whose copies the fullest node holds
  uint32_t domains_survived() const {
    return domains_alone_;
  }  // of which memory recovers if one is lost whole

 private:
  std::vector<std::vector<uint32_t>>
      owners_;                  // of each node: the nodes of whose shards it has a copy, itself first
  std::vector<uint32_t> lost_;  // of each node: lost copies of its shards
  std::vector<uint32_t> dead_;  // since Reset()
  uint32_t copies_ = 0;         // of each shard
  uint64_t losing_sets_ = 0;
  uint32_t held_max_ = 0;
  uint32_t domains_alone_ = 0;
};

// For 0 to `failures_max` lost nodes: in how many of `samples` draws memory alone recovers. One draw loses nodes in
// random order until a shard is lost. The same seed gives the same answer on every machine.
std::vector<uint64_t> CountRecovered(PlacedCopies* copies, uint32_t nodes, uint32_t failures_max,
                                     uint64_t samples, uint64_t seed);

struct PlanInput {
  uint32_t nodes = 0;  // 1 to kNodesMax
  uint32_t replicas = 1;
  uint32_t failures = 0;  // 1 to nodes
  uint32_t keep_steps = 2;
  uint32_t dead_after_ms = kDeadAfterMsDefault;
  std::vector<uint32_t> domains;  // as PlacedCopies takes it
  uint64_t shard_bytes = 0;       // what the ranks of a node save at a step; 0: unknown
  double link_bytes_per_s = 0;    // what a node's network carries in one direction; 0: unknown
  double mtbf_s = 0;              // of one node; 0: unknown
  uint64_t samples = 100'000;     // the widest 95 % interval is 0.6 points then
  uint64_t seed = 1;
};

struct PlanRow {
  uint32_t failures = 0;
  double formula = 0;   // GeminiProbability()
  double measured = 0;  // by Monte Carlo
  double low = 0;       // its 95 % interval (Wilson)
  double high = 0;
};

// Zero where the input does not have what it needs.
struct Plan {
  std::vector<PlanRow> rows;  // 1 failure and up
  uint64_t losing_sets = 0;
  uint64_t losing_sets_gemini = 0;  // of theorem 1's placement, which knows no domains
  uint32_t held_max = 0;
  uint32_t domains_survived = 0;
  // Of the fullest node's arena: K + 1 steps of its own shards and of the copies that it holds.
  double memory_bytes = 0;
  double memory_spare_bytes = 0;  // and its share of one lost node (docs/recovery.md)
  double detect_reset_s = 0;      // at most, where the host of the dead processes answers
  double detect_silence_s = 0;
  double restore_s = 0;      // the link's time for one lost node's shards of a step, to its replacement
  double restore_all_s = 0;  // for `failures` nodes at most, when one holder serves as many of them as it can
  double redundancy_s = 0;   // from the death of one node until all kept steps have 1 + R copies again
  // Mean time until memory alone cannot recover, where nodes fail independently and at a constant rate: a losing set of
  // m is lost when one of its nodes fails within redundancy_s of each of the m - 1 others.
  double loss_s = 0;
};

Plan MakePlan(const PlanInput& input);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_PLAN_H_
