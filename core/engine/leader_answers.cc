// SPDX-License-Identifier: Apache-2.0
//
// The leader's answers to questions: who may join which life, what the latest step is, who holds a shard, how
// the cluster stands.

#include <algorithm>

#include "core/base/log.h"
#include "core/engine/leader.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {
namespace {

constexpr uint32_t kWorldMax = 65536;  // ROPETEAM_WORLD_MAX

// As people are shown it.
unsigned long long Number(Incarnation incarnation) { return LifeNumber(incarnation); }

}  // namespace

void Leader::Reply(NodeId to, uint64_t number, const Status& status, std::string payload) {
  parts_.context.Send(to, ropeteam::Reply{number, status.code(), status.message(), std::move(payload)});
}

void Leader::OnQuestion(NodeId from, const Question& question) {
  if (!leading_) return;
  if (!complete()) {
    return Reply(from, question.number,
                 Error(Code::kUnavailable, "the leader waits for the inventory of %s", Missing().c_str()));
  }
  const auto asker = members_.find(from);
  if (asker == members_.end() || question.number < asker->second.inventory.asking_from)
    return;  // a late repeat
  JoinQuestion join;
  LatestQuestion latest;
  LocateQuestion locate;
  VerifyQuestion verify;
  switch (question.topic) {
    case Question::Topic::kJoin:
      if (Decode(question.payload, join)) return AnswerJoin(from, question.number, join);
      break;
    case Question::Topic::kLatest:
      if (Decode(question.payload, latest)) return AnswerLatest(from, question.number, latest);
      break;
    case Question::Topic::kLocate:
      if (Decode(question.payload, locate)) return AnswerLocate(from, question.number, locate);
      break;
    case Question::Topic::kReport:
      return AnswerReport(from, question.number);
    case Question::Topic::kVerify:
      if (Decode(question.payload, verify)) return AnswerVerify(from, question.number, verify);
      break;
  }
  Reply(from, question.number, Error(Code::kInvalidArgument, "a question that cannot be read"));
}

void Leader::AnswerJoin(NodeId from, uint64_t number, const JoinQuestion& join) {
  const Status admitted = Admit(from, number, join);
  if (!admitted.ok()) return Reply(from, number, admitted);
  dirty_ = true;
  Reply(from, number, OkStatus(), Encode(JoinReply{life_}));
}

Status Leader::Admit(NodeId from, uint64_t number, const JoinQuestion& join) {
  if (join.world_size == 0 || join.world_size > kWorldMax)
    return Error(Code::kInvalidArgument, "a world of %u ranks, limit %u", join.world_size, kWorldMax);
  if (join.rank >= join.world_size)
    return Error(Code::kInvalidArgument, "rank %u in a world of %u", join.rank, join.world_size);
  const auto seat = ranks_.find(join.rank);
  const bool known = seat != ranks_.end() && seat->second.token == join.token;
  if (join.incarnation != 0 && join.incarnation < life_.incarnation)
    return Error(Code::kStale, "rank %u belongs to incarnation %llu, the world is in incarnation %llu",
                 join.rank, Number(join.incarnation), Number(life_.incarnation));
  const auto world_fits = [&] {
    return join.world_size == life_.world_size
               ? OkStatus()
               : Error(Code::kInvalidArgument, "rank %u says the world has %u ranks, incarnation %llu has %u",
                       join.rank, join.world_size, Number(life_.incarnation), life_.world_size);
  };
  const bool returns = join.incarnation != 0 && join.incarnation == life_.incarnation;
  if (returns && life_.world_size == 0) {
    // Every daemon was restarted: of this life only the number was left. The handles that come back know the
    // rest.
    life_.world_size = join.world_size;
    life_.token = join.life;
  }
  if (!join.life.empty() && join.life == life_.token) {
    ROPETEAM_RETURN_IF_ERROR(world_fits());
    if (seat != ranks_.end() && !known && seat->second.present)
      return Error(Code::kAlreadyExists, "rank %u of this life is open already on %s", join.rank,
                   parts_.context.NameOf(seat->second.node).c_str());
  } else if (!join.life.empty()) {
    const auto& past = life_.past_tokens;
    if (std::find(past.begin(), past.end(), join.life) != past.end())
      return Error(Code::kStale, "life '%s' of rank %u has been superseded by incarnation %llu",
                   join.life.c_str(), join.rank, Number(life_.incarnation));
    BeginLife(join);
  } else if (returns) {
    ROPETEAM_RETURN_IF_ERROR(world_fits());
    if (seat != ranks_.end() && !known && seat->second.present)
      return Error(Code::kStale, "rank %u was opened again by another process", join.rank);
  } else {
    const bool fits = life_.incarnation != 0 && life_.token.empty() && life_.world_size == join.world_size;
    const bool taken = seat != ranks_.end() && !known;
    // Somebody who only looks must not end the life of a world that trains, and a launcher that starts
    // another world can wait for the processes of the one before.
    if (!fits && ranks_present() != 0)
      return Error(Code::kUnavailable,
                   "incarnation %llu (life '%s', %u ranks) has %u ranks open: a handle of %u ranks without a "
                   "life's name opens when they have left",
                   Number(life_.incarnation), life_.token.c_str(), life_.world_size, ranks_present(),
                   join.world_size);
    // Who holds the seat may have been admitted on a late repeat of a question, long gone: its node's next
    // inventory tells.
    if (fits && !life_.broken && taken && !seat->second.present && !seat->second.left)
      return Error(Code::kUnavailable, "rank %u was opened on %s, which has not said yet whether it is there",
                   join.rank, parts_.context.NameOf(seat->second.node).c_str());
    if (!fits || (!known && (life_.broken || taken))) BeginLife(join);
  }
  Admitted& admitted = ranks_[join.rank];
  const bool again = admitted.token == join.token && admitted.node == from;
  admitted = {join.token, from, number, again && admitted.present, false};
  return OkStatus();
}

void Leader::BeginLife(const JoinQuestion& join) {
  Life next;
  next.incarnation = NextIncarnation(life_.incarnation, parts_.context.view.epoch);
  next.token = join.life;
  next.world_size = join.world_size;
  next.pin = life_.pin;
  next.past_tokens = std::move(life_.past_tokens);
  if (!life_.token.empty()) next.past_tokens.push_back(life_.token);
  if (next.past_tokens.size() > kPastTokensMax) next.past_tokens.erase(next.past_tokens.begin());
  LOG_INFO("incarnation %llu begins, world %u, opened by rank %u", Number(next.incarnation), next.world_size,
           join.rank);
  life_ = std::move(next);
  ranks_.clear();
  dirty_ = true;
}

std::optional<StepId> Leader::NewestProducible(Incarnation only) const {
  for (auto step = table_.steps().rbegin(); step != table_.steps().rend(); ++step)
    if (step->second.producible() && !step->second.given_up && (only == 0 || step->first.incarnation == only))
      return step->first;
  return std::nullopt;
}

Result<StepId> Leader::ResolveLatest(Incarnation asking) {
  const Status none = Error(Code::kNotFound, "there is no step of which every rank's shard can be produced");
  if (asking == 0) {
    const std::optional<StepId> newest = NewestProducible(0);
    if (newest) return *newest;
    return none;
  }
  if (const std::optional<StepId> own = NewestProducible(asking)) return *own;
  if (life_.forgotten)
    return Error(Code::kUnavailable,
                 "no node remembers what incarnation %llu restores; the next life of the world can restore",
                 Number(life_.incarnation));
  if (life_.has_pin) {
    if (life_.pin == StepId()) return none;
    const StepTable::StepState* pinned = table_.Find(life_.pin);
    if (pinned != nullptr && pinned->producible()) return life_.pin;
    // Some rank of this life may have gone on from it: another step for the others would mix the two. Its
    // holder may come back; if not, the next life is offered an older step.
    LOG_WARNING("%s, which incarnation %llu restores, cannot be produced now", life_.pin.ToString().c_str(),
                Number(life_.incarnation));
    return Error(
        Code::kUnavailable,
        "%s, which this life restores, cannot be produced now; the next life is offered an older step",
        life_.pin.ToString().c_str());
  }
  const std::optional<StepId> newest = NewestProducible(0);
  for (const StepId& id : CommittedNewestFirst(1))
    if (!newest || *newest < id)
      LOG_WARNING("committed %s cannot be produced, offering %s", id.ToString().c_str(),
                  newest ? newest->ToString().c_str() : "nothing");
  life_.has_pin = true;
  life_.pin = newest.value_or(StepId());
  dirty_ = true;
  if (!newest) return none;
  LOG_INFO("incarnation %llu restores %s", Number(life_.incarnation), newest->ToString().c_str());
  return *newest;
}

bool Leader::PinIsKnown() const {
  return sequence_ != 0 && state_.life.has_pin && state_.life.incarnation == life_.incarnation &&
         std::all_of(members_.begin(), members_.end(),
                     [this](const auto& member) { return member.second.acked >= pin_sequence_; });
}

void Leader::AnswerLatest(NodeId from, uint64_t number, const LatestQuestion& latest) {
  const Context& context = parts_.context;
  if (latest.incarnation != 0) {
    if (latest.incarnation < life_.incarnation)
      return Reply(from, number,
                   Error(Code::kStale, "incarnation %llu asks, the world is in incarnation %llu",
                         Number(latest.incarnation), Number(life_.incarnation)));
    // Some node may hold what nobody here does: wait for the nodes that were announced, or for the whole
    // world.
    const uint32_t ranks = ranks_present();
    if (ranks < life_.world_size && members_.size() < context.settings.nodes)
      return Reply(from, number,
                   Error(Code::kUnavailable, "%u of %u ranks and %zu of %u nodes are here", ranks,
                         life_.world_size, members_.size(), context.settings.nodes));
  }
  Result<StepId> step = ResolveLatest(latest.incarnation);
  const bool pinned = latest.incarnation != 0 && (step.ok() ? step->incarnation != latest.incarnation
                                                            : step.status().code() == Code::kNotFound);
  if (pinned && !PinIsKnown()) {
    waiting_for_pin_[{from, number}] = latest;  // until OnStateAck()
    return;
  }
  if (!step.ok()) return Reply(from, number, step.status());
  Reply(from, number, OkStatus(), Encode(LatestReply{{*step}, table_.Find(*step)->world_size}));
}

Result<StepId> Leader::ResolveStep(const LocateQuestion& locate) const {
  if (locate.exact != 0) return StepId{locate.exact, locate.step};
  const auto producible = [&](const StepId& id) {
    const StepTable::StepState* step = table_.Find(id);
    return step != nullptr && step->producible();
  };
  const StepId own{locate.incarnation, locate.step};
  if (producible(own)) return own;
  if (life_.has_pin && life_.pin.step == locate.step && producible(life_.pin)) return life_.pin;
  const StepId* partial = nullptr;
  for (auto step = table_.steps().rbegin(); step != table_.steps().rend(); ++step) {
    if (step->first.step != locate.step) continue;
    if (step->second.producible()) return step->first;
    if (partial == nullptr) partial = &step->first;
  }
  if (partial == nullptr)
    return Error(Code::kNotFound, "no node holds a shard of step %llu",
                 static_cast<unsigned long long>(locate.step));
  return *partial;
}

void Leader::AnswerLocate(NodeId from, uint64_t number, const LocateQuestion& locate) {
  Result<StepId> id = ResolveStep(locate);
  if (!id.ok()) return Reply(from, number, id.status());
  const StepTable::StepState* step = table_.Find(*id);
  if (step == nullptr)
    return Reply(from, number, Error(Code::kNotFound, "no node holds a shard of %s", id->ToString().c_str()));
  if (locate.rank >= step->world_size)
    return Reply(from, number,
                 Error(Code::kNotFound, "rank %u of %s: it was saved by a world of %u", locate.rank,
                       id->ToString().c_str(), step->world_size));
  LocateReply reply;
  reply.shard.id = {id->incarnation, id->step, locate.rank};
  for (const StepTable::Copy& copy : step->ranks[locate.rank].copies)
    if (copy.bad.size() <= kBadListedMax) reply.holders.push_back(copy.node);
  if (reply.holders.empty())
    return Reply(from, number, Error(Code::kNotFound, "no node holds %s", reply.shard.id.ToString().c_str()));
  Reply(from, number, OkStatus(), Encode(reply));
}

StepReport Leader::Describe(const StepId& id, const StepTable::StepState& step) const {
  StepReport report;
  report.incarnation = id.incarnation;
  report.step = id.step;
  report.world_size = step.world_size;
  report.ranks_replicated = step.ranks_replicated;
  report.committed = step.committed;
  report.producible = step.producible();
  report.copies_min = UINT32_MAX;
  for (const StepTable::RankState& rank : step.ranks) {
    report.ranks_sealed += rank.copies.empty() ? 0 : 1;
    report.copies_min = std::min(report.copies_min, rank.good);
    report.bytes += rank.copies.empty() ? 0 : rank.bytes;
  }
  return report;
}

void Leader::AnswerReport(NodeId from, uint64_t number) {
  const Context& context = parts_.context;
  ClusterReport report;
  report.job = context.config.job;
  report.epoch = context.view.epoch;
  report.leader = context.config.node;
  report.nodes_expected = context.settings.nodes;
  report.incarnation = life_.incarnation;
  report.world_size = life_.world_size;
  report.ranks_open = ranks_present();
  for (const Member& member : context.view.members) {
    const auto known = members_.find(member.id);
    if (known != members_.end()) report.nodes.push_back(known->second.inventory.report);
  }
  for (auto step = table_.steps().rbegin(); step != table_.steps().rend(); ++step)
    report.steps.push_back(Describe(step->first, step->second));
  if (const std::optional<StepId> newest = NewestProducible(0)) {
    report.has_latest = true;
    report.latest = Describe(*newest, *table_.Find(*newest));
  }
  Reply(from, number, OkStatus(), Encode(report));
}

void Leader::AnswerVerify(NodeId from, uint64_t number, const VerifyQuestion& verify) {
  const auto key = std::make_pair(from, number);
  auto job = verifying_.find(key);
  if (job == verifying_.end()) {
    std::optional<StepId> step = NewestProducible(0);
    if (verify.has_step) {
      Result<StepId> resolved = ResolveStep({verify.step, 0, 0, 0});
      if (!resolved.ok()) return Reply(from, number, resolved.status());
      step = *resolved;
    }
    if (!step) return Reply(from, number, Error(Code::kNotFound, "there is no step to verify"));
    job = verifying_.emplace(key, VerifyJob()).first;
    job->second.number = ++next_verify_;
    job->second.report.incarnation = step->incarnation;
    job->second.report.step = step->step;
    for (const Member& member : parts_.context.view.members) {
      job->second.report.nodes_asked.push_back(member.name);
      job->second.missing.insert(member.id);
    }
    job->second.touched = parts_.context.now;
    job->second.next_send = parts_.context.now;
    OnTimer();
  }
  job->second.touched = parts_.context.now;
  if (!job->second.missing.empty())
    return Reply(from, number,
                 Error(Code::kUnavailable, "%zu nodes are still reading", job->second.missing.size()));
  Reply(from, number, OkStatus(), Encode(job->second.report));
}

void Leader::OnVerifyResult(NodeId from, const VerifyResult& result) {
  for (auto& [key, job] : verifying_) {
    if (job.number != result.number || job.missing.erase(from) == 0) continue;
    job.report.copies.insert(job.report.copies.end(), result.copies.begin(), result.copies.end());
  }
}

}  // namespace ropeteam::engine
