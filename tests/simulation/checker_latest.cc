// SPDX-License-Identifier: Apache-2.0
//
// Checks what an incarnation is told to restore. The rule follows from ARCHITECTURE.md alone, not from what
// the engine can know. docs/testing.md ("The oracle") states it.
#include <algorithm>
#include <cinttypes>

#include "tests/simulation/checker.h"

namespace ropeteam::simulation {

// ---- who is away

bool Checker::Remembered(const Host& host, const RestoreRecord& restore) const {
  return std::any_of(host.view.members.begin(), host.view.members.end(),
                     [&](const Member& member) { return restore.told.contains(member.id); });
}

void Checker::NoteTold(const Host& host) {
  if (restores_.empty()) return;
  auto& [incarnation, restore] = *restores_.rbegin();
  if (restore.answered && !restore.told.contains(host.id) && host.engine->incarnation() == incarnation &&
      Remembered(host, restore))
    restore.told.insert(host.id);
}

// A view ends for its members when the host gets another one.
void Checker::NoteSeen(const Host& host) {
  auto& [daemon, view] = viewed_[host.index];
  if (daemon == host.id && view.epoch == host.view.epoch) return;
  for (const View* at : {&std::as_const(view), &host.view})
    for (const Member& member : at->members)
      if (const auto place = places_.find(member.id); place != places_.end())
        last_seen_[place->second] = scheduler_.now();
  daemon = host.id;
  view = host.view;
}

bool Checker::AwayFor(const Place& place, TimeUs time) const {
  const Host& away = *hosts_[place.host];
  const bool seen = std::any_of(hosts_.begin(), hosts_.end(), [&](const auto& host) {
    return host.get() != &away && host->daemon_runs() && away.daemon_runs() && host->view.Contains(away.id);
  });
  const auto last = last_seen_.find(place);
  return !seen && (last == last_seen_.end() ? 0 : last->second) + time <= scheduler_.now();
}

bool Checker::WaitedFor(const StepId& step, const View& view) const {
  const uint32_t world = WorldOf(step);
  for (Rank rank = 0; rank < world; ++rank) {
    const Shard* shard = Find({step.incarnation, step.step, rank});
    if (shard == nullptr) continue;
    bool here = false;
    bool waited = true;
    for (const auto& [place, copy] : shard->copies) {
      if (copy.fate != Fate::kPresent) continue;
      const Host& host = *hosts_[place.host];
      here = here || (host.daemon_runs() && view.Contains(host.id));
      waited = waited && AwayFor(place, options_.wait_for_missing_us);
    }
    if (!here && waited) return true;
  }
  return false;
}

// No member was in the view in which ranks were told of the step, nor has heard from memory that was.
bool Checker::NobodyKnows(const View& view, const StepId& step) const {
  return std::none_of(hosts_.begin(), hosts_.end(), [&](const auto& host) {
    return host->daemon_runs() && view.Contains(host->id) && host->knows.contains(step);
  });
}

// ---- what is owed

// A death is known only some time after it. So two losses within that time are one trouble.
bool Checker::Unhealed(const Shard& shard, TimeUs lost_at) const {
  return shard.full_at <= lost_at || scheduler_.now() < lost_at + kNewsUs;
}

size_t Checker::Losses(const Shard& shard) const {
  return static_cast<size_t>(std::count_if(shard.lost_at.begin(), shard.lost_at.end(),
                                           [&](TimeUs lost_at) { return Unhealed(shard, lost_at); }));
}

// Only memory that was lost excuses an older step. Memory that is away does not: then the answer is to wait.
bool Checker::Owed(const StepId& step, const View& view) const {
  if (Retired(step) || quarantined_.contains(step) || NobodyKnows(view, step)) return false;
  const uint32_t world = WorldOf(step);
  std::set<size_t> hosts_lost;
  bool reachable = true;
  for (Rank rank = 0; rank < world; ++rank) {
    const Shard* shard = Find({step.incarnation, step.step, rank});
    if (shard == nullptr) return false;
    size_t hurt = 0;
    CountedRight(*shard, &hurt);
    const size_t lost = Losses(*shard) + hurt;
    if (lost > options_.replicas) return false;
    size_t away = 0;
    for (const auto& [place, copy] : shard->copies) {
      if (copy.counted() && !view.Contains(hosts_[place.host]->id)) ++away;
      if (copy.fate == Fate::kLost && copy.role != Role::kCache && Unhealed(*shard, copy.since))
        hosts_lost.insert(place.host);
    }
    reachable = reachable && lost + away <= options_.replicas;
  }
  if (reachable) return true;
  // Under two coordinators one loss may hide what only the other side knows (ARCHITECTURE.md, leases).
  const size_t allowed = options_.faults.two_coordinators_max_us != 0 ? 0 : options_.replicas;
  return hosts_lost.size() <= allowed && !WaitedFor(step, view);
}

StepId Checker::NewestOwed(const View& view, TimeUs told_before) const {
  for (auto at = committed_.rbegin(); at != committed_.rend(); ++at)
    if (at->second <= told_before && Owed(at->first, view)) return at->first;
  return {};
}

// A node that is not lost knows of the commit, and all that is not lost could produce the step.
StepId Checker::KnownSomewhere(const View& view, TimeUs told_before) const {
  for (const auto& [step, told_at] : committed_) {
    if (told_at > told_before || Retired(step) || quarantined_.contains(step) || !Producible(step)) continue;
    if (options_.faults.two_coordinators_max_us != 0) return {};
    if (WaitedFor(step, view) || NobodyKnows(view, step)) continue;
    for (auto at = shards_.lower_bound({step.incarnation, step.step, 0});
         at != shards_.end() && StepOf(at->first) == step; ++at)
      for (const auto& [place, copy] : at->second.copies)
        if (copy.fate == Fate::kPresent && copy.committed) return step;
  }
  return {};
}

StepId Checker::FloorOf(const Host& host) const {
  // More than the kept steps: if those are lost, an older one that is not dropped yet may be restored.
  constexpr size_t kLookedAtMax = 8;
  size_t looked_at = 0;
  for (auto at = committed_.rbegin(); at != committed_.rend() && looked_at < kLookedAtMax;
       ++at, ++looked_at) {
    // A copy that was made or repaired since may not be reported yet.
    const TimeUs reported = std::max(at->second, scheduler_.now() - kNewsUs);
    if (!quarantined_.contains(at->first) && ProducibleOnMembers(at->first, host, reported)) return at->first;
  }
  return {};
}

// The newest sound step on storage, whatever single nodes see there. If nobody was told of it, every listing
// must have had the time to show it. Under two coordinators the other side may have been told.
StepId Checker::NewestStored(const Host& host) const {
  StepId newest = storage_.NewestSound();
  if (quarantined_.contains(newest)) newest = {};
  const bool one_side = options_.faults.two_coordinators_max_us == 0;
  for (auto at = persisted_.rbegin(); at != persisted_.rend(); ++at)
    if (storage_.Sound(*at) && storage_.Listed(*at) && !quarantined_.contains(*at) &&
        (one_side || KnownInViewOf(host, *at)))
      return std::max(newest, *at);
  return newest;
}

// ---- answers

void Checker::OnLatestInput(const Host& host, const Session& session) {
  if (session.incarnation == 0) return;
  RestoreRecord& restore = restores_[session.incarnation];
  // Another opening under the same token restores for itself.
  if (options_.same_token_again() && session.launch > restore.launch) restore = {};
  if (restore.asked_at != 0) return;
  restore.launch = session.launch;
  restore.asked_at = scheduler_.now();
  restore.asked_in = host.view.epoch;
  restore.floor = FloorOf(host);
  restore.stored_floor = NewestStored(host);
}

void Checker::CheckOffered(const StepId& step, uint32_t world_size) {
  if (WorldOf(step) != world_size)
    return Fail("latest %s has a world of %u, not %u", step.ToString().c_str(), WorldOf(step), world_size);
  std::set<uint64_t> launches;
  for (Rank rank = 0; rank < world_size; ++rank)
    if (const Shard* shard = Find({step.incarnation, step.step, rank})) launches.insert(shard->launch);
  if (launches.size() > 1) return Fail("latest %s mixes openings", step.ToString().c_str());
  if (Disagrees(step)) return Fail("latest %s: its ranks gave different values", step.ToString().c_str());
  const TimeUs now = scheduler_.now();
  const bool there =
      Covered(step, [&](const Place& place, const Shard& shard, const Copy& copy, uint32_t chunk) {
        if (copy.fate != Fate::kPresent) return copy.since + kNewsUs >= now;
        // A flip that has not been read since is not known.
        return shard.flips.contains({place, chunk}) ||
               ChunkRight(*hosts_[place.host], copy.extents, copy.encryption, shard, chunk);
      });
  if (!Producible(step)) ++statistics_.restored_from_storage;
  if (!there && !storage_.Has(step)) Fail("latest %s cannot be produced", step.ToString().c_str());
}

void Checker::OnLatestAnswer(const Host& host, const Session& session, const Pending& request,
                             const StepId& step, uint32_t world_size) {
  ++statistics_.latest_answers;
  why_it_waits_.clear();
  if (step != StepId()) {
    ++statistics_.latest_found;
    CheckOffered(step, world_size);
  }
  if (session.incarnation == 0) return;  // of an operator
  RestoreRecord& restore = restores_[session.incarnation];
  if (session.launch < restore.launch) return;
  if (restore.answered && !restore.completed && step != restore.answer)
    return Fail("latest is %s for rank %u, and was %s for another of incarnation %" PRIu64,
                step.ToString().c_str(), session.rank, restore.answer.ToString().c_str(),
                session.incarnation);
  if (restore.answered && !restore.completed) return;
  if (!restore.answered && restore.asked_in == host.view.epoch && step < restore.floor &&
      ProducibleOnMembers(restore.floor, host))
    return Fail("latest is %s, but the members hold all of %s", step.ToString().c_str(),
                restore.floor.ToString().c_str());
  if (!restore.answered && step < restore.stored_floor && storage_.Sound(restore.stored_floor) &&
      !quarantined_.contains(restore.stored_floor))
    return Fail("latest is %s, but storage has %s", step.ToString().c_str(),
                restore.stored_floor.ToString().c_str());
  const StepId owed = NewestOwed(host.view, request.asked_at);
  const auto right = restore.rightly_chosen.find(step);
  if (step < owed && (right == restore.rightly_chosen.end() || committed_.at(owed) > right->second))
    return Fail("latest is %s for incarnation %" PRIu64
                ", but %s was told COMMITTED, and at most %u nodes that held it have lost their memory%s",
                step.ToString().c_str(), session.incarnation, owed.ToString().c_str(), options_.replicas,
                DescribeCopies(owed, SIZE_MAX).c_str());
  if (const StepId known = KnownSomewhere(host.view, request.asked_at);
      step == StepId() && known != StepId() && right == restore.rightly_chosen.end())
    return Fail("latest is nothing for incarnation %" PRIu64
                ", but a node that is not lost knows that %s is committed, and memory has all of it%s",
                session.incarnation, known.ToString().c_str(), DescribeCopies(known, SIZE_MAX).c_str());
  if (restore.answered) return;
  restore.answered = true;
  restore.answer = step;
  for (const Member& member : host.view.members) restore.told.insert(member.id);
}

// The leader may have answered although no rank has received the answer. So the choice is judged by what was
// lost when it was first announced. What is repaired later cannot change it.
void Checker::OnChosen(const Host& host, Incarnation incarnation, const StepId& pin) {
  const auto restore = restores_.find(incarnation);
  if (restore == restores_.end() || restore->second.answered || !restore->second.chosen.insert(pin).second)
    return;
  const TimeUs now = scheduler_.now();
  if (pin < NewestOwed(host.view, now)) return;
  if (pin == StepId() && KnownSomewhere(host.view, now) != StepId()) return;
  restore->second.rightly_chosen[pin] = now;
}

}  // namespace ropeteam::simulation
