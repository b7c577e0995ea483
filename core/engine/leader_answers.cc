// SPDX-License-Identifier: Apache-2.0
//
// The leader's answers to questions: which ranks may join which incarnation, the latest step, the nodes that hold a
// shard, and the state of the cluster.

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
  if (asker == nullptr) return;
  if (question.topic == Question::Topic::kJoin && question.number < asker->inventory().asking_from)
    return;  // a late repeat
  const bool decides =
      question.topic == Question::Topic::kJoin || question.topic == Question::Topic::kLatest ||
      question.topic == Question::Topic::kPersist || question.topic == Question::Topic::kQuarantine ||
      question.topic == Question::Topic::kDrain || question.topic == Question::Topic::kDrop ||
      question.topic == Question::Topic::kPolicy || question.topic == Question::Topic::kForget;
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
  PersistQuestion persist;
  QuarantineQuestion quarantine;
  DrainQuestion drain;
  DropQuestion drop;
  PolicyQuestion policy;
  ForgetQuestion forget;
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
    case Question::Topic::kPersist:
      if (Decode(question.payload, persist)) return AnswerPersist(from, question.number, persist);
      break;
    case Question::Topic::kQuarantine:
      if (Decode(question.payload, quarantine)) return AnswerQuarantine(from, question.number, quarantine);
      break;
    case Question::Topic::kDrop:
      if (Decode(question.payload, drop)) return AnswerDrop(from, question.number, drop);
      break;
    case Question::Topic::kDrain:
      if (Decode(question.payload, drain)) return AnswerDrain(from, question.number, drain);
      break;
    case Question::Topic::kForget:
      if (Decode(question.payload, forget)) return AnswerForget(from, question.number, forget);
      break;
    case Question::Topic::kPolicy:
      if (Decode(question.payload, policy)) return AnswerPolicy(from, question.number, policy);
      break;
  }
  Reply(from, question.number, Error(Code::kInvalidArgument, "the question cannot be decoded"));
}

void Leader::AnswerJoin(NodeId from, uint64_t number, const JoinQuestion& join) {
  if (!stored_.known() && incarnations_.current().number == 0)
    return Reply(
        from, number,
        Error(Code::kUnavailable, "%s; storage may have steps of this job", stored_.WhyUnknown().c_str()));
  incarnations_.SetFloor(stored_.incarnation_floor());
  const Incarnation before = incarnations_.current().number;
  const Status admitted = incarnations_.Admit(from, number, join, table_.HasSaved(before, join.rank));
  if (stored_.used() && incarnations_.current().number != before) {
    stored_.ListAgain();
    latest_.OnListAgain();
  }
  if (!admitted.ok()) return Reply(from, number, admitted);
  dirty_ = dirty_ || incarnations_.version() != incarnation_seen_;
  Reply(from, number, OkStatus(), Encode(JoinReply{incarnations_.current()}, context_.protocol));
}

bool Leader::PinIsKnown() const {
  return sequence_ != 0 && state_.incarnation.has_pin() &&
         state_.incarnation.number == incarnations_.current().number &&
         pin_durable_.Recorded({incarnations_.current().number, incarnations_.current().pin}, acked_by_all());
}

Status Leader::CheckIncarnation(Incarnation asking) const {
  const Incarnation current = incarnations_.current().number;
  if (asking < current)
    return Error(Code::kStale, "incarnation %llu asks, the world is in incarnation %llu",
                 IncarnationNumber(asking), IncarnationNumber(current));
  if (asking > current)
    return Error(Code::kUnavailable, "incarnation %llu asks, of which the leader has not heard",
                 IncarnationNumber(asking));
  return OkStatus();
}

void Leader::AnswerLatest(NodeId from, uint64_t number, const LatestQuestion& latest) {
  if (latest.persisted) {
    const Result<StepId> stored = latest_.NewestPersisted();
    if (!stored.ok()) return Reply(from, number, stored.status());
    return Reply(
        from, number, OkStatus(),
        Encode(LatestReply{{*stored}, stored_.Manifest(*stored)->world_size, {}}, context_.protocol));
  }
  if (latest.incarnation != 0) {
    const Status current = CheckIncarnation(latest.incarnation);
    if (!current.ok()) return Reply(from, number, current);
  }
  Result<StepId> step = latest_.Resolve(latest.incarnation);
  dirty_ = dirty_ || incarnations_.version() != incarnation_seen_;  // the pin must be announced
  const uint32_t world_size = step.ok() ? WorldSizeOf(*step) : 0;
  if (step.ok() && world_size == 0)
    return Reply(from, number,
                 Error(Code::kUnavailable, "the manifest of %s on storage is being read%s",
                       step->ToString().c_str(), stored_.Because().c_str()));
  const bool pinned = latest.incarnation != 0 && (step.ok() ? step->incarnation != latest.incarnation
                                                            : step.status().code() == Code::kNotFound);
  if (pinned && !PinIsKnown()) {
    latest_.Wait(from, number, latest);  // until OnStateAck()
    return;
  }
  if (pinned && latest_.may_choose_again()) {
    latest_.OnTold();
    dirty_ = true;  // other steps may be released now
  }
  if (!step.ok()) return Reply(from, number, step.status());
  Reply(from, number, OkStatus(),
        Encode(LatestReply{{*step}, world_size, {latest_.PassedOver(*step)}}, context_.protocol));
}

uint32_t Leader::WorldSizeOf(const StepId& id) {
  if (const StepTable::StepState* step = table_.Find(id)) return step->world_size;
  const std::shared_ptr<const StoredStep> stored = stored_.Manifest(id);
  return stored == nullptr ? 0 : stored->world_size;
}

// In a job of one node nobody can say more. Members of an older version cannot be asked.
std::optional<StepId> Leader::StepToSee() const {
  if (context_.view.members.size() > 1) return StepId();
  if (context_.stored_with_others != StepId()) return context_.stored_with_others;
  const bool alone = context_.view.settings.nodes <= 1 && !context_.had_others && roster_.record().nodes <= 1;
  return alone ? std::optional(StepId()) : std::nullopt;
}

std::vector<StepId> Leader::ReadOnStorage() {
  std::vector<StepId> steps = {incarnations_.current().pin};
  std::erase_if(loaders_, [this](const auto& known) { return IsOver(known.first, known.second); });
  for (const auto& [shard, loader] : loaders_) steps.push_back(StepOf(shard));
  return steps;
}

// The node has left, or no longer reads the shard.
bool Leader::IsOver(const ShardId& shard, const Loader& loader) {
  const MemberState* member = Find(loader.node);
  if (member == nullptr) return true;
  const std::vector<ShardId>& loading = member->inventory().loading;
  return loader.until <= context_.now && std::find(loading.begin(), loading.end(), shard) == loading.end();
}

// Chooses another node for each shard, so that many nodes share the work of a stalled one.
NodeId Leader::StandIn(const ShardId& shard, const Loader& loader) const {
  for (size_t i = 0; i < members_.size(); ++i) {
    const NodeId node = members_[(shard.rank + i) % members_.size()].id;
    if (!loader.stalled.contains(node)) return node;
  }
  return kNoNode;
}

Status Leader::OfferStored(NodeId asker, bool stalled, LocateReply* reply) {
  const ShardId& shard = reply->shard;
  const std::shared_ptr<const StoredStep> step = stored_.Manifest(StepOf(shard));
  if (step == nullptr) {
    if (stored_.Has(StepOf(shard)) || !stored_.known())
      return Error(Code::kUnavailable, "no node holds %s, and storage has not answered yet%s",
                   shard.ToString().c_str(), stored_.Because().c_str());
    return Error(Code::kNotFound, "no node holds %s%s", shard.ToString().c_str(),
                 stored_.used() ? ", nor does storage" : "");
  }
  if (shard.rank >= step->world_size)
    return Error(Code::kNotFound, "rank %u of %s: it was saved by a world of %u", shard.rank,
                 StepOf(shard).ToString().c_str(), step->world_size);
  Loader& loader = loaders_[shard];
  if (stalled) {
    loader.stalled.insert(asker);
  } else {
    loader.stalled.erase(asker);
  }
  if (loader.stalled.contains(loader.node) || IsOver(shard, loader)) {
    // If the substitute stalls, too, it is skipped.
    if (stalled && loader.node != kNoNode) loader.stalled.insert(loader.node);
    loader.node = stalled ? StandIn(shard, loader) : asker;
    loader.until = context_.now + kLoaderReportsUs;
    if (loader.node != asker && loader.node != kNoNode) context_.Send(loader.node, FetchOrder{shard});
  }
  const std::string found = damage_.Found(StepOf(shard));
  if (loader.node == kNoNode) {
    loader.stalled = {asker};  // the other nodes get another attempt
    return Error(Code::kUnavailable, "%s: no node can read it from storage now%s", shard.ToString().c_str(),
                 found.c_str());
  }
  if (loader.node != asker)
    return Error(Code::kUnavailable, "%s is being read from storage by %s%s", shard.ToString().c_str(),
                 context_.NameOf(loader.node).c_str(), found.c_str());
  reply->stored = true;
  reply->chunk_bytes = step->chunk_bytes;
  reply->stream_bytes = step->ranks[shard.rank].stream_bytes;
  reply->content = step->ranks[shard.rank].content;
  return OkStatus();
}

// The program gets the bytes of this step. One that cannot be read yet is not to blame for how the incarnation ends.
void Leader::NoteRestored(const StepId& id) {
  const IncarnationState& incarnation = incarnations_.current();
  if (incarnation.has_pin() && id == incarnation.pin && may_decide())
    restores_.OnRestored(id, incarnation.number);
}

void Leader::AnswerLocate(NodeId from, uint64_t number, const LocateQuestion& locate) {
  Result<StepId> id = latest_.ResolveStep(locate);
  if (!id.ok()) return Reply(from, number, id.status());
  LocateReply reply;
  reply.shard = {id->incarnation, id->step, locate.rank};
  const StepTable::StepState* step = table_.Find(*id);
  if (step != nullptr && locate.rank >= step->world_size)
    return Reply(from, number,
                 Error(Code::kNotFound, "rank %u of %s: it was saved by a world of %u", locate.rank,
                       id->ToString().c_str(), step->world_size));
  bool good = false;
  std::string unreadable;
  if (step != nullptr) {
    for (const StepTable::Copy& copy : step->ranks[locate.rank].copies) {
      if (!copy.readable) unreadable += (unreadable.empty() ? "" : ", ") + context_.NameOf(copy.node);
      if (!copy.usable() || copy.content != step->ranks[locate.rank].content) continue;
      reply.holders.push_back(copy.node);
      good = good || copy.good();
    }
  }
  // A rank opens the shard. A fetching node gives the shard's incarnation, and an operator has none.
  if (good && locate.exact == 0 && locate.incarnation != 0 &&
      locate.incarnation == incarnations_.current().number)
    NoteRestored(*id);
  // A node with a stalled read waits for a good copy made by another node.
  const bool from_storage = reply.holders.empty() || (locate.from_storage && !(locate.stalled && good));
  const Status stored = from_storage ? OfferStored(from, locate.stalled, &reply) : OkStatus();
  if (!unreadable.empty() && reply.holders.empty() && stored.code() == Code::kNotFound)
    return Reply(
        from, number,
        Error(Code::kUnavailable, "the copies of %s on %s are encrypted with keys that are not there",
              reply.shard.ToString().c_str(), unreadable.c_str()));
  // Or else the node tries a holder again.
  if (!stored.ok() && (reply.holders.empty() || stored.code() == Code::kUnavailable))
    return Reply(from, number, stored);
  Reply(from, number, OkStatus(), Encode(reply, context_.protocol));
}

void Leader::AnswerPersist(NodeId from, uint64_t number, const PersistQuestion& persist) {
  if (context_.view.settings.storage.empty())
    return Reply(from, number, Error(Code::kUnsupported, "this job has no storage to persist to"));
  if (!stored_.known())
    return Reply(from, number, Error(Code::kUnavailable, "%s", stored_.WhyUnknown().c_str()));
  const Status status = persistence_.Request(persist.step, incarnations_.current());
  if (!status.ok()) return Reply(from, number, status);
  // Every node must have recorded it, so that a later leader has it. Until then the asker repeats the question.
  const bool known = persisting_durable_.contains(persist.step)
                         ? persisting_durable_.Recorded(persist.step, acked_by_all())
                         : persistence_.version() == persistence_seen_;
  if (known) Reply(from, number, OkStatus(), Encode(Nothing{}));
}

// Any daemon may lead and delete by its own rules, so one daemon's rule counts for the job. If daemons differ in
// rules other than the number, the leader might delete what another daemon's rules keep.
Status Leader::CheckFlags(uint64_t persist_every, uint64_t keep_on_storage) const {
  const JobSettings& settings = context_.view.settings;
  if (persist_every != 0 && settings.persist_every != 0 &&
      (settings.persist_every_seconds || settings.persist_every != persist_every))
    return Error(Code::kInvalidArgument,
                 "persist_every %llu, this job's daemons were started with --persist-every %llu%s",
                 static_cast<unsigned long long>(persist_every),
                 static_cast<unsigned long long>(settings.persist_every),
                 settings.persist_every_seconds ? "s" : "");
  if (keep_on_storage == 0) return OkStatus();
  const std::string alone = "--keep-on-storage " + std::to_string(keep_on_storage);
  for (const MemberState& member : members_) {
    const NodeReport& report = member.inventory().report;
    if (report.keep_rules.empty()) continue;
    const bool covered = report.keep_rules == alone || report.keep_rules == context_.config.keep_rules;
    if (report.keep_on_storage == keep_on_storage && covered) continue;
    return Error(Code::kInvalidArgument,
                 "keep_on_storage %llu, this job's daemons were started with %s (node %s)",
                 static_cast<unsigned long long>(keep_on_storage), report.keep_rules.c_str(),
                 context_.NameOf(member.id).c_str());
  }
  return OkStatus();
}

Result<uint64_t> Leader::KeepByRanks() const {
  if (!complete() || !may_decide())
    return Error(Code::kUnavailable, "not every node has reported its inventory");
  const uint64_t keep = policy_.Of(incarnations_.current().number).keep_on_storage;
  ROPETEAM_RETURN_IF_ERROR(CheckFlags(0, keep));
  return keep;
}

PolicyReport Leader::DescribePolicy() const {
  const JobSettings& settings = context_.view.settings;
  PolicyReport report{!settings.storage.empty(),
                      settings.persist_every,
                      settings.persist_every_seconds,
                      context_.config.keep_rules,
                      policy_.Of(incarnations_.current().number),
                      {},
                      {}};
  const bool lists = stored_.known() || stored_.trouble().empty();
  report.trouble = lists ? persistence_.trouble() : stored_.WhyUnknown();
  report.doubt = CheckFlags(0, report.ranks.keep_on_storage).message();
  return report;
}

void Leader::AnswerPolicy(NodeId from, uint64_t number, const PolicyQuestion& question) {
  if (context_.view.settings.storage.empty())
    return Reply(from, number, Error(Code::kUnsupported, "this job has no storage"));
  Status status = Policy::Spoken(context_);  // the question may be from an earlier epoch
  if (status.ok()) status = CheckIncarnation(question.incarnation);
  // A known value was compared with the flags before. So not every rank is compared with the flags of every node.
  const RankPolicy known = policy_.Of(question.incarnation);
  if (status.ok() && !question.again)
    status = CheckFlags(known.persist_every == 0 ? question.persist_every : 0,
                        known.keep_on_storage == 0 ? question.keep_on_storage : 0);
  if (status.ok()) status = policy_.Set(question);
  if (!status.ok()) return Reply(from, number, status);
  // Every node must have recorded it, so that the next leader has it. Until then the asker repeats the question. It
  // also repeats while a running deletion removes steps that must be kept from now on.
  if (policy_durable_.Recorded(policy_.version(), acked_by_all()) &&
      !persistence_.DeletesBeyond(policy_.Of(question.incarnation).keep_on_storage))
    Reply(from, number, OkStatus(), Encode(Nothing{}));
}

// Several incarnations may have saved a step of this number. An undo means one that is quarantined. A question that is
// repeated means the same step as before, also if a newer incarnation has committed one in the meantime.
Result<StepId> Leader::StepToQuarantine(const QuarantineQuestion& quarantine) const {
  const bool recorded = restores_durable_.Recorded(restores_.version(), acked_by_all());
  StepId found;
  for (const RestoreNote& note : restores_.notes()) {
    const bool meant =
        quarantine.undo ? restores_.Holds(note.step) : note.quarantined && note.by_hand && !recorded;
    if (note.step.step == quarantine.step && meant) found = note.step;
  }
  if (found != StepId()) return found;
  for (const auto& [id, step] : table_.steps())
    if (id.step == quarantine.step && step.complete) found = id;
  if (const std::optional<StepId> stored = stored_.NewestOf(quarantine.step))
    found = std::max(found, *stored);
  // A commit that no node has a copy of can be given up, too.
  if (const StepId& heard = roster_.newest_committed(); heard.step == quarantine.step)
    found = std::max(found, heard);
  if (found == StepId())
    return Error(Code::kNotFound, "no step %llu is committed or on storage",
                 static_cast<unsigned long long>(quarantine.step));
  return found;
}

void Leader::AnswerQuarantine(NodeId from, uint64_t number, const QuarantineQuestion& quarantine) {
  const Status spoken = RequireProtocol(context_, kRestoresSince, "a quarantine");
  if (!spoken.ok()) return Reply(from, number, spoken);
  // If the answer is lost, the question comes again when a newer step of this number may be committed.
  const auto known = quarantined_for_.find({from, number});
  const Result<StepId> step = known == quarantined_for_.end() ? StepToQuarantine(quarantine) : known->second;
  if (!step.ok()) return Reply(from, number, step.status());
  if (quarantined_for_.size() >= kRestoreNotesMax) quarantined_for_.erase(quarantined_for_.begin());
  quarantined_for_[{from, number}] = *step;
  restores_.Set(*step, !quarantine.undo);
  // Every node must have recorded it, so that a later leader has it. Until then the asker repeats the question.
  if (restores_durable_.Recorded(restores_.version(), acked_by_all()))
    Reply(from, number, OkStatus(), Encode(Nothing{}));
}

// A commit that cannot be produced without the forgotten nodes is quarantined, so that no later choice waits for it.
void Leader::AnswerForget(NodeId from, uint64_t number, const ForgetQuestion& forget) {
  Status status = RequireProtocol(context_, kRosterSince, "forgetting a node");
  // A repeated question does not mean nodes that have left since.
  const bool repeated =
      std::find(forgets_.begin(), forgets_.end(), std::pair(from, number)) != forgets_.end();
  if (status.ok() && !repeated) status = roster_.Forget(forget.node);
  if (!status.ok()) return Reply(from, number, status);
  if (!repeated) forgets_.emplace_back(from, number);
  if (forgets_.size() > kRestoreNotesMax) forgets_.erase(forgets_.begin());
  // There is room for so many notes. Each one more would push out the note of the step before.
  size_t notes = restores_.notes().size();
  for (; !repeated && roster_.Missing() == 0 && notes < kRestoreNotesMax; ++notes) {
    const StepId lost = latest_.NewestKnown();
    if (lost == StepId() || latest_.Available(lost)) break;
    restores_.Set(lost, true);
  }
  // Every node must have recorded both, so that a later leader has them. Until then the asker repeats the question.
  if (!roster_durable_.Recorded(roster_.version(), acked_by_all()) ||
      !restores_durable_.Recorded(restores_.version(), acked_by_all()))
    return;
  Reply(from, number, OkStatus(), Encode(Nothing{}));
}

RosterReport Leader::DescribeRoster() const {
  const size_t missing = roster_.Missing();
  return {roster_.record().nodes, static_cast<uint32_t>(missing),
          missing == 0 ? "" : roster_.NamesOfMissing(), latest_.Waiting()};
}

void Leader::AnswerDrop(NodeId from, uint64_t number, const DropQuestion& drop) {
  Status status = drop.incarnation == 0 ? OkStatus() : CheckIncarnation(drop.incarnation);
  if (status.ok() && sequence_ == 0)
    status = Error(Code::kUnavailable, "the leader has not judged yet what is committed");
  const StepId newest_told = state_.told.empty() ? StepId() : *state_.told.rbegin();
  if (status.ok())
    status = drops_.Request(drop, {table_, incarnations_.current(), state_.release_before, newest_told,
                                   roster_.NamesOfMissing()});
  if (!status.ok()) return Reply(from, number, status);
  // The asker repeats the question until no member has a copy.
  if (drops_.Done(drop.step, table_, acked_by_all(), roster_.Missing() == 0))
    Reply(from, number, OkStatus(), Encode(Nothing{}));
}

bool Leader::LatestIsSafe() const {
  for (const StepId& id : table_.CompleteNewestFirst(1)) {
    if (stored_.Has(id)) continue;
    const StepTable::StepState& step = *table_.Find(id);
    for (Rank rank = 0; rank < step.world_size; ++rank) {
      const StepTable::RankState& state = step.ranks[rank];
      if (std::none_of(state.copies.begin(), state.copies.end(), [&](const StepTable::Copy& copy) {
            return copy.good() && copy.content == state.content && !table_.leaving().contains(copy.node);
          }))
        return false;
    }
  }
  return true;
}

void Leader::AnswerDrain(NodeId from, uint64_t number, const DrainQuestion& drain) {
  // The decision what to keep must include everything that the members have reported.
  if (!table_.leaving().contains(from) || sequence_ == 0 || dirty_ ||
      !roster_durable_.Recorded(roster_.version(), acked_by_all()))
    return Reply(from, number,
                 Error(Code::kUnavailable, "the leader has not heard yet that %s leaves",
                       context_.NameOf(from).c_str()));
  DrainReply reply;
  redundancy_.CountLeft(from, state_.keep, incarnations_.current().number, &reply);
  reply.latest_safe = LatestIsSafe();
  reply.no_room = short_of_memory_ != 0;
  reply.others_leave = table_.leaving().size() > 1;
  for (const StepId& id : persistence_.persisting())
    if (const auto* step = table_.Find(id); step != nullptr && step->complete) reply.persisting.insert(id);
  for (const StepId& id : drain.awaited)
    if (stored_.Has(id)) reply.persisted.insert(id);
  Reply(from, number, OkStatus(), Encode(reply));
}

StepReport Leader::Describe(const StepId& id, const StepTable::StepState& step) const {
  StepReport report;
  report.incarnation = id.incarnation;
  report.step = id.step;
  report.world_size = step.world_size;
  report.ranks_replicated = step.ranks_replicated;
  report.committed = step.complete;
  report.producible = step.producible();
  report.copies_min = UINT32_MAX;
  for (Rank rank = 0; rank < step.world_size; ++rank) {
    const StepTable::RankState& state = step.ranks[rank];
    report.ranks_sealed += state.copies.empty() ? 0 : 1;
    report.copies_min = std::min(report.copies_min, state.good);
    report.bytes += state.copies.empty() ? 0 : state.bytes;
  }
  report.persisted = stored_.Has(id);
  NoteRestores(id, &report);
  return report;
}

void Leader::NoteRestores(const StepId& id, StepReport* report) const {
  if (const RestoreNote* note = restores_.Find(id)) report->restores = note->restores;
  report->quarantined = restores_.Holds(id);
}

void Leader::AnswerReport(NodeId from, uint64_t number) {
  ClusterReport report;
  report.job = context_.config.job;
  report.epoch = context_.view.epoch;
  report.leader = context_.config.node;
  report.nodes_expected = context_.view.settings.nodes;
  report.incarnation = incarnations_.current().number;
  report.world_size = incarnations_.current().world_size;
  report.ranks_open = incarnations_.ranks_present();
  report.incarnation_token = incarnations_.current().token;
  report.policy = DescribePolicy();
  report.roster = DescribeRoster();
  for (const MemberState& member : members_) {
    report.nodes.push_back(member.inventory().report);
    report.nodes.back().scrub.pass_ended_us_ago += context_.now - member.heard_at;
  }
  for (auto step = table_.steps().rbegin(); step != table_.steps().rend(); ++step)
    report.steps.push_back(Describe(step->first, step->second));
  for (const StepId& id : stored_.NewestFirst(kStoredReportedMax)) {
    if (table_.Find(id) != nullptr) continue;
    StepReport stored;
    stored.incarnation = id.incarnation;
    stored.step = id.step;
    stored.persisted = stored.committed = true;
    NoteRestores(id, &stored);
    report.steps.push_back(stored);
  }
  // Quarantined steps are shown only if there are no others.
  for (const StepReport& step : report.steps) {
    const auto rank = [](const StepReport& of) {
      return std::tuple(!of.quarantined, of.incarnation, of.step);
    };
    const StepTable::StepState* held = table_.Find({step.incarnation, step.step});
    if (held != nullptr ? !held->producible() || held->never_commits() : !step.persisted) continue;
    if (!report.has_latest || rank(report.latest) < rank(step)) report.latest = step;
    report.has_latest = true;
  }
  Reply(from, number, OkStatus(), Encode(report, context_.protocol));
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
    // A committed step that cannot be produced is not passed over in silence.
    if (const StepId newest = latest_.NewestCommitted(); !verify.has_step && step.value_or(StepId()) < newest)
      step = newest;
    if (!step) return Reply(from, number, Error(Code::kNotFound, "there is no step to verify"));
    verifier_.Begin(asker, *step);
  }
  const Result<VerifyReport> report = verifier_.Look(asker);
  if (!report.ok()) return Reply(from, number, report.status());
  Reply(from, number, OkStatus(), Encode(*report, context_.protocol));
}

void Leader::OnVerifyResult(NodeId from, const VerifyResult& result) { verifier_.OnResult(from, result); }

}  // namespace ropeteam::engine
