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
  incarnations_.Begin(context_.life);
  latest_.Begin();
  redundancy_.Clear();
  listed_.clear();
  marked_.clear();
  decides_from_ = context_.settle_until;
  verifier_.Clear();
  replications_ = 0;
  progress_at_ = context_.now;
  state_ = LeaderState();
  sequence_ = 0;
  next_restore_ = context_.now + kRestoreEveryUs;
}

void Leader::OnView(const View& before) {
  const View& view = context_.view;
  const bool led = leading_ && before.leader == context_.config.self;
  leading_ = view.leader == context_.config.self;
  if (!leading_ || !led) Begin();
  if (!leading_) return;
  if (!led)
    LOG_INFO("leading in epoch %llu, members %zu", static_cast<unsigned long long>(view.epoch),
             view.members.size());
  for (auto member = members_.begin(); member != members_.end();) {
    if (view.Contains(member->first)) {
      ++member;
      continue;
    }
    table_.Replace(member->first, member->second.inventory().report.copies, {});
    incarnations_.Forget(member->first);
    member = members_.erase(member);
  }
  for (const Member& member : view.members) members_.try_emplace(member.id);
  ROPETEAM_CHECK(members_.size() == view.members.size());
  for (auto& [node, member] : members_) {
    member.answered = false;              // each tells again in this epoch,
    member.acked = member.next_send = 0;  // and is told again
  }
  verifier_.OnView();
  latest_.TakeWaiting();  // they ask again in this epoch
  dirty_ = true;
}

bool Leader::complete() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](const auto& member) { return member.second.answered; });
}

std::string Leader::Missing() const {
  std::string names;
  for (const auto& [node, member] : members_)
    if (!member.answered) names += (names.empty() ? "" : ", ") + context_.NameOf(node);
  return names;
}

void Leader::OnInventory(NodeId from, Inventory inventory) {
  const auto member = members_.find(from);
  if (!leading_ || member == members_.end()) return;  // it is sent again, to whoever leads then
  context_.Send(from, InventoryAck{inventory.sequence, false});
  HeldInventory& held = member->second.held;
  if (inventory.sequence > held.sequence()) Learn(from, &member->second, held.Replace(std::move(inventory)));
}

void Leader::OnInventoryDelta(NodeId from, const InventoryDelta& delta) {
  const auto member = members_.find(from);
  if (!leading_ || member == members_.end()) return;
  HeldInventory& held = member->second.held;
  std::optional<InventoryChange> change;
  const bool repeated = delta.sequence <= held.sequence();
  if (!repeated) change = held.Apply(delta);
  context_.Send(from, InventoryAck{delta.sequence, !repeated && !change});
  if (change) Learn(from, &member->second, *change);
}

void Leader::Learn(NodeId from, MemberState* member, const InventoryChange& change) {
  const Inventory& inventory = member->inventory();
  table_.Replace(from, change.before, change.after);
  if (change.life) incarnations_.Learn(inventory);
  member->answered = true;
  if (change.standing) member->heard_at = context_.now;
  if (change.standing) redundancy_.SetLostLinks(from, inventory.report.lost_links);
  if (change.life || change.sessions)
    incarnations_.LearnRanks(from, inventory.report.sessions, inventory.asking_from);
  if (table_.replications() != replications_) progress_at_ = context_.now;
  replications_ = table_.replications();
  dirty_ = true;
}

void Leader::Flush() {
  if (!leading_ || !dirty_ || !complete() || !may_decide()) return;
  dirty_ = false;
  if (sequence_ == 0 && !PinWasHeard()) latest_.NoRankWasTold();
  Announce();
  SettleContested();
  redundancy_.Restore(state_.keep, incarnations_.life().incarnation);
}

// A rank is told what its incarnation restores when every member of the view has acknowledged it. So where some
// member knows of this incarnation and not of its pin, the leader before has told no rank.
bool Leader::PinWasHeard() const {
  const Life& life = incarnations_.life();
  return life.has_pin && std::all_of(members_.begin(), members_.end(), [&](const auto& member) {
           const Life& known = member.second.inventory.life;
           return known.incarnation != life.incarnation || known.forgotten ||
                  (known.has_pin && known.pin == life.pin);
         });
}

// Uncommitted steps of this incarnation that some rank has passed without a shard of them.
std::set<StepId> Leader::Hopeless() const {
  std::set<StepId> hopeless;
  const Incarnation current = incarnations_.life().incarnation;
  std::vector<std::pair<StepId, const StepTable::StepState*>> open_steps;
  for (auto step = table_.steps().lower_bound({current, 0}); step != table_.steps().end(); ++step)
    if (!step->second.committed) open_steps.emplace_back(step->first, &step->second);
  for (const auto& [node, member] : members_) {
    if (open_steps.empty()) break;
    for (const SessionReport& session : member.inventory().report.sessions) {
      if (session.incarnation != current || !session.has_ended) continue;
      for (const auto& [id, step] : open_steps) {
        if (id.step >= session.newest_ended) break;
        const bool open = std::find(session.open_steps.begin(), session.open_steps.end(), id.step) !=
                          session.open_steps.end();
        if (!open && session.rank < step->world_size && step->ranks[session.rank].copies.empty())
          hopeless.insert(id);
      }
    }
  }
  return hopeless;
}

// Decides what is kept and released, and makes the table keep to it: what members may be releasing or evicting
// already is not committed by copies that come late.
RetentionPlan Leader::Retain() {
  const std::set<StepId> hopeless = Hopeless();
  RetentionPlan plan =
      PlanRetention({table_, incarnations_.life(), hopeless, marked_, context_.settings, members_.size()});
  for (const std::set<StepId>* gone : {&plan.released, &plan.dead})
    for (const StepId& id : *gone)
      if (!table_.Find(id)->committed) table_.GiveUp(id);
  for (const StepId& id : plan.evictable) table_.AllowEviction(id);
  return plan;
}

// Which of the listed commits every member has acknowledged by now.
void Leader::NoteMarked() {
  uint64_t acked = UINT64_MAX;
  for (const auto& [node, member] : members_) acked = std::min(acked, member.acked);
  for (const auto& [id, sequence] : listed_)
    if (sequence <= acked && marked_.insert(id).second) dirty_ = true;
}

// A marked copy is nobody's to drop: some rank may have been told that it is committed.
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
                            DropCopy{{shard}, copy.content, rank.content, context_.NameOf(counts->node)});
  }
  return losers;
}

// They are dropped by their nodes; should an order be lost, OnTimer() repeats it.
void Leader::SettleContested() {
  for (const auto& [node, drop] : Losers()) context_.Send(node, drop);
}

void Leader::Announce() {
  ROPETEAM_CHECK(leading_ && complete() && may_decide());
  LeaderState state;
  state.life = incarnations_.life();
  // Of a forgotten incarnation it is not known what it restores: nothing of a former one is committed any more.
  if (state.life.has_pin || state.life.forgotten)
    table_.Bar(state.life.incarnation, state.life.has_pin ? state.life.pin : StepId());
  // What has lost all its copies is not known any more; should copies return, it is listed again.
  const auto unknown = [this](const StepId& id) {
    const StepTable::StepState* step = table_.Find(id);
    return step == nullptr || !step->committed;
  };
  std::erase_if(marked_, unknown);
  std::erase_if(listed_, [&](const auto& listed) { return unknown(listed.first); });
  for (const StepId& id : table_.Commit()) LOG_DEBUG("%s has all its copies", id.ToString().c_str());
  const std::vector<StepId> committed =
      table_.CommittedNewestFirst(context_.settings.keep_steps + kCommittedListedMax);
  // Nodes mark whatever copy they have of a step that is listed: first those go that do not count.
  std::set<StepId> unsettled;
  for (const auto& [node, drop] : Losers()) unsettled.insert(StepOf(drop.shard.id));
  for (const StepId& id : committed) {
    if (unsettled.contains(id)) continue;
    state.committed.push_back({id});
    if (marked_.contains(id)) state.marked.push_back({id});
  }
  const RetentionPlan plan = Retain();
  for (const StepId& id : plan.keep) state.keep.push_back({id});
  for (const StepId& id : plan.dead) state.dead.push_back({id});
  for (const StepId& id : plan.evictable) state.evictable.push_back({id});
  state.release_before.id = plan.release_before;

  state.sequence = state_.sequence;
  const bool changed = sequence_ == 0 || Encode(state) != Encode(state_);
  const bool new_pin = state.life.has_pin && (sequence_ == 0 || !state_.life.has_pin ||
                                              state_.life.incarnation != state.life.incarnation ||
                                              state_.life.pin != state.life.pin);
  if (changed) {
    state.sequence = ++sequence_;
    if (new_pin) pin_sequence_ = sequence_;
    for (const StepKey& key : state.committed) listed_.try_emplace(key.id, sequence_);
    state_ = std::move(state);
  }
  for (auto& [node, member] : members_) {
    if (!changed && member.next_send != 0) continue;  // told, or being told again by OnTimer()
    member.next_send = context_.now + kRepeatUs;
    context_.Send(node, state_);
  }
}

// The arenas are full of steps that wait for copies there is no room for. The newest step that can be
// produced is worth more than those before it.
void Leader::GiveUpOlderSteps() {
  if (progress_at_ + kStuckUs > context_.now) return;
  if (std::none_of(members_.begin(), members_.end(),
                   [](const auto& member) { return member.second.inventory().short_of_memory; }))
    return;
  const Incarnation current = incarnations_.life().incarnation;
  const std::optional<StepId> newest = table_.NewestProducible(current);
  if (!newest) return;
  std::vector<StepId> older;
  for (auto step = table_.steps().lower_bound({current, 0}); step->first < *newest; ++step)
    if (!step->second.committed && !step->second.given_up) older.push_back(step->first);
  for (const StepId& id : older) {
    LOG_WARNING("%s is given up: no node has room for its copies, and %s is newer", id.ToString().c_str(),
                newest->ToString().c_str());
    table_.GiveUp(id);
    dirty_ = true;
  }
}

void Leader::OnStateAck(NodeId from, const LeaderStateAck& ack) {
  const auto member = members_.find(from);
  if (!leading_ || member == members_.end() || ack.sequence > sequence_) return;
  member->second.acked = std::max(member->second.acked, ack.sequence);
  NoteMarked();
  if (!may_decide() || !latest_.waiting() || !PinIsKnown()) return;
  for (const auto& [asker, question] : latest_.TakeWaiting())
    AnswerLatest(asker.first, asker.second, question);
}

void Leader::OnTimer() {
  if (!leading_ || !may_decide()) return;
  // While a member has not spoken the state is still that of the view before, judged without what it has.
  const bool judged = sequence_ != 0 && complete();
  for (auto& [node, member] : members_) {
    if (!judged || member.acked == sequence_ || member.next_send > context_.now) continue;
    member.next_send = context_.now + kRepeatUs;
    context_.Send(node, state_);
  }
  if (next_restore_ <= context_.now) {
    next_restore_ = context_.now + kRestoreEveryUs;
    if (complete()) {
      GiveUpOlderSteps();
      SettleContested();
      redundancy_.Trim(marked_);
      redundancy_.Restore(state_.keep, incarnations_.life().incarnation);
    }
  }
  verifier_.OnTimer();
}

TimeUs Leader::NextTimer() const {
  TimeUs due = kNever;
  if (!leading_ || !context_.has_lease()) return due;
  if (!may_decide()) return decides_from_;
  const bool judged = sequence_ != 0 && complete();
  for (const auto& [node, member] : members_) {
    if (judged && member.acked != sequence_) due = std::min(due, member.next_send);
    if (member.inventory().short_of_memory) due = std::min(due, next_restore_);
  }
  if (redundancy_.NeedsWork(state_.keep) || redundancy_.NeedsTrim(marked_) || !table_.contested().empty())
    due = std::min(due, next_restore_);
  return std::min(due, verifier_.NextTimer());
}

void Leader::CheckInvariants() const {
  if (!leading_) return;
  StepTable recomputed;
  for (const auto& [node, member] : members_) recomputed.Replace(node, {}, member.inventory().report.copies);
  ROPETEAM_CHECK(recomputed.steps().size() == table_.steps().size());
  for (const auto& [id, step] : table_.steps()) {
    const StepTable::StepState* again = recomputed.Find(id);
    ROPETEAM_CHECK(again != nullptr && again->world_size == step.world_size);
    ROPETEAM_CHECK(!(step.committed && (step.given_up || step.evictable)));
    for (Rank rank = 0; rank < step.world_size; ++rank)
      ROPETEAM_CHECK(again->ranks[rank].copies.size() == step.ranks[rank].copies.size());
  }
}

}  // namespace ropeteam::engine
