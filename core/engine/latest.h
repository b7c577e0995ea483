// SPDX-License-Identifier: Apache-2.0
//
// Finds the step that a question means: the one that an incarnation restores (the pin), the newest one that can be
// produced, or the one with a given number.

#ifndef ROPETEAM_CORE_ENGINE_LATEST_H_
#define ROPETEAM_CORE_ENGINE_LATEST_H_

#include <map>
#include <optional>
#include <utility>

#include "core/engine/incarnations.h"
#include "core/engine/restores.h"
#include "core/engine/step_table.h"
#include "core/engine/stored_steps.h"

namespace ropeteam::engine {

class Latest {
 public:
  Latest(const Context* context, const StepTable* table, Incarnations* incarnations, StoredSteps* stored,
         Restores* restores)
      : context_(*context),
        table_(*table),
        incarnations_(*incarnations),
        stored_(*stored),
        restores_(*restores) {}

  // This node begins to lead. It cannot tell which pin the previous leader has told a rank.
  void Begin() {
    may_choose_again_ = false;
    OnListAgain();
  }
  // A new listing of storage has begun.
  void OnListAgain() { waits_since_ = note_waits_since_ = 0; }
  // `asking`: the incarnation of the asking rank, which is the current one; 0: an operator asks. The first rank that
  // asks fixes the choice for its whole incarnation, unless the incarnation has a step of its own. As long as no rank
  // was told, the choice is made again in two cases: the step cannot be produced, or a newer committed step can be
  // produced again. `members`: the size of the view; all members have reported their inventory. While more than R of
  // the job's nodes are missing, no choice is made: a step that was reported COMMITTED might be invisible, and an older
  // one would look like the newest. Quarantined steps are passed over, unless there are no others.
  Result<StepId> Resolve(Incarnation asking, size_t members, const JobSettings& settings);
  // The newest step on storage whose files all exist with the right sizes. It does not fix a choice.
  Result<StepId> NewestPersisted();
  // The previous leader has not told a rank either.
  void NoRankWasTold() { may_choose_again_ = true; }
  // A rank is being told the pin: it can no longer change.
  void OnTold() { may_choose_again_ = false; }
  bool may_choose_again() const { return may_choose_again_; }
  // The newest quarantined step that could be offered instead of `offered`; {0, 0}: none.
  StepId PassedOver(const StepId& offered) const;
  // The step that a reader means by its number. It may be impossible to produce.
  Result<StepId> ResolveStep(const LocateQuestion& locate) const;

  // Questions that are answered once every member has the pin, so that a later leader cannot choose another.
  using Waiting = std::map<std::pair<NodeId, uint64_t>, LatestQuestion>;
  void Wait(NodeId from, uint64_t number, const LatestQuestion& question);
  Waiting TakeWaiting() { return std::exchange(waiting_, {}); }
  bool waiting() const { return !waiting_.empty(); }

 private:
  // If memory has a step to restore, the leader waits this long for storage that does not answer. A listing takes a
  // second, and a restart must not hang because storage is down.
  static constexpr TimeUs kStorageWaitUs = 10'000'000;

  bool Producible(const StepId& id) const;  // from memory
  // From memory or storage.
  bool Available(const StepId& id) const { return Producible(id) || stored_.Has(id); }
  enum class Of : uint8_t { kOffered, kAll };  // kAll: quarantined ones too
  StepId NewestCommitted() const;              // and not quarantined; {0, 0}: none
  // The newest that can be produced from memory.
  std::optional<StepId> NewestInMemory(Of of) const;
  // The newest step on storage that is newer than `floor` and older than `end`. kUnavailable: the listing is not
  // complete yet.
  Result<std::optional<StepId>> NewestStored(const std::optional<StepId>& floor, const StepId& end, Of of);
  // The newest step in memory or on storage that is older than `end`.
  Result<std::optional<StepId>> NewestBefore(const StepId& end, Of of);
  // Reads a step's restore count from storage, also for a step in memory. False: the count is not read yet.
  bool KnowsRestores(const StepId& id);

  const Context& context_;
  const StepTable& table_;
  Incarnations& incarnations_;
  StoredSteps& stored_;
  Restores& restores_;
  TimeUs waits_since_ = 0;  // waiting for the listing since then; 0: no question has come yet
  TimeUs note_waits_since_ = 0;
  Waiting waiting_;
  bool may_choose_again_ = false;  // no rank was told the choice
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_LATEST_H_
