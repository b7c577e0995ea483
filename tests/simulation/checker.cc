// SPDX-License-Identifier: Apache-2.0
//
// Tracks sealed copies, commits and losses. checker_latest.cc checks what incarnations restore,
// checker_answers.cc the other answers to ranks, checker_levels.cc the promises of the levels, checker_wire.cc
// the transfers of a job that encrypts.
#include "tests/simulation/checker.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <utility>

#include "core/base/checksum.h"
#include "tests/toy_cipher.h"

namespace ropeteam::simulation {
namespace {

std::vector<uint32_t> PlainCrcsOf(const SealedShard& shard) {
  return PlainCrcs(shard.encryption, shard.crcs);
}

const char* RoleName(Role role) {
  return role == Role::kOwn ? "own" : role == Role::kReplica ? "replica" : "cache";
}

}  // namespace

void Checker::Fail(const char* format, ...) {
  if (failed()) return;
  char text[1024];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  failure_ = text;
}

const Checker::Shard* Checker::Find(const ShardId& id) const {
  const auto at = shards_.find(id);
  return at == shards_.end() || !at->second.sealed ? nullptr : &at->second;
}

const std::vector<uint32_t>* Checker::CrcsOf(const ShardId& id) const {
  const Shard* shard = Find(id);
  return shard == nullptr ? nullptr : &shard->crcs;
}

uint32_t Checker::WorldOf(const StepId& step) const {
  for (auto at = shards_.lower_bound({step.incarnation, step.step, 0}); at != shards_.end(); ++at) {
    if (StepOf(at->first) != step) break;
    if (at->second.sealed) return at->second.world_size;
  }
  return 0;
}

bool Checker::ChunkRight(const Host& host, const std::vector<Extent>& extents, const Encryption& encryption,
                         const Shard& shard, size_t chunk) const {
  const uint64_t length = ChunkLength(shard.stream_bytes, shard.chunk_bytes, chunk);
  const std::byte* bytes = host.chunk(ChunkAt(extents, chunk));
  if (encryption.tags.empty()) return Crc32c(bytes, length) == shard.crcs[chunk];
  return Crc32c(ToyCrypt(bytes, length, ToyKey(encryption.key, encryption.salt, chunk)).data(), length) ==
         shard.crcs[chunk];
}

bool Checker::CopyRight(const Host& host, const Copy& copy, const Shard& shard, std::string* why) const {
  const Place place = PlaceOf(host);
  for (uint32_t i = 0; i < shard.crcs.size(); ++i) {
    if (std::binary_search(copy.bad.begin(), copy.bad.end(), i) || shard.flips.contains({place, i})) continue;
    if (ChunkRight(host, copy.extents, copy.encryption, shard, i)) continue;
    *why = "chunk ";
    *why += std::to_string(i);
    return false;
  }
  return true;
}

// ---- copies

void Checker::OnCommitInput(const Session& session, Step step, const SaveCommitInput& commit,
                            uint64_t chunk_bytes, uint64_t agreement) {
  const ShardId id{session.incarnation, step, session.rank};
  ReleaseGrant(session, commit.save);
  Shard& shard = shards_[id];
  if (shard.sealed) {  // the engine must refuse this save, or it replaces the former one
    if (session.host != shard.saver && commit.crcs != shard.crcs)
      shard.candidates[session.host] = {commit.stream_bytes, commit.crcs, agreement};
    return;
  }
  shard.launch = session.launch;
  shard.world_size = session.world_size;
  shard.stream_bytes = commit.stream_bytes;
  shard.chunk_bytes = chunk_bytes;
  shard.crcs = commit.crcs;
  shard.agreement = agreement;
  shard.saver = session.host;
}

void Checker::OnSaveBeginInput(const Session& session, Step step) {
  Step& begun = begun_[{session.incarnation, session.rank}];
  begun = std::max(begun, step);
}

void Checker::Observe(const Host& host) {
  if (!host.daemon_runs()) return;
  NoteTold(host);
  NoteSeen(host);
  const std::pair<NodeId, uint64_t> seen{host.id, host.store->changes()};
  if (std::exchange(observed_[host.index], seen) == seen) return;
  std::map<ShardId, Role>& known = known_[host.index];
  const auto& present = host.store->shards();
  auto before = known.begin();
  auto now = present.begin();
  while (before != known.end() || now != present.end()) {
    if (before == known.end() || (now != present.end() && now->first < before->first)) {
      OnSealed(host, *now->second);
      before = std::next(known.emplace_hint(before, now->first, now->second->role));
      ++now;
    } else if (now == present.end() || before->first < now->first) {
      OnDropped(host, before->first, before->second);
      before = known.erase(before);
    } else {
      const auto at = shards_.find(now->first);
      if (at != shards_.end() && at->second.copies[PlaceOf(host)].fate == Fate::kOther &&
          PlainCrcsOf(*now->second) == at->second.crcs) {
        OnSealed(host, *now->second);  // one input has replaced the other bytes by the right ones
      } else if (at != shards_.end()) {
        Copy& copy = at->second.copies[PlaceOf(host)];
        if (copy.encryption != now->second->encryption) {  // encrypted or decrypted, into other chunks
          const bool committed = copy.committed;
          const TimeUs since = copy.since;
          if (!copy.encryption.tags.empty() && now->second->encrypted()) ++statistics_.reencrypted;
          if (copy.fate == Fate::kPresent) OnSealed(host, *now->second);
          copy.extents = now->second->extents;
          copy.encryption = now->second->encryption;
          copy.committed = committed;
          copy.since = since;
        }
        if (copy.bad.size() > now->second->bad.size()) copy.repaired_at = scheduler_.now();
        if (copy.role != now->second->role || copy.bad != now->second->bad) promise_dirty_ = true;
        copy.role = before->second = now->second->role;
        if (copy.bad != now->second->bad) copy.bad = now->second->bad;
        if (!copy.committed && now->second->committed) OnMarked(host, *now->second, &at->second);
        copy.committed = now->second->committed;
      }
      ++before;
      ++now;
    }
  }
}

// The first marked bytes are the shard from now on, whatever the rank has saved under this name elsewhere.
void Checker::OnMarked(const Host& host, const SealedShard& sealed, Shard* shard) {
  const auto current = [&](const SealedShard& copy) {
    return copy.meta.stream_bytes == shard->stream_bytes && PlainCrcsOf(copy) == shard->crcs;
  };
  const bool right = current(sealed);
  for (const auto& [place, copy] : shard->copies)
    if (copy.committed && copy.fate == (right ? Fate::kOther : Fate::kPresent))
      return Fail("host %zu marked other bytes of %s as committed than host %zu has", host.index,
                  sealed.meta.id.ToString().c_str(), place.host);
  if (right) return;
  std::erase_if(shard->superseded,
                [&](const Variant& variant) { return variant.crcs == PlainCrcsOf(sealed); });
  shard->superseded.push_back({shard->stream_bytes, shard->crcs});
  shard->stream_bytes = sealed.meta.stream_bytes;
  shard->crcs = PlainCrcsOf(sealed);
  shard->lost_at.clear();
  promise_dirty_ = true;
  for (auto& [place, copy] : shard->copies) {
    const Host& holder = *hosts_[place.host];
    if (!holder.daemon_runs() || PlaceOf(holder) != place) continue;
    const SealedShard* there = holder.store->Find(sealed.meta.id);
    if (there == nullptr) continue;
    copy.fate = current(*there) ? Fate::kPresent : Fate::kOther;
    if (current(*there) && there->role == Role::kOwn) shard->saver = place.host;
  }
}

void Checker::OnSealed(const Host& host, const SealedShard& sealed) {
  const ShardId& id = sealed.meta.id;
  const auto at = shards_.find(id);
  if (at == shards_.end())
    return Fail("host %zu sealed %s, which no rank has saved", host.index, id.ToString().c_str());
  Shard& shard = at->second;
  const Variant variant{sealed.meta.stream_bytes, PlainCrcsOf(sealed)};
  const auto same = [&](const Variant& other) {
    return other.stream_bytes == variant.stream_bytes && other.crcs == variant.crcs;
  };
  if (std::any_of(shard.superseded.begin(), shard.superseded.end(), same)) {
    shard.copies[PlaceOf(host)] = {Fate::kOther, scheduler_.now(), sealed.role, sealed.extents, {},
                                   false,        sealed.encryption};
    return;
  }
  if (const auto candidate = shard.candidates.find(host.index);
      candidate != shard.candidates.end() && sealed.role == Role::kOwn && same(candidate->second)) {
    // The rank has moved here and saved other bytes. These are the shard from now on.
    shard.superseded.push_back({shard.stream_bytes, shard.crcs, shard.agreement});
    shard.agreement = candidate->second.agreement;
    shard.stream_bytes = variant.stream_bytes;
    shard.crcs = variant.crcs;
    shard.saver = host.index;
    shard.lost_at.clear();
    for (auto& [place, copy] : shard.copies)
      if (copy.fate == Fate::kPresent) copy.fate = Fate::kOther;
    shard.candidates.erase(candidate);
  }
  if (sealed.meta.stream_bytes != shard.stream_bytes || variant.crcs != shard.crcs)
    return Fail("host %zu sealed %s with another size or other checksums than it was saved with", host.index,
                id.ToString().c_str());
  if (sealed.meta.world_size != shard.world_size)
    return Fail("host %zu sealed %s for a world of %u, saved in one of %u", host.index, id.ToString().c_str(),
                sealed.meta.world_size, shard.world_size);
  if (!shard.sealed && (sealed.role != Role::kOwn || host.index != shard.saver))
    return Fail("host %zu sealed a copy of %s before its saver did", host.index, id.ToString().c_str());
  // A rank whose daemon has forgotten that it saved the step may save it again.
  if (shard.sealed && sealed.role == Role::kOwn) never_committed_.erase(StepOf(id));
  shard.sealed = true;
  ++statistics_.sealed;
  Copy& copy = shard.copies[PlaceOf(host)];
  copy = {Fate::kPresent, scheduler_.now(), sealed.role,      sealed.extents,
          sealed.bad,     sealed.committed, sealed.encryption};
  std::erase_if(shard.flips, [&](const auto& flip) { return flip.first == PlaceOf(host); });
  if (Committed(StepOf(id))) promise_dirty_ = true;
  for (uint32_t i = 0; !damaged_.empty() && i < shard.crcs.size(); ++i)
    if (damaged_.erase({PlaceOf(host), ChunkAt(sealed.extents, i)}) != 0 &&
        !ChunkRight(host, sealed.extents, sealed.encryption, shard, i))
      shard.flips.insert({PlaceOf(host), i});
  std::string why;
  if (!CopyRight(host, copy, shard, &why))
    Fail("host %zu sealed %s as %s with wrong bytes in %s", host.index, id.ToString().c_str(),
         RoleName(sealed.role), why.c_str());
}

void Checker::OnDropped(const Host& host, const ShardId& id, Role role) {
  const auto at = shards_.find(id);
  if (at == shards_.end()) return;
  Shard& shard = at->second;
  Copy& copy = shard.copies[PlaceOf(host)];
  const bool other = copy.fate == Fate::kOther;
  if (copy.counted() && !copy.bad.empty()) shard.lost_at.push_back(scheduler_.now());
  copy.fate = Fate::kDropped;
  copy.since = scheduler_.now();
  if (other) return;
  if (role != Role::kCache && Committed(StepOf(id))) promise_dirty_ = true;
  if (role != Role::kCache) dropped_.push_back(StepOf(id));
  to_judge_.emplace_back(id, role);
}

void Checker::JudgeDrops(const Host& host) {
  for (const auto& [id, role] : std::exchange(to_judge_, {})) JudgeDrop(host, id, role);
  if (std::exchange(promise_dirty_, false)) CheckPromise();
}

void Checker::JudgeDrop(const Host& host, const ShardId& id, Role role) {
  const Shard& shard = shards_.at(id);
  const bool broken = !shard.copies.at(PlaceOf(host)).bad.empty();
  const StepId step = StepOf(id);
  if (role != Role::kCache && !broken && !Dead(step) && committed_.upper_bound(step) == committed_.end()) {
    // Under two coordinators one side may drop a step that it has not heard the other side commit.
    const bool unheard = options_.faults.two_coordinators_max_us != 0 && drops_asked_.contains(step) &&
                         !KnownInViewOf(host, step);
    if (Committed(step) && !unheard)
      return Fail("host %zu dropped its %s copy of %s, of the newest committed step", host.index,
                  RoleName(role), id.ToString().c_str());
    // Once a later incarnation was told what it restores, an uncommitted step of a former one is never
    // committed. If the answer is still on its way to the rank, it holds for steps older than the chosen.
    bool barred = false;
    if (!restores_.empty() && restores_.rbegin()->first > step.incarnation) {
      const RestoreRecord& newest = restores_.rbegin()->second;
      barred = newest.answered || (!newest.chosen.empty() && step < *newest.chosen.rbegin());
    }
    const bool dropped = drops_asked_.contains(step) && !committed_.empty();
    if (!barred && !dropped && FullyReplicated(step))
      return Fail(
          "host %zu dropped its %s copy of %s, of a step that has all its copies and is newer than all that "
          "is committed",
          host.index, RoleName(role), id.ToString().c_str());
  }
  bool pinned = false;
  if (!restores_.empty()) {
    const RestoreRecord& newest = restores_.rbegin()->second;
    pinned = newest.answered && !newest.completed && newest.answer == step && Remembered(host, newest);
  }
  if (broken || !(pinned || Committed(step)) || (pinned ? RetiredByNewer(step) : Retired(step))) return;
  // The remaining nodes may not know of a commit although they have the copies: the leader was cut off before
  // it told them, or the nodes that knew are away, or had no copy to mark and have restarted. Such nodes keep
  // the step while it is the newest. They need not keep it once they know a newer committed step to restore.
  if (!pinned && !KnownInViewOf(host, step) && SaidToBeCommittedBeyond(host, step)) return;
  std::set<size_t> others;
  for (const auto& [place, other] : shard.copies) {
    if (place.host == host.index || other.fate == Fate::kDropped || other.fate == Fate::kOther) continue;
    if (other.fate == Fate::kLost && other.since + kNewsUs < scheduler_.now()) continue;
    others.insert(place.host);
  }
  const size_t wanted = role == Role::kCache ? 1 : options_.replicas + 1;
  if (others.size() >= wanted) return;
  // If all memory together could not produce the step, nothing is lost. Chunks dropped just now still have
  // their bytes.
  const bool worth_keeping =
      Covered(step, [&](const Place& at, const Shard& of, const Copy& copy, uint32_t chunk) {
        const bool there =
            copy.fate == Fate::kPresent || (copy.fate == Fate::kDropped && copy.since == scheduler_.now());
        return there && ChunkRight(*hosts_[at.host], copy.extents, copy.encryption, of, chunk);
      });
  if (!worth_keeping) return;
  Fail("host %zu dropped its %s copy of %s, of a step that is to be kept, with %zu others left", host.index,
       RoleName(role), id.ToString().c_str(), others.size());
}

void Checker::OnAdopted(const Host& host, bool table_damaged) {
  places_[host.id] = PlaceOf(host);
  std::map<ShardId, Role>& known = known_[host.index];
  if (table_damaged)
    std::erase_if(known, [&](const auto& entry) {
      if (host.store->shards().contains(entry.first)) return false;
      Shard& shard = shards_[entry.first];
      Copy& copy = shard.copies[PlaceOf(host)];
      if (copy.counted()) shard.lost_at.push_back(scheduler_.now());
      copy.fate = Fate::kLost;
      copy.since = scheduler_.now();
      return true;
    });
  for (const auto& [id, role] : known)
    if (!host.store->shards().contains(id))
      return Fail("host %zu restarted its daemon and %s is no longer there", host.index,
                  id.ToString().c_str());
  Observe(host);
  JudgeDrops(host);
}

void Checker::OnMemoryLost(const Host& host) {
  ++statistics_.memories_lost;
  for (const auto& [id, role] : known_[host.index]) {
    Copy& copy = shards_[id].copies[PlaceOf(host)];
    if (copy.counted()) shards_[id].lost_at.push_back(scheduler_.now());
    copy.fate = Fate::kLost;
    copy.since = scheduler_.now();
  }
  known_.erase(host.index);
}

void Checker::OnDrained(const Host& host) {
  // After this time a draining node does not wait for anything that is not settled.
  constexpr TimeUs kSettleUs = 5 * kSecond;
  if (host.drains_since + kSettleUs <= scheduler_.now() || options_.faults.two_coordinators_max_us != 0)
    return;
  ++statistics_.drains;
  size_t stay = 0;
  for (const auto& other : hosts_) stay += other->drains_since == 0 && host.view.Contains(other->id) ? 1 : 0;
  const size_t wanted = std::min<size_t>(options_.replicas + 1, stay);
  for (const StepId& step : KeptSteps()) {
    if (Retired(step)) continue;
    for (auto at = shards_.lower_bound({step.incarnation, step.step, 0});
         at != shards_.end() && StepOf(at->first) == step; ++at) {
      const auto own = at->second.copies.find(PlaceOf(host));
      if (own == at->second.copies.end() || !own->second.counted()) continue;
      const auto copies =
          std::count_if(at->second.copies.begin(), at->second.copies.end(), [&](const auto& entry) {
            const Host& other = *hosts_[entry.first.host];
            const Copy& copy = entry.second;
            // The leader may not know of a change that has just happened.
            if (other.drains_since != 0)
              return other.drains_since != kForever && scheduler_.now() < other.drains_since + kNewsUs;
            return copy.counted() || scheduler_.now() < copy.since + kNewsUs;
          });
      if (static_cast<size_t>(copies) < wanted)
        return Fail("host %zu leaves, and of %s there are only %zu copies on hosts that stay, of %zu%s",
                    host.index, at->first.ToString().c_str(), static_cast<size_t>(copies), wanted,
                    DescribeCopies(step, wanted + 1).c_str());
    }
  }
}

void Checker::OnFlip(const Host& host, const ShardId& id, uint32_t chunk) {
  ++statistics_.flips;
  shards_[id].flips.insert({PlaceOf(host), chunk});
}

void Checker::OnDamage(const Host& host, uint32_t chunk) {
  ++statistics_.flips;
  const Place place = PlaceOf(host);
  bool sealed = false;
  for (auto& [id, shard] : shards_) {
    const auto copy = shard.copies.find(place);
    if (copy == shard.copies.end() || copy->second.fate == Fate::kLost) continue;
    uint32_t index = 0;
    for (const Extent& extent : copy->second.extents) {
      if (chunk >= extent.first && chunk < extent.first + extent.count) {
        shard.flips.insert({place, index + chunk - extent.first});
        sealed = sealed || copy->second.fate == Fate::kPresent;
      }
      index += extent.count;
    }
  }
  if (!sealed) damaged_.insert({place, chunk});
}

// ---- steps

bool Checker::Committed(const StepId& step) const { return committed_.contains(step); }

std::optional<StepId> Checker::newest_committed() const {
  if (committed_.empty()) return std::nullopt;
  return committed_.rbegin()->first;
}

StepId Checker::newest_saved() const { return shards_.empty() ? StepId() : StepOf(shards_.rbegin()->first); }

size_t Checker::CommittedAfter(const StepId& step) const {
  return static_cast<size_t>(std::distance(committed_.upper_bound(step), committed_.end()));
}

bool Checker::KnownInViewOf(const Host& host, const StepId& step) const {
  const auto heard = heard_.find(step);
  const auto marked = [&](const Host& member) {
    for (auto at = shards_.lower_bound({step.incarnation, step.step, 0}); at != shards_.end(); ++at) {
      if (StepOf(at->first) != step) break;
      const auto copy = at->second.copies.find(PlaceOf(member));
      if (copy == at->second.copies.end() || !copy->second.committed) continue;
      if (copy->second.fate == Fate::kPresent || copy->second.since == scheduler_.now()) return true;
    }
    return false;
  };
  return std::any_of(hosts_.begin(), hosts_.end(), [&](const auto& member) {
    if (!host.view.Contains(member->id)) return false;
    return (heard != heard_.end() && heard->second.contains(member->id)) || marked(*member);
  });
}

bool Checker::SaidToBeCommittedBeyond(const Host& host, const StepId& step) const {
  return std::any_of(heard_.upper_bound(step), heard_.end(),
                     [&](const auto& heard) { return heard.second.contains(host.id); });
}

bool Checker::RetiredByNewer(const StepId& step) const {
  size_t newer = 0;
  for (auto at = committed_.upper_bound(step); at != committed_.end(); ++at)
    if (!quarantined_.contains(at->first) && (++newer >= options_.keep_steps || quarantined_.contains(step)))
      return true;
  return false;
}

bool Checker::Retired(const StepId& step) const {
  return RetiredByNewer(step) || (drops_asked_.contains(step) && CommittedAfter(step) != 0);
}

bool Checker::Disagrees(const StepId& step) const {
  std::set<uint64_t> given;
  for (Rank rank = 0; rank < WorldOf(step); ++rank)
    if (const Shard* shard = Find({step.incarnation, step.step, rank})) given.insert(shard->agreement);
  return given.size() > 1;
}

bool Checker::Dead(const StepId& step) const {
  if (Disagrees(step)) return true;
  const uint32_t world = WorldOf(step);
  for (Rank rank = 0; rank < world; ++rank) {
    const auto begun = begun_.find({step.incarnation, rank});
    if (begun == begun_.end() || begun->second <= step.step) continue;
    const Shard* shard = Find({step.incarnation, step.step, rank});
    if (shard == nullptr) return true;
    // It was saved, and lost with its arena while the rank continued.
    if (std::none_of(shard->copies.begin(), shard->copies.end(), [&](const auto& copy) {
          return copy.second.fate == Fate::kPresent ||
                 (copy.second.fate == Fate::kDropped && copy.second.since == scheduler_.now());
        }))
      return true;
  }
  return false;
}

bool Checker::Superseded(const StepId& step) const {
  return (!committed_.empty() && committed_.rbegin()->first > step) ||
         FollowedByIncarnation(step.incarnation) || Dead(step) || drops_asked_.contains(step);
}

bool Checker::FollowedByIncarnation(Incarnation incarnation) const {
  const auto own = restores_.find(incarnation);
  const TimeUs began = own == restores_.end() ? 0 : own->second.asked_at;
  return std::any_of(restores_.upper_bound(incarnation), restores_.end(),
                     [&](const auto& later) { return later.second.asked_at >= began; });
}

std::vector<StepId> Checker::KeptSteps() const {
  std::vector<StepId> kept;
  for (auto at = committed_.rbegin(); at != committed_.rend() && kept.size() < options_.keep_steps; ++at)
    kept.push_back(at->first);
  std::erase_if(kept, [this](const StepId& step) { return drops_asked_.contains(step) && Retired(step); });
  return kept;
}

bool Checker::Producible(const StepId& step) const {
  return Covered(step, [this](const Place& place, const Shard& shard, const Copy& copy, uint32_t chunk) {
    return copy.fate == Fate::kPresent &&
           ChunkRight(*hosts_[place.host], copy.extents, copy.encryption, shard, chunk);
  });
}

bool Checker::ProducibleOnMembers(const StepId& step, const Host& asked, TimeUs since) const {
  return Covered(step, [&](const Place& place, const Shard& shard, const Copy& copy, uint32_t chunk) {
    const Host& host = *hosts_[place.host];
    return copy.fate == Fate::kPresent && host.daemon_runs() && asked.view.Contains(host.id) &&
           std::max(copy.since, copy.repaired_at) <= since &&
           !std::binary_search(copy.bad.begin(), copy.bad.end(), chunk) &&
           ChunkRight(host, copy.extents, copy.encryption, shard, chunk);
  });
}

void Checker::OnStored(const StepId& id, const StoredStep& step) {
  if (!Committed(id)) return Fail("%s is on storage and was never committed", id.ToString().c_str());
  if (step.world_size != WorldOf(id) || step.ranks.size() != step.world_size)
    return Fail("%s is on storage with %zu ranks, saved by %u", id.ToString().c_str(), step.ranks.size(),
                WorldOf(id));
  if (storage_.Sound(id)) CheckStoredBytes(id);
}

void Checker::CheckStoredBytes(const StepId& id) {
  for (Rank rank = 0; rank < WorldOf(id); ++rank) {
    const ShardId shard_id{id.incarnation, id.step, rank};
    const Shard* shard = Find(shard_id);
    const std::string* stream = storage_.Stream(shard_id);
    if (shard == nullptr || stream == nullptr || stream->size() != shard->stream_bytes)
      return Fail("%s is on storage, not as it was saved", shard_id.ToString().c_str());
    for (uint32_t chunk = 0; chunk < shard->crcs.size(); ++chunk)
      if (Crc32c(stream->data() + chunk * shard->chunk_bytes,
                 ChunkLength(shard->stream_bytes, shard->chunk_bytes, chunk)) != shard->crcs[chunk])
        return Fail("chunk %u of %s is on storage with wrong bytes", chunk, shard_id.ToString().c_str());
  }
}

size_t Checker::GoodCopies(const Shard& shard) const {
  size_t good = 0;
  for (const auto& [place, copy] : shard.copies) {
    const Host& host = *hosts_[place.host];
    if (copy.fate != Fate::kPresent || !host.daemon_runs() || !copy.bad.empty()) continue;
    bool right = true;
    for (uint32_t i = 0; i < shard.crcs.size(); ++i)
      right = right && ChunkRight(host, copy.extents, copy.encryption, shard, i);
    good += right ? 1 : 0;
  }
  return good;
}

size_t Checker::CopiesMin(const StepId& step) const {
  const uint32_t world = WorldOf(step);
  size_t fewest = world == 0 ? 0 : SIZE_MAX;
  for (Rank rank = 0; rank < world; ++rank) {
    const Shard* shard = Find({step.incarnation, step.step, rank});
    fewest = std::min(fewest, shard == nullptr ? 0 : GoodCopies(*shard));
  }
  return fewest;
}

std::string Checker::DescribeCopies(const StepId& step, size_t wanted) const {
  constexpr const char* kFates[] = {"there", "dropped", "lost", "of other bytes"};
  std::string text;
  const uint32_t world = WorldOf(step);
  for (Rank rank = 0; rank < world; ++rank) {
    const Shard* shard = Find({step.incarnation, step.step, rank});
    if (shard == nullptr || GoodCopies(*shard) >= wanted) continue;
    char line[160];
    std::snprintf(line, sizeof(line), "; rank %u saved by host %zu:", rank, shard->saver);
    text += line;
    for (const auto& [place, copy] : shard->copies) {
      size_t wrong = 0;
      for (uint32_t i = 0; copy.fate == Fate::kPresent && i < shard->crcs.size(); ++i)
        wrong += ChunkRight(*hosts_[place.host], copy.extents, copy.encryption, *shard, i) ? 0 : 1;
      std::snprintf(line, sizeof(line), " host %zu %s %s, chunks marked bad %zu, wrong %zu;", place.host,
                    RoleName(copy.role), kFates[static_cast<size_t>(copy.fate)], copy.bad.size(), wrong);
      text += line;
    }
  }
  return text;
}

bool Checker::HasAnother(const Host& host, const ShardId& id, uint32_t chunk) const {
  const Shard* shard = Find(id);
  if (shard == nullptr || chunk >= shard->crcs.size()) return false;
  for (const auto& [place, copy] : shard->copies)
    if (place.host != host.index && copy.fate == Fate::kPresent && hosts_[place.host]->daemon_runs() &&
        ChunkRight(*hosts_[place.host], copy.extents, copy.encryption, *shard, chunk))
      return true;
  return false;
}

bool Checker::Flipped(const StepId& step) const {
  for (auto at = shards_.lower_bound({step.incarnation, step.step, 0}); at != shards_.end(); ++at) {
    if (StepOf(at->first) != step) break;
    if (!at->second.flips.empty()) return true;
  }
  return false;
}

bool Checker::Shadowed(const StepId& step) const {
  return std::any_of(shards_.begin(), shards_.end(), [&](const auto& entry) {
    const auto& [id, shard] = entry;
    return id.step == step.step && id.incarnation > step.incarnation &&
           std::any_of(shard.copies.begin(), shard.copies.end(),
                       [](const auto& copy) { return copy.second.fate == Fate::kPresent; });
  });
}

size_t Checker::CountedRight(const Shard& shard, size_t* hurt) const {
  size_t right = 0;
  for (const auto& [place, copy] : shard.copies) {
    if (!copy.counted()) continue;
    const Host& host = *hosts_[place.host];
    const auto wrong = [&](uint32_t chunk) {
      return !ChunkRight(host, copy.extents, copy.encryption, shard, chunk);
    };
    bool bad = std::any_of(copy.bad.begin(), copy.bad.end(), wrong);
    for (auto flip = shard.flips.lower_bound({place, 0}); flip != shard.flips.end() && flip->first == place;
         ++flip)
      bad = bad || wrong(flip->second);
    ++(bad ? *hurt : right);
  }
  return right;
}

// ---- at rest

bool Checker::AtRest(const Host& host) {
  uint64_t sealed = 0;
  for (const auto& [id, shard] : host.store->shards()) sealed += ChunkCount(shard->extents);
  const uint64_t kept = sealed + host.engine->Metrics().bounce_chunks;
  return host.store->chunks_free() + kept == host.store->chunks_total();
}

void Checker::CheckNoLeak(const Host& host) {
  if (!host.daemon_runs() || AtRest(host)) return;
  uint64_t sealed = 0;
  for (const auto& [id, shard] : host.store->shards()) sealed += ChunkCount(shard->extents);
  Fail("host %zu at rest has %llu chunks free and %llu sealed of %llu: some belong to nobody", host.index,
       static_cast<unsigned long long>(host.store->chunks_free()), static_cast<unsigned long long>(sealed),
       static_cast<unsigned long long>(host.store->chunks_total()));
}

void Checker::CheckAllBytes() {
  for (const auto& [id, shard] : shards_) {
    for (const auto& [place, copy] : shard.copies) {
      std::string why;
      if (copy.fate == Fate::kPresent && !CopyRight(*hosts_[place.host], copy, shard, &why))
        return Fail("host %zu has wrong bytes in %s of its copy of %s", place.host, why.c_str(),
                    id.ToString().c_str());
    }
  }
}

}  // namespace ropeteam::simulation
