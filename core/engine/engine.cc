// SPDX-License-Identifier: Apache-2.0
#include "core/engine/engine.h"

#include <algorithm>

#include "core/base/log.h"
#include "core/engine/drops.h"
#include "core/engine/inventory.h"
#include "core/engine/parts.h"
#include "core/engine/policy.h"
#include "core/engine/roster.h"

namespace ropeteam {

using engine::CopyFate;
using engine::kNever;

const char* LevelName(Level level) {
  switch (level) {
    case Level::kNone:
      return "not sealed";
    case Level::kLocal:
      return "local";
    case Level::kReplicated:
      return "replicated";
    case Level::kCommitted:
      return "committed";
    case Level::kPersisted:
      return "persisted";
  }
  return "unknown";
}

class Engine::Impl {
 public:
  Impl(const EngineConfig& config, Store* store) : parts_(config, store), context_(parts_.context) {}

  // Begin() and Finish() enclose every input.
  void Begin(TimeUs now) { context_.now = std::max(context_.now, now); }
  void Finish();

  void ApplyView(const View& view);
  void ApplyLease(TimeUs valid_until);
  void Receive(NodeId from, std::string_view bytes);
  void RunTimers();
  TimeUs NextTimer() const;
  NodeReport Report() const;
  EngineMetrics Metrics() const;
  void CheckInvariants() const;

  engine::Parts parts_;
  engine::Context& context_;

 private:
  // Envelopes of epochs whose view has not arrived yet. If there are more, this node is far behind, and the senders
  // repeat them.
  static constexpr size_t kEarlyMax = 1024;
  static constexpr size_t kAnnouncedMax = 256;

  void Dispatch(const Envelope& envelope);
  template <typename Message, typename Handler>
  void Handle(const Envelope& envelope, Handler handler);
  void ApplyLeaderState(NodeId from, const LeaderState& state);
  void NoteCommits(const LeaderState& state);
  // Emits an event for each step that is not yet known to have reached the level.
  void TellLevel(const std::set<StepId>& steps, Level level, std::set<StepId>* known);
  void Retain();
  void Drop(const DropCopy& drop);
  void Demote(const DemoteCopy& demote);
  TimeUs InventoryDue() const;
  void SendInventory();
  void NoteLease();

  std::deque<Envelope> early_;
  bool resumed_ = false;
  bool lease_lost_ = false;  // the loss has been logged
  uint64_t state_sequence_ = 0;
  std::set<StepId> announced_;
  std::set<StepId> persisted_;
  engine::InventorySender inventory_;
};

void Engine::Impl::Finish() {
  for (;;) {
    if (!context_.to_self.empty()) {
      const Envelope envelope = std::move(context_.to_self.front());
      context_.to_self.pop_front();
      if (envelope.epoch == context_.view.epoch) Dispatch(envelope);
      continue;
    }
    if (context_.inventory_dirty) {
      Retain();
      context_.inventory_dirty = false;
      inventory_.OnChange();
      continue;
    }
    if (InventoryDue() <= context_.now) {
      SendInventory();
      continue;
    }
    parts_.leader.Flush();
    if (context_.to_self.empty() && !context_.inventory_dirty) return;
  }
}

void Engine::Impl::ApplyView(const View& view) {
  if (view.epoch <= context_.view.epoch) return;
  const View before = std::move(context_.view);
  context_.SetView(view);
  if (context_.joined == 0 && context_.Contains(context_.config.self)) context_.joined = view.epoch;
  context_.had_others = context_.had_others || view.members.size() > 1;
  context_.settle_until = std::max(context_.settle_until, context_.now + view.settle_us);
  context_.to_self.clear();  // these are of the previous epoch; their sender asks again below
  context_.inventory_dirty = true;
  inventory_.OnView(view.leader);
  // Nothing is released or evicted before this epoch's leader has announced: copies that the previous leader counted
  // may have been lost since.
  context_.announced.heard = false;
  const bool lost = std::any_of(before.members.begin(), before.members.end(),
                                [&](const Member& member) { return !context_.Contains(member.id); });
  // The ranks of a lost node have left an incarnation without a token. Perhaps only the lost node had a record of them.
  if (lost && context_.incarnation.number != 0 && context_.incarnation.token.empty())
    context_.incarnation.broken = true;
  parts_.desk.OnView(before);
  parts_.leader.OnView(before);
  parts_.holder.OnView();
  // Before the commit, a shard's owner makes its copies. A lost node may have held one.
  if (lost || !resumed_) {
    for (const auto& [id, shard] : context_.store.shards()) parts_.replicator.Resume(id);
  }
  if (!resumed_) parts_.rekeyer.Begin();
  // A new member may hold good copies of chunks of which no member had any.
  const bool joined = std::any_of(view.members.begin(), view.members.end(),
                                  [&](const Member& member) { return !before.Contains(member.id); });
  if (joined || !resumed_) {
    std::vector<ShardId> bad;
    for (const auto& [id, shard] : context_.store.shards())
      if (!shard->bad.empty()) bad.push_back(id);
    for (const ShardId& id : bad) parts_.fetcher.Repair(id, {}, [](const Status&) {});
  }
  resumed_ = true;
  parts_.links.OnView();
  std::erase_if(context_.local.peers, [&](const auto& peer) { return !context_.Contains(peer.first); });
  parts_.replicator.OnView();
  parts_.fetcher.OnView();
  parts_.range_holder.OnView();
  parts_.range_reader.OnView();
  parts_.asker.OnView();
  std::deque<Envelope> early = std::move(early_);
  early_.clear();
  for (Envelope& envelope : early) {
    if (envelope.epoch > view.epoch) {
      early_.push_back(std::move(envelope));
    } else if (envelope.epoch == view.epoch && context_.Contains(envelope.from)) {
      Dispatch(envelope);
    }
  }
}

void Engine::Impl::ApplyLease(TimeUs valid_until) {
  const bool had = context_.has_lease();
  context_.lease_until = valid_until;
  if (context_.has_lease() && !had) {
    if (lease_lost_) LOG_INFO("lease is valid again, replication and commits go on");
    lease_lost_ = false;
    context_.inventory_dirty = true;
    inventory_.OnLease();
    parts_.transfers.Resume();
    parts_.leader.OnLease();
  }
  NoteLease();
}

void Engine::Impl::NoteLease() {
  if (context_.has_lease() || context_.lease_until == 0 || lease_lost_) return;
  lease_lost_ = true;
  ++context_.local.leases_lost;
  context_.inventory_dirty = true;
  parts_.leader.OnLeaseLost();
  parts_.desk.OnLeaseLost();
  LOG_WARNING("the lease has expired: saves stay local and reads go on until membership renews it");
}

void Engine::Impl::Receive(NodeId from, std::string_view bytes) {
  Envelope envelope;
  if (!Decode(bytes, envelope) || envelope.from != from) {
    LOG_WARNING("a message of %zu bytes from %s cannot be read", bytes.size(), context_.NameOf(from).c_str());
    return;
  }
  if (envelope.to != context_.config.self || envelope.epoch < context_.view.epoch) {
    ++context_.counters.messages_stale;
    return;
  }
  if (envelope.epoch > context_.view.epoch) {
    if (early_.size() >= kEarlyMax) early_.pop_front();
    early_.push_back(std::move(envelope));
    return;
  }
  if (context_.Contains(from)) Dispatch(envelope);
}

template <typename Message, typename Handler>
void Engine::Impl::Handle(const Envelope& envelope, Handler handler) {
  Message message;
  if (Decode(envelope.payload, message, context_.protocol)) {
    handler(message);
  } else {
    LOG_WARNING("a message of kind %u from %s cannot be read", static_cast<unsigned>(envelope.kind),
                context_.NameOf(envelope.from).c_str());
  }
}

void Engine::Impl::Dispatch(const Envelope& envelope) {
  const NodeId from = envelope.from;
  engine::Parts& p = parts_;
  p.links.OnMessage(from, envelope.kind);
  const bool encrypted = envelope.kind == Kind::kEncryptedSeal || envelope.kind == Kind::kEncryptedGrant ||
                         envelope.kind == Kind::kEncryptCopy;
  if (encrypted && !context_.config.encrypts()) {
    LOG_WARNING("a message of kind %u from %s refused: this job does not encrypt",
                static_cast<unsigned>(envelope.kind), context_.NameOf(from).c_str());
    return;
  }
  switch (envelope.kind) {
    case Kind::kReplicaReserve:
      return Handle<ReplicaReserve>(envelope, [&](auto& m) { p.holder.OnReserve(from, m); });
    case Kind::kReplicaGrant:
      return Handle<ReplicaGrant>(envelope, [&](auto& m) { p.replicator.OnGrant(from, m); });
    case Kind::kReplicaArrived:
      return Handle<ReplicaArrived>(envelope, [&](auto& m) { p.holder.OnArrived(from, m); });
    case Kind::kReplicaSeal:
      return Handle<ReplicaSeal>(envelope, [&](auto& m) { p.holder.OnSeal(from, m, {}); });
    case Kind::kEncryptedSeal:
      return Handle<EncryptedSeal>(envelope, [&](auto& m) { p.holder.OnSeal(from, m.seal, m.encryption); });
    case Kind::kReplicaSealed:
      return Handle<ReplicaSealed>(envelope, [&](auto& m) { p.replicator.OnSealed(from, m); });
    case Kind::kReplicaAbort:
      return Handle<ReplicaAbort>(envelope, [&](auto& m) { p.holder.OnAbort(from, m); });
    case Kind::kCopyQuery:
      return Handle<CopyQuery>(envelope, [&](auto& m) { p.replicator.OnQuery(from, m); });
    case Kind::kInventory:
      return Handle<Inventory>(envelope, [&](auto& m) { p.leader.OnInventory(from, std::move(m)); });
    case Kind::kInventoryAck:
      return Handle<InventoryAck>(envelope, [&](auto& m) { inventory_.OnAck(from, m); });
    case Kind::kInventoryDelta:
      return Handle<InventoryDelta>(envelope, [&](auto& m) { p.leader.OnInventoryDelta(from, m); });
    case Kind::kLeaderState:
      return Handle<LeaderState>(envelope, [&](auto& m) { ApplyLeaderState(from, m); });
    case Kind::kLeaderStateAck:
      return Handle<LeaderStateAck>(envelope, [&](auto& m) { p.leader.OnStateAck(from, m); });
    case Kind::kQuestion:
      return Handle<Question>(envelope, [&](auto& m) { p.leader.OnQuestion(from, m); });
    case Kind::kReply:
      return Handle<Reply>(envelope, [&](auto& m) { p.asker.OnReply(from, m); });
    case Kind::kFetchOpen:
      return Handle<FetchOpen>(envelope, [&](auto& m) { p.holder.OnFetchOpen(from, m); });
    case Kind::kFetchGrant:
      return Handle<FetchGrant>(envelope, [&](auto& m) { p.fetcher.OnGrant(from, m, {}); });
    case Kind::kEncryptedGrant:
      return Handle<EncryptedGrant>(envelope,
                                    [&](auto& m) { p.fetcher.OnGrant(from, m.grant, m.encryption); });
    case Kind::kEncryptCopy:
      return Handle<EncryptCopy>(envelope, [&](auto& m) { p.holder.OnEncryptCopy(from, m); });
    case Kind::kFetchClose:
      return Handle<FetchClose>(envelope, [&](auto& m) { p.holder.OnFetchClose(from, m); });
    case Kind::kBadCopy:
      return Handle<BadCopy>(envelope, [&](auto& m) { p.holder.OnBadCopy(from, m); });
    case Kind::kCopyOrder:
      return Handle<CopyOrder>(envelope, [&](auto& m) {
        if (from == context_.view.leader) p.replicator.Order(m.shard, m.target);
      });
    case Kind::kDropCopy:
      return Handle<DropCopy>(envelope, [&](auto& m) {
        if (from == context_.view.leader && context_.has_lease()) Drop(m);
      });
    case Kind::kDemoteCopy:
      return Handle<DemoteCopy>(envelope, [&](auto& m) {
        if (from == context_.view.leader && context_.has_lease()) Demote(m);
      });
    case Kind::kPersistOrder:
      return Handle<PersistOrder>(envelope, [&](auto& m) { p.persister.OnOrder(from, m); });
    case Kind::kPersistResult:
      return Handle<PersistResult>(envelope, [&](auto& m) { p.leader.OnPersistResult(from, m); });
    case Kind::kStoredRead:
      return Handle<StoredRead>(envelope, [&](auto& m) { p.leader.OnStoredRead(from, m); });
    case Kind::kCheckStored:
      return Handle<CheckStored>(envelope, [&](auto& m) { p.persister.OnCheck(from, m); });
    case Kind::kStoredChecked:
      return;  // leaders before protocol 9 ask for it
    case Kind::kStorageOrder:
      return Handle<StorageOrder>(envelope, [&](auto& m) { p.desk.OnOrder(from, m); });
    case Kind::kStorageResult:
      return Handle<StorageResult>(envelope, [&](auto& m) { p.leader.OnStorageResult(from, m); });
    case Kind::kFetchOrder:
      return Handle<FetchOrder>(envelope, [&](auto& m) {
        if (from == context_.view.leader) p.fetcher.Fetch(m.shard, [](const Status&) {});
      });
    case Kind::kRangesOpen:
      return Handle<RangesOpen>(envelope, [&](auto& m) { p.range_holder.OnOpen(from, std::move(m)); });
    case Kind::kRangesGrant:
      return Handle<RangesGrant>(envelope, [&](auto& m) { p.range_reader.OnGrant(from, m); });
    case Kind::kRangesClose:
      return Handle<RangesClose>(envelope, [&](auto& m) { p.range_holder.OnClose(from, m); });
    case Kind::kVerifyOrder:
      return Handle<VerifyOrder>(envelope, [&](auto& m) { p.holder.OnVerifyOrder(from, m); });
    case Kind::kVerifyResult:
      return Handle<VerifyResult>(envelope, [&](auto& m) { p.leader.OnVerifyResult(from, m); });
    case Kind::kTraceQuestion:
      return Handle<TraceQuestion>(envelope, [&](auto& m) {
        context_.Send(from, TraceAnswer{m.number, m.asked_at, context_.now,
                                        m.events ? context_.trace.Of(m.step) : std::vector<TraceEvent>()});
      });
    case Kind::kTraceAnswer:
      return Handle<TraceAnswer>(envelope, [&](auto& m) { p.sessions.OnTraceAnswer(from, std::move(m)); });
  }
  LOG_WARNING("a message of unknown kind %u from %s", static_cast<unsigned>(envelope.kind),
              context_.NameOf(from).c_str());
}

void Engine::Impl::ApplyLeaderState(NodeId from, const LeaderState& state) {
  // Without a lease, the others may have declared this node and its leader dead. The leader repeats the announcement.
  if (from != context_.view.leader || !context_.has_lease() || !state.incarnation.possible()) return;
  // This state is older than an incarnation that a rank here has joined. The announcement of that incarnation is still
  // on its way.
  if (state.incarnation.number < context_.incarnation.number) return;
  context_.Send(from, LeaderStateAck{state.sequence});
  if (context_.announced.heard && state.sequence <= state_sequence_) return;
  state_sequence_ = state.sequence;

  const bool incarnation_changed = !(context_.incarnation == state.incarnation);
  const bool left_here =
      state.incarnation.number == context_.incarnation.number && context_.incarnation.broken;
  context_.incarnation = state.incarnation;
  context_.incarnation.broken = context_.incarnation.broken || left_here;  // the leader may not know it yet
  if (state.incarnation.number > context_.store.incarnation_max())
    context_.store.SetIncarnationMax(state.incarnation.number);
  if (context_.view.members.size() > 1 && !state.persisted.empty())
    context_.stored_with_others = *state.persisted.rbegin();
  if (state.persisting != context_.announced.persisting) context_.inventory_dirty = true;
  // A leader of version 8 does not count restores. The notes are kept for the next leader.
  if (context_.protocol >= 9 && state.restores != context_.restores) {
    context_.inventory_dirty = true;
    context_.restores = state.restores;
  }
  if (context_.protocol >= 9 && engine::Join(&context_.policy, state.policy)) context_.inventory_dirty = true;
  NoteCommits(state);
  context_.announced = {state, true};
  for (const StepId& id : state.keep) context_.announced.dead.erase(id);
  TellLevel(context_.announced.told, Level::kCommitted, &announced_);
  TellLevel(context_.announced.persisted, Level::kPersisted, &persisted_);
  parts_.persister.OnLeaderState(context_.announced.persisting);
  if (incarnation_changed) context_.inventory_dirty = true;
  Retain();
}

// Before the acknowledgement, so that every member knows of a step that ranks are told is committed.
void Engine::Impl::NoteCommits(const LeaderState& state) {
  NodeFacts facts = context_.store.facts();
  for (const StepId& id : state.listed)
    if (id.incarnation < kIncarnationMax) facts.committed = std::max(facts.committed, id);
  const RosterRecord& roster = state.roster;
  const bool made_here = roster.epoch == context_.view.epoch;
  // The roster here, less nodes given up since. A drained node has an older one of the same epoch, and is in none since.
  const auto& gone = state.forgotten;
  const bool same_nodes = roster.epoch == facts.roster_epoch &&
                          roster.revision <= facts.roster_revision + gone.size() &&
                          std::find(gone.begin(), gone.end(), context_.config.node) == gone.end();
  if (roster.revision > facts.roster_revision && !context_.leaving && (made_here || same_nodes)) {
    facts.roster_revision = roster.revision;
    facts.roster_epoch = roster.epoch;
    facts.roster_nodes = roster.nodes;
    std::vector<std::string> names =
        made_here ? engine::RosterNames(context_.view) : context_.store.roster_names();
    for (const std::string& name : state.forgotten) std::erase(names, name);
    context_.store.SetRosterNames(roster.revision, names);
  }
  if (facts == context_.store.facts()) return;
  context_.store.SetFacts(facts);
  context_.inventory_dirty = true;
}

void Engine::Impl::TellLevel(const std::set<StepId>& steps, Level level, std::set<StepId>* known) {
  for (auto id = steps.rbegin(); id != steps.rend();
       ++id) {  // newest first: its event also covers the older steps
    if (!known->insert(*id).second) continue;
    const ShardId step{id->incarnation, id->step, LevelEvent::kNoRank};
    context_.out.events.push_back({step, level, 0, 0});
    context_.Note({.what = TraceEvent::What::kLevel, .shard = step, .first = static_cast<uint32_t>(level)});
    if (known->size() > kAnnouncedMax) known->erase(known->begin());
  }
}

// Marks the copies of committed steps. Removes the copies of steps that can never be complete, and of steps that are
// older than the newest committed one and not kept. A later copy gets the mark with its bytes (ReplicaSeal,
// FetchGrant), or when the leader has compared them. Without the mark, its step would not be known as committed when
// the earlier copies are gone.
void Engine::Impl::Retain() {
  std::vector<ShardId> marked;
  std::vector<ShardId> released;
  for (const auto& [id, shard] : context_.store.shards()) {
    const StepId step = StepOf(id);
    if (FateOf(shard->role, step, context_.announced) == CopyFate::kReleased) {
      released.push_back(id);
    } else if (!shard->committed && context_.announced.listed.contains(step) &&
               inventory_.FirstWith(id, shard->content) <= context_.announced.judged) {
      marked.push_back(id);
    }
  }
  for (const ShardId& id : marked) {
    context_.store.SetCommitted(id);
    context_.inventory_dirty = true;
  }
  for (const ShardId& id : released) {
    LOG_DEBUG("release %s", id.ToString().c_str());
    if (context_.announced.dead.contains(StepOf(id))) parts_.memory.KeepForReplicas();
    context_.store.Remove(id);
    context_.inventory_dirty = true;
  }
  parts_.replicator.DropObsolete();
  parts_.sessions.OnLeaderState(context_.announced.told, released);
}

void Engine::Impl::Drop(const DropCopy& drop) {
  const SealedShard* shard = context_.store.Find(drop.shard);
  if (shard == nullptr || shard->content != drop.content || shard->committed) return;
  LOG_WARNING(
      "the copy of %s here (content %016llx) is dropped: node %s has another shard of that name, which "
      "counts "
      "(content %016llx)",
      drop.shard.ToString().c_str(), static_cast<unsigned long long>(drop.content), drop.holder.c_str(),
      static_cast<unsigned long long>(drop.content_counts));
  context_.store.Remove(drop.shard);
  context_.inventory_dirty = true;
  parts_.replicator.DropObsolete();
  parts_.sessions.OnLeaderState(context_.announced.told, {drop.shard});
}

void Engine::Impl::Demote(const DemoteCopy& demote) {
  const SealedShard* shard = context_.store.Find(demote.shard);
  if (demote.inventory != inventory_.sequence()) return;
  if (shard == nullptr || shard->content != demote.content || shard->role != Role::kReplica) return;
  LOG_DEBUG("%s is now a cache here: other nodes have enough copies", demote.shard.ToString().c_str());
  context_.store.SetRole(demote.shard, Role::kCache);
  context_.inventory_dirty = true;
}

TimeUs Engine::Impl::InventoryDue() const {
  const bool more_soon = parts_.sessions.filling_chunks() + parts_.holder.granted_chunks() != 0;
  return inventory_.Due(more_soon, context_.counters_dirty);
}

void Engine::Impl::SendInventory() {
  if (inventory_.in_flight()) {
    ++context_.local.messages_repeated;
    const auto& repeat = inventory_.Repeat(context_.now);
    return context_.SendEncoded(context_.view.leader, repeat.kind, repeat.payload);
  }
  Inventory inventory;
  inventory.report = Report();
  inventory.incarnation = context_.incarnation;
  inventory.incarnation_max = context_.store.incarnation_max();
  inventory.asking_from = parts_.sessions.asking_from();
  inventory.short_of_memory = parts_.memory.refuses_replicas();
  inventory.persisting = context_.announced.persisting;
  inventory.loading = parts_.persister.loading();
  inventory.restores = context_.restores;
  inventory.policy = context_.policy;
  const NodeFacts& facts = context_.store.facts();
  inventory.roster = {facts.roster_revision, facts.roster_epoch, static_cast<uint32_t>(facts.roster_nodes),
                      context_.store.roster_names()};
  inventory.newest_committed = facts.committed;
  inventory.joined = context_.joined;
  const auto& message = inventory_.Send(context_.now, std::move(inventory), context_.protocol);
  if (inventory_.counters_at() == context_.now) context_.counters_dirty = false;
  context_.SendEncoded(context_.view.leader, message.kind, message.payload);
}

void Engine::Impl::RunTimers() {
  NoteLease();
  parts_.memory.OnTimer();
  parts_.asker.OnTimer();
  parts_.sessions.OnTimer();
  parts_.replicator.OnTimer();
  parts_.holder.OnTimer();
  parts_.fetcher.OnTimer();
  parts_.range_holder.OnTimer();
  parts_.range_reader.OnTimer();
  parts_.scrubber.OnTimer();
  parts_.links.OnTimer();
  parts_.rekeyer.OnTimer();
  parts_.drainer.OnTimer(inventory_.known() && !context_.inventory_dirty);
  parts_.leader.OnTimer();
}

TimeUs Engine::Impl::NextTimer() const {
  TimeUs due = std::min({parts_.memory.NextTimer(), parts_.asker.NextTimer(), parts_.sessions.NextTimer(),
                         parts_.replicator.NextTimer(), parts_.holder.NextTimer(), parts_.fetcher.NextTimer(),
                         parts_.range_holder.NextTimer(), parts_.range_reader.NextTimer(),
                         parts_.scrubber.NextTimer(), parts_.rekeyer.NextTimer(), parts_.drainer.NextTimer(),
                         parts_.links.NextTimer(), parts_.leader.NextTimer()});
  // Also after an input that came when the lease had just ended: NoteLease() is still due.
  if (context_.lease_until != 0 && !lease_lost_) due = std::min(due, context_.lease_until);
  return std::min(due, InventoryDue());
}

NodeReport Engine::Impl::Report() const {
  NodeReport report;
  report.id = context_.config.self;
  report.name = context_.config.node;
  report.chunk_bytes = context_.store.chunk_bytes();
  report.chunks_total = context_.store.chunks_total();
  report.chunks_free = context_.store.chunks_free();
  report.sessions = parts_.sessions.Report();
  for (const auto& [id, shard] : context_.store.shards()) {
    // A leader before protocol 9 would commit it without checking the agreement of its ranks.
    if (context_.protocol < 9 && shard->meta.agreement != 0 && !shard->committed) continue;
    const bool seated = shard->role == Role::kOwn && parts_.sessions.HasRank(id.rank);
    CopyReport copy{id,
                    shard->meta.world_size,
                    shard->meta.replicas,
                    shard->meta.stream_bytes,
                    shard->role,
                    shard->committed,
                    seated,
                    context_.Readable(*shard),
                    shard->bad,
                    shard->content,
                    shard->meta.agreement,
                    shard->encryption.key};
    if (copy.bad.size() > kBadListedMax) copy.bad.resize(kBadListedMax + 1);
    report.copies.push_back(std::move(copy));
  }
  report.counters = context_.counters;
  report.counters.table_repairs = context_.store.table_repairs();
  report.has_lease = context_.has_lease();
  report.leaving = context_.leaving;
  for (const auto& [peer, link] : context_.unreachable)
    report.lost_links.push_back(
        {peer, context_.NameOf(peer), link.reason, context_.now - link.since, link.data, link.control});
  report.scrub = parts_.scrubber.Report();
  report.keep_on_storage = context_.config.keep_on_storage;
  report.keep_rules = context_.config.keep_rules;
  report.keys = context_.config.keys;
  report.reencrypted = parts_.rekeyer.reencrypted();
  return report;
}

EngineMetrics Engine::Impl::Metrics() const {
  const Store& store = context_.store;
  EngineMetrics metrics;
  metrics.counters = context_.counters;
  metrics.counters.table_repairs = store.table_repairs();
  metrics.local = context_.local;
  metrics.chunk_bytes = store.chunk_bytes();
  metrics.chunks_total = store.chunks_total();
  metrics.chunks_free = store.chunks_free();
  metrics.bounce_chunks = parts_.transfers.bounce_chunks();
  metrics.own = store.use(Role::kOwn);
  metrics.replica = store.use(Role::kReplica);
  metrics.cache = store.use(Role::kCache);
  using Priority = engine::Transfers::Priority;
  metrics.gets_waiting = parts_.transfers.waiting(Priority::kFetch);
  metrics.puts_waiting = parts_.transfers.waiting(Priority::kSave);
  metrics.background_waiting = parts_.transfers.waiting(Priority::kBackground);
  metrics.transfers_running = parts_.transfers.running();
  metrics.checks_running = parts_.transfers.checking();
  metrics.storage_running = parts_.storage.running();
  metrics.questions_open = parts_.asker.open();
  metrics.saves_open = parts_.sessions.saves_open();
  metrics.sessions = parts_.sessions.sessions_open();
  metrics.leader = parts_.leader.leading();
  for (const auto& [peer, link] : context_.unreachable) {
    metrics.lost_data += link.data ? 1 : 0;
    metrics.lost_control += link.control ? 1 : 0;
  }
  metrics.reencrypted = parts_.rekeyer.reencrypted();
  metrics.copies_of_other_keys = parts_.rekeyer.left();
  metrics.copies_unreadable = parts_.rekeyer.unreadable();
  metrics.redundant = parts_.leader.redundant();
  const std::set<StepId>& told = context_.announced.told;
  const std::set<StepId>& persisted = context_.announced.persisted;
  metrics.has_committed = !told.empty();
  metrics.has_persisted = !persisted.empty();
  if (metrics.has_committed) metrics.newest_committed = told.rbegin()->step;
  if (metrics.has_persisted) metrics.newest_persisted = persisted.rbegin()->step;
  return metrics;
}

void Engine::Impl::CheckInvariants() const {
  context_.store.CheckInvariants();
  parts_.leader.CheckInvariants();
  parts_.replicator.CheckInvariants();
  uint64_t sealed = 0;
  for (const auto& [id, shard] : context_.store.shards()) sealed += ChunkCount(shard->extents);
  const uint64_t unsealed = parts_.sessions.filling_chunks() + parts_.holder.granted_chunks() +
                            parts_.fetcher.allocated_chunks() + parts_.persister.allocated_chunks() +
                            parts_.memory.quarantined_chunks() + parts_.transfers.bounce_chunks() +
                            parts_.converter.allocated_chunks() + parts_.range_holder.allocated_chunks() +
                            parts_.range_reader.allocated_chunks();
  ROPETEAM_CHECK(context_.store.chunks_free() + sealed + context_.store.removed_chunks() + unsealed ==
                 context_.store.chunks_total());
}

Engine::Engine(const EngineConfig& config, Store* store) : impl_(std::make_unique<Impl>(config, store)) {}
Engine::~Engine() = default;

Outbox& Engine::outbox() { return impl_->context_.out; }
TimeUs Engine::NextTimer() const { return impl_->NextTimer(); }

void Engine::OnView(TimeUs now, const View& view) {
  impl_->Begin(now);
  impl_->ApplyView(view);
  impl_->Finish();
}
void Engine::OnMessage(TimeUs now, NodeId from, std::string_view envelope) {
  impl_->Begin(now);
  impl_->Receive(from, envelope);
  impl_->Finish();
}
void Engine::OnTransferDone(TimeUs now, uint64_t tag, Code code) {
  impl_->Begin(now);
  impl_->parts_.transfers.OnDone(tag, code);
  impl_->Finish();
}
void Engine::OnCheckDone(TimeUs now, uint64_t tag, const std::vector<uint32_t>& bad,
                         const std::vector<EncryptedChunk>& encrypted) {
  impl_->Begin(now);
  impl_->parts_.transfers.OnCheckDone(tag, bad, encrypted);
  impl_->Finish();
}
void Engine::OnStorageDone(TimeUs now, uint64_t tag, const Status& status, const StorageDone& done) {
  impl_->Begin(now);
  impl_->parts_.storage.OnDone(tag, status, done);
  impl_->Finish();
}
void Engine::OnStorageStalled(TimeUs now, uint64_t tag) {
  impl_->Begin(now);
  impl_->parts_.storage.OnStalled(tag);
  impl_->Finish();
}
void Engine::OnPeerFenced(TimeUs now, NodeId peer) {
  impl_->Begin(now);
  impl_->parts_.memory.OnPeerFenced(peer);
  impl_->Finish();
}
void Engine::OnTimer(TimeUs now) {
  impl_->Begin(now);
  impl_->RunTimers();
  impl_->Finish();
}

void Engine::OnLease(TimeUs now, TimeUs valid_until) {
  impl_->Begin(now);
  impl_->ApplyLease(valid_until);
  impl_->Finish();
}
void Engine::OnPeerLink(TimeUs now, NodeId peer, bool up, const std::string& reason) {
  impl_->Begin(now);
  impl_->parts_.links.OnDataPath(peer, up, reason);
  impl_->Finish();
}
void Engine::OnCheckMembers(TimeUs now, const std::vector<NodeId>& members) {
  impl_->Begin(now);
  impl_->parts_.links.Check(members);
  impl_->Finish();
}

void Engine::OnSessionOpened(TimeUs now, SessionId session) {
  impl_->Begin(now);
  impl_->parts_.sessions.Open(session);
  impl_->Finish();
}
void Engine::OnSessionClosed(TimeUs now, SessionId session) {
  impl_->Begin(now);
  impl_->parts_.sessions.Close(session);
  impl_->Finish();
}
void Engine::OnHello(TimeUs now, SessionId session, RequestId request, const HelloInput& hello) {
  impl_->Begin(now);
  impl_->parts_.sessions.Hello(session, request, hello);
  impl_->Finish();
}
void Engine::OnSaveBegin(TimeUs now, SessionId session, RequestId request, Step step, uint64_t stream_bytes,
                         uint64_t agreement) {
  impl_->Begin(now);
  impl_->parts_.sessions.SaveBegin(session, request, step, stream_bytes, agreement);
  impl_->Finish();
}
void Engine::OnSaveExtend(TimeUs now, SessionId session, RequestId request, SaveId save, uint64_t chunks) {
  impl_->Begin(now);
  impl_->parts_.sessions.SaveExtend(session, request, save, chunks);
  impl_->Finish();
}
void Engine::OnSaveFilled(TimeUs now, SessionId session, SaveId save, uint32_t first,
                          const std::vector<uint32_t>& crcs) {
  impl_->Begin(now);
  impl_->parts_.sessions.SaveFilled(session, save, first, crcs);
  impl_->Finish();
}
void Engine::OnSaveDirect(TimeUs now, SessionId session, const SaveDirectInput& direct) {
  impl_->Begin(now);
  impl_->parts_.sessions.SaveDirect(session, direct);
  impl_->Finish();
}
void Engine::OnSaveSettle(TimeUs now, SessionId session, RequestId request, SaveId save, TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.SaveSettle(session, request, save, timeout_us);
  impl_->Finish();
}
void Engine::OnSaveCommit(TimeUs now, SessionId session, RequestId request, const SaveCommitInput& commit) {
  impl_->Begin(now);
  impl_->parts_.sessions.SaveCommit(session, request, commit);
  impl_->Finish();
}
std::function<Status()> Engine::ManifestCheck(SessionId session, const SaveCommitInput& commit) const {
  return impl_->parts_.sessions.ManifestCheck(session, commit);
}
void Engine::OnSaveAbort(TimeUs now, SessionId session, RequestId request, SaveId save) {
  impl_->Begin(now);
  impl_->parts_.sessions.SaveAbort(session, request, save);
  impl_->Finish();
}
void Engine::OnWait(TimeUs now, SessionId session, RequestId request, Step step, Level level,
                    TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.Wait(session, request, step, level, timeout_us);
  impl_->Finish();
}
void Engine::OnDrop(TimeUs now, SessionId session, RequestId request, Step step, TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.Drop(session, request, step, timeout_us);
  impl_->Finish();
}
void Engine::OnPersist(TimeUs now, SessionId session, RequestId request, Step step, TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.Persist(session, request, step, timeout_us);
  impl_->Finish();
}
void Engine::OnSetPolicy(TimeUs now, SessionId session, RequestId request, const PolicyInput& policy,
                         TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.SetPolicy(session, request, policy, timeout_us);
  impl_->Finish();
}
void Engine::OnLatest(TimeUs now, SessionId session, RequestId request, Level level, TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.Latest(session, request, level, timeout_us);
  impl_->Finish();
}
void Engine::OnViewOpen(TimeUs now, SessionId session, RequestId request, Step step, Rank rank,
                        TimeUs timeout_us, bool partial) {
  impl_->Begin(now);
  impl_->parts_.sessions.ViewOpen(session, request, step, rank, timeout_us, partial);
  impl_->Finish();
}
void Engine::OnViewRead(TimeUs now, SessionId session, RequestId request, ViewId view,
                        const std::vector<PackedPart>& parts, TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.ViewRead(session, request, view, parts, timeout_us);
  impl_->Finish();
}
void Engine::OnViewRepair(TimeUs now, SessionId session, RequestId request, ViewId view,
                          const std::vector<uint32_t>& chunks, TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.ViewRepair(session, request, view, chunks, timeout_us);
  impl_->Finish();
}
void Engine::OnViewClose(TimeUs now, SessionId session, ViewId view) {
  impl_->Begin(now);
  impl_->parts_.sessions.ViewClose(session, view);
  impl_->Finish();
}
void Engine::OnQuarantine(TimeUs now, SessionId session, RequestId request, Step step, bool undo,
                          TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.Quarantine(session, request, step, undo, timeout_us);
  impl_->Finish();
}
void Engine::OnForget(TimeUs now, SessionId session, RequestId request, const std::string& node,
                      TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.Forget(session, request, node, timeout_us);
  impl_->Finish();
}
void Engine::OnReport(TimeUs now, SessionId session, RequestId request, TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.Report(session, request, timeout_us);
  impl_->Finish();
}
void Engine::OnVerify(TimeUs now, SessionId session, RequestId request, const Step* step, TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.Verify(session, request, step, timeout_us);
  impl_->Finish();
}
void Engine::OnTrace(TimeUs now, SessionId session, RequestId request, NodeId node, bool events, Step step,
                     TimeUs timeout_us) {
  impl_->Begin(now);
  impl_->parts_.sessions.Trace(session, request, node, events, step, timeout_us);
  impl_->Finish();
}

void Engine::OnDrain(TimeUs now) {
  impl_->Begin(now);
  impl_->parts_.drainer.Begin();
  impl_->Finish();
}

DrainReport Engine::drain() const { return impl_->parts_.drainer.report(); }
NodeReport Engine::Report() const { return impl_->Report(); }
EngineMetrics Engine::Metrics() const { return impl_->Metrics(); }
bool Engine::redundant() const { return impl_->parts_.leader.redundant(); }
bool Engine::is_leader() const { return impl_->parts_.leader.leading(); }
const View& Engine::view() const { return impl_->context_.view; }
bool Engine::saving() const { return impl_->parts_.sessions.saving(); }
Incarnation Engine::incarnation() const { return impl_->context_.incarnation.number; }
void Engine::CheckInvariants() const { impl_->CheckInvariants(); }

}  // namespace ropeteam
