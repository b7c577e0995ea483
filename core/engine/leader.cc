// SPDX-License-Identifier: Apache-2.0
#include "core/engine/leader.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"
#include "core/engine/parts.h"
#include "core/engine/placement.h"

namespace ropeteam::engine {

void Leader::OnView(const View& before) {
  const Context& context = parts_.context;
  const bool leads = context.view.leader == context.config.self;
  if (!leads || !leading_ || before.leader != context.config.self) {
    members_.clear();
    table_ = StepTable();
    ranks_.clear();
    orders_.clear();
    verifying_.clear();
    replications_ = 0;
    progress_at_ = context.now;
    state_ = LeaderState();
    sequence_ = 0;
    leading_ = leads;
    if (!leads) return;
    life_ = context.life;
    next_restore_ = context.now + kRestoreEveryUs;
    LOG_INFO("leading in epoch %llu, members %zu", static_cast<unsigned long long>(context.view.epoch),
             context.view.members.size());
  }
  for (auto member = members_.begin(); member != members_.end();) {
    if (context.view.Contains(member->first)) {
      ++member;
      continue;
    }
    table_.Replace(member->first, member->second.inventory.report.copies, {});
    UpdateRanks(member->first, {}, UINT64_MAX);
    member = members_.erase(member);
  }
  for (const Member& member : context.view.members) members_.try_emplace(member.id);
  for (auto& [node, member] : members_)
    member.acked = member.next_send = 0;  // each is told anew in this epoch
  for (auto& [key, job] : verifying_)
    std::erase_if(job.missing, [&](NodeId node) { return !context.view.Contains(node); });
  std::erase_if(verifying_, [&](const auto& job) { return !context.view.Contains(job.first.first); });
  waiting_for_pin_.clear();  // they ask again in this epoch
  dirty_ = true;
}

bool Leader::complete() const {
  return std::all_of(members_.begin(), members_.end(),
                     [](const auto& member) { return member.second.heard; });
}

std::string Leader::Missing() const {
  std::string names;
  for (const auto& [node, member] : members_)
    if (!member.heard) names += (names.empty() ? "" : ", ") + parts_.context.NameOf(node);
  return names;
}

void Leader::OnInventory(NodeId from, Inventory inventory) {
  const auto member = members_.find(from);
  if (!leading_ || member == members_.end()) return;  // it is sent again, to whoever leads then
  parts_.context.Send(from, InventoryAck{inventory.sequence});
  MemberState& state = member->second;
  if (state.heard && inventory.sequence <= state.inventory.sequence) return;
  for (const StepId& id : table_.Replace(from, state.inventory.report.copies, inventory.report.copies))
    LOG_DEBUG("%s has all its copies", id.ToString().c_str());
  LearnLife(inventory);
  state.heard = true;
  state.inventory = std::move(inventory);
  UpdateRanks(from, state.inventory.report.sessions, state.inventory.asking_from);
  if (table_.replications() != replications_) progress_at_ = parts_.context.now;
  replications_ = table_.replications();
  dirty_ = true;
}

void Leader::LearnLife(const Inventory& inventory) {
  const Life& told = inventory.life;
  if (told.incarnation > life_.incarnation) {
    ranks_.clear();
    life_ = told;
  } else if (told.incarnation == life_.incarnation) {
    const bool broken = told.broken || (life_.broken && !life_.forgotten);
    if ((life_.forgotten && !told.forgotten) || (told.has_pin && !life_.has_pin)) life_ = told;
    if (broken) life_.broken = true;
  }
  // A life nobody remembers but by its number: never to be used again.
  if (inventory.incarnation_max > life_.incarnation) {
    ranks_.clear();
    Life unknown;
    unknown.incarnation = inventory.incarnation_max;
    unknown.broken = true;
    unknown.forgotten = true;
    unknown.past_tokens = life_.past_tokens;
    life_ = unknown;
  }
}

void Leader::UpdateRanks(NodeId node, const std::vector<SessionReport>& sessions, uint64_t asking_from) {
  for (auto& [rank, admitted] : ranks_) {
    if (admitted.node != node || !admitted.present) continue;
    const bool still =
        std::any_of(sessions.begin(), sessions.end(), [&, r = rank](const SessionReport& session) {
          return session.rank == r && session.token == admitted.token &&
                 session.incarnation == life_.incarnation;
        });
    if (still) continue;
    admitted.present = false;
    admitted.left = true;
    if (life_.token.empty()) life_.broken = true;
    dirty_ = true;
  }
  for (const SessionReport& session : sessions) {
    if (session.incarnation != life_.incarnation) continue;
    if (life_.world_size == 0) life_.world_size = session.world_size;
    ranks_[session.rank] = {session.token, node, ranks_[session.rank].question, true, false};
  }
  // Admitted on a late repeat of a question whose asker has gone: nobody ever sat there.
  std::erase_if(ranks_, [&](const auto& seat) {
    const Admitted& admitted = seat.second;
    return admitted.node == node && !admitted.present && !admitted.left && admitted.question < asking_from;
  });
}

uint32_t Leader::ranks_present() const {
  return static_cast<uint32_t>(std::count_if(ranks_.begin(), ranks_.end(), [&](const auto& rank) {
    return !rank.second.left && members_.contains(rank.second.node);
  }));
}

std::vector<StepId> Leader::CommittedNewestFirst(size_t count) const {
  std::vector<StepId> committed;
  for (auto step = table_.steps().rbegin(); step != table_.steps().rend() && committed.size() < count; ++step)
    if (step->second.committed) committed.push_back(step->first);
  return committed;
}

void Leader::Flush() {
  if (!leading_ || !dirty_ || !complete()) return;
  dirty_ = false;
  Announce();
  RestoreRedundancy();
}

void Leader::Announce() {
  const Context& context = parts_.context;
  LeaderState state;
  state.life = life_;
  for (const StepId& id : CommittedNewestFirst(context.settings.keep_steps + kCommittedListedMax))
    state.committed.push_back({id});
  // Kept are the newest producible step, committed or not, and every committed step down to the K-th that is
  // producible: a committed step whose holder is away for a moment is not given up for an older one.
  std::set<StepId> keep;
  StepId release_before;
  size_t producible_committed = 0;
  bool newest = true;
  for (auto step = table_.steps().rbegin();
       step != table_.steps().rend() && producible_committed < context.settings.keep_steps; ++step) {
    const bool producible = step->second.producible() && !step->second.given_up;
    if (step->second.committed || (producible && newest)) keep.insert(step->first);
    if (!producible) continue;
    newest = false;
    if (!step->second.committed) continue;
    if (++producible_committed == 1) release_before = step->first;
  }
  // Fewer than that are known to be committed at a job's beginning, or when what knew of the others is lost:
  // then older steps that can be produced are kept in their place.
  for (auto step = table_.steps().rbegin();
       step != table_.steps().rend() && producible_committed < context.settings.keep_steps; ++step) {
    if (step->second.committed || step->second.given_up || !step->second.producible() ||
        !(step->first < release_before))
      continue;
    keep.insert(step->first);
    ++producible_committed;
  }
  if (life_.pin != StepId() && table_.Find(life_.pin) != nullptr) {
    // The step this life was restored from is protected until the life has a committed step of its own. While
    // this life has not chosen, the choice of the life before stays one, unless a newer step is committed.
    const bool own = !state.committed.empty() && state.committed.front().id.incarnation == life_.incarnation;
    const bool surpassed = life_.has_pin ? own : life_.pin < release_before;
    if (!surpassed) keep.insert(life_.pin);
  }
  for (const StepId& id : keep) state.keep.push_back({id});
  state.release_before.id = release_before;
  // What the members are told to release must not be judged committed while they do, by copies that come
  // late.
  const auto released = [&](const StepId& id) { return id < release_before && !keep.contains(id); };
  std::vector<StepId> late;
  for (const auto& [id, step] : table_.steps())
    if (released(id) && !step.committed && !step.given_up) late.push_back(id);
  for (const StepId& id : late) table_.GiveUp(id);
  // Nor what they may evict from now on, because it is of a former life and not kept.
  std::vector<StepId> former;
  for (const auto& [id, step] : table_.steps())
    if (id.incarnation < life_.incarnation && !keep.contains(id) && !step.committed) former.push_back(id);
  for (const StepId& id : former) table_.AllowEviction(id);
  state.dead = DeadSteps();
  std::erase_if(state.dead, [&](const StepKey& key) { return released(key.id); });

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
    member.next_send = context.now + kRepeatUs;
    parts_.context.Send(node, state_);
  }
}

std::vector<StepKey> Leader::DeadSteps() const {
  std::set<StepId> dead;
  std::vector<std::pair<StepId, const StepTable::StepState*>> open_steps;  // that may still become committed
  for (auto step = table_.steps().lower_bound({life_.incarnation, 0}); step != table_.steps().end(); ++step)
    if (!step->second.committed) open_steps.emplace_back(step->first, &step->second);
  for (const auto& [node, member] : members_) {
    if (open_steps.empty()) break;
    for (const SessionReport& session : member.inventory.report.sessions) {
      if (session.incarnation != life_.incarnation || !session.has_ended) continue;
      const StepId passed{session.incarnation, session.newest_ended};
      for (const auto& [id, step] : open_steps) {
        if (!(id < passed)) break;
        const bool open = std::find(session.open_steps.begin(), session.open_steps.end(), id.step) !=
                          session.open_steps.end();
        if (!open && session.rank < step->world_size && step->ranks[session.rank].copies.empty())
          dead.insert(id);
      }
    }
  }
  for (const auto& [id, step] : table_.steps())
    if (step.given_up) dead.insert(id);
  std::vector<StepKey> keys;
  for (const StepId& id : dead) keys.push_back({id});
  return keys;
}

// The arenas are full of steps that wait for copies there is no room for. The newest step that can be
// produced is worth more than those before it.
void Leader::GiveUpOlderSteps() {
  if (progress_at_ + kStuckUs > parts_.context.now) return;
  if (std::none_of(members_.begin(), members_.end(),
                   [](const auto& member) { return member.second.inventory.short_of_memory; }))
    return;
  const std::optional<StepId> newest = NewestProducible(life_.incarnation);
  if (!newest) return;
  std::vector<StepId> older;
  for (auto step = table_.steps().lower_bound({life_.incarnation, 0}); step->first < *newest; ++step)
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
  if (waiting_for_pin_.empty() || !PinIsKnown()) return;
  for (const auto& [asker, question] : std::exchange(waiting_for_pin_, {}))
    AnswerLatest(asker.first, asker.second, question);
}

void Leader::RestoreRedundancy() {
  const Context& context = parts_.context;
  std::map<NodeId, size_t> load;
  for (auto& [shard, orders] : orders_) {
    const StepTable::StepState* step = table_.Find(StepOf(shard));
    std::erase_if(orders, [&](const Order& order) {
      if (step == nullptr || order.until <= context.now || !context.view.Contains(order.source) ||
          !context.view.Contains(order.target))
        return true;
      const auto& copies = step->ranks[shard.rank].copies;
      return std::any_of(copies.begin(), copies.end(),
                         [&](const auto& copy) { return copy.node == order.target; });
    });
    for (const Order& order : orders) {
      ++load[order.source];
      ++load[order.target];
    }
  }
  std::erase_if(orders_, [](const auto& entry) { return entry.second.empty(); });
  for (auto key = state_.keep.rbegin(); key != state_.keep.rend(); ++key)
    if (const StepTable::StepState* step = table_.Find(key->id)) OrderCopies(key->id, *step, &load);
}

void Leader::OrderCopies(const StepId& id, const StepTable::StepState& step, std::map<NodeId, size_t>* load) {
  const Context& context = parts_.context;
  for (Rank rank = 0; rank < step.world_size; ++rank) {
    const StepTable::RankState& state = step.ranks[rank];
    if (state.replicated || state.copies.empty()) continue;
    const ShardId shard{id.incarnation, id.step, rank};
    const StepTable::Copy* source = nullptr;
    bool owner_lives = false;
    for (const StepTable::Copy& copy : state.copies) {
      owner_lives = owner_lives || copy.role == Role::kOwn;
      if (!copy.bad.empty()) continue;
      if (source == nullptr || (*load)[copy.node] < (*load)[source->node]) source = &copy;
    }
    // Before the commit the owner sees to the copies itself.
    if (owner_lives && !step.committed && id.incarnation == life_.incarnation) continue;
    if (source == nullptr) continue;
    std::vector<Order>& orders = orders_[shard];
    size_t missing = state.replicas + 1 - std::min(state.replicas + 1, state.good);
    missing -= std::min(missing, orders.size());
    for (const NodeId target : HoldersOf(context.view, source->node, state.replicas)) {
      if (missing == 0 || (*load)[source->node] >= kOrdersPerSourceMax) break;
      const bool has = std::any_of(state.copies.begin(), state.copies.end(),
                                   [&](const auto& copy) { return copy.node == target; });
      const bool ordered = std::any_of(orders.begin(), orders.end(),
                                       [&](const Order& order) { return order.target == target; });
      if (has || ordered || (*load)[target] >= kOrdersPerSourceMax) continue;
      orders.push_back({source->node, target, context.now + kOrderTimeoutUs});
      ++(*load)[source->node];
      ++(*load)[target];
      --missing;
      LOG_INFO("order a copy of %s from %s to %s", shard.ToString().c_str(),
               context.NameOf(source->node).c_str(), context.NameOf(target).c_str());
      parts_.context.Send(source->node, CopyOrder{{shard}, target});
    }
  }
}

void Leader::OnTimer() {
  if (!leading_) return;
  Context& context = parts_.context;
  // While a member has not spoken the state is still that of the view before, judged without what it has.
  const bool judged = sequence_ != 0 && complete();
  for (auto& [node, member] : members_) {
    if (!judged || member.acked == sequence_ || member.next_send > context.now) continue;
    member.next_send = context.now + kRepeatUs;
    context.Send(node, state_);
  }
  if (next_restore_ <= context.now) {
    next_restore_ = context.now + kRestoreEveryUs;
    if (complete()) {
      GiveUpOlderSteps();
      RestoreRedundancy();
    }
  }
  for (auto& [key, job] : verifying_) {
    if (job.missing.empty() || job.next_send > context.now) continue;
    job.next_send = context.now + kVerifyRepeatUs;
    for (const NodeId node : job.missing)
      context.Send(node, VerifyOrder{job.number, {{job.report.incarnation, job.report.step}}});
  }
  std::erase_if(verifying_,
                [&](const auto& job) { return job.second.touched + kVerifyForgetUs < context.now; });
}

TimeUs Leader::NextTimer() const {
  TimeUs due = kNever;
  if (!leading_) return due;
  const bool judged = sequence_ != 0 && complete();
  for (const auto& [node, member] : members_) {
    if (judged && member.acked != sequence_) due = std::min(due, member.next_send);
    if (member.inventory.short_of_memory) due = std::min(due, next_restore_);
  }
  // Redundancy needs a look only while some kept step lacks copies.
  for (const StepKey& key : state_.keep) {
    const StepTable::StepState* step = table_.Find(key.id);
    if (step != nullptr && step->ranks_replicated != step->world_size) due = std::min(due, next_restore_);
  }
  for (const auto& [key, job] : verifying_) {
    if (!job.missing.empty()) due = std::min(due, job.next_send);
    due = std::min(due, job.touched + kVerifyForgetUs + 1);
  }
  return due;
}

}  // namespace ropeteam::engine
