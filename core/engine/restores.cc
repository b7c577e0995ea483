// SPDX-License-Identifier: Apache-2.0
#include "core/engine/restores.h"

#include <algorithm>

#include "core/base/log.h"

namespace ropeteam::engine {

void Restores::Begin() {
  ++generation_;
  notes_.clear();
  written_.clear();
  storing_ = false;
  store_at_ = 0;
  Learn(context_.restores);
  ++version_;
}

void Restores::Merge(const RestoreNote& note) {
  if (note.step.incarnation >= kIncarnationMax || note.counted >= kIncarnationMax || note.revision == 0)
    return;
  const auto known = notes_.find(note.step);
  if (known != notes_.end() && known->second.revision >= note.revision) return;
  NoteOf(note.step) = note;
  ++version_;
}

void Restores::Learn(const std::vector<RestoreNote>& notes) {
  for (const RestoreNote& note : notes) Merge(note);
}

void Restores::LearnStored(const RestoreNote& note) {
  if (note.revision == 0) return;
  uint32_t& written = written_[note.step];
  written = std::max(written, note.revision);
  Merge(note);
}

// If there are too many notes, the one of the oldest step is removed. Old steps are released long before that.
RestoreNote& Restores::NoteOf(const StepId& step) {
  if (!notes_.contains(step) && notes_.size() >= kRestoreNotesMax) notes_.erase(notes_.begin());
  RestoreNote& note = notes_[step];
  note.step = step;
  return note;
}

void Restores::Changed(RestoreNote* note) {
  ++note->revision;
  ++version_;
  store_at_ = context_.now;
}

void Restores::OnRestored(const StepId& step, Incarnation by) {
  if (context_.config.restores_max == 0) return;
  if (const RestoreNote* known = Find(step); known != nullptr && known->counted >= by) return;
  RestoreNote& note = NoteOf(step);
  ++note.restores;
  note.counted = by;
  Changed(&note);
  if (note.restores >= 2)
    LOG_WARNING("%s is restored for the %u. time without a newer commit, limit %u", step.ToString().c_str(),
                note.restores, context_.config.restores_max);
}

void Restores::OnCommitted(const StepId& step) {
  for (auto& [id, note] : notes_) {
    if (!(id < step)) break;
    if (note.restores == 0 || note.quarantined) continue;
    note.restores = 0;
    Changed(&note);
  }
}

void Restores::Set(const StepId& step, bool quarantined) {
  if (const RestoreNote* known = Find(step);
      (known == nullptr && !quarantined) ||
      (known != nullptr && known->quarantined == quarantined && (quarantined || known->restores == 0)))
    return;
  RestoreNote& note = NoteOf(step);
  note.quarantined = note.by_hand = quarantined;
  if (!quarantined) note.restores = 0;
  Changed(&note);
  LOG_WARNING("%s is %s by hand", step.ToString().c_str(),
              quarantined ? "quarantined" : "out of quarantine, and its restores are counted from 0");
}

void Restores::PassOver(const StepId& step, const StepId& chosen) {
  RestoreNote& note = NoteOf(step);
  LOG_WARNING(
      "%s is quarantined: %s; %s is offered instead. `ropeteam quarantine --undo %llu` offers it again; "
      "with --quarantine-after 0 no step is quarantined, for example while the program is debugged",
      step.ToString().c_str(),
      note.by_hand
          ? "by hand"
          : (std::to_string(note.restores) + " incarnations restored it without a newer commit").c_str(),
      chosen.ToString().c_str(), static_cast<unsigned long long>(step.step));
  if (note.quarantined) return;
  note.quarantined = true;
  Changed(&note);
}

bool Restores::Holds(const StepId& step) const {
  const RestoreNote* note = Find(step);
  const uint32_t max = context_.config.restores_max;
  return note != nullptr && (note->quarantined || (max != 0 && note->restores >= max));
}

const RestoreNote* Restores::Find(const StepId& step) const {
  const auto at = notes_.find(step);
  return at == notes_.end() ? nullptr : &at->second;
}

std::vector<RestoreNote> Restores::notes() const {
  std::vector<RestoreNote> notes;
  for (const auto& [id, note] : notes_) notes.push_back(note);
  return notes;
}

// Another job's steps (restore_from) get no notes.
const RestoreNote* Restores::NextToStore() const {
  if (storing_ || !stored_.used() || !stored_.known()) return nullptr;
  for (const auto& [id, note] : notes_) {
    const auto written = written_.find(id);
    if (note.revision <= (written == written_.end() ? 0 : written->second)) continue;
    if (stored_.Has(id) && !stored_.IsOfSource(id)) return &note;
  }
  return nullptr;
}

void Restores::Store(const RestoreNote& note) {
  storing_ = true;
  hold_.Confirm([this, note, generation = generation_](const Status& held) {
    if (generation != generation_) return;
    const auto ended = [this, note, generation](const Status& status, const StorageDone&) {
      if (generation != generation_) return;
      storing_ = false;
      if (status.ok()) {
        written_[note.step] = std::max(written_[note.step], note.revision);
        return;
      }
      store_at_ = context_.now + kAgainUs;
      LOG_INFO("the restore count of %s is not on storage yet: %s", note.step.ToString().c_str(),
               status.ToString().c_str());
    };
    if (!held.ok()) return ended(held, {});
    keeper_.Start(NoteStored{note}, ended,
                  [this] { keeper_.PassOn("a restore count has made no progress for a minute"); });
  });
}

void Restores::OnHoldReleased() {
  ++generation_;
  storing_ = false;
}

void Restores::OnTimer() {
  if (store_at_ > context_.now) return;
  if (const RestoreNote* note = NextToStore()) Store(*note);
}

TimeUs Restores::NextTimer() const { return NextToStore() == nullptr ? kNever : store_at_; }

}  // namespace ropeteam::engine
