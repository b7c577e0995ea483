// SPDX-License-Identifier: Apache-2.0
//
// The leader's role. It knows only the newest inventory of each member. So a new leader knows everything as soon as
// every member has reported. It computes from the inventories:
//
// * A step is producible when every rank's shard can be put together from good chunks on living members.
// * A step is committed when every rank of its incarnation has 1 + R good copies that count (copy_rules.h) on different
//   members. It stays committed if that held once; the marks on the copies say so. Ranks are told COMMITTED when every
//   member has acknowledged the mark.
// * A step whose ranks gave different values (ShardMeta::agreement) is never committed, and is released.
// * What is kept, released and may be evicted: see retention.h.
// * A shard of a kept step with fewer than 1 + R copies is copied to the nodes where placement wants it.
//
// The leader also decides which incarnation is current and which node each rank is on, and announces it to every node.
// The nodes' inventories repeat it to the next leader.
//
// Leader keeps the members' inventories and the announcement. Other classes decide from them: Incarnations (admission),
// Latest (the pin), PlanRetention(), Redundancy (orders to copy), StorageKeeper (storage) and Verifier.
//
// The leader decides nothing (admits no rank, pins, announces and orders nothing) without a lease. A new leader also
// waits until no former leader can act any more, whether it has left the view or is a member of it (View::settle_us).

#ifndef ROPETEAM_CORE_ENGINE_LEADER_H_
#define ROPETEAM_CORE_ENGINE_LEADER_H_

#include <map>
#include <set>
#include <string>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/drops.h"
#include "core/engine/durable.h"
#include "core/engine/incarnations.h"
#include "core/engine/inventory.h"
#include "core/engine/latest.h"
#include "core/engine/persistence.h"
#include "core/engine/policy.h"
#include "core/engine/redundancy.h"
#include "core/engine/restores.h"
#include "core/engine/retention.h"
#include "core/engine/roster.h"
#include "core/engine/step_table.h"
#include "core/engine/storage_hold.h"
#include "core/engine/stored_damage.h"
#include "core/engine/stored_steps.h"
#include "core/engine/verifier.h"

namespace ropeteam::engine {

class Leader {
 public:
  Leader(Context* context, StorageDesk* desk)
      : context_(*context),
        incarnations_(context),
        keeper_(context, desk),
        stored_(context, &keeper_, &incarnations_.current()),
        restores_(context, &keeper_, &hold_, &stored_),
        roster_(context),
        latest_(context, &table_, &incarnations_, &stored_, &damage_, &restores_, &roster_),
        redundancy_(context, &table_),
        hold_(&keeper_, [this] { return StepToSee(); }),
        damage_(context, &keeper_, &hold_, &stored_),
        policy_(context),
        persistence_(
            context, &keeper_, &hold_, &roster_, &table_, &stored_, &policy_,
            [this] { return ReadOnStorage(); }, [this] { return KeepByRanks(); }),
        verifier_(context) {}

  void OnView(const View& before);
  void OnInventory(NodeId from, Inventory inventory);
  void OnInventoryDelta(NodeId from, const InventoryDelta& delta);
  void OnStateAck(NodeId from, const LeaderStateAck& ack);
  void OnQuestion(NodeId from, const Question& question);
  void OnVerifyResult(NodeId from, const VerifyResult& result);
  void OnPersistResult(NodeId from, const PersistResult& result);
  void OnStoredRead(NodeId from, const StoredRead& read);
  void OnStorageResult(NodeId from, const StorageResult& result);
  void Flush();  // at the end of an input: decides again and announces what has changed
  void OnTimer();
  void OnLease();  // there is one again
  // Releases the hold of storage: another node may lead by now, and this node may still reach storage.
  void OnLeaseLost();
  TimeUs NextTimer() const;
  bool leading() const { return leading_; }
  // Every member has reported its inventory, and no kept step lacks a copy.
  bool redundant() const {
    return leading_ && complete() && may_decide() &&
           !redundancy_.NeedsWork(state_.keep, incarnations_.current().number);
  }
  void CheckInvariants() const;

 private:
  // Committed steps in an announcement, in addition to K. They are for members that missed one commit while the next
  // ones followed. A rank has at most 4 saves open.
  static constexpr size_t kCommittedListedMax = 16;
  // Persisted steps in an announcement: steps that a rank may wait for. `ropeteam ls` lists all.
  static constexpr size_t kPersistedListedMax = 16;
  static constexpr size_t kStoredReportedMax = 1000;  // a report stays readable
  // The time from the permission to read a shard from storage until the inventory reports the read. It allows for a few
  // messages, some of them lost.
  static constexpr TimeUs kLoaderReportsUs = 2'000'000;
  static_assert(kLoaderReportsUs > 4 * kRepeatMaxUs / 2);

  struct MemberState {
    NodeId id = kNoNode;
    bool answered = false;  // in this epoch
    HeldInventory held;     // the newest one, even of an earlier epoch
    TimeUs heard_at = 0;    // when its report came, without the lists
    uint64_t acked = 0;     // the newest announcement that it has acknowledged in this epoch
    uint64_t judged = 0;    // the newest inventory that the last announcement took into account
    const Inventory& inventory() const { return held.inventory(); }
  };

  void Begin();  // to lead
  MemberState* Find(NodeId node);
  // Every member has reported its inventory in this epoch.
  bool complete() const { return answered_ == members_.size(); }
  bool may_decide() const { return context_.has_lease() && decides_from_ <= context_.now; }
  // Every member has acknowledged announcements up to this one.
  uint64_t acked_by_all() const { return acked_.empty() ? 0 : acked_.begin()->first; }
  bool awaits_acks() const { return announced_once_ && acked_by_all() < sequence_; }
  std::string Missing() const;
  // `was_short`: before the change.
  void Learn(MemberState* member, bool was_short, const InventoryChange& change);
  void SetShortOfMemory(size_t members);
  // The session's rank will never save that step.
  bool Passed(const SessionReport& session, Step step) const;
  // The session's rank has passed an uncommitted step of which no node has its shard.
  bool PassesOpenStep(const SessionReport& session) const;
  void Announce();
  // The first key of every member; kPlaintext while they differ.
  KeyId CommonKey() const;
  void Tell();  // every member that has not acknowledged the newest announcement
  // Announce() asks these in order.
  void ReleaseAbandoned();
  void ListCommits(LeaderState* state);
  bool MayRenewRoster(const std::set<StepId>& listed) const;
  bool HasAllCopies(const StepId& id) const;
  void AddDecisions(LeaderState* state);
  void NoteAnnounced();
  RetentionPlan Retain(const std::set<StepId>& told);  // `told`: steps that ranks are told are committed
  std::set<StepId> Hopeless() const;
  void NoteTold();
  // Copies with other bytes than the shard that counts, and where they are.
  std::vector<std::pair<NodeId, DropCopy>> Losers() const;
  void SettleContested();
  std::vector<StepId> Abandoned() const;
  void ReleaseForMemory();
  void ReleaseDisagreeing();
  void ReleaseDropped();
  void Restore();
  void RestoreAndTrim();
  void RestoreSoon();
  // Every member has acknowledged what this incarnation restores: no later leader can decide otherwise.
  bool PinIsKnown() const;
  // All members may have acknowledged it under the previous leader.
  bool PinWasHeard() const;

  // leader_answers.cc
  // `asking`: the incarnation of a rank that asks. kStale, kUnavailable.
  Status CheckIncarnation(Incarnation asking) const;
  void Reply(NodeId to, uint64_t number, const Status& status, std::string payload = {});
  void AnswerJoin(NodeId from, uint64_t number, const JoinQuestion& join);
  void AnswerLatest(NodeId from, uint64_t number, const LatestQuestion& latest);
  void AnswerLocate(NodeId from, uint64_t number, const LocateQuestion& locate);
  void AnswerReport(NodeId from, uint64_t number);
  void AnswerVerify(NodeId from, uint64_t number, const VerifyQuestion& verify);
  void AnswerPersist(NodeId from, uint64_t number, const PersistQuestion& persist);
  void AnswerPolicy(NodeId from, uint64_t number, const PolicyQuestion& question);
  // kInvalidArgument: a daemon's flag has another value; the message names both.
  Status CheckFlags(uint64_t persist_every, uint64_t keep_on_storage) const;
  Result<uint64_t> KeepByRanks() const;  // as Persistence::Keep
  PolicyReport DescribePolicy() const;
  Result<StepId> StepToQuarantine(const QuarantineQuestion& quarantine) const;
  void AnswerQuarantine(NodeId from, uint64_t number, const QuarantineQuestion& quarantine);
  void AnswerDrop(NodeId from, uint64_t number, const DropQuestion& drop);
  void AnswerDrain(NodeId from, uint64_t number, const DrainQuestion& drain);
  void AnswerForget(NodeId from, uint64_t number, const ForgetQuestion& forget);
  RosterReport DescribeRoster() const;
  bool LatestIsSafe() const;  // the newest committed step can be produced without the leaving nodes
  // Fills in what a node needs to read the shard from storage. kUnavailable: another node reads it, or its manifest is
  // being read. kNotFound: it is not on storage. `stalled`: the read on the node that asks makes no progress or has
  // failed, so another node is to read it.
  Status OfferStored(NodeId asker, bool stalled, LocateReply* reply);
  uint32_t WorldSizeOf(const StepId& id);
  void NoteRestored(const StepId& id);
  std::optional<StepId> StepToSee() const;  // of StorageHold
  std::vector<StepId> ReadOnStorage();      // steps that are being restored or read
  StepReport Describe(const StepId& id, const StepTable::StepState& step) const;
  void NoteRestores(const StepId& id, StepReport* report) const;

  Context& context_;
  bool leading_ = false;
  std::vector<MemberState> members_;  // as in the view
  // Counts for complete(), acked_by_all() and similar, so that they need not visit every member.
  size_t answered_ = 0;
  size_t short_of_memory_ = 0;
  TimeUs short_since_ = 0;  // start of the shortage, with no gap of kShortageGapUs since; 0: no shortage
  TimeUs short_seen_ = 0;   // the last time that a member was short
  // By announcement: how many members have acknowledged it and no newer one.
  std::map<uint64_t, size_t> acked_;
  std::map<std::pair<NodeId, uint64_t>, StepId> quarantined_for_;  // by question, the step that was meant
  std::vector<std::pair<NodeId, uint64_t>> forgets_;  // the last questions to forget nodes that were done
  StepTable table_;
  Incarnations incarnations_;
  StorageKeeper keeper_;
  StoredSteps stored_;
  Restores restores_;
  Roster roster_;
  Latest latest_;
  Redundancy redundancy_;
  Drops drops_;
  StorageHold hold_;
  StoredDamage damage_;
  Policy policy_;
  Persistence persistence_;
  Verifier verifier_;
  // The input of an announcement may have changed.
  bool dirty_ = false;
  bool mark_again_ = false;  // announce also if nothing else has changed
  uint64_t table_seen_ = 0;  // the versions that the last announcement was made from
  uint64_t incarnation_seen_ = 0;
  uint64_t persistence_seen_ = 0;
  uint64_t drops_seen_ = 0;
  uint64_t stored_seen_ = 0;
  Durable<> restores_durable_;
  Durable<> policy_durable_;
  Durable<> roster_durable_;
  Durable<std::pair<Incarnation, StepId>> pin_durable_;
  DurableSteps persisting_durable_;
  LeaderState state_;
  uint64_t sequence_ = 0;
  bool announced_once_ = false;  // the newest announcement was sent to all in this epoch
  TimeUs tell_again_at_ = kNever;
  TimeUs tell_again_after_ = 0;
  // The highest step that a session of the incarnation has ended. Only older uncommitted steps can be hopeless.
  Incarnation ended_incarnation_ = 0;
  Step ended_max_ = 0;
  uint64_t replications_ = 0;  // of the table, at the last check
  uint64_t losses_ = 0;
  TimeUs progress_at_ = 0;  // when that changed
  TimeUs next_restore_ = kNever;
  TimeUs decides_from_ = 0;
  DurableSteps listed_;                           // the committed steps that are announced
  std::map<StepId, Disagreement> disagreements_;  // the newest
  std::set<StepId> told_;                         // the steps of `listed_` that every member has acknowledged
  // Shards that a node may read from storage, and the time until which the permission lasts if the node does not report
  // the read.
  struct Loader {
    NodeId node = kNoNode;
    TimeUs until = 0;
    std::set<NodeId> stalled;  // nodes where reading it makes no progress, or has failed
  };
  bool IsOver(const ShardId& shard, const Loader& loader);
  NodeId StandIn(const ShardId& shard, const Loader& loader) const;
  std::map<ShardId, Loader> loaders_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_LEADER_H_
