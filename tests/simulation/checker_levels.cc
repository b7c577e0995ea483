// SPDX-License-Identifier: Apache-2.0
//
// Checks what each level promises, to the ranks and to waits while nobody saves.
#include "tests/simulation/checker.h"

#include <algorithm>

namespace ropeteam::simulation {

// Any R hosts can be lost if each shard is on R + 1 hosts. Copies that are already lost, and copies with
// flipped bits, count as part of those R until there are R + 1 right copies again.
void Checker::CheckPromise() {
  size_t newer = 0;
  for (auto at = committed_.rbegin(); at != committed_.rend() && newer < options_.keep_steps; ++at, ++newer) {
    const StepId& step = at->first;
    if (drops_asked_.contains(step) && Retired(step)) continue;
    const uint32_t world = WorldOf(step);
    bool kept = true;
    for (Rank rank = 0; rank < world; ++rank) {
      const ShardId id{step.incarnation, step.step, rank};
      const auto found = shards_.find(id);
      if (found == shards_.end() || !found->second.sealed) return;  // CheckCommitted() has said so
      Shard& shard = found->second;
      size_t hurt = 0;
      const size_t right = CountedRight(shard, &hurt);
      // A surplus copy may be about to be dropped because of one that has just been lost.
      const bool news = std::any_of(shard.lost_at.begin(), shard.lost_at.end(),
                                    [this](TimeUs lost_at) { return scheduler_.now() < lost_at + kNewsUs; });
      if (right > options_.replicas && !news) shard.full_at = scheduler_.now();
      const size_t losses = Losses(shard);
      if (right + hurt + losses <= options_.replicas)
        return Fail(
            "%s is committed, and no newer step is kept; of rank %u %zu hosts have a copy that counts, %zu a "
            "bad one, %zu were lost, %u promised",
            step.ToString().c_str(), rank, right, hurt, losses, options_.replicas + 1);
      kept = kept && right != 0;
    }
    if (kept) return;
  }
}

bool Checker::FullyReplicated(const StepId& step) const {
  const uint32_t world = WorldOf(step);
  for (Rank rank = 0; rank < world; ++rank) {
    const Shard* shard = Find({step.incarnation, step.step, rank});
    if (shard == nullptr) return false;
    const auto there = [&](const auto& entry) {
      const Copy& copy = entry.second;
      const bool going = copy.fate == Fate::kDropped && copy.since == scheduler_.now();
      return copy.counted() || (going && copy.role != Role::kCache);
    };
    if (static_cast<size_t>(std::count_if(shard->copies.begin(), shard->copies.end(), there)) <=
        options_.replicas)
      return false;
  }
  return world != 0;
}

void Checker::CheckReplicated(const Host& host, const ShardId& id, const char* said) {
  const Shard* shard = Find(id);
  if (shard == nullptr)
    return Fail("host %zu said %s of %s, which is not even sealed", host.index, said, id.ToString().c_str());
  const auto holders = [&](bool dropped_too) {
    std::set<size_t> hosts;
    for (const auto& [place, copy] : shard->copies)
      if (place.host != shard->saver && copy.role != Role::kCache && copy.fate != Fate::kOther &&
          (copy.fate != Fate::kDropped || dropped_too))
        hosts.insert(place.host);
    return hosts.size();
  };
  if (holders(false) >= options_.replicas) return;
  // A holder may drop a copy that is no longer needed in the same input that sealed it. Its acknowledgement
  // is sent nevertheless.
  const bool superseded = Superseded(StepOf(id));
  if (superseded && !Committed(StepOf(id))) return;
  if (holders(superseded) < options_.replicas)
    Fail("host %zu said %s of %s with %zu copies sealed on other nodes, %u promised", host.index, said,
         id.ToString().c_str(), holders(superseded), options_.replicas);
}

void Checker::CheckCommitted(const Host& host, const StepId& step) {
  const uint32_t world = WorldOf(step);
  if (world == 0)
    return Fail("host %zu said COMMITTED of %s, of which nothing is sealed", host.index,
                step.ToString().c_str());
  std::set<uint64_t> launches;
  for (Rank rank = 0; rank < world; ++rank) {
    const ShardId id{step.incarnation, step.step, rank};
    const Shard* shard = Find(id);
    if (shard == nullptr)
      return Fail("host %zu said COMMITTED of %s, but rank %u of %u has not saved it", host.index,
                  step.ToString().c_str(), rank, world);
    if (shard->world_size != world)
      return Fail("host %zu said COMMITTED of %s, whose ranks disagree about the world's size", host.index,
                  step.ToString().c_str());
    launches.insert(shard->launch);
    CheckReplicated(host, id, "COMMITTED");
  }
  if (Disagrees(step))
    return Fail("host %zu said COMMITTED of %s, of which ranks gave different values", host.index,
                step.ToString().c_str());
  if (launches.size() > 1)
    Fail("host %zu said COMMITTED of %s, which mixes %zu incarnations", host.index, step.ToString().c_str(),
         launches.size());
}

void Checker::OnEvent(const Host& host, const LevelEvent& event) {
  // Also if it is dropped again before the input ends.
  if (event.level == Level::kLocal)
    if (const auto saved = shards_.find(event.shard); saved != shards_.end()) saved->second.sealed = true;
  if (event.level == Level::kReplicated && event.shard.rank != LevelEvent::kNoRank) {
    ++statistics_.replicated;
    CheckReplicated(host, event.shard, "REPLICATED");
  }
  const StepId step = StepOf(event.shard);
  if (event.level == Level::kPersisted) {
    statistics_.persisted += persisted_.insert(step).second ? 1 : 0;
    return CheckPersisted(host, step);
  }
  if (event.level != Level::kCommitted || event.shard.rank != LevelEvent::kNoRank) return;
  heard_[step].insert(host.id);
  if (Committed(step)) return;
  ++statistics_.committed;
  CheckCommitted(host, step);
  if (never_committed_.contains(step))
    Fail("host %zu said COMMITTED of %s, which was dropped before", host.index, step.ToString().c_str());
  // If the ranks of the newest incarnation were told to restore an older step, this step is lost for them.
  if (!restores_.empty()) {
    const auto& [newest, restore] = *restores_.rbegin();
    if (newest > step.incarnation && restore.answered && restore.answer < step && Remembered(host, restore))
      Fail("host %zu said COMMITTED of %s, but incarnation %llu has restored %s", host.index,
           step.ToString().c_str(), static_cast<unsigned long long>(newest),
           restore.answer.ToString().c_str());
  }
  committed_[step] = scheduler_.now();
  for (const Member& member : host.view.members)
    if (const auto place = places_.find(member.id); place != places_.end())
      if (Host& knowing = *hosts_[place->second.host]; PlaceOf(knowing) == place->second)
        knowing.knows.Add(step);
  promise_dirty_ = true;
  restores_[step.incarnation].completed = true;
}

// Every shard's bytes are in the store itself, whatever single nodes see there.
void Checker::CheckPersisted(const Host& host, const StepId& step) {
  if (storage_.Pruned(step)) return;
  // In a job that began with one node, nobody can say that this node sees another directory.
  if (host.view.members.size() == 1 && options_.nodes_announced == 1 && !storage_.Has(step)) return;
  if (!storage_.Has(step))
    return Fail("host %zu said PERSISTED of %s, which is not on storage", host.index,
                step.ToString().c_str());
  if (storage_.Sound(step)) CheckStoredBytes(step);
}

bool Checker::MustEnd(const OpenWait& wait) const {
  const StepId step = StepOf(wait.shard);
  if (Find(wait.shard) == nullptr) return false;
  if (Committed(step)) return true;
  // A wait for an incomplete step may stay open: restarts may have lost what daemons knew of it.
  // Any wait may, if bits have flipped in the last copies.
  if ((wait.level <= Level::kReplicated || Complete(step)) && Producible(step)) return true;
  const bool newer_committed = !committed_.empty() && committed_.rbegin()->first > step;
  return newer_committed || FollowedByIncarnation(step.incarnation);
}

bool Checker::Complete(const StepId& step) const {
  const uint32_t world = WorldOf(step);
  for (Rank rank = 0; rank < world; ++rank) {
    const Shard* shard = Find({step.incarnation, step.step, rank});
    if (shard == nullptr || std::none_of(shard->copies.begin(), shard->copies.end(),
                                         [](const auto& copy) { return copy.second.counted(); }))
      return false;
  }
  return world != 0;
}

}  // namespace ropeteam::simulation
