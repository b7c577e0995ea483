// SPDX-License-Identifier: Apache-2.0
#include "core/engine/sessions.h"

#include <algorithm>

#include "core/base/log.h"
#include "core/engine/parts.h"
#include "core/engine/policy.h"

namespace ropeteam::engine {

TimeUs Sessions::Deadline(TimeUs timeout_us) const {
  const TimeUs now = parts_.context.now;
  return timeout_us > kNever - 1 - now ? kNever - 1 : now + timeout_us;
}

Sessions::Session* Sessions::Find(SessionId session) {
  const auto found = sessions_.find(session);
  return found == sessions_.end() ? nullptr : &found->second;
}

Sessions::Session& Sessions::SessionOf(SessionId session) {
  const auto found = sessions_.find(session);
  ROPETEAM_CHECK(found != sessions_.end());
  ROPETEAM_CHECK(!found->second.admitted || found->second.question == 0);
  return found->second;
}

void Sessions::AnswerTo(SessionId session, RequestId request, decltype(Answer::body) body) {
  if (sessions_.contains(session)) parts_.context.out.answers.push_back({session, request, std::move(body)});
}

void Sessions::AnswerStatusTo(SessionId session, RequestId request, Status status) {
  AnswerTo(session, request, AnswerStatus{std::move(status)});
}

Sessions::Session* Sessions::Admitted(SessionId session, RequestId request) {
  Session* found = &SessionOf(session);
  const Context& context = parts_.context;
  if (!found->admitted) {
    AnswerStatusTo(session, request, Error(Code::kInvalidArgument, "not admitted yet: hello comes first"));
    return nullptr;
  }
  if (found->incarnation < context.incarnation.number) {
    AnswerStatusTo(
        session, request,
        Error(Code::kStale, "rank %u belongs to incarnation %llu, the world is in incarnation %llu",
              found->hello.rank, IncarnationNumber(found->incarnation),
              IncarnationNumber(context.incarnation.number)));
    return nullptr;
  }
  return found;
}

uint64_t Sessions::AddPending(SessionId session, RequestId request, TimeUs deadline, const char* doing) {
  Session* found = &SessionOf(session);
  if (found->pending >= kWaitsMax) {
    AnswerStatusTo(session, request,
                   Error(Code::kNoSpace, "%u requests are waiting, limit %zu", found->pending, kWaitsMax));
    return 0;
  }
  ++found->pending;
  const bool fresh = pending_.try_emplace(next_pending_, Pending{session, request, deadline, doing}).second;
  ROPETEAM_CHECK(fresh && next_pending_ != 0);
  return next_pending_++;
}

std::optional<Sessions::Pending> Sessions::TakePending(uint64_t number) {
  const auto found = pending_.find(number);
  if (found == pending_.end()) return std::nullopt;
  const Pending pending = found->second;
  pending_.erase(found);
  Session& session = SessionOf(pending.session);  // Close() also removes a session's pending requests
  ROPETEAM_CHECK(session.pending > 0);
  --session.pending;
  return pending;
}

void Sessions::Open(SessionId session) {
  const bool fresh = sessions_.try_emplace(session).second;
  ROPETEAM_CHECK(fresh);
}

void Sessions::Close(SessionId id) {
  Session* session = Find(id);
  if (session == nullptr) return;
  if (session->question != 0) parts_.asker.Forget(session->question);
  const size_t pending =
      std::erase_if(pending_, [id](const auto& each) { return each.second.session == id; }) +
      std::erase_if(waiters_, [id](const Waiter& waiter) { return waiter.session == id; });
  ROPETEAM_CHECK(pending == session->pending);
  std::vector<SaveId> saves;
  for (const auto& [save_id, save] : saves_)
    if (save.session == id) saves.push_back(save_id);
  ROPETEAM_CHECK(saves.size() == session->saves);
  for (const SaveId save : saves) EndSave(save, "its rank has gone");
  ROPETEAM_CHECK(session->saves == 0);
  for (auto& [view, open] : session->views) EndView(&open);
  // The inventory reports it from now on: a later leader must also know that a rank has left.
  IncarnationState& current = parts_.context.incarnation;
  if (session->admitted && session->incarnation == current.number) current.broken = true;
  sessions_.erase(id);
  parts_.context.inventory_dirty = true;
}

void Sessions::Hello(SessionId id, RequestId request, const HelloInput& hello) {
  Session* session = &SessionOf(id);
  if (session->is_rank())
    return AnswerStatusTo(id, request, Error(Code::kInvalidArgument, "hello was already sent"));
  const bool open = std::any_of(sessions_.begin(), sessions_.end(), [&](const auto& each) {
    const Session& other = each.second;
    return other.admitted && other.incarnation == parts_.context.incarnation.number &&
           other.hello.incarnation_token == hello.incarnation_token && other.hello.rank == hello.rank &&
           other.hello.token != hello.token;
  });
  if (open && !hello.incarnation_token.empty())
    return AnswerStatusTo(id, request,
                          Error(Code::kAlreadyExists, "rank %u with token '%s' is open here already",
                                hello.rank, hello.incarnation_token.c_str()));
  session->hello = hello;
  const JoinQuestion join{hello.rank, hello.world_size, hello.token, hello.incarnation_token,
                          hello.incarnation};
  session->question = parts_.asker.Ask(
      Question::Topic::kJoin, Encode(join), Deadline(hello.timeout_us),
      [this, id, request](const Result<std::string>& reply) {
        Session* joined = &SessionOf(id);  // Close() cancels the question
        ROPETEAM_CHECK(!joined->admitted && joined->question != 0);
        joined->question = 0;
        JoinReply admitted;
        parts_.context.inventory_dirty = true;  // the leader needs an inventory with or without the session
        if (!reply.ok()) return AnswerStatusTo(id, request, reply.status());
        if (!Decode(*reply, admitted, parts_.context.protocol) || !admitted.incarnation.possible())
          return AnswerStatusTo(id, request, Error(Code::kInternal, "the leader's answer cannot be read"));
        joined->admitted = true;
        joined->incarnation = admitted.incarnation.number;
        Context& context = parts_.context;
        if (admitted.incarnation.number > context.incarnation.number) {
          context.incarnation = admitted.incarnation;
          context.announced.heard = false;  // the leader's last announcement was for the former incarnation
        }
        if (admitted.incarnation.number > context.store.incarnation_max())
          context.store.SetIncarnationMax(admitted.incarnation.number);
        SetPolicyAgain(*joined);
        AnswerTo(id, request, AnswerHello{joined->incarnation});
      });
}

Step Sessions::OldestUnsaved(const Session& session, Step ended) const {
  const auto& shards = parts_.context.store.shards();
  for (auto at = shards.lower_bound({session.incarnation, ended, 0}); at != shards.begin();) {
    --at;
    if (at->first.incarnation != session.incarnation) break;
    if (at->first.rank == session.hello.rank && at->second->role == Role::kOwn) return at->first.step + 1;
  }
  return ended;
}

void Sessions::NoteEnded(SessionId id, Step step) {
  Session& session = SessionOf(id);
  if (session.has_ended && session.oldest_ended <= step && step <= session.newest_ended) return;
  session.oldest_ended =
      session.has_ended ? std::min(session.oldest_ended, step) : OldestUnsaved(session, step);
  session.newest_ended = std::max(session.newest_ended, step);
  session.has_ended = true;
  parts_.context.inventory_dirty = true;
}

Sessions::Progress& Sessions::ProgressOf(const ShardId& shard) {
  while (progress_.size() >= kProgressMax) {
    // A rank may ask an hour later for a step that is being persisted.
    auto oldest = progress_.begin();
    while (oldest != progress_.end() && parts_.context.announced.persisting.contains(StepOf(oldest->first)))
      ++oldest;
    if (oldest == progress_.end() || !(oldest->first < shard)) break;
    progress_.erase(oldest);
  }
  return progress_[shard];
}

void Sessions::Reached(const ShardId& shard, Level level) {
  ROPETEAM_CHECK(level > Level::kNone && level <= Level::kPersisted);
  Progress& progress = ProgressOf(shard);
  if (progress.level >= level) return;
  progress.level = level;
  const TimeUs since = progress.begun == 0 ? 0 : parts_.context.now - progress.begun;
  if (level == Level::kReplicated) {
    parts_.context.counters.last_replicated_us = since;
    parts_.context.counters_dirty = true;
  }
  parts_.context.out.events.push_back({shard, level, progress.bytes, since});
  parts_.context.Note(
      {.what = TraceEvent::What::kLevel, .shard = shard, .first = static_cast<uint32_t>(level)});
  Settle();
}

void Sessions::OnReplicated(const ShardId& shard) {
  // After a restart, the leader's announcement may have come before these copies were found again.
  Reached(shard, std::max(Level::kReplicated, Announced(shard)));
}

Level Sessions::Announced(const ShardId& shard) const {
  if (!HasCommitted(shard)) return Level::kNone;
  const Announcement& announced = parts_.context.announced;
  if (announced.persisted.contains(StepOf(shard))) return Level::kPersisted;
  return announced.told.contains(StepOf(shard)) ? Level::kCommitted : Level::kNone;
}

// Whether this node saved the committed content. Other bytes under the same name do not count (SaveBegin()). A shard
// that was released since counts as committed.
bool Sessions::HasCommitted(const ShardId& shard) const {
  const SealedShard* sealed = parts_.context.store.Find(shard);
  const auto progress = progress_.find(shard);
  if (progress != progress_.end() && progress->second.aborted) return false;
  return sealed == nullptr || sealed->committed;
}

// Sets the level of this node's own shards of these steps.
void Sessions::ReachedBy(const std::set<StepId>& steps, Level level) {
  std::vector<ShardId> reached;
  for (const StepId& step : steps) {
    for (auto at = progress_.lower_bound({step.incarnation, step.step, 0});
         at != progress_.end() && StepOf(at->first) == step; ++at)
      if (at->second.level >= Level::kLocal && at->second.level < level && HasCommitted(at->first))
        reached.push_back(at->first);
  }
  for (const ShardId& shard : reached) Reached(shard, level);
}

void Sessions::OnLeaderState(const std::set<StepId>& told, const std::vector<ShardId>& released) {
  ReachedBy(told, Level::kCommitted);
  ReachedBy(parts_.context.announced.persisted, Level::kPersisted);
  const auto end = [this](const auto& found) {  // a wait for the step if it is not committed
    const StepId& step = found.step;
    for (auto at = progress_.lower_bound({step.incarnation, step.step, 0});
         at != progress_.end() && StepOf(at->first) == step; ++at)
      if (at->second.level >= Level::kLocal && at->second.level < Level::kCommitted)
        at->second.aborted = Error(Code::kAborted, "%s", Explain(found).c_str());
  };
  const LeaderState& state = parts_.context.announced;
  std::for_each(state.disagreements.begin(), state.disagreements.end(), end);
  std::for_each(state.dropped.begin(), state.dropped.end(), end);
  for (const ShardId& shard : released) {
    const auto progress = progress_.find(shard);
    if (progress != progress_.end() && progress->second.level < Level::kCommitted &&
        !progress->second.aborted)
      progress->second.aborted =
          Error(Code::kAborted,
                "%s was released before it was committed: a newer step, or another shard of this name, is",
                shard.ToString().c_str());
  }
  Settle();
}

std::optional<Status> Sessions::Outcome(const Waiter& waiter) const {
  const auto progress = progress_.find(waiter.shard);
  if (progress != progress_.end() && progress->second.level >= waiter.level) return OkStatus();
  if (progress != progress_.end() && progress->second.aborted) return progress->second.aborted;
  if (waiter.level == Level::kPersisted && progress != progress_.end() &&
      progress->second.level == Level::kCommitted)
    if (const std::optional<Status> why = NotPersisted(StepOf(waiter.shard))) return why;
  if (waiter.shard.incarnation < parts_.context.incarnation.number)
    return Error(Code::kAborted, "%s will never be %s: the world is in incarnation %llu",
                 waiter.shard.ToString().c_str(), LevelName(waiter.level),
                 IncarnationNumber(parts_.context.incarnation.number));
  // Its copies may have been released since.
  if (progress == progress_.end() && parts_.context.announced.persisted.contains(StepOf(waiter.shard)))
    return OkStatus();
  if (progress == progress_.end())
    return Error(Code::kNotFound, "%s was not saved here", waiter.shard.ToString().c_str());
  if (waiter.deadline <= parts_.context.now)
    return Error(Code::kDeadlineExceeded, "%s is %s, not %s yet", waiter.shard.ToString().c_str(),
                 LevelName(progress->second.level), LevelName(waiter.level));
  return std::nullopt;
}

std::optional<Status> Sessions::NotPersisted(const StepId& step) const {
  const Announcement& announced = parts_.context.announced;
  if (!announced.heard || announced.persisting.contains(step)) return std::nullopt;
  // The shard's own level follows soon: a node's shards reach a level one after the other, and waits are checked in
  // between.
  if (announced.persisted.contains(step)) return std::nullopt;
  const std::string name = step.ToString();
  for (const ropeteam::NotPersisted& each : announced.not_persisted)
    if (each.step == step)
      return Error(Code::kAborted, "%s is not persisted: %s", name.c_str(), each.why.c_str());
  if (announced.persist_judged < step) return std::nullopt;
  const PersistEvery every = PersistEveryOf(parts_.context, parts_.context.policy, step.incarnation);
  if (every.count == 0)
    return Error(Code::kAborted, "%s is not persisted: it was not requested, and --persist-every is 0",
                 name.c_str());
  return Error(Code::kAborted, "%s is not persisted: it is not due (%s %llu%s)", name.c_str(),
               every.by_rank ? "persist_every" : "--persist-every",
               static_cast<unsigned long long>(every.count), every.seconds ? "s" : "");
}

void Sessions::Settle() {
  std::vector<std::pair<Waiter, Status>> settled;
  std::erase_if(waiters_, [&](const Waiter& waiter) {
    std::optional<Status> status = Outcome(waiter);
    if (status) settled.emplace_back(waiter, std::move(*status));
    return status.has_value();
  });
  for (auto& [waiter, status] : settled) {
    Session& session = SessionOf(waiter.session);
    ROPETEAM_CHECK(session.pending > 0);
    --session.pending;
    AnswerStatusTo(waiter.session, waiter.request, std::move(status));
  }
}

void Sessions::Wait(SessionId id, RequestId request, Step step, Level level, TimeUs timeout_us) {
  Session* session = &SessionOf(id);
  if (!session->admitted)
    return AnswerStatusTo(id, request, Error(Code::kInvalidArgument, "not admitted yet: hello comes first"));
  if (level < Level::kLocal || level > Level::kPersisted)
    return AnswerStatusTo(
        id, request,
        Error(Code::kInvalidArgument, "level %u, levels are 1 to 4", static_cast<unsigned>(level)));
  if (level == Level::kPersisted && parts_.context.view.settings.storage.empty())
    return AnswerStatusTo(id, request, Error(Code::kUnsupported, "this job has no storage to persist to"));
  if (session->pending >= kWaitsMax)
    return AnswerStatusTo(
        id, request,
        Error(Code::kNoSpace, "%u requests are waiting, limit %zu", session->pending, kWaitsMax));
  const Waiter waiter{
      id, request, {session->incarnation, step, session->hello.rank}, level, Deadline(timeout_us)};
  const SealedShard* sealed = parts_.context.store.Find(waiter.shard);
  if (!progress_.contains(waiter.shard) && sealed != nullptr && sealed->role == Role::kOwn) {
    // An earlier daemon sealed it.
    Progress& progress = ProgressOf(waiter.shard);
    progress.level = std::max(Level::kLocal, Announced(waiter.shard));
    progress.bytes = sealed->meta.stream_bytes;
  }
  ++session->pending;
  waiters_.push_back(waiter);
  Settle();
}

template <typename Payload, typename ToAnswer>
void Sessions::AskLeader(SessionId id, RequestId request, Question::Topic topic, std::string question,
                         TimeUs timeout_us, ToAnswer to_answer) {
  const uint64_t pending = AddPending(id, request, Deadline(timeout_us));
  if (pending == 0) return;
  parts_.asker.Ask(topic, std::move(question), Deadline(timeout_us),
                   [this, pending, to_answer](const Result<std::string>& reply) {
                     const std::optional<Pending> open = TakePending(pending);
                     Payload payload;
                     if (!open) return;
                     if (!reply.ok()) return AnswerStatusTo(open->session, open->request, reply.status());
                     if (!Decode(*reply, payload, parts_.context.protocol))
                       return AnswerStatusTo(open->session, open->request,
                                             Error(Code::kInternal, "the leader's answer cannot be read"));
                     AnswerTo(open->session, open->request, to_answer(std::move(payload)));
                   });
}

void Sessions::Drop(SessionId id, RequestId request, Step step, TimeUs timeout_us) {
  const Session& session = SessionOf(id);
  if (session.is_rank() && Admitted(id, request) == nullptr) return;
  if (const Status spoken = RequireProtocol(parts_.context, kDropSince, "a drop"); !spoken.ok())
    return AnswerStatusTo(id, request, spoken);
  DropQuestion question{step, 0, DroppedStep::kOperator, false};
  if (session.is_rank()) {
    const ShardId own{session.incarnation, step, session.hello.rank};
    question = {step, own.incarnation, own.rank, parts_.context.store.Find(own) != nullptr};
  }
  AskLeader<Nothing>(id, request, Question::Topic::kDrop, Encode(question), timeout_us,
                     [](const Nothing&) { return AnswerStatus{}; });
}

void Sessions::Persist(SessionId id, RequestId request, Step step, TimeUs timeout_us) {
  const Session* session = Admitted(id, request);
  if (session == nullptr) return;
  const PersistQuestion question{{session->incarnation, step}};
  AskLeader<Nothing>(id, request, Question::Topic::kPersist, Encode(question), timeout_us,
                     [](const Nothing&) { return AnswerStatus{}; });
}

void Sessions::SetPolicy(SessionId id, RequestId request, const PolicyInput& policy, TimeUs timeout_us) {
  const Session* session = Admitted(id, request);
  if (session == nullptr) return;
  if (!policy.any())
    return AnswerStatusTo(id, request,
                          Error(Code::kInvalidArgument, "neither persist_every nor keep_on_storage is set"));
  if (policy.persist_every > kPersistEveryMax || policy.keep_on_storage > kKeepOnStorageMax)
    return AnswerStatusTo(
        id, request,
        Error(Code::kInvalidArgument, "persist_every %llu, limit %llu; keep_on_storage %u, limit %u",
              static_cast<unsigned long long>(policy.persist_every),
              static_cast<unsigned long long>(kPersistEveryMax), policy.keep_on_storage, kKeepOnStorageMax));
  const Status spoken = Policy::Spoken(parts_.context);
  if (!spoken.ok()) return AnswerStatusTo(id, request, spoken);
  const PolicyQuestion question{session->incarnation, session->hello.rank, policy.persist_every,
                                policy.keep_on_storage, false};
  AskLeader<Nothing>(id, request, Question::Topic::kPolicy, Encode(question), timeout_us,
                     [](const Nothing&) { return AnswerStatus{}; });
}

void Sessions::SetPolicyAgain(const Session& session) {
  const PolicyInput& policy = session.hello.policy;
  if (!policy.any() || !Policy::Spoken(parts_.context).ok()) return;
  const Rank rank = session.hello.rank;
  const PolicyQuestion question{session.incarnation, rank, policy.persist_every, policy.keep_on_storage,
                                true};
  parts_.asker.Ask(Question::Topic::kPolicy, Encode(question), Deadline(kPolicyAgainUs),
                   [rank](const Result<std::string>& reply) {
                     if (!reply.ok())
                       LOG_WARNING("the policy that rank %u has set for storage may be lost: %s", rank,
                                   reply.status().ToString().c_str());
                   });
}

void Sessions::Latest(SessionId id, RequestId request, Level level, TimeUs timeout_us) {
  if (level != Level::kNone && level != Level::kCommitted && level != Level::kPersisted)
    return AnswerStatusTo(id, request,
                          Error(Code::kInvalidArgument, "level %d (%s): latest takes committed or persisted",
                                static_cast<int>(level), LevelName(level)));
  const Session* session = &SessionOf(id);
  Incarnation incarnation = 0;
  if (session->is_rank()) {
    if (Admitted(id, request) == nullptr) return;
    incarnation = session->incarnation;
  }
  AskLeader<LatestReply>(id, request, Question::Topic::kLatest,
                         Encode(LatestQuestion{incarnation, level == Level::kPersisted}), timeout_us,
                         [](LatestReply latest) {
                           return AnswerLatest{latest.step, latest.world_size, latest.passed_over};
                         });
}

void Sessions::Quarantine(SessionId id, RequestId request, Step step, bool undo, TimeUs timeout_us) {
  AskLeader<Nothing>(id, request, Question::Topic::kQuarantine, Encode(QuarantineQuestion{step, undo}),
                     timeout_us, [](const Nothing&) { return AnswerStatus{}; });
}

void Sessions::Forget(SessionId id, RequestId request, const std::string& node, TimeUs timeout_us) {
  if (node.size() > kNodeNameBytesMax)
    return AnswerStatusTo(
        id, request,
        Error(Code::kInvalidArgument, "node name of %zu bytes, limit %zu", node.size(), kNodeNameBytesMax));
  AskLeader<Nothing>(id, request, Question::Topic::kForget, Encode(ForgetQuestion{node}), timeout_us,
                     [](const Nothing&) { return AnswerStatus{}; });
}

void Sessions::Report(SessionId id, RequestId request, TimeUs timeout_us) {
  AskLeader<ClusterReport>(id, request, Question::Topic::kReport, Encode(Nothing{}), timeout_us,
                           [](ClusterReport report) { return AnswerReport{std::move(report)}; });
}

void Sessions::Verify(SessionId id, RequestId request, const Step* step, TimeUs timeout_us) {
  const VerifyQuestion question{step != nullptr, step != nullptr ? *step : 0};
  AskLeader<VerifyReport>(id, request, Question::Topic::kVerify, Encode(question), timeout_us,
                          [](VerifyReport report) { return AnswerVerify{std::move(report)}; });
}

void Sessions::Trace(SessionId id, RequestId request, NodeId node, bool events, Step step,
                     TimeUs timeout_us) {
  Context& context = parts_.context;
  if (!context.Contains(node))
    return AnswerStatusTo(id, request, Error(Code::kNotFound, "no such node is in the view"));
  const uint64_t pending = AddPending(id, request, Deadline(timeout_us), "the node was asked for its trace");
  if (pending == 0) return;
  pending_.at(pending).asked = node;
  context.Send(node, TraceQuestion{pending, context.now, events, step});
}

void Sessions::OnTraceAnswer(NodeId from, TraceAnswer answer) {
  const auto found = pending_.find(answer.number);
  if (found == pending_.end() || found->second.asked != from) return;
  const std::optional<Pending> open = TakePending(answer.number);
  AnswerTo(open->session, open->request,
           AnswerTrace{answer.asked_at, answer.node_at, parts_.context.now, std::move(answer.events)});
}

void Sessions::OnTimer() {
  Settle();
  std::vector<uint64_t> late;
  for (const auto& [number, pending] : pending_)
    if (pending.deadline <= parts_.context.now) late.push_back(number);
  for (const uint64_t number : late) {
    const std::optional<Pending> pending = TakePending(number);
    ROPETEAM_CHECK(pending && pending->deadline <= parts_.context.now);
    const std::string why = pending->fetched ? parts_.fetcher.Trouble(*pending->fetched) : "";
    AnswerStatusTo(pending->session, pending->request,
                   Error(Code::kDeadlineExceeded, "the deadline passed while %s%s%s", pending->doing,
                         why.empty() ? "" : "; last heard: ", why.c_str()));
  }
}

TimeUs Sessions::NextTimer() const {
  TimeUs due = kNever;
  for (const Waiter& waiter : waiters_) due = std::min(due, waiter.deadline);
  for (const auto& [number, pending] : pending_) due = std::min(due, pending.deadline);
  return due;
}

std::vector<SessionReport> Sessions::Report() const {
  std::vector<SessionReport> reports;
  for (const auto& [id, session] : sessions_) {
    if (!session.admitted) continue;
    SessionReport report{
        session.hello.rank, session.hello.world_size, session.incarnation,  session.hello.token,
        session.has_ended,  session.oldest_ended,     session.newest_ended, {}};
    for (const auto& [save_id, save] : saves_)
      if (save.session == id) report.open_steps.push_back(save.shard.step);
    reports.push_back(std::move(report));
  }
  return reports;
}

bool Sessions::HasRank(Rank rank) const {
  return std::any_of(sessions_.begin(), sessions_.end(), [&](const auto& session) {
    return session.second.admitted && session.second.hello.rank == rank &&
           session.second.incarnation == parts_.context.incarnation.number;
  });
}

// Only join questions count. Other questions may wait as long as the rank likes, and their answer may come when no
// other change sends an inventory.
uint64_t Sessions::asking_from() const {
  uint64_t oldest = parts_.asker.next_number();
  for (const auto& [id, session] : sessions_)
    if (session.question != 0) oldest = std::min(oldest, session.question);
  return oldest;
}

uint64_t Sessions::filling_chunks() const {
  uint64_t chunks = quiescing_chunks_;
  for (const auto& [id, save] : saves_) {
    ROPETEAM_CHECK(ChunkCount(save.extents) == save.crcs.size() && save.ready.size() == save.crcs.size());
    chunks += ChunkCount(save.extents);
  }
  return chunks;
}

}  // namespace ropeteam::engine
