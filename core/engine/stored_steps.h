// SPDX-License-Identifier: Apache-2.0
//
// The leader's list of the steps on storage. Storage is listed when the node begins to lead, and again after a failure.
// Steps that this leader persists are added. A manifest is read when its step is needed. If the manifest or a file is
// damaged, the step is passed over from then on. While a listing or a read hangs, no second one of its kind is started,
// even after the node begins to lead again: each would occupy a thread.
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
#include "core/engine/storage_works.h"

namespace ropeteam::engine {

class StoredSteps {
 public:
  // `current`: the newest incarnation; must outlive this.
  StoredSteps(Context* context, StorageWorks* works, const IncarnationState* current)
      : context_(*context), works_(*works), current_(*current) {}

  void Begin();  // to lead, or no longer: forgets everything
  bool used() const { return context_.view.settings.reads_storage(); }
  // There is no storage, or it has been listed.
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
  // The damage of the other job's step that was checked last; empty: none.
  const std::string& source_damage() const { return source_damage_; }
  // Whether the step is listed and not known to be damaged.
  bool Has(const StepId& id) const;
  std::optional<StepId> Newest() const;
  std::optional<StepId> NewestBefore(const StepId& end) const;
  std::optional<StepId> NewestOf(Step step) const;  // the newest step with this number
  std::vector<StepId> NewestFirst(size_t count) const;
  // Null: the manifest is not there, is damaged, or is being read; see Has().
  std::shared_ptr<const StoredStep> Manifest(const StepId& id);

  // Another leader may have persisted steps since: under another coordinator, or by a late request.
  void ListAgain();
  // A question waits for the listing: retries soon.
  void Hurry() { again_at_ = std::min(again_at_, context_.now + kAgainUs); }

  void Add(std::shared_ptr<const StoredStep> step);  // a step that was just persisted
  void Remove(const std::vector<StepId>& steps);     // deleted steps
  void MarkDamaged(const StepId& id, const std::string& why);

  void OnTimer();
  TimeUs NextTimer() const;
  // Grows with every change.
  uint64_t version() const { return version_; }

 private:
  // The pause after a failure; it doubles with each further one.
  static constexpr TimeUs kAgainUs = 1'000'000;
  static constexpr TimeUs kAgainMaxUs = 30'000'000;
  // One manifest is restored from; others may be looked at. A manifest of 131,072 ranks takes 3 MiB without its files.
  static constexpr size_t kManifestsMax = 3;

  // A manifest that cannot be read this many times is treated as damaged.
  static constexpr uint32_t kReadsMax = 5;

  struct Entry {
    bool damaged = false;
    bool of_source = false;
    uint32_t failures = 0;
    std::shared_ptr<const StoredStep> manifest;
    uint64_t used_at = 0;  // compared with use_
  };
  bool Offers(const StepId& id, const Entry& entry) const;
  void List();
  void OnListed(const Status& status, const StorageDone& done);
  void ReadManifest(const StepId& id);
  void OnRead(const StepId& id, const Status& status, const StorageDone& done);
  void Fail(const Status& status);
  void ForgetOldManifests();

  Context& context_;
  StorageWorks& works_;
  const IncarnationState& current_;
  uint64_t generation_ = 0;  // of leadership: results of an earlier one are ignored
  bool begun_ = false;
  bool known_ = false;
  bool listing_ = false;
  bool listing_stalls_ = false;
  uint64_t wanted_ = 0;       // grows when the result of a running listing will be outdated
  std::set<StepId> reading_;  // manifests
  Incarnation incarnation_max_ = 0;
  Incarnation source_incarnation_max_ = 0;
  std::string source_damage_;
  std::map<StepId, Entry> steps_;
  std::string trouble_;
  TimeUs again_at_ = 0;
  TimeUs again_after_ = kAgainUs;
  uint64_t use_ = 0;
  uint64_t version_ = 0;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORED_STEPS_H_
