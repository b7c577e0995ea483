// SPDX-License-Identifier: Apache-2.0
//
// The leader's answers to questions: which ranks may join which incarnation, what the latest step is, which nodes
// hold a shard, how the cluster stands.

#include <algorithm>
#include <optional>

#include "core/base/log.h"
#include "core/engine/leader.h"

namespace ropeteam::engine {

void Leader::Reply(NodeId to, uint64_t number, const Status& status, std::string payload) {
  context_.Send(to, ropeteam::Reply{number, status.code(), status.message(), std::move(payload)});
}

void Leader::OnQuestion(NodeId from, const Question& question) {
  if (!leading_) return;
  if (!complete()) {
    return Reply(from, question.number,
                 Error(Code::kUnavailable, "the leader waits for the inventory of %s", Missing().c_str()));
  }
  const MemberState* asker = Find(from);
  if (asker == nullptr || question.number < asker->inventory().asking_from) return;  // a late repeat
  const bool decides = question.topic == Question::Topic::kJoin || question.topic == Question::Topic::kLatest;
  if (decides && !may_decide())
    return Reply(
        from, question.number,
        Error(Code::kUnavailable,
              context_.has_lease() ? "the leader is new and waits until the former one's lease has run out"
                                   : "the leader %s has no lease: it does not reach the coordinator",
              context_.config.node.c_str()));
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
  const Status admitted = incarnations_.Admit(from, number, join);
  if (!admitted.ok()) return Reply(from, number, admitted);
  dirty_ = dirty_ || incarnations_.version() != incarnation_seen_;
  Reply(from, number, OkStatus(), Encode(JoinReply{incarnations_.life()}));
}

bool Leader::PinIsKnown() const {
  return sequence_ != 0 && state_.life.has_pin() &&
         state_.life.incarnation == incarnations_.life().incarnation &&
         state_.life.pin == incarnations_.life().pin && acked_by_all() >= pin_sequence_;
}

void Leader::AnswerLatest(NodeId from, uint64_t number, const LatestQuestion& latest) {
  if (latest.incarnation != 0) {
    if (latest.incarnation < incarnations_.life().incarnation)
      return Reply(from, number,
                   Error(Code::kStale, "incarnation %llu asks, the world is in incarnation %llu",
                         LifeNumber(latest.incarnation), LifeNumber(incarnations_.life().incarnation)));
    if (latest.incarnation > incarnations_.life().incarnation)
      return Reply(from, number,
                   Error(Code::kUnavailable, "incarnation %llu asks, of which the leader has not heard",
                         LifeNumber(latest.incarnation)));
    // An absent node may hold what no member does: wait for the nodes that were announced, or for the whole
    // world.
    const uint32_t ranks = incarnations_.ranks_present();
    if (ranks < incarnations_.life().world_size && members_.size() < context_.view.settings.nodes)
      return Reply(from, number,
                   Error(Code::kUnavailable, "%u of %u ranks and %zu of %u nodes are here", ranks,
                         incarnations_.life().world_size, members_.size(), context_.view.settings.nodes));
  }
  Result<StepId> step = latest_.Resolve(latest.incarnation, members_.size(), context_.view.settings);
  dirty_ = dirty_ || incarnations_.version() != incarnation_seen_;  // the pin is to be announced
  const bool pinned = latest.incarnation != 0 && (step.ok() ? step->incarnation != latest.incarnation
                                                            : step.status().code() == Code::kNotFound);
  if (pinned && !PinIsKnown()) {
    latest_.Wait(from, number, latest);  // until OnStateAck()
    return;
  }
  if (pinned && latest_.may_choose_again()) {
    latest_.OnTold();
    dirty_ = true;  // other steps may go now
  }
  if (!step.ok()) return Reply(from, number, step.status());
  Reply(from, number, OkStatus(), Encode(LatestReply{{*step}, table_.Find(*step)->world_size}));
}

void Leader::AnswerLocate(NodeId from, uint64_t number, const LocateQuestion& locate) {
  Result<StepId> id = latest_.ResolveStep(locate);
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
    if (copy.bad.size() <= kBadListedMax && copy.content == step->ranks[locate.rank].content)
      reply.holders.push_back(copy.node);
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
  ClusterReport report;
  report.job = context_.config.job;
  report.epoch = context_.view.epoch;
  report.leader = context_.config.node;
  report.nodes_expected = context_.view.settings.nodes;
  report.incarnation = incarnations_.life().incarnation;
  report.world_size = incarnations_.life().world_size;
  report.ranks_open = incarnations_.ranks_present();
  for (const MemberState& member : members_) {
    report.nodes.push_back(member.inventory().report);
    report.nodes.back().scrub.pass_ended_us_ago += context_.now - member.heard_at;
  }
  for (auto step = table_.steps().rbegin(); step != table_.steps().rend(); ++step)
    report.steps.push_back(Describe(step->first, step->second));
  if (const std::optional<StepId> newest = table_.NewestProducible(0)) {
    report.has_latest = true;
    report.latest = Describe(*newest, *table_.Find(*newest));
  }
  Reply(from, number, OkStatus(), Encode(report));
}

void Leader::AnswerVerify(NodeId from, uint64_t number, const VerifyQuestion& verify) {
  const Verifier::Asker asker{from, number};
  if (!verifier_.Knows(asker)) {
    std::optional<StepId> step = table_.NewestProducible(0);
    if (verify.has_step) {
      Result<StepId> resolved = latest_.ResolveStep({verify.step, 0, 0, 0});
      if (!resolved.ok()) return Reply(from, number, resolved.status());
      step = *resolved;
    }
    if (!step) return Reply(from, number, Error(Code::kNotFound, "there is no step to verify"));
    verifier_.Begin(asker, *step);
  }
  const Result<VerifyReport> report = verifier_.Look(asker);
  if (!report.ok()) return Reply(from, number, report.status());
  Reply(from, number, OkStatus(), Encode(*report));
}

void Leader::OnVerifyResult(NodeId from, const VerifyResult& result) { verifier_.OnResult(from, result); }

}  // namespace ropeteam::engine
