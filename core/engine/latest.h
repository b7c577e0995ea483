// SPDX-License-Identifier: Apache-2.0
//
// Which step a question means: the one that an incarnation restores (the pin), the newest that can be produced,
// or the one that has a given number.

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

  // This node begins to lead: what another leader may have told a rank is not known.
  void Begin() {
    may_choose_again_ = false;
    OnListAgain();
  }
  // Storage is being listed again.
  void OnListAgain() { waits_since_ = note_waits_since_ = 0; }
  // For a rank of incarnation `asking`, which is the current one; 0: for a person. The first rank that asks
  // makes the choice for its whole incarnation, unless the incarnation has a step of its own. While no rank has been
  // told it is made again when it cannot be produced, or when a newer committed step can be again. `members`: of the
  // view, all of which have told what they hold. With more than R of the job's nodes missing no choice is made:
  // a step that was told COMMITTED might not be seen, and an older one look like the newest. Quarantined steps are passed
  // over, unless there are no others.
  Result<StepId> Resolve(Incarnation asking, size_t members, const JobSettings& settings);
  // The newest step that lies on storage and whose files are there with their sizes. Chooses nothing.
  Result<StepId> NewestPersisted();
  // The previous leader told no rank either.
  void NoRankWasTold() { may_choose_again_ = true; }
  // A rank is being told the pin: it stays.
  void OnTold() { may_choose_again_ = false; }
  bool may_choose_again() const { return may_choose_again_; }
  // The newest quarantined step that could be offered instead of `offered`; {0, 0}: none.
  StepId PassedOver(const StepId& offered) const;
  // The step a reader means by its number. It need not be producible.
  Result<StepId> ResolveStep(const LocateQuestion& locate) const;

  // Questions that are answered once every member knows the pin. A leader that comes later can then not
  // choose another.
  using Waiting = std::map<std::pair<NodeId, uint64_t>, LatestQuestion>;
  void Wait(NodeId from, uint64_t number, const LatestQuestion& question);
  Waiting TakeWaiting() { return std::exchange(waiting_, {}); }
  bool waiting() const { return !waiting_.empty(); }

 private:
  // Where memory has something to restore, storage that does not answer is waited for so long: a listing takes a
  // second, and a world that restarts must not hang on a store that is down.
  static constexpr TimeUs kStorageWaitUs = 10'000'000;

  bool Producible(const StepId& id) const;  // from memory
  // From memory or storage.
  bool Available(const StepId& id) const { return Producible(id) || stored_.Has(id); }
  enum class Of : uint8_t { kOffered, kAll };  // kAll: quarantined ones too
  StepId NewestCommitted() const;              // and not quarantined; {0, 0}: none
  // The newest that can be produced from memory.
  std::optional<StepId> NewestInMemory(Of of) const;
  // The newest step that is newer than `floor`, older than `end` and lies on storage. kUnavailable: that is not known yet.
  Result<std::optional<StepId>> NewestStored(const std::optional<StepId>& floor, const StepId& end, Of of);
  // The newest in memory and on storage, older than `end`.
  Result<std::optional<StepId>> NewestBefore(const StepId& end, Of of);
  // Reads what storage says of a step's restores, for a step that is in memory too. False: that is not known yet.
  bool KnowsRestores(const StepId& id);

  const Context& context_;
  const StepTable& table_;
  Incarnations& incarnations_;
  StoredSteps& stored_;
  Restores& restores_;
  TimeUs waits_since_ = 0;  // for the listing; 0: nobody has asked yet
  TimeUs note_waits_since_ = 0;
  Waiting waiting_;
  bool may_choose_again_ = false;  // no rank has been told of the choice
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_LATEST_H_
