// SPDX-License-Identifier: Apache-2.0
#include "core/engine/leader.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::engine {

void Leader::Begin() {
  members_.clear();
  table_ = StepTable();
  incarnations_.Begin(context_.incarnation);
  latest_.Begin();
  redundancy_.Clear();
  drops_.Begin();
  stored_.Begin();
  hold_.Begin();
  restores_.Begin();
  damage_.Begin();
  policy_.Begin();
  persistence_.Begin();
  loaders_.clear();
  persisting_durable_.Begin();
  restores_durable_.Begin();
  policy_durable_.Begin();
  roster_durable_.Begin();
  pin_durable_.Begin();
  roster_.Begin();
  disagreements_.clear();
  listed_.Begin();
  told_.clear();
  decides_from_ = context_.settle_until;
  verifier_.Clear();
  ended_incarnation_ = ended_max_ = 0;
  replications_ = losses_ = 0;
  progress_at_ = context_.now;
  short_since_ = short_seen_ = 0;
  mark_again_ = false;
  quarantined_for_.clear();
  forgets_.clear();
  state_ = LeaderState();
  sequence_ = 0;
  next_restore_ = context_.now + kRestoreEveryUs;
  keeper_.Begin();  // last: the others do not wait for its answers any more
}

Leader::MemberState* Leader::Find(NodeId node) {
  const size_t at = leading_ ? context_.PositionOf(node) : Context::kNowhere;
  if (at == Context::kNowhere) return nullptr;
  ROPETEAM_CHECK(at < members_.size() && members_[at].id == node);
  return &members_[at];
}

void Leader::OnView(const View& before) {
  const View& view = context_.view;
  const bool led = leading_ && before.leader == context_.config.self && view.led_since <= before.epoch;
  leading_ = view.leader == context_.config.self;
  if (!leading_ || !led) Begin();
  if (!leading_) return;
  if (!led)
    LOG_INFO("leading in epoch %llu, members %zu", static_cast<unsigned long long>(view.epoch),
             view.members.size());
  std::vector<MemberState> members(view.members.size());
  for (size_t i = 0; i < members.size(); ++i) members[i].id = view.members[i].id;
  for (MemberState& member : members_) {
    const size_t at = context_.PositionOf(member.id);
    if (at != Context::kNowhere) {
      members[at].held = std::move(member.held);
      members[at].heard_at = member.heard_at;
      continue;
    }
    table_.Replace(member.id, member.inventory().report.copies, {});
    table_.SetLeaving(member.id, false);
    incarnations_.Forget(member.id);
    redundancy_.SetLostLinks(member.id, {});
  }
  members_ = std::move(members);
  answered_ = 0;            // each member reports again in this epoch,
  announced_once_ = false;  // and gets the announcement again
  acked_ = {{0, members_.size()}};
  SetShortOfMemory(
      static_cast<size_t>(std::count_if(members_.begin(), members_.end(), [](const auto& member) {
        return member.inventory().short_of_memory;
      })));
  roster_.OnView();
  keeper_.OnView();
  stored_.OnView();
  verifier_.OnView();
  persistence_.OnView();
  latest_.TakeWaiting();  // they ask again in this epoch
  dirty_ = true;
}

std::string Leader::Missing() const {
  constexpr size_t kNamed = 4;
  std::string names;
  size_t more = members_.size() - answered_;
  size_t named = 0;
  for (auto member = members_.begin(); more > 0 && named < kNamed; ++member) {
    ROPETEAM_CHECK(member != members_.end());
    if (member->answered) continue;
    names += (names.empty() ? "" : ", ") + context_.NameOf(member->id);
    ++named;
    --more;
  }
  if (more > 0) names += " and " + std::to_string(more) + " more";
  return names;
}

void Leader::OnInventory(NodeId from, Inventory inventory) {
  MemberState* member = Find(from);
  if (member == nullptr) return;  // the node sends it again to the leader of its view
  context_.Send(from, InventoryAck{inventory.sequence, false});
  if (inventory.sequence <= member->held.sequence()) return;
  const bool was_short = member->inventory().short_of_memory;
  Learn(member, was_short, member->held.Replace(std::move(inventory), context_.protocol));
}

void Leader::OnInventoryDelta(NodeId from, const InventoryDelta& delta) {
  MemberState* member = Find(from);
  if (member == nullptr) return;
  const bool repeated = delta.sequence <= member->held.sequence();
  const bool was_short = member->inventory().short_of_memory;
  std::optional<InventoryChange> change;
  if (!repeated) change = member->held.Apply(delta, context_.protocol);
  context_.Send(from, InventoryAck{delta.sequence, !repeated && !change});
  if (change) Learn(member, was_short, *change);
}

void Leader::SetShortOfMemory(size_t members) {
  // Members forget a refusal after a second, so a short gap does not end a shortage.
  if (members != 0 && (short_since_ == 0 || short_seen_ + kShortageGapUs < context_.now))
    short_since_ = context_.now;
  if (members != 0 || short_of_memory_ != 0) short_seen_ = context_.now;
  short_of_memory_ = members;
}

void Leader::Learn(MemberState* member, bool was_short, const InventoryChange& change) {
  const Inventory& inventory = member->inventory();
  SetShortOfMemory(short_of_memory_ - (was_short ? 1 : 0) + (inventory.short_of_memory ? 1 : 0));
  if (!member->answered) {
    member->answered = true;
    ++answered_;
    ROPETEAM_CHECK(answered_ <= members_.size());
  }
  table_.Replace(member->id, change.before, change.after);
  if (change.standing) {
    member->heard_at = context_.now;
    redundancy_.SetLostLinks(member->id, inventory.report.lost_links);
  }
  const bool newer = std::any_of(change.after.begin(), change.after.end(), [this](const CopyReport& copy) {
    return copy.id.incarnation > incarnations_.current().number;
  });
  if (change.incarnation || newer) incarnations_.Learn(inventory);
  persistence_.Learn(inventory.persisting);
  restores_.Learn(inventory.restores);
  policy_.Learn(inventory.policy);
  roster_.Learn(member->id, inventory);
  // An earlier leader allowed these reads.
  for (const ShardId& shard : inventory.loading) loaders_.try_emplace(shard, Loader{member->id, 0, {}});
  if (change.incarnation || change.seats)
    incarnations_.LearnRanks(member->id, inventory.report.sessions, inventory.asking_from);
  for (const SessionReport& session : change.sessions) {
    if (!session.has_ended || session.incarnation < ended_incarnation_ ||
        session.incarnation >= kIncarnationMax)
      continue;
    if (session.incarnation > ended_incarnation_) ended_max_ = 0;
    ended_incarnation_ = session.incarnation;
    ended_max_ = std::max(ended_max_, session.newest_ended);
    dirty_ = dirty_ || PassesOpenStep(session);
  }
  // If a node has a copy without a mark, no announcement since has taken that copy into account.
  for (const CopyReport& copy : change.after)
    if (!copy.committed && listed_.contains(StepOf(copy.id))) mark_again_ = dirty_ = true;
  if (table_.replications() != replications_) progress_at_ = context_.now;
  replications_ = table_.replications();
  const bool leaves = table_.SetLeaving(member->id, inventory.report.leaving);
  if (redundancy_.OnCopies(member->id, change.after) || table_.losses() != losses_ || leaves) RestoreSoon();
  losses_ = table_.losses();
  dirty_ = dirty_ || (roster_.Behind() && MayRenewRoster(state_.listed)) || table_.version() != table_seen_ ||
           incarnations_.version() != incarnation_seen_;
}

void Leader::OnPersistResult(NodeId from, const PersistResult& result) {
  if (Find(from) != nullptr && may_decide()) persistence_.OnResult(from, result);
}

void Leader::OnStoredRead(NodeId from, const StoredRead& read) {
  if (Find(from) == nullptr) return;
  damage_.OnRead(from, read);
  // Damage counts as a restore, too: where no second node can confirm it, the step is passed over all the same.
  const StoredWord word = WordOf(read.code);
  const bool got = word == StoredWord::kGood || word == StoredWord::kBad;
  if (got && context_.protocol >= kStorageOrdersSince) NoteRestored(StepOf(read.shard));
}

void Leader::OnStorageResult(NodeId from, const StorageResult& result) {
  if (Find(from) != nullptr) keeper_.OnResult(from, result);
}

// A shard that was saved in an earlier session may be on a missing node. If none is missing, the table has it.
bool Leader::Passed(const SessionReport& session, Step step) const {
  return session.has_ended && step < session.newest_ended &&
         (session.oldest_ended <= step || roster_.Missing() == 0) &&
         std::find(session.open_steps.begin(), session.open_steps.end(), step) == session.open_steps.end();
}

bool Leader::PassesOpenStep(const SessionReport& session) const {
  const Incarnation current = incarnations_.current().number;
  if (session.incarnation != current || !session.has_ended) return false;
  for (auto step = table_.steps().lower_bound({current, 0});
       step != table_.steps().end() && step->first.step < session.newest_ended; ++step) {
    if (step->second.complete || step->second.released || session.rank >= step->second.world_size) continue;
    if (step->second.ranks[session.rank].copies.empty() && Passed(session, step->first.step)) return true;
  }
  return false;
}

void Leader::Flush() {
  dirty_ = dirty_ || persistence_.version() != persistence_seen_ || stored_.version() != stored_seen_ ||
           !restores_durable_.Announced(restores_.version()) || drops_.version() != drops_seen_ ||
           !policy_durable_.Announced(policy_.version()) || !roster_durable_.Announced(roster_.version());
  if (!leading_ || !dirty_ || !complete() || !may_decide()) return;
  dirty_ = false;
  if (roster_.Missing() == 0) latest_.NoneMissing();
  if (sequence_ == 0 && !PinWasHeard()) latest_.NoRankWasTold();
  Announce();
  SettleContested();
  Restore();
}

// A rank is told what its incarnation restores only after every member of the view has acknowledged it. So if some
// member has this incarnation without its pin, the former leader has told no rank.
bool Leader::PinWasHeard() const {
  const IncarnationState& incarnation = incarnations_.current();
  return incarnation.has_pin() && std::all_of(members_.begin(), members_.end(), [&](const auto& member) {
           const IncarnationState& known = member.inventory().incarnation;
           return known.number != incarnation.number || known.forgotten ||
                  (known.has_pin() && known.pin == incarnation.pin);
         });
}

// Uncommitted steps of this incarnation that some rank has passed without saving its shard.
std::set<StepId> Leader::Hopeless() const {
  std::set<StepId> hopeless;
  const Incarnation current = incarnations_.current().number;
  std::vector<std::pair<StepId, const StepTable::StepState*>> open_steps;
  if (ended_incarnation_ != current) return hopeless;
  for (auto step = table_.steps().lower_bound({current, 0});
       step != table_.steps().end() && step->first.step < ended_max_; ++step)
    if (!step->second.complete && !step->second.released) open_steps.emplace_back(step->first, &step->second);
  if (open_steps.empty()) return hopeless;
  for (const MemberState& member : members_) {
    for (const SessionReport& session : member.inventory().report.sessions) {
      if (session.incarnation != current || !session.has_ended) continue;
      for (const auto& [id, step] : open_steps) {
        if (id.step >= session.newest_ended) break;
        if (session.rank < step->world_size && step->ranks[session.rank].copies.empty() &&
            Passed(session, id.step))
          hopeless.insert(id);
      }
    }
  }
  return hopeless;
}

// Decides what is kept and released, and records the released steps in the table. Members may already be releasing or
// evicting their copies, so a late copy must not commit such a step.
RetentionPlan Leader::Retain(const std::set<StepId>& told) {
  const std::set<StepId> hopeless = Hopeless();
  const std::set<StepId> persisting = persistence_.pinned();
  std::set<StepId> quarantined;
  for (const RestoreNote& note : restores_.notes())
    if (restores_.Holds(note.step)) quarantined.insert(note.step);
  RetentionPlan plan =
      PlanRetention({table_, incarnations_.current(), hopeless, told, persisting, context_.view.settings,
                     roster_.MayChoose(), !latest_.may_choose_again(), quarantined, drops_.steps()});
  for (const std::set<StepId>* gone : {&plan.released, &plan.dead})
    for (const StepId& id : *gone)
      if (!table_.Find(id)->complete) table_.Release(id);
  for (const StepId& id : plan.evictable) table_.AllowEviction(id);
  persistence_.SetKept(plan.keep);
  return plan;
}

// Records which of the listed commits every member has acknowledged.
void Leader::NoteTold() {
  const uint64_t acked = acked_by_all();
  for (const auto& [id, sequence] : listed_.since())
    if (sequence <= acked && told_.insert(id).second) dirty_ = true;
}

// A marked copy is never dropped, because some rank may have been told that the step is committed.
std::vector<std::pair<NodeId, DropCopy>> Leader::Losers() const {
  std::vector<std::pair<NodeId, DropCopy>> losers;
  for (const ShardId& shard : table_.contested()) {
    const StepTable::StepState* step = table_.Find(StepOf(shard));
    ROPETEAM_CHECK(step != nullptr && shard.rank < step->world_size);
    const StepTable::RankState& rank = step->ranks[shard.rank];
    const auto counts = std::find_if(rank.copies.begin(), rank.copies.end(),
                                     [&](const auto& copy) { return copy.content == rank.content; });
    ROPETEAM_CHECK(counts != rank.copies.end());
    for (const StepTable::Copy& copy : rank.copies)
      if (copy.content != rank.content && !copy.committed)
        losers.emplace_back(copy.node,
                            DropCopy{shard, copy.content, rank.content, context_.NameOf(counts->node)});
  }
  return losers;
}

// Orders nodes to drop copies with the wrong content. If an order is lost, OnTimer() repeats it.
void Leader::SettleContested() {
  for (const auto& [node, drop] : Losers()) context_.Send(node, drop);
}

// A forgotten incarnation has no known pin, so no step of an earlier incarnation is committed any more.
void Leader::ReleaseAbandoned() {
  const IncarnationState& incarnation = incarnations_.current();
  if (incarnation.forgotten) {
    table_.Bar(incarnation.number, StepId());
  } else if (incarnation.pinned_by != 0) {
    table_.Bar(incarnation.pinned_by, incarnation.pin);
  }
  // A step that has lost all its copies is removed from the list. If copies return, it is listed again.
  std::erase_if(told_, [this](const StepId& id) {
    const StepTable::StepState* step = table_.Find(id);
    return step == nullptr || !step->complete;
  });
  ReleaseDisagreeing();
  ReleaseDropped();
}

void Leader::ListCommits(LeaderState* state) {
  for (const StepId& id : table_.Complete()) LOG_DEBUG("%s has all its copies", id.ToString().c_str());
  // Nodes mark every copy of a listed step. So copies with other bytes must be dropped before the step is listed.
  std::set<StepId> unsettled;
  for (const auto& [node, drop] : Losers()) unsettled.insert(StepOf(drop.shard));
  for (const StepId& id :
       table_.CompleteNewestFirst(context_.view.settings.keep_steps + kCommittedListedMax)) {
    if (unsettled.contains(id)) continue;
    state->listed.insert(id);
    // The job may have continued without a marked step. Then no rank was told of the step, or it was lost with more
    // than R nodes. From now on no rank may be told of it.
    if (told_.contains(id) && !table_.Barred(id)) state->told.insert(id);
  }
}

// Only members that know of every commit may become the roster. After an incarnation has chosen what it restores, its own
// commits are newer than any that a missing node may know of.
bool Leader::MayRenewRoster(const std::set<StepId>& listed) const {
  if (listed.empty() || context_.protocol < kRosterSince) return false;
  const StepId& newest = *listed.rbegin();
  const bool own = newest.incarnation == latest_.chosen_for() && told_.contains(newest);
  return !(newest < roster_.newest_committed()) && HasAllCopies(newest) && (own || roster_.MayChoose());
}

// Copies on leaving nodes do not count once the roster is to do without these nodes.
bool Leader::HasAllCopies(const StepId& id) const {
  const StepTable::StepState* step = table_.Find(id);
  if (step == nullptr || !step->producible()) return false;  // a rank without any copy lacks none
  return table_.leaving().empty() ? step->ranks_replicated == step->world_size : step->lacking.empty();
}

void Leader::AddDecisions(LeaderState* state) {
  RetentionPlan plan = Retain(state->told);
  for (const StepId& id : drops_.never_committed())
    if (table_.Find(id) == nullptr && !(id < plan.release_before)) plan.dead.insert(id);
  state->keep = std::move(plan.keep);
  state->dead = std::move(plan.dead);
  state->evictable = std::move(plan.evictable);
  state->release_before = plan.release_before;
  state->persisting = persistence_.persisting();
  const std::vector<StepId> persisted = stored_.NewestFirst(kPersistedListedMax);
  state->persisted.insert(persisted.begin(), persisted.end());
  state->not_persisted.assign(persistence_.not_persisted().begin(), persistence_.not_persisted().end());
  state->persist_judged = persistence_.judged();
  state->restores = restores_.notes();
  state->policy = policy_.known();
  const RosterRecord& roster = roster_.record();
  state->roster = {roster.revision, roster.epoch, roster.nodes, {}};  // members know the names in their view
  state->forgotten = roster_.forgotten();
  for (const auto& [id, found] : disagreements_) state->disagreements.push_back(found);
  state->dropped = drops_.notes();
  state->key = CommonKey();
}

void Leader::NoteAnnounced() {
  const IncarnationState& incarnation = state_.incarnation;
  listed_.OnAnnounced(state_.listed, sequence_);
  persisting_durable_.OnAnnounced(state_.persisting, sequence_);
  if (incarnation.has_pin()) pin_durable_.OnAnnounced({incarnation.number, incarnation.pin}, sequence_);
  restores_durable_.OnAnnounced(restores_.version(), sequence_);
  policy_durable_.OnAnnounced(policy_.version(), sequence_);
  roster_durable_.OnAnnounced(roster_.version(), sequence_);
  drops_.OnAnnounced(sequence_, state_.keep);
  table_seen_ = table_.version();
  drops_seen_ = drops_.version();
  incarnation_seen_ = incarnations_.version();
  persistence_seen_ = persistence_.version();
  stored_seen_ = stored_.version();
}

void Leader::Announce() {
  ROPETEAM_CHECK(leading_ && complete() && may_decide());
  LeaderState state;
  state.incarnation = incarnations_.current();
  ReleaseAbandoned();
  ListCommits(&state);
  if (MayRenewRoster(state.listed)) roster_.Renew();
  // A step that is too old to be listed releases nothing, because no rank is told of it.
  persistence_.Judge(state.told, incarnations_.current());
  if (!state.told.empty()) restores_.OnCommitted(*state.told.rbegin());
  AddDecisions(&state);
  state.sequence = state_.sequence;
  const bool changed = sequence_ == 0 || mark_again_ || Encode(state) != Encode(state_);
  mark_again_ = false;
  if (changed) {
    state.sequence = ++sequence_;
    state_ = std::move(state);
  }
  NoteAnnounced();
  if (!changed && announced_once_) return;
  announced_once_ = true;
  tell_again_after_ = kRepeatUs;
  Tell();
}

KeyId Leader::CommonKey() const {
  const KeyId key = context_.config.key();
  const bool all = std::all_of(members_.begin(), members_.end(), [key](const MemberState& member) {
    const std::vector<KeyId>& keys = member.inventory().report.keys;
    return !keys.empty() && keys.front() == key;
  });
  return all ? key : kPlaintext;
}

void Leader::Tell() {
  for (MemberState& member : members_) {
    if (member.acked >= sequence_) continue;
    // If something has changed since the last announcement, that announcement does not cover the members' newest
    // inventories.
    if (!dirty_) member.judged = member.held.sequence();
    state_.judged = member.judged;
    context_.Send(member.id, state_);
  }
  state_.judged = 0;  // set for each member below
  tell_again_at_ = context_.now + tell_again_after_;
  tell_again_after_ = std::min(2 * tell_again_after_, kRepeatMaxUs);
}

void Leader::Restore() { redundancy_.Restore(state_.keep, incarnations_.current().number); }

void Leader::RestoreAndTrim() {
  ReleaseForMemory();
  SettleContested();
  if (redundancy_.NeedsTrim(told_))
    redundancy_.Trim(told_, [this](NodeId node) {
      const MemberState* member = Find(node);
      ROPETEAM_CHECK(member != nullptr);  // the table has copies of members only
      return member->held.sequence();
    });
  Restore();
}

void Leader::RestoreSoon() { next_restore_ = std::min(next_restore_, context_.now + kRestoreSoonUs); }

// Uncommitted steps that keep a committed one from getting its copies. No open rank can complete them, and no rank was
// told that they are committed.
std::vector<StepId> Leader::Abandoned() const {
  std::vector<StepId> abandoned;
  const bool committed_lacks = std::any_of(state_.keep.begin(), state_.keep.end(), [this](const StepId& id) {
    const StepTable::StepState* step = table_.Find(id);
    return step != nullptr && step->complete && !step->lacking.empty();
  });
  if (!committed_lacks || incarnations_.ranks_present() != 0 || !roster_.MayChoose()) return abandoned;
  for (const auto& [id, step] : table_.steps()) {
    if (!step.complete && !step.released && !step.producible() && id != incarnations_.current().pin)
      abandoned.push_back(id);
  }
  return abandoned;
}

// The arenas are full of steps that wait for copies, and no node has room for these. The newest step that can be
// produced is worth more than the steps before it.
void Leader::ReleaseForMemory() {
  if (short_of_memory_ == 0 || std::max(progress_at_, short_since_) + kStuckUs > context_.now) return;
  const Incarnation current = incarnations_.current().number;
  std::vector<StepId> waiting = Abandoned();
  if (const std::optional<StepId> newest = table_.NewestProducible(current)) {
    for (auto step = table_.steps().lower_bound({current, 0}); step->first < *newest; ++step)
      if (!step->second.complete) waiting.push_back(step->first);
  }
  for (const StepId& id : waiting) {
    if (table_.Find(id)->released) continue;
    LOG_WARNING(
        "%s is released: no node has room for its copies, and a step that can be restored is worth more",
        id.ToString().c_str());
    table_.Release(id);
    dirty_ = true;
  }
}

// Every member has reported its copies, so the values are those of the shards that count.
void Leader::ReleaseDisagreeing() {
  for (const auto& [id, step] : table_.steps()) {
    if (!step.disagrees() || step.released) continue;
    const Disagreement& found = disagreements_[id] = StepTable::DisagreementOf(id, step);
    LOG_WARNING("%s", Explain(found).c_str());
    table_.Release(id);
  }
  while (disagreements_.size() > kDisagreementsMax) disagreements_.erase(disagreements_.begin());
}

void Leader::ReleaseDropped() {
  for (const StepId& id : drops_.steps())
    if (const auto* step = table_.Find(id); step != nullptr && !step->complete) table_.Release(id);
}

void Leader::OnStateAck(NodeId from, const LeaderStateAck& ack) {
  MemberState* member = Find(from);
  if (member == nullptr || ack.sequence > sequence_ || ack.sequence <= member->acked) return;
  const auto before = acked_.find(member->acked);
  ROPETEAM_CHECK(before != acked_.end() && before->second > 0);
  if (--before->second == 0) acked_.erase(before);
  ++acked_[member->acked = ack.sequence];
  NoteTold();
  if (!may_decide() || !latest_.waiting() || !PinIsKnown()) return;
  for (const auto& [asker, question] : latest_.TakeWaiting())
    AnswerLatest(asker.first, asker.second, question);
}

void Leader::OnLease() {
  dirty_ = true;
  tell_again_at_ = context_.now;
  tell_again_after_ = kRepeatUs;
}

void Leader::OnLeaseLost() {
  hold_.Release();
  damage_.OnHoldReleased();
  restores_.OnHoldReleased();
  persistence_.OnHoldReleased();
}

void Leader::OnTimer() {
  if (!leading_ || !may_decide()) return;
  if (awaits_acks() && tell_again_at_ <= context_.now) Tell();
  if (next_restore_ <= context_.now) {
    next_restore_ = context_.now + kRestoreEveryUs;  // changes meanwhile do not delay it
    if (complete()) RestoreAndTrim();
  }
  verifier_.OnTimer();
  keeper_.OnTimer();
  stored_.OnTimer();
  damage_.OnTimer();
  restores_.OnTimer();
  if (complete()) persistence_.OnTimer();
}

TimeUs Leader::NextTimer() const {
  TimeUs due = kNever;
  if (!leading_ || !context_.has_lease()) return due;
  if (!may_decide()) return decides_from_;
  if (awaits_acks()) due = tell_again_at_;
  // An incomplete leader needs no timer: the next report of a member runs this again.
  if (complete() && (short_of_memory_ != 0 || !table_.contested().empty() || redundancy_.NeedsTrim(told_) ||
                     redundancy_.NeedsWork(state_.keep, incarnations_.current().number)))
    due = std::min(due, next_restore_);
  if (complete()) due = std::min(due, persistence_.NextTimer());
  return std::min({due, verifier_.NextTimer(), keeper_.NextTimer(), stored_.NextTimer(), damage_.NextTimer(),
                   restores_.NextTimer()});
}

void Leader::CheckInvariants() const {
  if (!leading_) return;
  StepTable recomputed;
  size_t answered = 0;
  size_t acked = 0;
  for (const MemberState& member : members_) {
    recomputed.Replace(member.id, {}, member.inventory().report.copies);
    ROPETEAM_CHECK(table_.leaving().contains(member.id) == member.inventory().report.leaving);
    answered += member.answered ? 1 : 0;
    ROPETEAM_CHECK(acked_.contains(member.acked));
  }
  for (const auto& [sequence, count] : acked_) acked += count;
  ROPETEAM_CHECK(answered == answered_ && acked == members_.size());
  incarnations_.CheckInvariants();
  ROPETEAM_CHECK(recomputed.steps().size() == table_.steps().size());
  for (const auto& [id, step] : table_.steps()) {
    const StepTable::StepState* again = recomputed.Find(id);
    ROPETEAM_CHECK(again != nullptr && again->world_size == step.world_size);
    ROPETEAM_CHECK(!(step.complete && (step.released || step.evictable)));
    ROPETEAM_CHECK(again->copies == step.copies);
    for (Rank rank = 0; rank < step.world_size; ++rank) {
      ROPETEAM_CHECK(again->ranks[rank].copies.size() == step.ranks[rank].copies.size());
      ROPETEAM_CHECK(step.lacking.contains(rank) == (step.ranks[rank].staying <= step.ranks[rank].replicas &&
                                                     !step.ranks[rank].copies.empty()));
    }
  }
}

}  // namespace ropeteam::engine
