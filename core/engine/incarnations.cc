// SPDX-License-Identifier: Apache-2.0
#include "core/engine/incarnations.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "core/base/log.h"
#include "core/engine/limits.h"

namespace ropeteam::engine {

const Incarnations::Seat* Incarnations::Find(Rank rank) const {
  return rank < seats_.size() && seats_[rank].taken() ? &seats_[rank] : nullptr;
}

void Incarnations::Put(Rank rank, const Seat& seat) {
  ROPETEAM_CHECK(rank < kWorldMax && seat.taken() && !(seat.present && seat.left));
  Free(rank);
  if (rank >= seats_.size()) seats_.resize(size_t{rank} + 1);
  seats_[rank] = seat;
  const bool fresh = ranks_of_[seat.node].insert(rank).second;
  ROPETEAM_CHECK(fresh);
  ranks_present_ += seat.left ? 0 : 1;
}

void Incarnations::Free(Rank rank) {
  if (Find(rank) == nullptr) return;
  const auto ranks = ranks_of_.find(seats_[rank].node);
  ROPETEAM_CHECK(ranks != ranks_of_.end());
  const size_t erased = ranks->second.erase(rank);
  ROPETEAM_CHECK(erased == 1);
  if (ranks->second.empty()) ranks_of_.erase(ranks);
  ranks_present_ -= seats_[rank].left ? 0 : 1;
  seats_[rank] = Seat();
}

void Incarnations::FreeAll() {
  seats_.clear();
  ranks_of_.clear();
  ranks_present_ = 0;
}

void Incarnations::Change(Life life) {
  if (life == life_) return;
  ROPETEAM_CHECK(life.incarnation >= life_.incarnation);
  if (life.incarnation != life_.incarnation) FreeAll();
  life_ = std::move(life);
  ++version_;
}

void Incarnations::Begin(const Life& known) {
  FreeAll();
  life_ = known;
  ++version_;
}

// The incarnation may have been begun by a leader that knew of no choice as new as this one.
void Incarnations::KeepPin(const Life& known) {
  if (life_.forgotten || known.pinned_by <= life_.pinned_by || known.pinned_by > life_.incarnation) return;
  Life life = life_;
  life.pinned_by = known.pinned_by;
  life.pin = known.pin;
  Change(std::move(life));
}

void Incarnations::Learn(const Inventory& inventory) {
  const Life& told = inventory.life;
  const Life before = life_;
  if (!told.possible()) {
    LOG_WARNING("ignored: incarnation %llu is said to go on from %s, chosen by incarnation %llu",
                static_cast<unsigned long long>(told.incarnation), told.pin.ToString().c_str(),
                static_cast<unsigned long long>(told.pinned_by));
    return;
  }
  if (told.incarnation > life_.incarnation) {
    Change(told);
  } else if (told.incarnation == life_.incarnation) {
    const bool broken = told.broken || (life_.broken && !life_.forgotten);
    Life merged = life_.forgotten && !told.forgotten ? told : life_;
    merged.broken = merged.broken || broken;
    Change(std::move(merged));
  }
  KeepPin(before);
  KeepPin(told);
  // An incarnation of which only the number is remembered, or a copy that its node was given before it heard of
  // the incarnation: that number must never be used again.
  Incarnation heard = 0;
  const auto hear = [&heard](Incarnation incarnation) {
    if (incarnation < kIncarnationMax) heard = std::max(heard, incarnation);
  };
  hear(inventory.incarnation_max);
  for (const CopyReport& copy : inventory.report.copies) hear(copy.id.incarnation);
  if (heard > life_.incarnation) {
    Life unknown;
    unknown.incarnation = heard;
    unknown.broken = true;
    unknown.forgotten = true;
    unknown.past_tokens = life_.past_tokens;
    Change(std::move(unknown));
  }
  ROPETEAM_CHECK(life_.incarnation >= heard);
}

void Incarnations::LearnRanks(NodeId node, const std::vector<SessionReport>& sessions, uint64_t asking_from) {
  Life life = life_;
  std::vector<Rank> seated;
  if (const auto ranks = ranks_of_.find(node); ranks != ranks_of_.end())
    seated.assign(ranks->second.begin(), ranks->second.end());
  for (const Rank rank : seated) {
    Seat seat = seats_[rank];
    if (!seat.present) continue;
    const bool still = std::any_of(sessions.begin(), sessions.end(), [&](const SessionReport& session) {
      return session.rank == rank && session.token == seat.token && session.incarnation == life_.incarnation;
    });
    if (still) continue;
    seat.present = false;
    seat.left = true;
    Put(rank, seat);
    if (life.token.empty()) life.broken = true;
  }
  for (const SessionReport& session : sessions) {
    if (session.incarnation != life_.incarnation || session.rank >= kWorldMax) continue;
    if (life.world_size == 0) life.world_size = session.world_size;
    const Seat* before = Find(session.rank);
    Put(session.rank, {session.token, node, before == nullptr ? 0 : before->question, true, false});
  }
  // Admitted on a late repeat of a question from a process that has ended: no rank ever used this seat.
  for (const Rank rank : seated) {
    const Seat& seat = seats_[rank];
    if (seat.node == node && !seat.present && !seat.left && seat.question < asking_from) Free(rank);
  }
  Change(std::move(life));
}

void Incarnations::CheckInvariants() const {
  uint32_t present = 0;
  size_t taken = 0;
  for (Rank rank = 0; rank < seats_.size(); ++rank) {
    const Seat& seat = seats_[rank];
    if (!seat.taken()) continue;
    ++taken;
    present += seat.left ? 0 : 1;
    ROPETEAM_CHECK(ranks_of_.at(seat.node).contains(rank));
  }
  for (const auto& [node, ranks] : ranks_of_) taken -= ranks.size();
  ROPETEAM_CHECK(taken == 0 && present == ranks_present_);
}

void Incarnations::Pin(const StepId& step) {
  ROPETEAM_CHECK(life_.incarnation != 0 && !life_.forgotten && step.incarnation < life_.incarnation);
  Life life = life_;
  life.pinned_by = life.incarnation;
  life.pin = step;
  Change(std::move(life));
}

Status Incarnations::CheckWorld(const JoinQuestion& join) const {
  if (join.world_size == life_.world_size) return OkStatus();
  return Error(Code::kInvalidArgument, "rank %u has world_size %u, incarnation %llu has %u", join.rank,
               join.world_size, LifeNumber(life_.incarnation), life_.world_size);
}

// A handle that names no incarnation and was in none before.
Status Incarnations::AdmitUnnamed(const JoinQuestion& join) {
  const Seat* seat = Find(join.rank);
  const bool known = seat != nullptr && seat->token == join.token;
  const bool fits = life_.incarnation != 0 && life_.token.empty() && life_.world_size == join.world_size;
  const bool taken = seat != nullptr && !known;
  // A handle that only reads must not end the incarnation of ranks that train. A launcher that starts the ranks
  // again can wait for the processes of the former incarnation.
  if (!fits && ranks_present() != 0)
    return Error(Code::kUnavailable,
                 "incarnation %llu (token '%s', %u ranks) has %u ranks open: a handle of %u ranks without a "
                 "token opens when they have left",
                 LifeNumber(life_.incarnation), life_.token.c_str(), life_.world_size, ranks_present(),
                 join.world_size);
  // The seat may have been given on a late repeat of a question from a process that has ended. The next inventory
  // of its node shows it.
  if (fits && !life_.broken && taken && !seat->present && !seat->left)
    return Error(Code::kUnavailable, "rank %u was opened on %s, whose inventory has not confirmed it yet",
                 join.rank, context_.NameOf(seat->node).c_str());
  if (!fits || (!known && (life_.broken || taken))) BeginNext(join);
  return OkStatus();
}

Status Incarnations::Admit(NodeId from, uint64_t question, const JoinQuestion& join) {
  ROPETEAM_CHECK(context_.Contains(from));
  if (join.world_size == 0 || join.world_size > kWorldMax)
    return Error(Code::kInvalidArgument, "world_size %u, limit %u", join.world_size, kWorldMax);
  if (join.rank >= join.world_size)
    return Error(Code::kInvalidArgument, "rank %u, world_size %u: a rank must be below world_size", join.rank,
                 join.world_size);
  const Seat* seat = Find(join.rank);
  const bool known = seat != nullptr && seat->token == join.token;
  if (join.incarnation != 0 && join.incarnation < life_.incarnation)
    return Error(Code::kStale, "rank %u belongs to incarnation %llu, the world is in incarnation %llu",
                 join.rank, LifeNumber(join.incarnation), LifeNumber(life_.incarnation));
  const bool returns = join.incarnation != 0 && join.incarnation == life_.incarnation;
  if (returns && life_.world_size == 0) {
    // Every daemon was restarted: only the incarnation's number was left. The handles that come back know the
    // rest.
    Life life = life_;
    life.world_size = join.world_size;
    life.token = join.life;
    Change(std::move(life));
  }
  if (!join.life.empty() && join.life == life_.token) {
    ROPETEAM_RETURN_IF_ERROR(CheckWorld(join));
    if (seat != nullptr && !known && seat->present)
      return Error(Code::kAlreadyExists, "rank %u of the incarnation with token '%s' is open already on %s",
                   join.rank, join.life.c_str(), context_.NameOf(seat->node).c_str());
  } else if (!join.life.empty()) {
    const auto& past = life_.past_tokens;
    if (std::find(past.begin(), past.end(), join.life) != past.end())
      return Error(Code::kStale,
                   "token '%s' of rank %u is of a former incarnation, superseded by incarnation %llu",
                   join.life.c_str(), join.rank, LifeNumber(life_.incarnation));
    BeginNext(join);
  } else if (returns) {
    ROPETEAM_RETURN_IF_ERROR(CheckWorld(join));
    if (seat != nullptr && !known && seat->present)
      return Error(Code::kStale, "rank %u was opened again by another process", join.rank);
  } else {
    ROPETEAM_RETURN_IF_ERROR(AdmitUnnamed(join));
  }
  ROPETEAM_CHECK(life_.incarnation != 0 && life_.world_size == join.world_size);
  const Seat* before = Find(join.rank);
  const bool again = before != nullptr && before->token == join.token && before->node == from;
  Put(join.rank, {join.token, from, question, again && before->present, false});
  return OkStatus();
}

void Incarnations::BeginNext(const JoinQuestion& join) {
  Life next;
  next.incarnation = NextIncarnation(std::max(life_.incarnation, floor_), context_.view.epoch);
  next.token = join.life;
  next.world_size = join.world_size;
  // Until it has a pin of its own, the last restored step still determines which steps were abandoned.
  next.pinned_by = life_.forgotten ? life_.incarnation : life_.pinned_by;
  next.pin = life_.pin;
  next.past_tokens = life_.past_tokens;
  if (!life_.token.empty()) next.past_tokens.push_back(life_.token);
  while (next.past_tokens.size() > kPastTokensMax) next.past_tokens.erase(next.past_tokens.begin());
  ROPETEAM_CHECK(next.incarnation > life_.incarnation && next.past_tokens.size() <= kPastTokensMax);
  LOG_INFO("incarnation %llu begins, world %u, opened by rank %u", LifeNumber(next.incarnation),
           next.world_size, join.rank);
  Change(std::move(next));
}

}  // namespace ropeteam::engine
