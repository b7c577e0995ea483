// SPDX-License-Identifier: Apache-2.0
#include "core/engine/latest.h"

#include <optional>

#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::engine {

bool Latest::Producible(const StepId& id) const {
  const StepTable::StepState* step = table_.Find(id);
  return step != nullptr && step->producible();
}

StepId Latest::NewestCommitted() const {
  for (auto step = table_.steps().rbegin(); step != table_.steps().rend(); ++step)
    if (step->second.committed && !restores_.Holds(step->first)) return step->first;
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
  if (!stored_.known()) {
    stored_.Hurry();
    if (waits_since_ == 0) waits_since_ = context_.now;
    const bool other = floor || NewestInMemory(Of::kAll);
    if (other && waits_since_ + kStorageWaitUs <= context_.now) return std::optional<StepId>();
    return Error(Code::kUnavailable, "%s; storage may have a newer step", stored_.WhyUnknown().c_str());
  }
  while (const std::optional<StepId> newest = stored_.NewestBefore(end)) {
    // The job has steps of its own in memory, so it does not begin from another job's steps.
    if (floor && (!(*floor < *newest) || stored_.IsOfSource(*newest))) break;
    if (const std::shared_ptr<const StoredStep> manifest = stored_.Manifest(*newest)) {
      if (!stored_.IsOfSource(*newest)) restores_.LearnStored(manifest->restored);
      if (of == Of::kAll || !restores_.Holds(*newest)) return newest;
      end = *newest;
      continue;
    }
    if (!stored_.Has(*newest)) continue;  // damaged: try the next older one
    return Error(Code::kUnavailable, "the manifest of %s on storage is being read%s",
                 newest->ToString().c_str(), stored_.Because().c_str());
  }
  return std::optional<StepId>();
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

Result<StepId> Latest::Resolve(Incarnation asking, size_t members, const JobSettings& settings) {
  const Status none = Error(Code::kNotFound, "there is no step of which every rank's shard can be produced");
  if (asking == 0) {
    for (const Of of : {Of::kOffered, Of::kAll}) {
      const Result<std::optional<StepId>> found = NewestBefore({UINT64_MAX, 0}, of);
      if (const std::optional<StepId> newest = found.ok() ? *found : NewestInMemory(of)) return *newest;
      if (of == Of::kAll && !found.ok()) return found.status();
    }
    return none;
  }
  // The incarnation's own steps may be on storage only.
  const std::optional<StepId> own = table_.NewestProducible(asking);
  const Result<std::optional<StepId>> own_stored =
      NewestStored(own ? *own : StepId{asking, 0}, {asking + 1, 0}, Of::kAll);
  if (!own_stored.ok()) return own_stored.status();
  if (*own_stored) return **own_stored;
  if (own) return *own;
  const IncarnationState& incarnation = incarnations_.current();
  if (incarnation.forgotten)
    return Error(Code::kUnavailable,
                 "no node remembers what incarnation %llu restores; the next incarnation can restore",
                 IncarnationNumber(incarnation.number));
  // A better step exists if a node with a newer committed step was away during the choice, and no rank was told.
  const bool better =
      may_choose_again_ && Producible(NewestCommitted()) && incarnation.pin < NewestCommitted();
  if (incarnation.has_pin() && !better) {
    if (incarnation.pin == StepId() && !may_choose_again_) return none;
    if (Available(incarnation.pin)) return incarnation.pin;
  }
  if (incarnation.has_pin() && !may_choose_again_) {
    // Some rank of this incarnation may have continued from it, and another step for the others would mix the two. Its
    // holder may come back. If not, the next incarnation is offered an older step.
    LOG_WARNING("%s, which incarnation %llu restores, cannot be produced now",
                incarnation.pin.ToString().c_str(), IncarnationNumber(incarnation.number));
    return Error(
        Code::kUnavailable,
        "%s, which this incarnation restores, cannot be produced now; the next one is offered an older step",
        incarnation.pin.ToString().c_str());
  }
  if (members + settings.replicas < settings.nodes)
    return Error(
        Code::kUnavailable,
        "%zu of %u nodes are here, and with more than %u missing a committed step might not be seen: start "
        "the others, or all daemons again with --nodes %zu",
        members, settings.nodes, settings.replicas, members);
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
  if (const StepId id = NewestCommitted(); newest.value_or(StepId()) < id) {
    if (!newest && members < settings.nodes)
      return Error(Code::kUnavailable,
                   "committed %s cannot be produced by the nodes that are here, and not all of the job's are",
                   id.ToString().c_str());
    LOG_WARNING("committed %s cannot be produced, offering %s", id.ToString().c_str(),
                newest ? newest->ToString().c_str() : "nothing");
  }
  if (!newest && !stored_.source_damage().empty())
    return Error(Code::kCorrupt, "no step of %s is good: %s", settings.restore_from.c_str(),
                 stored_.source_damage().c_str());
  const StepId chosen = newest.value_or(StepId());
  if (!has_other && newest)
    LOG_WARNING("all steps are quarantined: %s, the newest, is offered anyway", newest->ToString().c_str());
  for (const RestoreNote& note : restores_.notes())
    if (chosen < note.step && restores_.Holds(note.step) && Available(note.step))
      restores_.PassOver(note.step, chosen);
  if (incarnation.has_pin() && incarnation.pin != chosen)
    LOG_WARNING(
        "%s was not told to any rank and %s: choosing again", incarnation.pin.ToString().c_str(),
        better ? "is older than a committed step that can be produced again" : "cannot be produced now");
  incarnations_.Pin(chosen);
  may_choose_again_ = true;
  if (!newest) return none;
  ROPETEAM_CHECK(Available(*newest));
  LOG_INFO("incarnation %llu restores %s%s", IncarnationNumber(incarnation.number),
           newest->ToString().c_str(), Producible(*newest) ? "" : " from storage");
  return *newest;
}

Result<StepId> Latest::NewestPersisted() {
  if (!stored_.used()) return Error(Code::kUnsupported, "this job has no storage");
  Result<std::optional<StepId>> stored = NewestStored(std::nullopt, {UINT64_MAX, 0}, Of::kOffered);
  if (stored.ok() && !*stored) stored = NewestStored(std::nullopt, {UINT64_MAX, 0}, Of::kAll);
  if (!stored.ok()) return stored.status();
  if (!*stored) return Error(Code::kNotFound, "there is no good step on storage");
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
