// SPDX-License-Identifier: Apache-2.0
//
// The leader's list of the steps on storage. Every member lists it when the node begins to lead, because a member may
// see another directory in the place of the store, or nothing, or hang; what one of them has seen counts. Steps that this
// leader persists are added. A manifest is read when its step is needed, by one member after the other until one can.
//
//     what the members say of a step (StoredWord)         then
//     two say bad, or one twice, and no other sees it     it is passed over from then on
//     one says that it is bad                             another one reads it; if that is good, so is the step
//     unreadable                                          they read it again, for ever
//     none sees it for a while, nor the one that has      it is gone
//     listed it
//
// A job may begin from another job's steps (JobSettings::restore_from). Those steps are also listed as long as the job
// has none of its own on storage. Their incarnations are the other job's, and that job may go on counting. Steps with
// the current incarnation's number or a higher one are not offered, because they could be mistaken for steps of this
// job.

#ifndef ROPETEAM_CORE_ENGINE_STORED_STEPS_H_
#define ROPETEAM_CORE_ENGINE_STORED_STEPS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/storage_keeper.h"

namespace ropeteam::engine {

class StoredSteps {
 public:
  // `current`: the newest incarnation; must outlive this.
  StoredSteps(Context* context, StorageKeeper* keeper, const IncarnationState* current)
      : context_(*context), keeper_(*keeper), current_(*current) {}

  void Begin();  // to lead, or no longer: forgets everything
  void OnView();
  bool used() const { return context_.view.settings.reads_storage(); }
  // There is no storage, or it has been listed: by every member; or by some, and there are steps; or by some, and the
  // others have not answered for JobSettings::wait_for_missing_us.
  bool known() const { return !used() || known_; }
  // The highest incarnation of any folder of this job on storage.
  Incarnation incarnation_max() const { return incarnation_max_; }
  // The highest incarnation of any step, another job's included. It must not be used again.
  Incarnation incarnation_floor() const { return std::max(incarnation_max_, source_incarnation_max_); }
  // The last failure to list storage or to read a manifest, or which of these hangs; empty: it has succeeded since.
  const std::string& trouble() const { return trouble_; }
  // The same as the end of a sentence: ": " and the failure, or nothing.
  std::string Because() const { return trouble_.empty() ? "" : ": " + trouble_; }
  // While the steps are not known: the reason.
  std::string WhyUnknown() const {
    return "storage has not been listed: " + (trouble_.empty() ? "it is being listed" : trouble_);
  }

  // Whether it is a step of the other job.
  bool IsOfSource(const StepId& id) const;
  // The newest damaged step that could be offered if it were good, and what it has; empty: none but those given up.
  std::string Damage(const std::set<StepId>& given_up) const;
  // Whether the step is listed and not known to be damaged.
  bool Has(const StepId& id) const;
  std::optional<StepId> Newest() const;
  std::optional<StepId> NewestBefore(const StepId& end) const;
  std::optional<StepId> NewestOf(
      Step step) const;  // the newest step with this number, a good one if possible
  std::vector<StepId> NewestFirst(size_t count) const;
  // Null: the manifest is not there, is damaged, or is being read; see Has().
  std::shared_ptr<const StoredStep> Manifest(const StepId& id);

  // No member could read its manifest so far.
  bool CannotBeRead(const StepId& id) const;

  // Another leader may have persisted steps since: under another coordinator, or by a late request.
  void ListAgain();
  // A question waits for the listing: retries soon.
  void Hurry();

  void Add(const StepId& id);                     // a step that was just persisted
  void Remove(const std::vector<StepId>& steps);  // deleted steps
  // It is proven.
  void MarkDamaged(const StepId& id, const std::string& why);

  void OnTimer();
  TimeUs NextTimer() const;
  // Grows with every change.
  uint64_t version() const { return version_; }

 private:
  // The pause after a failure; it doubles with each further one.
  static constexpr TimeUs kAgainUs = 1'000'000;
  static constexpr TimeUs kAgainMaxUs = 30'000'000;
  // If a member has listed steps, the others have this time to list newer ones.
  static constexpr TimeUs kOthersUs = 2'000'000;
  // One manifest is restored from; others may be looked at. A manifest of 131,072 ranks takes 3 MiB without its files.
  static constexpr size_t kManifestsMax = 3;
  // A step that no member sees is gone after this time. A mount may be made again.
  static constexpr TimeUs kGoneUs = 5'000'000;
  // A member that has not read a manifest for this time is given up for this round; what it says later counts if it is
  // good. A manifest takes milliseconds, and a hung mount is reported only after a minute.
  static constexpr TimeUs kReadUs = 5'000'000;
  // The members that try to read a manifest before a pause. The next ones follow after it.
  static constexpr size_t kReadersMax = 8;

  struct Pause {
    TimeUs at = 0;  // the time of the next attempt
    TimeUs after = kAgainUs;
    void Fail(TimeUs now) {
      at = now + after;
      after = std::min(2 * after, kAgainMaxUs);
    }
  };
  // A member's listing.
  struct Lister {
    bool listed = false;
    bool running = false;
    Pause again;
    std::string trouble;
  };
  struct Entry {
    std::string damage;  // proven
    bool of_source = false;
    NodeId lister = kNoNode;            // that has listed it, or the keeper that has written it
    NodeId reader = kNoNode;            // that is reading it
    std::map<NodeId, StoredWord> said;  // until every member has spoken
    size_t said_before = 0;             // the last pause
    std::set<std::string> bad;          // names of nodes that found it bad, since it was good
    bool bad_before = false;            // all who saw it had found it bad already when all had spoken before
    TimeUs unseen_since = 0;            // no member sees it; 0: one did
    Pause again;
    std::shared_ptr<const StoredStep> manifest;
    uint64_t used_at = 0;  // compared with use_
  };
  // It may be offered if it is good.
  bool Fits(const StepId& id, const Entry& entry) const;
  bool Offers(const StepId& id, const Entry& entry) const { return entry.damage.empty() && Fits(id, entry); }
  void List(NodeId node, Lister* lister);
  void OnListed(NodeId node, const Status& status, const StorageDone& done);
  void Learn(NodeId node, const StoredList& list);
  void Decide();  // whether storage is known now
  TimeUs DecidesAt() const;
  NodeId ReaderOf(const Entry& entry) const;  // kNoNode: there is a pause, or every member has spoken
  void ReadManifest(const StepId& id);
  void OnRead(const StepId& id, NodeId node, const Status& status, const StorageDone& done);
  void EndRound(const StepId& id);
  bool IsGone(Entry* entry) const;
  void ForgetOldManifests();

  Context& context_;
  StorageKeeper& keeper_;
  const IncarnationState& current_;
  uint64_t generation_ = 0;  // of leadership and listings: results of an earlier one are ignored
  bool known_ = false;
  bool was_known_ = false;  // since this node leads
  std::map<NodeId, Lister> listers_;
  TimeUs listed_at_ = 0;      // the first member's listing; 0: none
  TimeUs unknown_since_ = 0;  // likewise of the first listing that was begun since it was known
  NodeId best_ = kNoNode;     // that has listed the newest step, the keeper if possible
  StepId best_newest_;
  Incarnation incarnation_max_ = 0;
  Incarnation source_incarnation_max_ = 0;
  bool has_own_ = false;  // steps of this job
  std::map<StepId, Entry> steps_;
  std::map<StepId, TimeUs> reading_;  // until then
  std::string trouble_;
  uint64_t use_ = 0;
  uint64_t version_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORED_STEPS_H_
