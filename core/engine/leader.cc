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
  redundancy_.Clear();
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
    table_.Replace(member->first, member->second.inventory.report.copies, {});
    incarnations_.Forget(member->first);
    member = members_.erase(member);
  }
  for (const Member& member : view.members) members_.try_emplace(member.id);
  ROPETEAM_CHECK(members_.size() == view.members.size());
  for (auto& [node, member] : members_)
    member.acked = member.next_send = 0;  // each is told again in this epoch
  verifier_.OnView();
  latest_.TakeWaiting();  // they ask again in this epoch
  dirty_ = true;
}

bool Leader::complete() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](const auto& member) { return member.second.heard; });
}

std::string Leader::Missing() const {
  std::string names;
  for (const auto& [node, member] : members_)
    if (!member.heard) names += (names.empty() ? "" : ", ") + context_.NameOf(node);
  return names;
}

void Leader::OnInventory(NodeId from, Inventory inventory) {
  const auto member = members_.find(from);
  if (!leading_ || member == members_.end()) return;  // it is sent again, to whoever leads then
  context_.Send(from, InventoryAck{inventory.sequence});
  MemberState& state = member->second;
  if (state.heard && inventory.sequence <= state.inventory.sequence) return;
  for (const StepId& id : table_.Replace(from, state.inventory.report.copies, inventory.report.copies))
    LOG_DEBUG("%s has all its copies", id.ToString().c_str());
  incarnations_.Learn(inventory);
  state.heard = true;
  state.inventory = std::move(inventory);
  incarnations_.LearnRanks(from, state.inventory.report.sessions, state.inventory.asking_from);
  if (table_.replications() != replications_) progress_at_ = context_.now;
  replications_ = table_.replications();
  dirty_ = true;
}

void Leader::Flush() {
  if (!leading_ || !dirty_ || !complete()) return;
  dirty_ = false;
  Announce();
  redundancy_.Restore(state_.keep, incarnations_.life().incarnation);
}

// Decides what is kept and released, and makes the table keep to it.
RetentionDecision Leader::Retain() {
  RetentionInput input{table_, incarnations_.life(), context_.settings.keep_steps, {}};
  for (const auto& [node, member] : members_)
    for (const SessionReport& session : member.inventory.report.sessions) input.sessions.push_back(&session);
  RetentionDecision decision = DecideRetention(input);
  for (const StepId& id : decision.give_up) table_.GiveUp(id);
  for (const StepId& id : decision.evictable) table_.AllowEviction(id);
  return decision;
}

void Leader::Announce() {
  ROPETEAM_CHECK(leading_ && complete());
  LeaderState state;
  state.life = incarnations_.life();
  for (const StepId& id : table_.CommittedNewestFirst(context_.settings.keep_steps + kCommittedListedMax))
    state.committed.push_back({id});
  const RetentionDecision decision = Retain();
  for (const StepId& id : decision.keep) state.keep.push_back({id});
  for (const StepId& id : decision.dead) state.dead.push_back({id});
  state.release_before.id = decision.release_before;

  state.sequence = state_.sequence;
  const bool changed = sequence_ == 0 || Encode(state) != Encode(state_);
  const bool new_pin = state.life.has_pin && (sequence_ == 0 || !state_.life.has_pin ||
                                              state_.life.incarnation != state.life.incarnation);
  if (changed) {
    state.sequence = ++sequence_;
    if (new_pin) pin_sequence_ = sequence_;
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
                   [](const auto& member) { return member.second.inventory.short_of_memory; }))
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
  if (leading_ && member != members_.end() && ack.sequence <= sequence_)
    member->second.acked = std::max(member->second.acked, ack.sequence);
  if (!latest_.waiting() || !PinIsKnown()) return;
  for (const auto& [asker, question] : latest_.TakeWaiting())
    AnswerLatest(asker.first, asker.second, question);
}

void Leader::OnTimer() {
  if (!leading_) return;
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
      redundancy_.Restore(state_.keep, incarnations_.life().incarnation);
    }
  }
  verifier_.OnTimer();
}

TimeUs Leader::NextTimer() const {
  TimeUs due = kNever;
  if (!leading_) return due;
  const bool judged = sequence_ != 0 && complete();
  for (const auto& [node, member] : members_) {
    if (judged && member.acked != sequence_) due = std::min(due, member.next_send);
    if (member.inventory.short_of_memory) due = std::min(due, next_restore_);
  }
  if (redundancy_.NeedsWork(state_.keep)) due = std::min(due, next_restore_);
  return std::min(due, verifier_.NextTimer());
}

}  // namespace ropeteam::engine
