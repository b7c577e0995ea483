// SPDX-License-Identifier: Apache-2.0
//
// Counts how often each step was restored, and quarantines steps: `latest` then offers the next older step instead.
// Otherwise a step that ends every incarnation that restores it would be offered for ever.
//
// A restore by an incarnation counts once, when the first of its ranks gets a shard of its pin. After k restores in a
// row (EngineConfig::restores_max) without a newer commit, the next incarnation is offered an older step. `ropeteam
// quarantine` has the same effect at once, and can undo it.
//
//     counted ──restored k times, and an incarnation chooses──> quarantined ──undone by an operator──> counted from 0
//        └── a newer step is committed: from 0                        (by an operator: at once)
//
// The leader writes the notes. It announces them, and every node repeats them in its inventory to the next leader. If
// the step is on storage, its note is also written into the step's folder there, so it survives the loss of all memory.
// Of two notes for the same step, the one with the higher revision counts.

#ifndef ROPETEAM_CORE_ENGINE_RESTORES_H_
#define ROPETEAM_CORE_ENGINE_RESTORES_H_

#include <map>
#include <set>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/storage_hold.h"
#include "core/engine/stored_steps.h"

namespace ropeteam::engine {

// The first protocol version whose messages have the notes.
inline constexpr uint32_t kRestoresSince = 9;

class Restores {
 public:
  Restores(Context* context, StorageKeeper* keeper, StorageHold* hold, const StoredSteps* stored)
      : context_(*context), keeper_(*keeper), hold_(*hold), stored_(*stored) {}

  void Begin();  // to lead, or no longer: starts from this node's last known notes
  void Learn(const std::vector<RestoreNote>& notes);
  // A note that was read from storage.
  void LearnStored(const RestoreNote& note);

  // A rank of this incarnation gets a shard of the step that the incarnation restores.
  void OnRestored(const StepId& step, Incarnation by);
  // Every member has acknowledged that this step is committed.
  void OnCommitted(const StepId& step);
  // An operator's order. After an undo, the step is counted from 0.
  void Set(const StepId& step, bool quarantined);
  // An incarnation has chosen `chosen` instead of this newer quarantined step.
  void PassOver(const StepId& step, const StepId& chosen);

  // Whether the step is quarantined, or was restored as often as allowed.
  bool Holds(const StepId& step) const;
  const RestoreNote* Find(const StepId& step) const;
  std::vector<RestoreNote> notes() const;  // by step, at most kRestoreNotesMax
  uint64_t version() const { return version_; }

  void OnHoldReleased();  // because the lease has expired
  void OnTimer();         // writes changed notes to storage
  TimeUs NextTimer() const;

 private:
  // The pause after a note could not be written. A dead holder of storage is recognised after 15 s.
  static constexpr TimeUs kAgainUs = 5'000'000;

  RestoreNote& NoteOf(const StepId& step);
  void Changed(RestoreNote* note);
  void Merge(const RestoreNote& note);
  const RestoreNote* NextToStore() const;
  void Store(const RestoreNote& note);

  Context& context_;
  StorageKeeper& keeper_;
  StorageHold& hold_;
  const StoredSteps& stored_;
  std::map<StepId, RestoreNote> notes_;
  std::map<StepId, uint32_t> written_;  // the revisions on storage
  uint64_t generation_ = 0;
  bool storing_ = false;
  TimeUs store_at_ = 0;
  uint64_t version_ = 1;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_RESTORES_H_
