// SPDX-License-Identifier: Apache-2.0
//
// The leader's knowledge of the steps on storage. They are listed when the node begins to lead, and again after a
// failure; steps that it persists itself are added. A manifest is read when its step is needed; a step whose manifest or
// files are damaged is passed over from then on. While a listing or a read hangs, no second one of its kind is started,
// not even after the node has begun to lead again: each would take a thread.
//
// If a job shall begin from another job's steps (JobSettings::restore_from), those are listed too, while it has none of
// its own on storage. They have incarnations of the other job, which may go on counting. Those of the current
// incarnation's number and above are not offered, since they could be taken for steps of this job.

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
  // The highest incarnation of any folder of this job.
  Incarnation incarnation_max() const { return incarnation_max_; }
  // The highest of any step, another job's included. It must not be used again.
  Incarnation incarnation_floor() const { return std::max(incarnation_max_, source_incarnation_max_); }
  // Why no listing, or this manifest, is available yet.
  const std::string& trouble() const { return trouble_; }

  // It is another job's.
  bool IsOfSource(const StepId& id) const;
  // What is wrong with the step of the other job that was checked last; empty: nothing.
  const std::string& source_damage() const { return source_damage_; }
  // Listed, and not known to be damaged.
  bool Has(const StepId& id) const;
  std::optional<StepId> Newest() const;
  std::optional<StepId> NewestBefore(const StepId& end) const;
  std::optional<StepId> NewestOf(Step step) const;  // that has this number
  std::vector<StepId> NewestFirst(size_t count) const;
  // Null: it is not there or damaged, or is being read; see Has().
  std::shared_ptr<const StoredStep> Manifest(const StepId& id);

  // Another leader may have persisted since: another coordinator's, or one whose last request was late.
  void ListAgain();
  // A question waits for the listing.
  void Hurry() { again_at_ = std::min(again_at_, context_.now + kAgainUs); }

  void Add(std::shared_ptr<const StoredStep> step);  // it has just been persisted
  void Remove(const std::vector<StepId>& steps);     // they have been deleted
  void MarkDamaged(const StepId& id, const std::string& why);

  void OnTimer();
  TimeUs NextTimer() const;
  // Grows with every change.
  uint64_t version() const { return version_; }

 private:
  // After a failure; doubled with each.
  static constexpr TimeUs kAgainUs = 1'000'000;
  static constexpr TimeUs kAgainMaxUs = 30'000'000;
  // One is restored from; others are looked at. A manifest of 131,072 ranks takes 3 MiB without its files.
  static constexpr size_t kManifestsMax = 3;

  // A manifest that the operating system refuses to read so often is damaged.
  static constexpr uint32_t kReadsMax = 5;

  struct Entry {
    bool damaged = false;
    bool of_source = false;
    uint32_t failures = 0;
    std::shared_ptr<const StoredStep> manifest;
    uint64_t used_at = 0;  // by use_
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
  uint64_t generation_ = 0;  // of leadership: results of an earlier one are dropped
  bool begun_ = false;
  bool known_ = false;
  bool listing_ = false;
  bool listing_stalls_ = false;
  uint64_t wanted_ = 0;       // grows when the result of a running listing will be too old
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
