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
#include "core/engine/roster.h"
#include "core/engine/step_table.h"
#include "core/engine/stored_damage.h"
#include "core/engine/stored_steps.h"

namespace ropeteam::engine {

class Latest {
 public:
  Latest(const Context* context, const StepTable* table, Incarnations* incarnations, StoredSteps* stored,
         const StoredDamage* damage, Restores* restores, const Roster* roster)
      : context_(*context),
        table_(*table),
        incarnations_(*incarnations),
        stored_(*stored),
        damage_(*damage),
        restores_(*restores),
        roster_(*roster) {}

  // This node begins to lead. It cannot tell which pin the previous leader has told a rank.
  void Begin() {
    may_choose_again_ = false;
    missing_since_ = chosen_for_ = 0;
    OnListAgain();
  }
  // A new listing of storage has begun.
  void OnListAgain() {
    waits_since_ = note_waits_since_ = 0;
    manifest_ = {};
  }
  // `asking`: the incarnation of the asking rank, which is the current one; 0: an operator asks. The first rank that
  // asks fixes the choice for its whole incarnation, unless the incarnation has a step of its own. As long as no rank
  // was told, the choice is made again in two cases: the step cannot be produced, or a newer committed step can be
  // produced again. No choice is made before the members know of every commit (roster.h), nor while a known commit
  // cannot be produced and a node is missing; but not for longer than JobSettings::wait_for_missing_us. Then an older
  // step is offered, with a warning; nothing is offered only where nothing is known to be committed. Quarantined steps
  // are passed over, unless there are no others.
  Result<StepId> Resolve(Incarnation asking);
  // Why a choice waits for missing nodes, and for how long; empty: it does not.
  std::string Waiting() const;
  // From memory or storage.
  bool Available(const StepId& id) const { return Producible(id) || stored_.Has(id); }
  // The newest committed step of which a node has a copy, and which is not quarantined; {0, 0}: none.
  StepId NewestCommitted() const;
  // The newest committed step that is neither quarantined nor abandoned, also if no node has a copy; {0, 0}: none.
  StepId NewestKnown() const;
  // The newest step on storage whose files all exist with the right sizes. It does not fix a choice.
  Result<StepId> NewestPersisted();
  // The previous leader has not told a rank either.
  void NoRankWasTold() { may_choose_again_ = true; }
  // A rank is being told the pin: it can no longer change.
  void OnTold() { may_choose_again_ = false; }
  bool may_choose_again() const { return may_choose_again_; }
  // The incarnation for which this leader has chosen; 0: none.
  Incarnation chosen_for() const { return chosen_for_; }
  // The newest quarantined step that could be offered instead of `offered`; {0, 0}: none.
  StepId PassedOver(const StepId& offered) const;
  // The step that a reader means by its number. It may be impossible to produce.
  Result<StepId> ResolveStep(const LocateQuestion& locate) const;

  // No node is missing: a later wait for nodes starts from zero.
  void NoneMissing();

  // Questions that are answered once every member has the pin, so that a later leader cannot choose another.
  using Questions = std::map<std::pair<NodeId, uint64_t>, LatestQuestion>;
  void Wait(NodeId from, uint64_t number, const LatestQuestion& question);
  Questions TakeWaiting() { return std::exchange(waiting_, {}); }
  bool waiting() const { return !waiting_.empty(); }

 private:
  // If memory has a step to restore, the leader waits this long for storage that does not answer. A listing takes a
  // second, and a restart must not hang because storage is down.
  static constexpr TimeUs kStorageWaitUs = 10'000'000;

  bool Producible(const StepId& id) const;     // from memory
  enum class Of : uint8_t { kOffered, kAll };  // kAll: quarantined ones too
  Result<StepId> ResolveForOperator();
  // The newest step of the incarnation itself, in memory or on storage; nullopt: none.
  Result<std::optional<StepId>> OwnStep(Incarnation incarnation);
  // The pin, if the choice stands; nullopt: there is a choice to make.
  Result<std::optional<StepId>> Pinned() const;
  bool BetterThanPin() const;
  bool RosterIsUnknown() const;
  std::string WhyWait() const;  // empty: a choice needs to wait for no node
  std::string NamesOfMissing() const;
  Status WaitForMissing();
  Result<StepId> Choose(Incarnation asking);
  // The newest that can be produced from memory.
  std::optional<StepId> NewestInMemory(Of of) const;
  // The newest step on storage that is newer than `floor` and older than `end`. kUnavailable: the listing is not
  // complete yet.
  Result<std::optional<StepId>> NewestStored(const std::optional<StepId>& floor, const StepId& end, Of of);
  // The newest step in memory or on storage that is older than `end`.
  Result<std::optional<StepId>> NewestBefore(const StepId& end, Of of);
  Status NothingGood() const;  // kCorrupt
  // Reads a step's restore count from storage, also for a step in memory. False: the count is not read yet.
  bool KnowsRestores(const StepId& id);
  // The step's manifest cannot be read, and memory has an older step: whether the job has waited long enough.
  bool GivesUpManifest(const StepId& id, const StepId& older);

  const Context& context_;
  const StepTable& table_;
  Incarnations& incarnations_;
  StoredSteps& stored_;
  const StoredDamage& damage_;
  Restores& restores_;
  const Roster& roster_;
  TimeUs waits_since_ = 0;  // waiting for the listing since then; 0: no question has come yet
  TimeUs note_waits_since_ = 0;
  struct Awaited {  // a manifest that cannot be read
    StepId step;
    TimeUs since = 0;
    bool given_up = false;
  };
  Awaited manifest_;
  Questions waiting_;
  TimeUs missing_since_ = 0;  // a choice waits for missing nodes since then; 0: it does not
  Incarnation chosen_for_ = 0;
  Incarnation said_for_ = 0;       // the incarnation for which the end of the wait was logged
  bool may_choose_again_ = false;  // no rank was told the choice
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_LATEST_H_
