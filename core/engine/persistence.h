// SPDX-License-Identifier: Apache-2.0
//
// The leader's part in persisting: which committed steps go to storage, which node writes which shard, and when a step
// counts. One step is written at a time, so retention keeps one step more for it, and another one while a step that was
// asked for waits.
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
// A begun step waits until this node holds storage (storage_hold.h). Then it goes through three phases: every shard's files
// are named by a node that has a good copy of it, the owner if it can; then they are written, each by one node; then this
// node writes the manifest. The hold is confirmed all the time, and before the manifest: without it nothing is ordered. Names
// come first because two ranks may want the same one: the lowest rank gets it. All of it is soft: a leader that comes later learns from the
// inventories which steps were being persisted, and begins them again; files that are there are used.

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
#include "core/engine/step_table.h"
#include "core/engine/storage_hold.h"
#include "core/engine/storage_works.h"
#include "core/engine/stored_steps.h"

namespace ropeteam::engine {

class Persistence {
 public:
  // `in_use`: steps on storage that some node may be reading.
  using InUse = std::function<std::vector<StepId>()>;
  // How many steps are kept on storage as ranks have set; 0: not set. kUnavailable: not known yet. Other errors: it is in
  // doubt, and nothing is deleted.
  using Keep = std::function<Result<uint64_t>()>;
  Persistence(Context* context, StorageWorks* works, StorageHold* hold, const StepTable* table,
              StoredSteps* stored, const Policy* policy, InUse in_use, Keep keep)
      : context_(*context),
        works_(*works),
        hold_(*hold),
        table_(*table),
        stored_(*stored),
        policy_(*policy),
        in_use_(std::move(in_use)),
        keep_(std::move(keep)) {}

  void Begin();  // to lead, or no longer: forgets everything
  void OnView();
  void OnHoldReleased();  // for want of a lease; what is begun goes on when there is one again
  // The steps that a member heard are being persisted: by the leader before, or by this one.
  void Learn(const std::vector<StepKey>& persisting);
  // kInvalidArgument, kAborted: it will not be persisted. OK for one that is persisted already.
  Status Request(const StepId& id, const IncarnationState& incarnation);
  // Decides which of these steps are to be persisted. `told`: what ranks are told is committed, all of it.
  void Judge(const std::set<StepId>& told, const IncarnationState& incarnation);
  void OnResult(NodeId from, const PersistResult& result);
  void OnTimer();  // gives orders; nothing is done before it is due
  TimeUs NextTimer() const;

  std::vector<StepKey> persisting() const;
  // Those of them whose copies must stay.
  std::vector<StepKey> pinned() const;
  // What retention keeps now.
  void SetKept(const std::set<StepId>& kept) { kept_ = kept; }
  const std::deque<NotPersisted>& not_persisted() const { return not_persisted_; }
  const StepId& judged() const { return judged_; }
  // Deletions are under way that began when fewer steps than this were to be kept.
  bool DeletesBeyond(uint64_t keep) const {
    return std::any_of(pruning_.begin(), pruning_.end(),
                       [keep](uint64_t each) { return each != 0 && each < keep; });
  }
  // Grows whenever one of the above has changed.
  uint64_t version() const { return version_; }

 private:
  static constexpr size_t kRequestsMax = 16;  // of uncommitted steps: a rank has at most 4 saves open
  static constexpr size_t kNotPersistedMax = 8;
  // Of one node at a time. Each shard is written in parallel parts already; the second keeps the node busy while the first
  // one's last part is on its way.
  static constexpr size_t kOrdersPerNodeMax = 2;
  // An order is repeated after this, then ever more seldom: writing a shard takes seconds to minutes.
  static constexpr TimeUs kOrderAgainMaxUs = 5'000'000;
  // A node that could not write is asked again after this.
  static constexpr TimeUs kRetryUs = 1'000'000;
  static constexpr TimeUs kRetryMaxUs = 30'000'000;
  // A node that has not answered for so long is itself stopped, or its driver does not see that it hangs: another one
  // writes the shard, too. Time for 256 GiB at 0.5 GB/s.
  static constexpr TimeUs kOrderStalledUs = 600'000'000;
  // The hold is confirmed so often while a step is written, and before the manifest.
  static constexpr TimeUs kHoldAgainUs = 5'000'000;
  // Another cluster holds storage, or a leader that has just died: asked again after this, then after twice as long, up to
  // kHoldAgainUs.
  static constexpr TimeUs kHoldRetryUs = 1'000'000;
  static constexpr TimeUs kWarnEveryUs = 10'000'000;
  // Without a finished shard for so long, and with failures, a begun step makes room for the one that waits.
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
    uint64_t number = 0;  // of runs, by this node
    enum class Phase : uint8_t { kHold, kName, kWrite, kManifest } phase = Phase::kHold;
    bool held = false;  // when the driver was asked last
    bool confirming = false;
    TimeUs confirm_at = 0;
    TimeUs confirm_after = kHoldRetryUs;  // the next refusal
    uint32_t world_size = 0;
    std::vector<RankWork> ranks;
    Rank metadata_of = UINT32_MAX;  // the lowest rank that gave any, and what it gave
    std::string metadata;
    size_t done = 0;                             // ranks, in this phase
    std::map<NodeId, std::deque<Rank>> waiting;  // by the node that is to be asked
    std::set<Rank> homeless;                     // no node can be asked now
    std::map<Rank, Order> orders;
    TimeUs orders_due = kNever;                // none of them is due before
    std::map<NodeId, std::set<Rank>> ordered;  // of each node
    std::map<NodeId, TimeUs> avoid_until;
    TimeUs progress_at = 0;
    std::string trouble;  // since progress_at
    TimeUs warned_at = 0;
    bool writing_manifest = false;
    TimeUs manifest_at = 0;
  };

  bool Due(const StepId& id, const IncarnationState& incarnation) const;
  void Want(const Candidate& candidate);
  void BeginRun(const Candidate& candidate);
  void BeginPhase(Run::Phase phase);
  void HaveTrouble(std::string trouble);  // notes why the run does not go on, and warns now and then
  void EndRun();
  void Confirm();
  void OnConfirmed(const Status& status);
  void BeginWaiting();
  void Abandon(const std::string& why);
  void Note(const StepId& id, std::string why, LogLevel level = LogLevel::kWarning);
  void NoteOvertaken(const StepId& id, const StepId& by);
  NodeId WriterOf(Rank rank) const;  // kNoNode: no node can be asked now
  NodeId Enqueue(Rank rank);         // to be asked next; kNoNode: none can be
  void RequeueFrom(NodeId node);
  bool Unqueue(Rank rank);  // false: it was in no queue
  void GiveOrders();
  void GiveOrdersTo(NodeId node);
  void SendOrder(Rank rank, Order* order);
  void TakeOrder(Rank rank);  // it is answered or void
  void RepeatOrders();
  void FinishRank(Rank rank);
  TimeUs RetryAfter() const;
  void AssignNames();
  void PutManifest();
  void OnManifest(const StepId& id, const std::shared_ptr<const StoredStep>& step, const Status& status);
  void LookAtHomeless();
  void Prune();  // after a step was persisted
  void StartPruning(uint64_t keep);

  Context& context_;
  StorageWorks& works_;
  StorageHold& hold_;
  const StepTable& table_;
  StoredSteps& stored_;
  const Policy& policy_;
  const InUse in_use_;
  const Keep keep_;
  std::multiset<uint64_t> pruning_;  // what the deletions under way keep; those of a former leadership, too
  TimeUs prune_at_ = kNever;         // tried again then, because it was not known what is kept
  uint64_t generation_ = 0;
  std::set<StepId> requested_;
  std::set<StepId> learned_;  // of a former leader, not judged yet
  std::optional<Candidate> waiting_;
  std::set<StepId> kept_;
  std::optional<Run> run_;
  uint64_t runs_ = 0;
  std::string refused_;    // storage, when it was asked for last, and why
  TimeUs refused_at_ = 0;  // then
  StepId judged_;
  StepId last_due_;
  TimeUs last_due_at_ = 0;
  std::deque<NotPersisted> not_persisted_;
  TimeUs look_at_ = 0;  // at homeless ranks and at whether the run is stuck
  uint64_t version_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_PERSISTENCE_H_
