// SPDX-License-Identifier: Apache-2.0
#include "core/engine/incarnations.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::engine {
namespace {

constexpr uint32_t kWorldMax = 65536;  // ROPETEAM_WORLD_MAX

// As people are shown it.
unsigned long long Number(Incarnation incarnation) { return LifeNumber(incarnation); }

}  // namespace

void Incarnations::Begin(const Life& known) {
  seats_.clear();
  life_ = known;
}

void Incarnations::Learn(const Inventory& inventory) {
  const Incarnation before = life_.incarnation;
  const Life& told = inventory.life;
  if (told.incarnation > life_.incarnation) {
    seats_.clear();
    life_ = told;
  } else if (told.incarnation == life_.incarnation) {
    const bool broken = told.broken || (life_.broken && !life_.forgotten);
    if ((life_.forgotten && !told.forgotten) || (told.has_pin && !life_.has_pin)) life_ = told;
    if (broken) life_.broken = true;
  }
  // An incarnation of which only the number is remembered, or a copy that its node was given before it heard of
  // the incarnation: that number must never be used again.
  Incarnation heard = inventory.incarnation_max;
  for (const CopyReport& copy : inventory.report.copies) heard = std::max(heard, copy.id.incarnation);
  if (heard > life_.incarnation) {
    seats_.clear();
    Life unknown;
    unknown.incarnation = heard;
    unknown.broken = true;
    unknown.forgotten = true;
    unknown.past_tokens = life_.past_tokens;
    life_ = unknown;
  }
  ROPETEAM_CHECK(life_.incarnation >= before && life_.incarnation >= heard);
  ROPETEAM_CHECK(life_.incarnation == before || seats_.empty());
}

void Incarnations::LearnRanks(NodeId node, const std::vector<SessionReport>& sessions, uint64_t asking_from) {
  for (auto& [rank, seat] : seats_) {
    if (seat.node != node || !seat.present) continue;
    const bool still =
        std::any_of(sessions.begin(), sessions.end(), [&, r = rank](const SessionReport& session) {
          return session.rank == r && session.token == seat.token && session.incarnation == life_.incarnation;
        });
    if (still) continue;
    seat.present = false;
    seat.left = true;
    if (life_.token.empty()) life_.broken = true;
  }
  for (const SessionReport& session : sessions) {
    if (session.incarnation != life_.incarnation) continue;
    if (life_.world_size == 0) life_.world_size = session.world_size;
    seats_[session.rank] = {session.token, node, seats_[session.rank].question, true, false};
  }
  // Admitted on a late repeat of a question whose asker has gone: nobody ever sat there.
  std::erase_if(seats_, [&](const auto& entry) {
    const Seat& seat = entry.second;
    ROPETEAM_CHECK(seat.node != kNoNode && !(seat.present && seat.left));
    return seat.node == node && !seat.present && !seat.left && seat.question < asking_from;
  });
}

uint32_t Incarnations::ranks_present() const {
  return static_cast<uint32_t>(
      std::count_if(seats_.begin(), seats_.end(), [](const auto& seat) { return !seat.second.left; }));
}

void Incarnations::Pin(const StepId& step) {
  ROPETEAM_CHECK(life_.incarnation != 0 && !life_.forgotten && step.incarnation < life_.incarnation);
  life_.has_pin = true;
  life_.pin = step;
}

Status Incarnations::CheckWorld(const JoinQuestion& join) const {
  if (join.world_size == life_.world_size) return OkStatus();
  return Error(Code::kInvalidArgument, "rank %u says the world has %u ranks, incarnation %llu has %u",
               join.rank, join.world_size, Number(life_.incarnation), life_.world_size);
}

// A handle that names no incarnation and was in none before.
Status Incarnations::AdmitUnnamed(const JoinQuestion& join) {
  const auto seat = seats_.find(join.rank);
  const bool known = seat != seats_.end() && seat->second.token == join.token;
  const bool fits = life_.incarnation != 0 && life_.token.empty() && life_.world_size == join.world_size;
  const bool taken = seat != seats_.end() && !known;
  // Somebody who only looks must not end the incarnation of a world that trains, and a launcher that starts
  // another world can wait for the processes of the one before.
  if (!fits && ranks_present() != 0)
    return Error(Code::kUnavailable,
                 "incarnation %llu (life '%s', %u ranks) has %u ranks open: a handle of %u ranks without a "
                 "life's name opens when they have left",
                 Number(life_.incarnation), life_.token.c_str(), life_.world_size, ranks_present(),
                 join.world_size);
  // The seat may have been given on a late repeat of a question whose asker is long gone: its node's next
  // inventory tells.
  if (fits && !life_.broken && taken && !seat->second.present && !seat->second.left)
    return Error(Code::kUnavailable, "rank %u was opened on %s, which has not said yet whether it is there",
                 join.rank, context_.NameOf(seat->second.node).c_str());
  if (!fits || (!known && (life_.broken || taken))) BeginNext(join);
  return OkStatus();
}

Status Incarnations::Admit(NodeId from, uint64_t question, const JoinQuestion& join) {
  ROPETEAM_CHECK(context_.view.Contains(from));
  if (join.world_size == 0 || join.world_size > kWorldMax)
    return Error(Code::kInvalidArgument, "a world of %u ranks, limit %u", join.world_size, kWorldMax);
  if (join.rank >= join.world_size)
    return Error(Code::kInvalidArgument, "rank %u in a world of %u", join.rank, join.world_size);
  const auto seat = seats_.find(join.rank);
  const bool known = seat != seats_.end() && seat->second.token == join.token;
  if (join.incarnation != 0 && join.incarnation < life_.incarnation)
    return Error(Code::kStale, "rank %u belongs to incarnation %llu, the world is in incarnation %llu",
                 join.rank, Number(join.incarnation), Number(life_.incarnation));
  const bool returns = join.incarnation != 0 && join.incarnation == life_.incarnation;
  if (returns && life_.world_size == 0) {
    // Every daemon was restarted: only the incarnation's number was left. The handles that come back know the
    // rest.
    life_.world_size = join.world_size;
    life_.token = join.life;
  }
  if (!join.life.empty() && join.life == life_.token) {
    ROPETEAM_RETURN_IF_ERROR(CheckWorld(join));
    if (seat != seats_.end() && !known && seat->second.present)
      return Error(Code::kAlreadyExists, "rank %u of this life is open already on %s", join.rank,
                   context_.NameOf(seat->second.node).c_str());
  } else if (!join.life.empty()) {
    const auto& past = life_.past_tokens;
    if (std::find(past.begin(), past.end(), join.life) != past.end())
      return Error(Code::kStale, "life '%s' of rank %u has been superseded by incarnation %llu",
                   join.life.c_str(), join.rank, Number(life_.incarnation));
    BeginNext(join);
  } else if (returns) {
    ROPETEAM_RETURN_IF_ERROR(CheckWorld(join));
    if (seat != seats_.end() && !known && seat->second.present)
      return Error(Code::kStale, "rank %u was opened again by another process", join.rank);
  } else {
    ROPETEAM_RETURN_IF_ERROR(AdmitUnnamed(join));
  }
  ROPETEAM_CHECK(life_.incarnation != 0 && life_.world_size == join.world_size);
  Seat& given = seats_[join.rank];
  const bool again = given.token == join.token && given.node == from;
  given = {join.token, from, question, again && given.present, false};
  return OkStatus();
}

void Incarnations::BeginNext(const JoinQuestion& join) {
  Life next;
  next.incarnation = NextIncarnation(life_.incarnation, context_.view.epoch);
  next.token = join.life;
  next.world_size = join.world_size;
  next.pin = life_.pin;
  next.past_tokens = std::move(life_.past_tokens);
  if (!life_.token.empty()) next.past_tokens.push_back(life_.token);
  while (next.past_tokens.size() > kPastTokensMax) next.past_tokens.erase(next.past_tokens.begin());
  ROPETEAM_CHECK(next.incarnation > life_.incarnation && next.past_tokens.size() <= kPastTokensMax);
  LOG_INFO("incarnation %llu begins, world %u, opened by rank %u", Number(next.incarnation), next.world_size,
           join.rank);
  life_ = std::move(next);
  seats_.clear();
}

}  // namespace ropeteam::engine
