// SPDX-License-Identifier: Apache-2.0
//
// The state of each step, computed from the members' inventories. It knows nothing of time or messages.

#ifndef ROPETEAM_CORE_ENGINE_STEP_TABLE_H_
#define ROPETEAM_CORE_ENGINE_STEP_TABLE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/engine/messages.h"
#include "core/engine/rank_set.h"

namespace ropeteam::engine {

class StepTable {
 public:
  struct Copy {
    NodeId node = kNoNode;
    Role role = Role::kOwn;
    std::vector<uint32_t> bad;
    uint64_t content = 0;
    bool committed = false;
    bool seated = false;
    uint64_t agreement = 0;
  };
  struct RankState {
    std::vector<Copy> copies;
    uint64_t bytes = 0;
    uint32_t replicas = 0;
    bool producible = false;
    bool replicated = false;
    uint32_t good = 0;     // copies that count: not bad, no caches, of the content that counts
    uint32_t staying = 0;  // those of them on nodes that stay: redundancy
    // If the copies differ, one content counts: that of a copy marked as committed; else that of the copy on the
    // node where the rank is open; else the one with most copies. After the commit it changes only to one that
    // was marked before.
    uint64_t content = 0;
    // The rank's value (ShardMeta::agreement) in the copies with that content; nullopt: there is no copy. Copies made by
    // nodes before protocol 9 have 0, so another value in any copy counts.
    std::optional<uint64_t> agreement;
  };
  struct StepState {
    uint32_t world_size = 0;
    std::vector<RankState> ranks;
    uint32_t ranks_producible = 0;
    uint32_t ranks_replicated = 0;
    uint64_t copies = 0;  // of all ranks; the step is forgotten with the last
    RankSet lacking;      // ranks that have a copy, and on nodes that stay fewer than they need
    RankSet orphans;      // those of them without an own copy: no node copies them without an order
    RankSet surplus;      // ranks that have more good copies on nodes that stay than 1 + R
    bool committed = false;
    bool released = false;   // every node is to release its copies: it must not be committed any more
    bool evictable = false;  // its copies may be evicted when memory is needed: likewise
    std::map<uint64_t, uint32_t> agreements;  // what its ranks gave, and how many of them each
    bool producible() const { return ranks_producible == world_size; }
    // Ranks gave different values; 0 (none) is also a value. A marked step was accepted by an earlier leader.
    bool disagrees() const { return !committed && agreements.size() > 1; }
    bool never_commits() const { return released || disagrees(); }
  };

  // Replaces the known copies of a node. A step is committed by a mark on one of its copies, or else by Commit().
  void Replace(NodeId node, const std::vector<CopyReport>& before, const std::vector<CopyReport>& after);
  // Copies on a node that leaves count for what is promised now, and not for redundancy. False: it was so already.
  bool SetLeaving(NodeId node, bool leaving);
  const std::set<NodeId>& leaving() const { return leaving_; }
  // Commits the steps of which every rank has its copies now, and returns them. For a leader that may decide and
  // has heard every member.
  std::vector<StepId> Commit();
  const std::map<StepId, StepState>& steps() const { return steps_; }
  const StepState* Find(const StepId& id) const;
  // The lowest rank with a copy, and the lowest that gave another value, of a step that disagrees().
  static Disagreement DisagreementOf(const StepId& id, const StepState& step);
  // Of this incarnation, or of all if `only` is 0.
  std::optional<StepId> NewestProducible(Incarnation only) const;
  std::vector<StepId> CommittedNewestFirst(size_t count) const;
  // Steps of incarnations before `chosen_by` that are newer than the step it restored are no longer committed: the job
  // went on without them.
  void Bar(Incarnation chosen_by, const StepId& restored);
  bool Barred(const StepId& id) const { return id.incarnation < barred_before_ && barred_after_ < id; }
  // Shards of which there are copies with different contents.
  const std::set<ShardId>& contested() const { return contested_; }
  void Release(const StepId& id);
  void AllowEviction(const StepId& id);
  // Grows whenever a shard gets the last copy it lacked, and whenever it loses one it needs.
  uint64_t replications() const { return replications_; }
  uint64_t losses() const { return losses_; }
  // Grows when a step comes or goes, or something that is decided by has changed: whether it can be produced,
  // is committed or could be, and which shards are contested; or when an uncommitted step has lost all copies
  // of a rank.
  uint64_t version() const { return version_; }

 private:
  struct Standing {
    bool producible = false;
    bool replicated = false;
    bool committed = false;
    bool disagrees = false;
    friend bool operator==(const Standing&, const Standing&) = default;
  };
  static Standing StandingOf(const StepState& step) {
    return {step.producible(), step.ranks_replicated == step.world_size, step.committed, step.disagrees()};
  }
  void Prefetch(const std::vector<const CopyReport*>& copies) const;
  void Remove(NodeId node, const CopyReport& copy);
  bool Add(NodeId node, const CopyReport& copy);
  void Recount(const StepId& id, StepState* step, Rank rank);
  static void RecountAgreement(StepState* step, RankState* rank);
  bool MayCommit(const StepId& id, const StepState& step) const;
  std::map<StepId, StepState> steps_;
  std::set<ShardId> contested_;
  std::set<NodeId> leaving_;
  Incarnation barred_before_ = 0;
  StepId barred_after_;
  uint64_t replications_ = 0;
  uint64_t losses_ = 0;
  uint64_t version_ = 0;
};

// For messages.
std::string Explain(const Disagreement& found);

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STEP_TABLE_H_
