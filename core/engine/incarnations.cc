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

void Incarnations::Change(IncarnationState state) {
  if (state == current_) return;
  ROPETEAM_CHECK(state.number >= current_.number);
  if (state.number != current_.number) FreeAll();
  current_ = std::move(state);
  ++version_;
}

void Incarnations::Begin(const IncarnationState& known) {
  FreeAll();
  current_ = known;
  ++version_;
}

// The leader that began the current incarnation may not have known of this newer choice.
void Incarnations::KeepPin(const IncarnationState& known) {
  if (current_.forgotten || known.pinned_by <= current_.pinned_by || known.pinned_by > current_.number)
    return;
  IncarnationState changed = current_;
  changed.pinned_by = known.pinned_by;
  changed.pin = known.pin;
  Change(std::move(changed));
}

void Incarnations::Learn(const Inventory& inventory) {
  const IncarnationState& told = inventory.incarnation;
  const IncarnationState before = current_;
  if (!told.possible()) {
    LOG_WARNING("ignored a report that incarnation %llu continues from %s, chosen by incarnation %llu",
                static_cast<unsigned long long>(told.number), told.pin.ToString().c_str(),
                static_cast<unsigned long long>(told.pinned_by));
    return;
  }
  if (told.number > current_.number) {
    Change(told);
  } else if (told.number == current_.number) {
    const bool broken = told.broken || (current_.broken && !current_.forgotten);
    IncarnationState merged = current_.forgotten && !told.forgotten ? told : current_;
    merged.broken = merged.broken || broken;
    Change(std::move(merged));
  }
  KeepPin(before);
  KeepPin(told);
  // A node may remember only an incarnation's number, or have received a copy of it before the announcement. That
  // number must never be used again.
  Incarnation heard = 0;
  const auto hear = [&heard](Incarnation incarnation) {
    if (incarnation < kIncarnationMax) heard = std::max(heard, incarnation);
  };
  hear(inventory.incarnation_max);
  for (const CopyReport& copy : inventory.report.copies) hear(copy.id.incarnation);
  if (heard > current_.number) {
    IncarnationState unknown;
    unknown.number = heard;
    unknown.broken = true;
    unknown.forgotten = true;
    unknown.past_tokens = current_.past_tokens;
    Change(std::move(unknown));
  }
  ROPETEAM_CHECK(current_.number >= heard);
}

void Incarnations::LearnRanks(NodeId node, const std::vector<SessionReport>& sessions, uint64_t asking_from) {
  IncarnationState changed = current_;
  std::vector<Rank> seated;
  if (const auto ranks = ranks_of_.find(node); ranks != ranks_of_.end())
    seated.assign(ranks->second.begin(), ranks->second.end());
  for (const Rank rank : seated) {
    Seat seat = seats_[rank];
    if (!seat.present) continue;
    const bool still = std::any_of(sessions.begin(), sessions.end(), [&](const SessionReport& session) {
      return session.rank == rank && session.token == seat.token && session.incarnation == current_.number;
    });
    if (still) continue;
    seat.present = false;
    seat.left = true;
    Put(rank, seat);
    // The ranks of a lost node come back with their handles if only the node's daemon has died. Without a token, other
    // processes may come instead of them.
    if (changed.token.empty() || context_.Contains(node)) changed.broken = true;
  }
  for (const SessionReport& session : sessions) {
    if (session.incarnation != current_.number || session.rank >= kWorldMax) continue;
    if (changed.world_size == 0) changed.world_size = session.world_size;
    const Seat* before = Find(session.rank);
    Put(session.rank, {session.token, node, before == nullptr ? 0 : before->question, true, false});
  }
  // A late repeat of a question from an ended process got this seat. No rank ever used it.
  for (const Rank rank : seated) {
    const Seat& seat = seats_[rank];
    if (seat.node == node && !seat.present && !seat.left && seat.question < asking_from) Free(rank);
  }
  Change(std::move(changed));
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
  ROPETEAM_CHECK(current_.number != 0 && !current_.forgotten && step.incarnation < current_.number);
  IncarnationState changed = current_;
  changed.pinned_by = changed.number;
  changed.pin = step;
  Change(std::move(changed));
}

Status Incarnations::CheckWorld(const JoinQuestion& join) const {
  if (join.world_size == current_.world_size) return OkStatus();
  return Error(Code::kInvalidArgument, "rank %u has world_size %u, incarnation %llu has %u", join.rank,
               join.world_size, IncarnationNumber(current_.number), current_.world_size);
}

// The seat belongs to another process, which may have ended: a late repeat of its question got the seat, or the node's
// last inventory is older than this question.
Status Incarnations::Unconfirmed(const JoinQuestion& join) const {
  return Error(Code::kUnavailable, "rank %u was opened on %s, whose next inventory shows whether it still is",
               join.rank, context_.NameOf(Find(join.rank)->node).c_str());
}

// A handle with the token of the current incarnation. A step must not mix two runs that use one token, such as a retry
// loop inside one step of SLURM. So the next incarnation begins when a rank has left this one and any rank opens again.
Status Incarnations::AdmitNamed(NodeId from, const JoinQuestion& join, bool returns, bool saved) {
  const Seat* seat = Find(join.rank);
  const bool taken = seat != nullptr && seat->token != join.token;
  const bool first = !returns && (seat == nullptr || taken);  // the handle was never admitted
  const bool vacant = !taken || seat->left;
  if (first && vacant && (current_.broken || saved)) {
    BeginNext(join);
    return OkStatus();
  }
  ROPETEAM_RETURN_IF_ERROR(CheckWorld(join));
  // Another process of the same node has ended: otherwise Sessions::Hello() would have refused.
  if (taken && seat->present && (returns || seat->node != from))
    return Error(Code::kAlreadyExists, "rank %u of the incarnation with token '%s' is open already on %s",
                 join.rank, join.incarnation_token.c_str(), context_.NameOf(seat->node).c_str());
  return first && !vacant ? Unconfirmed(join) : OkStatus();
}

// A handle that gives no token and was in no incarnation before.
Status Incarnations::AdmitUnnamed(const JoinQuestion& join) {
  const Seat* seat = Find(join.rank);
  const bool known = seat != nullptr && seat->token == join.token;
  const bool fits = current_.number != 0 && current_.token.empty() && current_.world_size == join.world_size;
  const bool taken = seat != nullptr && !known;
  // A handle that only reads must not end the incarnation of ranks that train. A launcher that restarts the ranks can
  // wait for the processes of the former incarnation.
  if (!fits && ranks_present() != 0)
    return Error(Code::kUnavailable,
                 "incarnation %llu (token '%s', %u ranks) has %u ranks open: a handle of %u ranks without a "
                 "token opens when they have left",
                 IncarnationNumber(current_.number), current_.token.c_str(), current_.world_size,
                 ranks_present(), join.world_size);
  if (fits && !current_.broken && taken && !seat->present && !seat->left) return Unconfirmed(join);
  if (!fits || (!known && (current_.broken || taken))) BeginNext(join);
  return OkStatus();
}

Status Incarnations::Admit(NodeId from, uint64_t question, const JoinQuestion& join, bool saved) {
  ROPETEAM_CHECK(context_.Contains(from));
  if (join.world_size == 0 || join.world_size > kWorldMax)
    return Error(Code::kInvalidArgument, "world_size %u, limit %u", join.world_size, kWorldMax);
  if (join.rank >= join.world_size)
    return Error(Code::kInvalidArgument, "rank %u, world_size %u: a rank must be below world_size", join.rank,
                 join.world_size);
  const Seat* seat = Find(join.rank);
  const bool known = seat != nullptr && seat->token == join.token;
  if (join.incarnation != 0 && join.incarnation < current_.number)
    return Error(Code::kStale, "rank %u belongs to incarnation %llu, the world is in incarnation %llu",
                 join.rank, IncarnationNumber(join.incarnation), IncarnationNumber(current_.number));
  const bool returns = join.incarnation != 0 && join.incarnation == current_.number;
  if (returns && current_.world_size == 0) {
    // Every daemon was restarted, so only the incarnation's number is left. The handles that reconnect know the rest.
    IncarnationState changed = current_;
    changed.world_size = join.world_size;
    changed.token = join.incarnation_token;
    Change(std::move(changed));
  }
  if (!join.incarnation_token.empty() && join.incarnation_token == current_.token) {
    ROPETEAM_RETURN_IF_ERROR(AdmitNamed(from, join, returns, saved));
  } else if (!join.incarnation_token.empty()) {
    const auto& past = current_.past_tokens;
    if (std::find(past.begin(), past.end(), join.incarnation_token) != past.end())
      return Error(Code::kStale,
                   "token '%s' of rank %u is of a former incarnation, superseded by incarnation %llu",
                   join.incarnation_token.c_str(), join.rank, IncarnationNumber(current_.number));
    BeginNext(join);
  } else if (returns) {
    ROPETEAM_RETURN_IF_ERROR(CheckWorld(join));
    if (seat != nullptr && !known && seat->present)
      return Error(Code::kStale, "rank %u was opened again by another process", join.rank);
  } else {
    ROPETEAM_RETURN_IF_ERROR(AdmitUnnamed(join));
  }
  ROPETEAM_CHECK(current_.number != 0 && current_.world_size == join.world_size);
  const Seat* before = Find(join.rank);
  const bool again = before != nullptr && before->token == join.token && before->node == from;
  Put(join.rank, {join.token, from, question, again && before->present, false});
  return OkStatus();
}

void Incarnations::BeginNext(const JoinQuestion& join) {
  IncarnationState next;
  next.number = NextIncarnation(std::max(current_.number, floor_), context_.view.epoch);
  next.token = join.incarnation_token;
  next.world_size = join.world_size;
  // Until the new incarnation has its own pin, the last restored step still determines which steps were abandoned.
  next.pinned_by = current_.forgotten ? current_.number : current_.pinned_by;
  next.pin = current_.pin;
  next.past_tokens = current_.past_tokens;
  if (!current_.token.empty() && current_.token != next.token) next.past_tokens.push_back(current_.token);
  while (next.past_tokens.size() > kPastTokensMax) next.past_tokens.erase(next.past_tokens.begin());
  ROPETEAM_CHECK(next.number > current_.number && next.past_tokens.size() <= kPastTokensMax);
  LOG_INFO("incarnation %llu begins, world %u, opened by rank %u", IncarnationNumber(next.number),
           next.world_size, join.rank);
  Change(std::move(next));
}

}  // namespace ropeteam::engine
