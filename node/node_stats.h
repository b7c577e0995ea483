// SPDX-License-Identifier: Apache-2.0
//
// The times that a Node measures for `--metrics`, in addition to its Engine's counters: from a save to each level, and
// from the loss of a node to its detection and to full redundancy.
//
// Loop thread only.

#ifndef ROPETEAM_NODE_NODE_STATS_H_
#define ROPETEAM_NODE_NODE_STATS_H_

#include <array>
#include <cstdint>
#include <map>
#include <unordered_set>

#include "core/base/histogram.h"
#include "core/engine/engine.h"

namespace ropeteam {

class NodeStats {
 public:
  void OnLevel(const LevelEvent& event);
  // The first sign that this member may be lost: a transfer that failed, or its link.
  void OnSign(TimeUs now, NodeId peer) { signs_.try_emplace(peer, now); }
  // It was a false alarm.
  void OnLinkUp(NodeId peer) { signs_.erase(peer); }
  // `members`: of the view after `before`.
  void OnView(TimeUs now, const View& before, const std::unordered_set<NodeId>& members);
  void OnLease(TimeUs now, TimeUs valid_until);
  void AfterInput(TimeUs now, const Engine& engine);

  // From save_begin on this node to a level, for its own shards. Indexed by Level; [kNone] stays empty.
  const std::array<Histogram, 5>& levels() const { return levels_; }
  // Steps that this node has heard of as COMMITTED and PERSISTED.
  uint64_t steps_committed() const { return steps_committed_; }
  uint64_t steps_persisted() const { return steps_persisted_; }
  // From the first sign on this node to the view without the lost node. A loss without a sign here is not measured:
  // this node had no transfer with it.
  const Histogram& detection() const { return detection_; }
  // From the view without the node to every kept step having all its copies again. Measured by the leader.
  const Histogram& recovery() const { return recovery_; }
  bool recovering() const { return lost_at_ != 0; }
  uint64_t views() const { return views_; }
  uint64_t members_lost() const { return members_lost_; }
  TimeUs lease_renewed_at() const { return lease_renewed_at_; }  // 0: it has no lease
  TimeUs lease_until() const { return lease_until_; }

 private:
  std::array<Histogram, 5> levels_;
  uint64_t steps_committed_ = 0;
  uint64_t steps_persisted_ = 0;
  std::map<NodeId, TimeUs> signs_;  // members of the view only
  Histogram detection_;
  Histogram recovery_;
  // The first loss after which redundancy is not restored yet; 0: none, or another node leads.
  TimeUs lost_at_ = 0;
  uint64_t views_ = 0;
  uint64_t members_lost_ = 0;
  TimeUs lease_renewed_at_ = 0;
  TimeUs lease_until_ = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_NODE_STATS_H_
