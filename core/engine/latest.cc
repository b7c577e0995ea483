// SPDX-License-Identifier: Apache-2.0
#include "core/engine/latest.h"

#include <optional>
#include <utility>

#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::engine {
namespace {

Status NoStep() {
  return Error(Code::kNotFound, "there is no step of which every rank's shard can be produced");
}

}  // namespace

bool Latest::Producible(const StepId& id) const {
  const StepTable::StepState* step = table_.Find(id);
  return step != nullptr && step->producible();
}

StepId Latest::NewestCommitted() const {
  for (auto step = table_.steps().rbegin(); step != table_.steps().rend(); ++step)
    if (step->second.complete && !restores_.Holds(step->first)) return step->first;
  return {};
}

std::optional<StepId> Latest::NewestInMemory(Of of) const {
  for (auto step = table_.steps().rbegin(); step != table_.steps().rend(); ++step)
    if (step->second.producible() && !step->second.never_commits() &&
        (of == Of::kAll || !restores_.Holds(step->first)))
      return step->first;
  return std::nullopt;
}

StepId Latest::PassedOver(const StepId& offered) const {
  const std::vector<RestoreNote> notes = restores_.notes();
  for (auto note = notes.rbegin(); note != notes.rend() && offered < note->step; ++note)
    if (restores_.Holds(note->step) && Available(note->step)) return note->step;
  return {};
}

// A step in memory does not wait for storage that is unreachable.
bool Latest::KnowsRestores(const StepId& id) {
  if (!stored_.Has(id) || stored_.IsOfSource(id)) return true;
  if (const std::shared_ptr<const StoredStep> manifest = stored_.Manifest(id)) {
    restores_.LearnStored(manifest->restored);
    return true;
  }
  if (!stored_.Has(id)) return true;  // it is damaged
  if (note_waits_since_ == 0) note_waits_since_ = context_.now;
  return note_waits_since_ + kStorageWaitUs <= context_.now;
}

Result<std::optional<StepId>> Latest::NewestStored(const std::optional<StepId>& floor, const StepId& before,
                                                   Of of) {
  StepId end = before;
  const bool in_memory = floor && Producible(*floor);  // or else it only bounds the search
  if (!stored_.known()) {
    stored_.Hurry();
    if (waits_since_ == 0) waits_since_ = context_.now;
    const bool other = in_memory || NewestInMemory(Of::kAll);
    if (other && waits_since_ + kStorageWaitUs <= context_.now) return std::optional<StepId>();
    return Error(Code::kUnavailable, "%s; storage may have a newer step", stored_.WhyUnknown().c_str());
  }
  while (const std::optional<StepId> newest = stored_.NewestBefore(end)) {
    // The job has steps of its own in memory, so it does not begin from another job's steps.
    if (floor && (!(*floor < *newest) || stored_.IsOfSource(*newest))) break;
    // A step that is given up need not be readable, and is not offered for want of others.
    const RestoreNote* note = restores_.Find(*newest);
    const bool given_up = note != nullptr && note->by_hand &&
                          (stored_.CannotBeRead(*newest) || !damage_.Found(*newest).empty());
    if (given_up || (of == Of::kOffered && restores_.Holds(*newest))) {
      end = *newest;
      continue;
    }
    if (const std::shared_ptr<const StoredStep> manifest = stored_.Manifest(*newest)) {
      if (!stored_.IsOfSource(*newest)) restores_.LearnStored(manifest->restored);
      if (of == Of::kAll || !restores_.Holds(*newest)) return newest;
      end = *newest;
      continue;
    }
    if (!stored_.Has(*newest)) continue;  // damaged: try the next older one
    if (in_memory && GivesUpManifest(*newest, *floor)) return std::optional<StepId>();
    const std::string way_out =
        stored_.CannotBeRead(*newest)
            ? "; `ropeteam quarantine " + std::to_string(newest->step) + "` gives the step up"
            : "";
    return Error(Code::kUnavailable, "the manifest of %s on storage is being read%s%s",
                 newest->ToString().c_str(), stored_.Because().c_str(), way_out.c_str());
  }
  return std::optional<StepId>();
}

bool Latest::GivesUpManifest(const StepId& id, const StepId& older) {
  if (manifest_.step != id) manifest_ = {id, context_.now, false};
  if (context_.now < manifest_.since + context_.view.settings.wait_for_missing_us) return false;
  if (!std::exchange(manifest_.given_up, true))
    LOG_WARNING("%s on storage is newer than %s, and cannot be read: it goes on without",
                id.ToString().c_str(), older.ToString().c_str());
  return true;
}

Result<std::optional<StepId>> Latest::NewestBefore(const StepId& end, Of of) {
  std::optional<StepId> newest = NewestInMemory(of);
  while (newest && of == Of::kOffered) {
    if (!KnowsRestores(*newest))
      return Error(Code::kUnavailable, "the restore count of %s on storage is being read%s",
                   newest->ToString().c_str(), stored_.Because().c_str());
    if (!restores_.Holds(*newest)) break;
    newest = NewestInMemory(of);
  }
  const Result<std::optional<StepId>> stored = NewestStored(newest, end, of);
  if (!stored.ok()) return stored.status();
  return *stored ? *stored : newest;
}

StepId Latest::NewestKnown() const {
  const StepId heard = roster_.newest_committed();
  const IncarnationState& incarnation = incarnations_.current();
  // The job has continued from an older step.
  const bool abandoned = incarnation.pinned_by != 0 && incarnation.pin < heard &&
                         heard.incarnation < incarnation.pinned_by && !may_choose_again_;
  const StepId held = NewestCommitted();
  return abandoned || restores_.Holds(heard) ? held : std::max(held, heard);
}

Result<StepId> Latest::ResolveForOperator() {
  for (const Of of : {Of::kOffered, Of::kAll}) {
    const Result<std::optional<StepId>> found = NewestBefore({UINT64_MAX, 0}, of);
    if (const std::optional<StepId> newest = found.ok() ? *found : NewestInMemory(of)) return *newest;
    if (of == Of::kAll && !found.ok()) return found.status();
  }
  return NoStep();
}

Result<std::optional<StepId>> Latest::OwnStep(Incarnation incarnation) {
  const std::optional<StepId> own = table_.NewestProducible(incarnation);
  const Result<std::optional<StepId>> stored =
      NewestStored(own ? *own : StepId{incarnation, 0}, {incarnation + 1, 0}, Of::kAll);
  if (!stored.ok() || *stored) return stored;
  return own;
}

// A node with a newer committed step was away during the choice, and no rank was told.
bool Latest::BetterThanPin() const {
  return may_choose_again_ && Producible(NewestCommitted()) &&
         incarnations_.current().pin < NewestCommitted();
}

Result<std::optional<StepId>> Latest::Pinned() const {
  const IncarnationState& incarnation = incarnations_.current();
  if (incarnation.forgotten)
    return Error(Code::kUnavailable,
                 "no node remembers what incarnation %llu restores; the next incarnation can restore",
                 IncarnationNumber(incarnation.number));
  if (!incarnation.has_pin()) return std::optional<StepId>();
  if (!BetterThanPin()) {
    if (incarnation.pin == StepId() && !may_choose_again_) return NoStep();
    if (Available(incarnation.pin)) return std::optional<StepId>(incarnation.pin);
  }
  if (may_choose_again_) return std::optional<StepId>();
  // Some rank of this incarnation may have continued from it, and another step for the others would mix the two. Its
  // holder may come back. If not, the next incarnation is offered an older step.
  LOG_WARNING("%s, which incarnation %llu restores, cannot be produced now",
              incarnation.pin.ToString().c_str(), IncarnationNumber(incarnation.number));
  return Error(
      Code::kUnavailable,
      "%s, which this incarnation restores, cannot be produced now; the next one is offered an older step",
      incarnation.pin.ToString().c_str());
}

// Members that joined after the newest commit know the step, but not the roster that had it.
bool Latest::RosterIsUnknown() const {
  const StepId known = NewestKnown();
  return roster_.record().revision == 0 && context_.protocol >= kRosterSince && known != StepId() &&
         !Available(known);
}

// A missing node may hold a step that no member has. It is often on its way as long as ranks are missing, too.
std::string Latest::WhyWait() const {
  const StepId known = NewestKnown();
  const uint32_t ranks = incarnations_.ranks_present();
  const uint32_t world = incarnations_.current().world_size;
  if (roster_.Missing() == 0 && !RosterIsUnknown()) return {};
  if (known != StepId() && !Available(known))
    return "committed " + known.ToString() + " cannot be produced without them";
  if (!roster_.MayChoose()) return "they may know of a newer commit";
  return ranks < world ? std::to_string(ranks) + " of " + std::to_string(world) + " ranks are here" : "";
}

std::string Latest::NamesOfMissing() const {
  return roster_.Missing() == 0 ? "nodes whose names no member knows" : roster_.NamesOfMissing();
}

void Latest::NoneMissing() {
  if (!RosterIsUnknown()) missing_since_ = 0;
}

std::string Latest::Waiting() const {
  const TimeUs until = missing_since_ + context_.view.settings.wait_for_missing_us;
  const std::string why = WhyWait();
  if (missing_since_ == 0 || until <= context_.now || why.empty()) return {};
  return "missing " + NamesOfMissing() + ": " + why + "; waits " +
         std::to_string((until - context_.now + 999'999) / 1'000'000) +
         " s more, or until `ropeteam forget` gives them up";
}

Status Latest::WaitForMissing() {
  const std::string why = WhyWait();
  if (why.empty()) {
    missing_since_ = 0;
    return OkStatus();
  }
  if (missing_since_ == 0) missing_since_ = context_.now;
  const std::string waiting = Waiting();
  if (!waiting.empty()) return Error(Code::kUnavailable, "%s", waiting.c_str());
  if (said_for_ == incarnations_.current().number) return OkStatus();
  said_for_ = incarnations_.current().number;
  LOG_WARNING("missing %s: %s; waited %llu s and goes on without them", NamesOfMissing().c_str(), why.c_str(),
              static_cast<unsigned long long>(context_.view.settings.wait_for_missing_us / 1'000'000));
  return OkStatus();
}

Result<StepId> Latest::Resolve(Incarnation asking) {
  if (asking == 0) return ResolveForOperator();
  const Result<std::optional<StepId>> own = OwnStep(asking);
  if (!own.ok()) return own.status();
  if (*own) return **own;
  const Result<std::optional<StepId>> pinned = Pinned();
  if (!pinned.ok()) return pinned.status();
  if (*pinned) return **pinned;
  ROPETEAM_RETURN_IF_ERROR(WaitForMissing());
  return Choose(asking);
}

Result<StepId> Latest::Choose(Incarnation asking) {
  const IncarnationState& incarnation = incarnations_.current();
  if (const std::optional<StepId> later = stored_.Newest(); later && asking < later->incarnation)
    return Error(Code::kStale, "storage has %s, of an incarnation after this one: restart the world",
                 later->ToString().c_str());
  Result<std::optional<StepId>> offered = NewestBefore({asking, 0}, Of::kOffered);
  // Offer a quarantined step rather than none.
  const bool has_other = !offered.ok() || *offered;
  if (!has_other) offered = NewestBefore({asking, 0}, Of::kAll);
  if (!offered.ok()) return offered.status();
  const std::optional<StepId> newest = *offered;
  if (!stored_.known() && newest)
    LOG_WARNING("%s is chosen from memory: %s", newest->ToString().c_str(), stored_.WhyUnknown().c_str());
  if (const StepId id = NewestKnown(); newest.value_or(StepId()) < id) {
    if (!newest)
      return Error(Code::kUnavailable,
                   "committed %s cannot be produced, and there is no older step: bring back %s, or give the "
                   "step up with `ropeteam quarantine %llu`",
                   id.ToString().c_str(),
                   roster_.Missing() == 0 ? "its copies" : roster_.NamesOfMissing().c_str(),
                   static_cast<unsigned long long>(id.step));
    LOG_WARNING("committed %s cannot be produced and is given up, offering %s", id.ToString().c_str(),
                newest->ToString().c_str());
  }
  if (!newest) ROPETEAM_RETURN_IF_ERROR(NothingGood());
  const StepId chosen = newest.value_or(StepId());
  if (!has_other && newest)
    LOG_WARNING("all steps are quarantined: %s, the newest, is offered anyway", newest->ToString().c_str());
  for (const RestoreNote& note : restores_.notes())
    if (chosen < note.step && restores_.Holds(note.step) && Available(note.step))
      restores_.PassOver(note.step, chosen);
  if (incarnation.has_pin() && incarnation.pin != chosen)
    LOG_WARNING("%s was not told to any rank and %s: choosing again", incarnation.pin.ToString().c_str(),
                BetterThanPin() ? "is older than a committed step that can be produced again"
                                : "cannot be produced now");
  incarnations_.Pin(chosen);
  chosen_for_ = asking;
  may_choose_again_ = true;
  if (!newest) return NoStep();
  ROPETEAM_CHECK(Available(*newest));
  LOG_INFO("incarnation %llu restores %s%s", IncarnationNumber(incarnation.number),
           newest->ToString().c_str(), Producible(*newest) ? "" : " from storage");
  return *newest;
}

// Storage has steps, and every one is damaged: the job does not begin from nothing unless an operator says so.
Status Latest::NothingGood() const {
  std::set<StepId> given_up;
  for (const RestoreNote& note : restores_.notes())
    if (note.quarantined && note.by_hand) given_up.insert(note.step);
  const std::string damage = stored_.Damage(given_up);
  if (damage.empty()) return OkStatus();
  return Error(Code::kCorrupt,
               "no step on storage is good, the newest is %s; `ropeteam quarantine STEP` gives one up",
               damage.c_str());
}

Result<StepId> Latest::NewestPersisted() {
  if (!stored_.used()) return Error(Code::kUnsupported, "this job has no storage");
  Result<std::optional<StepId>> stored = NewestStored(std::nullopt, {UINT64_MAX, 0}, Of::kOffered);
  if (stored.ok() && !*stored) stored = NewestStored(std::nullopt, {UINT64_MAX, 0}, Of::kAll);
  if (!stored.ok()) return stored.status();
  ROPETEAM_RETURN_IF_ERROR(*stored ? OkStatus() : NothingGood());
  if (!*stored) return Error(Code::kNotFound, "there is no step on storage");
  return **stored;
}

Result<StepId> Latest::ResolveStep(const LocateQuestion& locate) const {
  if (locate.exact != 0) return StepId{locate.exact, locate.step};
  const StepId own{locate.incarnation, locate.step};
  if (Available(own)) return own;
  const IncarnationState& incarnation = incarnations_.current();
  // This holds even if it cannot be produced: another step of this number is not the one that the other ranks have
  // restored.
  if (incarnation.has_pin() && incarnation.pin.step == locate.step &&
      locate.incarnation == incarnation.number)
    return incarnation.pin;
  const StepId* partial = nullptr;
  for (auto step = table_.steps().rbegin(); step != table_.steps().rend(); ++step) {
    if (step->first.step != locate.step) continue;
    if (step->second.producible()) return step->first;
    if (partial == nullptr) partial = &step->first;
  }
  if (const std::optional<StepId> stored = stored_.NewestOf(locate.step)) return *stored;
  if (partial == nullptr)
    return Error(Code::kNotFound, "no node holds a shard of step %llu",
                 static_cast<unsigned long long>(locate.step));
  return *partial;
}

void Latest::Wait(NodeId from, uint64_t number, const LatestQuestion& question) {
  ROPETEAM_CHECK(question.incarnation != 0);  // an operator's question depends on no pin
  waiting_[{from, number}] = question;
}

}  // namespace ropeteam::engine
