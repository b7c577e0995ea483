// SPDX-License-Identifier: Apache-2.0
//
// The leader's part in persisting. It decides which committed steps go to storage, which node writes which shard, and
// when a step counts. One step is written at a time. So retention keeps one more step for it, and another one while a
// requested step waits.
//
// clang-format off
//   a step is     when                                                          then
//   -----------   -----------------------------------------------------------   ----------------------------------------
//   asked for     a program has named it, and it is not committed yet           its copies count as usual
//   waiting       it is committed, due or asked for, and another is written     a newer one that is due takes its place (not
//                                                                               that of one asked for, whose copies stay);
//                                                                               so does the newest committed one where its
//                                                                               copies have been released
//   begun         none was being written                                        its copies stay until it is persisted, or
//                                                                               abandoned: it cannot be produced any more, or
//                                                                               nothing of it was written for a minute and
//                                                                               another one waits
//   persisted     its manifest is on storage                                    ranks are told PERSISTED
// clang-format on
//
// A begun step waits until the keeper holds storage (storage_hold.h). Then it goes through three phases. First a node
// with a good copy of each shard names its files, the owner if possible. Then each shard is written by one node that sees
// the keeper's lock. Then the keeper writes the manifest, if it sees every file; if not, the shards are written again.
// The hold is confirmed regularly, and again before the manifest; without the hold nothing is ordered. Names come first
// because two ranks may want the same one: the lowest rank gets it. All of this is soft state. A new leader learns from
// the inventories which steps were being persisted, and begins them again. It uses files that already exist.

#ifndef ROPETEAM_CORE_ENGINE_PERSISTENCE_H_
#define ROPETEAM_CORE_ENGINE_PERSISTENCE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/base/log.h"
#include "core/engine/context.h"
#include "core/engine/policy.h"
#include "core/engine/roster.h"
#include "core/engine/step_table.h"
#include "core/engine/storage_hold.h"
#include "core/engine/stored_steps.h"

namespace ropeteam::engine {

class Persistence {
 public:
  // `in_use`: steps on storage that some node may be reading.
  using InUse = std::function<std::vector<StepId>()>;
  // How many steps ranks want to keep on storage; 0: not set. kUnavailable: not known yet. With any other error the
  // number is in doubt, and nothing is deleted.
  using Keep = std::function<Result<uint64_t>()>;
  Persistence(Context* context, StorageKeeper* keeper, StorageHold* hold, const Roster* roster,
              const StepTable* table, StoredSteps* stored, const Policy* policy, InUse in_use, Keep keep)
      : context_(*context),
        keeper_(*keeper),
        hold_(*hold),
        roster_(*roster),
        table_(*table),
        stored_(*stored),
        policy_(*policy),
        in_use_(std::move(in_use)),
        keep_(std::move(keep)) {}

  void Begin();  // to lead, or no longer: forgets everything
  void OnView();
  void OnHoldReleased();  // because the lease has expired; a begun step continues with the next lease
  // The steps that a member reports as being persisted, as this leader or the previous one announced them.
  void Learn(const std::set<StepId>& persisting);
  // kInvalidArgument, kAborted: the step will not be persisted. OK also if it is already persisted.
  Status Request(const StepId& id, const IncarnationState& incarnation);
  // Decides which of these steps are persisted. `told`: all steps that ranks are told are committed.
  void Judge(const std::set<StepId>& told, const IncarnationState& incarnation);
  void OnResult(NodeId from, const PersistResult& result);
  void OnTimer();  // gives the orders that are due
  TimeUs NextTimer() const;

  std::set<StepId> persisting() const;
  // The steps being persisted whose copies must stay.
  std::set<StepId> pinned() const;
  // The steps that retention keeps now.
  void SetKept(const std::set<StepId>& kept) { kept_ = kept; }
  const std::deque<NotPersisted>& not_persisted() const { return not_persisted_; }
  const StepId& judged() const { return judged_; }
  // Deletions are running that began when fewer steps than this were to be kept.
  bool DeletesBeyond(uint64_t keep) const {
    return std::any_of(pruning_.begin(), pruning_.end(),
                       [keep](uint64_t each) { return each != 0 && each < keep; });
  }
  // Grows whenever one of the values above changes.
  uint64_t version() const { return version_; }
  // What keeps the present step from being written, or else why the last one was given up, with the step. Empty: no
  // failure since a step was persisted.
  std::string trouble() const;

 private:
  // Requests for uncommitted steps: a rank has at most 4 saves open.
  static constexpr size_t kRequestsMax = 16;
  static constexpr size_t kNotPersistedMax = 8;
  // Outstanding orders per node. A shard is written in parallel parts already. A second one keeps the node busy during
  // the first one's last part.
  static constexpr size_t kOrdersPerNodeMax = 2;
  // Repeats of an order have growing pauses, up to this: writing a shard takes seconds to minutes.
  static constexpr TimeUs kOrderAgainMaxUs = 5'000'000;
  // Pauses before a node that could not write is asked again.
  static constexpr TimeUs kRetryUs = 1'000'000;
  static constexpr TimeUs kRetryMaxUs = 30'000'000;
  // If a node has not answered for this time, another node writes the shard, too. The silent node is stopped, or its
  // driver does not notice that storage hangs. It is the time for 256 GiB at 0.5 GB/s.
  static constexpr TimeUs kOrderStalledUs = 600'000'000;
  // The pause between confirmations of the hold while a step is written. It is also confirmed before the manifest.
  static constexpr TimeUs kHoldAgainUs = 5'000'000;
  // The first pause if another cluster, or a leader that has just died, holds storage. The pauses double up to
  // kHoldAgainUs.
  static constexpr TimeUs kHoldRetryUs = 1'000'000;
  static constexpr TimeUs kWarnEveryUs = 10'000'000;
  // After this time with failures and without a finished shard, a begun step makes room for the waiting one.
  static constexpr TimeUs kStuckUs = 60'000'000;

  struct Candidate {
    StepId id;
    bool requested = false;
  };
  struct RankWork {
    bool done = false;  // in this phase
    std::vector<std::string> names;
    std::vector<std::string> taken;
    StoredRank stored;
  };
  struct Order {
    NodeId node = kNoNode;
    TimeUs again_at = 0;
    TimeUs again_after = kRepeatUs;
    TimeUs given_at = 0;
  };
  struct Run {
    Candidate step;
    uint64_t number = 0;  // counts the runs of this node
    enum class Phase : uint8_t { kHold, kName, kWrite, kManifest } phase = Phase::kHold;
    bool held = false;  // the driver's last answer
    bool confirming = false;
    TimeUs confirm_at = 0;
    TimeUs confirm_after = kHoldRetryUs;  // the pause after the next refusal
    uint32_t world_size = 0;
    std::vector<RankWork> ranks;
    Rank metadata_of = UINT32_MAX;  // the lowest rank that gave metadata
    std::string metadata;
    size_t done = 0;                             // ranks that are done in this phase
    std::map<NodeId, std::deque<Rank>> waiting;  // by the node that will get the order
    std::set<Rank> homeless;                     // ranks for which no node is available now
    std::map<Rank, Order> orders;
    TimeUs orders_due = kNever;                // no order is due before
    std::map<NodeId, std::set<Rank>> ordered;  // ranks ordered from each node
    std::map<NodeId, TimeUs> avoid_until;
    TimeUs progress_at = 0;
    std::string trouble;  // since progress_at
    TimeUs warned_at = 0;
    uint32_t attempt = 0;  // counts how often the shards are written
    bool writing_manifest = false;
    TimeUs manifest_at = 0;
  };

  bool Due(const StepId& id, const IncarnationState& incarnation) const;
  void Want(const Candidate& candidate);
  void BeginRun(const Candidate& candidate);
  void BeginPhase(Run::Phase phase);
  // Records why the run does not continue, and logs a warning now and then.
  void HaveTrouble(std::string why);
  // The same, or that the run waits for a hold that hangs; empty: neither.
  std::string RunTrouble() const;
  void EndRun();
  void Confirm();
  bool MayOrder() const;
  void OnConfirmed(const Status& status);
  void BeginWaiting();
  void Abandon(const std::string& why);
  // The step will not be persisted. kInfo: a newer step took its place, which is not a failure. kDebug: a failure that
  // was logged before.
  void Note(const StepId& id, std::string why, LogLevel level = LogLevel::kWarning);
  NodeId WriterOf(Rank rank) const;  // kNoNode: no node is available now
  NodeId Enqueue(Rank rank);         // returns the node that gets the order; kNoNode: none
  void RequeueFrom(NodeId node);
  bool Unqueue(Rank rank);  // false: it was in no queue
  void GiveOrders();
  void GiveOrdersTo(NodeId node);
  void SendOrder(Rank rank, Order* order);
  void TakeOrder(Rank rank);  // the order is answered or void
  void RepeatOrders();
  void FinishRank(Rank rank);
  TimeUs RetryAfter() const;
  void AssignNames();
  void PutManifest();
  void OnManifest(const StepId& id, const Status& status);
  void LookAtHomeless();
  void Prune();  // after a step was persisted
  void StartPruning(uint64_t keep);

  Context& context_;
  StorageKeeper& keeper_;
  StorageHold& hold_;
  const Roster& roster_;
  const StepTable& table_;
  StoredSteps& stored_;
  const Policy& policy_;
  const InUse in_use_;
  const Keep keep_;
  // how many steps each running deletion keeps, also deletions of an earlier leadership
  std::multiset<uint64_t> pruning_;
  TimeUs prune_at_ = kNever;  // time of the next attempt, because the number to keep was not known
  uint64_t generation_ = 0;
  std::set<StepId> requested_;
  std::set<StepId> learned_;  // from an earlier leader, not judged yet
  std::optional<Candidate> waiting_;
  std::set<StepId> kept_;
  std::optional<Run> run_;
  uint64_t runs_ = 0;
  std::string refused_;    // why the last request for storage was refused
  TimeUs refused_at_ = 0;  // time of the last refusal
  StepId judged_;
  StepId last_due_;
  TimeUs last_due_at_ = 0;
  std::deque<NotPersisted> not_persisted_;
  std::string trouble_;  // by Note()
  TimeUs look_at_ = 0;   // time of the next check of homeless ranks and of a stuck run
  uint64_t version_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_PERSISTENCE_H_
