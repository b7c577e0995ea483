// SPDX-License-Identifier: Apache-2.0
//
// The state of each step, computed from the members' inventories. It uses neither time nor messages.

#ifndef ROPETEAM_CORE_ENGINE_STEP_TABLE_H_
#define ROPETEAM_CORE_ENGINE_STEP_TABLE_H_

#include <cstdint>
#include <map>
#include <memory>
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
    bool committed = false;
    bool seated = false;
    bool readable = true;  // as in CopyReport
    std::vector<uint32_t> bad;
    uint64_t content = 0;
    uint64_t agreement = 0;
    bool good() const { return readable && bad.empty(); }
    bool usable() const { return readable && bad.size() <= kBadListedMax; }
  };
  struct RankState {
    std::vector<Copy> copies;
    uint64_t bytes = 0;
    uint32_t replicas = 0;
    bool producible = false;
    bool replicated = false;
    uint32_t good = 0;     // copies that count: good, not caches, with the content that counts
    uint32_t staying = 0;  // the good copies on nodes that stay: redundancy
    // If the copies differ, one content counts. It is the content of a copy marked as committed; else of the copy on
    // the node where the rank is open; else of the most copies. After the commit, it changes only to a content that was
    // marked before.
    uint64_t content = 0;
    // The rank's value (ShardMeta::agreement) in the copies with that content; nullopt: there is no copy. Nodes before
    // protocol 9 make copies with 0, so a different value in any copy counts.
    std::optional<uint64_t> agreement;
  };
  // The states of a step's ranks, in blocks that exist once a rank of theirs has had a copy. So steps that one rank of a
  // large world saves, and the others do not, cost the leader little.
  class RankStates {
   public:
    void Resize(uint32_t world_size) { blocks_.resize((size_t{world_size} + kBlock - 1) / kBlock); }
    const RankState& operator[](Rank rank) const {
      static const RankState kNone;
      const auto& block = blocks_[rank / kBlock];
      return block == nullptr ? kNone : block[rank % kBlock];
    }
    RankState& Make(Rank rank) {
      auto& block = blocks_[rank / kBlock];
      if (block == nullptr) block = std::make_unique<RankState[]>(kBlock);
      return block[rank % kBlock];
    }
    // The ranks that may have copies, in order.
    template <typename Visit>
    void ForEach(Visit visit) const {
      for (size_t i = 0; i < blocks_.size(); ++i)
        for (size_t j = 0; blocks_[i] != nullptr && j < kBlock; ++j)
          visit(static_cast<Rank>(i * kBlock + j), blocks_[i][j]);
    }

   private:
    static constexpr size_t kBlock = 128;
    std::vector<std::unique_ptr<RankState[]>> blocks_;
  };
  struct StepState {
    uint32_t world_size = 0;
    RankStates ranks;
    uint32_t ranks_producible = 0;
    uint32_t ranks_replicated = 0;
    uint64_t copies = 0;  // of all ranks; the step is removed with the last copy
    RankSet lacking;      // ranks with a copy, and with too few on nodes that stay
    RankSet orphans;      // ranks in `lacking` without an own copy: their copies need an order
    RankSet surplus;      // ranks with more than 1 + R good copies on nodes that stay
    // Once all its copies were there together, or one has a mark. Complete steps are listed for the members, which mark
    // their copies; ranks are told of a listed step when every member has (LeaderState).
    bool complete = false;
    bool released = false;   // every node is to release its copies: never commit the step
    bool evictable = false;  // copies may be evicted when memory is needed: never commit the step
    std::map<uint64_t, uint32_t> agreements;  // the values of its ranks, and the number of ranks for each
    bool producible() const { return ranks_producible == world_size; }
    // Ranks gave different values; 0 (none) is also a value. A marked step never disagrees: an earlier leader accepted
    // it.
    bool disagrees() const { return !complete && agreements.size() > 1; }
    bool never_commits() const { return released || disagrees(); }
  };

  // Replaces the known copies of a node. A mark on any copy completes its step; Complete() finds the others.
  void Replace(NodeId node, const std::vector<CopyReport>& before, const std::vector<CopyReport>& after);
  // Copies on a leaving node count for what is promised now, but not for redundancy. Returns false if nothing changes.
  bool SetLeaving(NodeId node, bool leaving);
  const std::set<NodeId>& leaving() const { return leaving_; }
  // The steps whose ranks all have their copies now are complete; returns them. Only for a leader that may decide and
  // has the inventory of every member.
  std::vector<StepId> Complete();
  const std::map<StepId, StepState>& steps() const { return steps_; }
  const StepState* Find(const StepId& id) const;
  // Whether there is a copy of a shard that the rank has saved in the incarnation.
  bool HasSaved(Incarnation incarnation, Rank rank) const;
  // For a step that disagrees(): the lowest rank with a copy, and the lowest rank with a different value.
  static Disagreement DisagreementOf(const StepId& id, const StepState& step);
  // Only steps of incarnation `only`; 0: of all.
  std::optional<StepId> NewestProducible(Incarnation only) const;
  std::vector<StepId> CompleteNewestFirst(size_t count) const;
  // The job continued from `restored` in incarnation `chosen_by`. Steps of earlier incarnations that are newer than
  // `restored` are no longer committed.
  void Bar(Incarnation chosen_by, const StepId& restored);
  bool Barred(const StepId& id) const { return id.incarnation < barred_before_ && barred_after_ < id; }
  // Shards whose copies have different contents.
  const std::set<ShardId>& contested() const { return contested_; }
  void Release(const StepId& id);
  void AllowEviction(const StepId& id);
  // replications() grows whenever a shard gets its last missing copy; losses() grows whenever a shard loses a needed
  // copy.
  uint64_t replications() const { return replications_; }
  uint64_t losses() const { return losses_; }
  // Grows when a step appears or disappears, and when an input of a decision changes. Such inputs are whether a step
  // can be produced, is committed or could be, and which shards are contested. It also grows when an uncommitted step
  // has lost all copies of a rank.
  uint64_t version() const { return version_; }

 private:
  struct Standing {
    bool producible = false;
    bool replicated = false;
    bool complete = false;
    bool disagrees = false;
    friend bool operator==(const Standing&, const Standing&) = default;
  };
  static Standing StandingOf(const StepState& step) {
    return {step.producible(), step.ranks_replicated == step.world_size, step.complete, step.disagrees()};
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

// For log and error messages.
std::string Explain(const Disagreement& found);

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STEP_TABLE_H_
