// SPDX-License-Identifier: Apache-2.0
#include "core/engine/persistence.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "core/base/log.h"
#include "core/shard/file_names.h"

namespace ropeteam::engine {

void Persistence::Begin() {
  ++generation_;
  requested_.clear();
  learned_.clear();
  waiting_.reset();
  kept_.clear();
  prune_at_ = kNever;
  run_.reset();
  refused_.clear();
  judged_ = last_due_ = StepId();
  last_due_at_ = context_.now;
  not_persisted_.clear();
  trouble_.clear();
  look_at_ = 0;
  ++version_;
}

void Persistence::Learn(const std::set<StepId>& persisting) {
  for (const StepId& id : persisting)
    if (judged_ < id) learned_.insert(id);
}

std::set<StepId> Persistence::persisting() const {
  std::set<StepId> steps = requested_;
  steps.insert(learned_.begin(), learned_.end());
  if (waiting_) steps.insert(waiting_->id);
  if (run_) steps.insert(run_->step.id);
  return steps;
}

std::set<StepId> Persistence::pinned() const {
  std::set<StepId> steps = persisting();
  if (waiting_ && !waiting_->requested) steps.erase(waiting_->id);
  return steps;
}

void Persistence::Note(const StepId& id, std::string why, LogLevel level) {
  ROPETEAM_LOG(level, "%s is not persisted: %s", id.ToString().c_str(), why.c_str());
  if (level != LogLevel::kInfo) trouble_ = id.ToString() + ": " + why;
  not_persisted_.push_back({{id}, std::move(why)});
  if (not_persisted_.size() > kNotPersistedMax) not_persisted_.pop_front();
  ++version_;
}

Status Persistence::Request(const StepId& id, const IncarnationState& incarnation) {
  if (id.incarnation != incarnation.number)
    return Error(Code::kInvalidArgument, "%s: the world is in incarnation %llu", id.ToString().c_str(),
                 IncarnationNumber(incarnation.number));
  const bool under_way =
      requested_.contains(id) || (waiting_ && waiting_->id == id) || (run_ && run_->step.id == id);
  if (under_way || stored_.Has(id)) return OkStatus();
  if (requested_.size() >= kRequestsMax)
    return Error(Code::kNoSpace, "%zu steps that are not committed yet were asked to be persisted, limit %zu",
                 requested_.size(), kRequestsMax);
  const StepTable::StepState* step = table_.Find(id);
  if (!(judged_ < id)) {
    if (step == nullptr || !step->complete || step->released || step->evictable)
      return Error(Code::kAborted, "%s: a newer step is committed, and not every copy of this one is kept",
                   id.ToString().c_str());
    // The asker repeats the question until it is answered. A repeat must not begin the step again.
    if (!refused_.empty() && context_.now < refused_at_ + kHoldAgainUs)
      return Error(Code::kAborted, "%s: %s", id.ToString().c_str(), refused_.c_str());
    if (run_ && waiting_ && waiting_->requested)
      return Error(Code::kAborted, "%s was also requested and already waits",
                   waiting_->id.ToString().c_str());
    Want({id, true});
  } else {
    requested_.insert(id);
    ++version_;
  }
  return OkStatus();
}

// If the interval is in steps, multiples of it are counted, so a program that saves at odd steps persists equally
// often.
bool Persistence::Due(const StepId& id, const IncarnationState& incarnation) const {
  const PersistEvery every = PersistEveryOf(context_, policy_.known(), id.incarnation);
  if (every.count == 0) return false;
  if (every.seconds) return context_.now >= last_due_at_ + every.count * 1'000'000;
  StepId last = last_due_;
  for (const StepId& stored : stored_.NewestFirst(1)) last = std::max(last, stored);
  Step before = 0;
  if (last.incarnation == id.incarnation) {
    before = last.step;
  } else if (incarnation.has_pin() && incarnation.number == id.incarnation) {
    before = incarnation.pin.step;
  }
  return id.step / every.count > before / every.count;
}

void Persistence::Judge(const std::set<StepId>& told, const IncarnationState& incarnation) {
  // Which steps are due depends on what was persisted before.
  if (context_.view.settings.storage.empty() || !stored_.known()) return;
  for (const StepId& id : told) {
    const bool asked = requested_.erase(id) + learned_.erase(id) != 0;
    if (!(judged_ < id) && !asked) continue;
    judged_ = std::max(judged_, id);
    ++version_;
    if (stored_.Has(id)) continue;
    if (stored_.incarnation_max() > incarnation.number) {
      if (asked || Due(id, incarnation))
        Note(id, "storage has steps of incarnation " + std::to_string(stored_.incarnation_max()) +
                     ", which began after this world's: restart the world");
      continue;
    }
    const bool due = Due(id, incarnation);
    if (!asked && !due) continue;
    if (due) {
      last_due_ = id;
      last_due_at_ = context_.now;
    }
    Want({id, asked});
  }
  // Steps that were overtaken before their commit, or whose incarnation has ended.
  for (std::set<StepId>* steps : {&requested_, &learned_}) {
    std::erase_if(*steps, [this](const StepId& id) {
      const StepTable::StepState* step = table_.Find(id);
      const bool over = id < judged_ && (step == nullptr || !step->complete);
      if (over) Note(id, "a newer step was committed, and this one is not", LogLevel::kInfo);
      return over;
    });
  }
}

void Persistence::Want(const Candidate& candidate) {
  ++version_;
  if (!run_) return BeginRun(candidate);
  if (!waiting_) {
    waiting_ = candidate;
  } else if (waiting_->requested && !candidate.requested) {
    Note(candidate.id, waiting_->id.ToString() + " was requested and waits before it", LogLevel::kInfo);
  } else {
    Note(waiting_->id, "it was overtaken by " + candidate.id.ToString() + " before it was begun",
         LogLevel::kInfo);
    waiting_ = candidate;
  }
}

void Persistence::BeginRun(const Candidate& candidate) {
  ROPETEAM_CHECK(!run_);
  const StepTable::StepState* step = table_.Find(candidate.id);
  if (step == nullptr) return Note(candidate.id, "its copies are gone");
  run_ = Run();
  run_->step = candidate;
  run_->number = ++runs_;
  run_->world_size = step->world_size;
  run_->ranks.resize(step->world_size);
  run_->progress_at = context_.now;
  ++version_;
  Confirm();
}

// Another caller's request may have lost the hold since the last answer. An order without a proof asks for none.
bool Persistence::MayOrder() const {
  return run_->held && (context_.protocol < kStorageOrdersSince || !hold_.proof().empty());
}

void Persistence::Confirm() {
  ROPETEAM_CHECK(run_ && !run_->confirming);
  run_->confirm_at = context_.now;
  if (!context_.has_lease()) return;  // OnTimer() tries again
  run_->confirming = true;
  hold_.Confirm([this, number = run_->number, generation = generation_](const Status& status) {
    if (generation == generation_ && run_ && run_->number == number) OnConfirmed(status);
  });
}

void Persistence::OnConfirmed(const Status& status) {
  if (!context_.has_lease()) return OnHoldReleased();
  run_->confirming = false;
  const bool regained = status.ok() && !run_->held;
  run_->held = status.ok();
  if (status.code() == Code::kAlreadyExists) {
    const LogLevel level = status.message() == refused_ ? LogLevel::kDebug : LogLevel::kWarning;
    refused_ = status.message();
    refused_at_ = context_.now;
    Note(run_->step.id, refused_, level);
    return EndRun();
  }
  if (!status.ok()) {
    HaveTrouble("storage is not held: " + status.ToString());
    run_->confirm_at = context_.now + run_->confirm_after;
    run_->confirm_after = std::min(2 * run_->confirm_after, kHoldAgainUs);
    return;
  }
  refused_.clear();
  run_->confirm_at = context_.now + kHoldAgainUs;
  run_->confirm_after = kHoldRetryUs;
  if (regained) {
    run_->trouble.clear();
    run_->progress_at = context_.now;
  }
  if (run_->phase == Run::Phase::kHold) {
    LOG_INFO("%s is being persisted", run_->step.id.ToString().c_str());
    return BeginPhase(Run::Phase::kName);
  }
  if (run_->phase == Run::Phase::kManifest) return PutManifest();
  if (regained) run_->orders_due = context_.now;
  GiveOrders();  // none was given if another caller's request had lost the hold
}

void Persistence::OnHoldReleased() {
  if (!run_) return;
  run_->number = ++runs_;  // answers on their way do not count any more
  run_->held = run_->confirming = false;
  run_->confirm_at = context_.now;
}

void Persistence::BeginPhase(Run::Phase phase) {
  ROPETEAM_CHECK(run_ && run_->orders.empty() && run_->homeless.empty());
  run_->phase = phase;
  run_->done = 0;
  run_->progress_at = context_.now;
  run_->trouble.clear();
  if (phase == Run::Phase::kManifest) {
    if (run_->manifest_at > context_.now) {
      run_->confirm_at = run_->manifest_at;
    } else if (!run_->confirming) {
      Confirm();
    }
    return;
  }
  run_->waiting.clear();
  for (Rank rank = 0; rank < run_->world_size; ++rank) {
    run_->ranks[rank].done = false;
    Enqueue(rank);
  }
  GiveOrders();
}

void Persistence::HaveTrouble(std::string why) {
  run_->trouble = std::move(why);
  const bool warn = run_->warned_at + kWarnEveryUs <= context_.now;
  if (warn) run_->warned_at = context_.now;
  ROPETEAM_LOG(warn ? LogLevel::kWarning : LogLevel::kDebug, "%s is not persisted yet, trying again: %s",
               run_->step.id.ToString().c_str(), run_->trouble.c_str());
}

void Persistence::EndRun() {
  run_.reset();
  ++version_;
  while (!run_ && waiting_) BeginWaiting();
}

// A step that is only due is not kept while it waits, because slow storage must not cost memory. The newest committed
// step replaces it.
void Persistence::BeginWaiting() {
  Candidate next = *std::exchange(waiting_, std::nullopt);
  if (!next.requested && !kept_.contains(next.id) && next.id < judged_) {
    Note(next.id, "it was overtaken by " + judged_.ToString() + " before it was begun", LogLevel::kInfo);
    next.id = judged_;
  }
  BeginRun(next);
}

void Persistence::Abandon(const std::string& why) {
  ROPETEAM_CHECK(run_);
  Note(run_->step.id, why);
  EndRun();
}

// The owner, unless it is gone or has failed. Otherwise the holder with the fewest orders.
NodeId Persistence::WriterOf(Rank rank) const {
  const StepTable::StepState* step = table_.Find(run_->step.id);
  if (step == nullptr || step->world_size != run_->world_size) return kNoNode;
  const StepTable::RankState& state = step->ranks[rank];
  NodeId best = kNoNode;
  size_t best_load = 0;
  for (const StepTable::Copy& copy : state.copies) {
    if (!copy.good() || copy.content != state.content || !context_.Contains(copy.node)) continue;
    const auto avoid = run_->avoid_until.find(copy.node);
    if (avoid != run_->avoid_until.end() && avoid->second > context_.now) continue;
    if (copy.role == Role::kOwn) return copy.node;
    const auto waiting = run_->waiting.find(copy.node);
    const size_t load = waiting == run_->waiting.end() ? 0 : waiting->second.size();
    if (best != kNoNode && load >= best_load) continue;
    best = copy.node;
    best_load = load;
  }
  return best;
}

NodeId Persistence::Enqueue(Rank rank) {
  const NodeId node = WriterOf(rank);
  if (node == kNoNode) {
    run_->homeless.insert(rank);
  } else {
    run_->waiting[node].push_back(rank);
  }
  return node;
}

bool Persistence::Unqueue(Rank rank) {
  if (run_->homeless.erase(rank) != 0) return true;
  for (auto& [node, ranks] : run_->waiting)
    if (std::erase(ranks, rank) != 0) return true;
  return false;
}

void Persistence::GiveOrders() {
  for (const auto& [node, ranks] : run_->waiting) GiveOrdersTo(node);
}

void Persistence::GiveOrdersTo(NodeId node) {
  const auto waiting = run_->waiting.find(node);
  if (waiting == run_->waiting.end() || !MayOrder()) return;
  std::deque<Rank>& ranks = waiting->second;
  std::set<Rank>& ordered = run_->ordered[node];
  while (ordered.size() < kOrdersPerNodeMax && !ranks.empty()) {
    const Rank rank = ranks.front();
    ranks.pop_front();
    ordered.insert(rank);
    Order& order = run_->orders[rank];
    order.node = node;
    order.given_at = context_.now;
    SendOrder(rank, &order);
  }
}

void Persistence::SendOrder(Rank rank, Order* order) {
  PersistOrder message;
  message.shard = {run_->step.id.incarnation, run_->step.id.step, rank};
  message.phase = run_->phase == Run::Phase::kName ? PersistOrder::Phase::kName : PersistOrder::Phase::kWrite;
  message.taken = run_->ranks[rank].taken;
  message.proof = hold_.proof();
  message.attempt = run_->attempt;
  order->again_at = context_.now + order->again_after;
  order->again_after = std::min(2 * order->again_after, kOrderAgainMaxUs);
  run_->orders_due = std::min(run_->orders_due, order->again_at);
  context_.Send(order->node, message);
}

void Persistence::TakeOrder(Rank rank) {
  const auto order = run_->orders.find(rank);
  ROPETEAM_CHECK(order != run_->orders.end());
  const size_t known = run_->ordered[order->second.node].erase(rank);
  ROPETEAM_CHECK(known == 1);
  run_->orders.erase(order);
}

// Other nodes take over this node's work.
void Persistence::RequeueFrom(NodeId node) {
  const std::set<Rank> ordered = run_->ordered[node];
  std::vector<Rank> ranks(ordered.begin(), ordered.end());
  for (const Rank rank : ranks) TakeOrder(rank);
  if (const auto waiting = run_->waiting.find(node); waiting != run_->waiting.end()) {
    ranks.insert(ranks.end(), waiting->second.begin(), waiting->second.end());
    run_->waiting.erase(waiting);
  }
  std::set<NodeId> nodes;
  for (const Rank rank : ranks) nodes.insert(Enqueue(rank));
  for (const NodeId other : nodes) GiveOrdersTo(other);
}

void Persistence::OnView() {
  if (!run_) return;
  std::set<NodeId> gone;
  for (const auto& [node, ranks] : run_->waiting)
    if (!context_.Contains(node)) gone.insert(node);
  for (const auto& [rank, order] : run_->orders)
    if (!context_.Contains(order.node)) gone.insert(order.node);
  for (const NodeId node : gone) RequeueFrom(node);
  // Messages of the previous epoch are lost.
  for (auto& [rank, order] : run_->orders) order.again_at = context_.now;
  run_->orders_due = context_.now;
  GiveOrders();
}

// Trouble with storage itself affects all nodes. The longer it lasts, the longer the pauses.
TimeUs Persistence::RetryAfter() const {
  return std::clamp(context_.now - run_->progress_at, kRetryUs, kRetryMaxUs);
}

void Persistence::OnResult(NodeId from, const PersistResult& result) {
  const StepId id = StepOf(result.shard);
  const Rank rank = result.shard.rank;
  const bool naming = result.phase == PersistOrder::Phase::kName;
  if (!run_ || run_->step.id != id || rank >= run_->world_size || run_->ranks[rank].done ||
      run_->phase != (naming ? Run::Phase::kName : Run::Phase::kWrite))
    return;
  const StepTable::StepState* step = table_.Find(id);
  std::string trouble;
  if (result.code != Code::kOk) {
    trouble = CodeName(result.code) + (": " + result.message);
  } else if (!naming && step != nullptr && rank < step->world_size &&
             step->ranks[rank].content != result.stored.content) {
    trouble = "its copy has other bytes than the one that counts";
  } else if (result.stored.metadata.size() > kStepMetadataBytesMax) {
    trouble = "metadata of " + std::to_string(result.stored.metadata.size()) + " bytes, limit " +
              std::to_string(kStepMetadataBytesMax);
  }
  const auto order = run_->orders.find(rank);
  const bool ordered = order != run_->orders.end() && order->second.node == from;
  // A node that seemed to hang has finished after all. Its result is as good as that of the node ordered since.
  if (!ordered && !trouble.empty()) return;
  const NodeId freed = order == run_->orders.end() ? from : order->second.node;
  if (order != run_->orders.end()) {
    TakeOrder(rank);
  } else if (!Unqueue(rank)) {
    return;
  }
  if (!trouble.empty()) {
    HaveTrouble(context_.NameOf(from) + ": " + trouble);
    run_->avoid_until[from] = context_.now + RetryAfter();
    GiveOrdersTo(Enqueue(rank));
    return RequeueFrom(from);
  }
  RankWork& work = run_->ranks[rank];
  if (naming) {
    work.names = result.names;
  } else {
    work.stored = result.stored;
    const std::string metadata = std::exchange(work.stored.metadata, {});
    if (!metadata.empty() && rank < run_->metadata_of) {
      run_->metadata_of = rank;
      run_->metadata = metadata;
    }
  }
  FinishRank(rank);
  if (run_) GiveOrdersTo(freed);
}

void Persistence::FinishRank(Rank rank) {
  RankWork& work = run_->ranks[rank];
  ROPETEAM_CHECK(!work.done);
  work.done = true;
  run_->progress_at = context_.now;
  run_->trouble.clear();
  if (++run_->done < run_->world_size) return;
  if (run_->phase == Run::Phase::kWrite) return BeginPhase(Run::Phase::kManifest);
  AssignNames();
  BeginPhase(Run::Phase::kWrite);
}

// Every node that writes this step must choose the same names, so names depend only on what was saved.
void Persistence::AssignNames() {
  std::set<std::string> names;
  for (RankWork& work : run_->ranks) work.taken = TakeFileNames(std::exchange(work.names, {}), &names);
}

void Persistence::PutManifest() {
  if (run_->writing_manifest || run_->manifest_at > context_.now) return;
  auto step = std::make_shared<StoredStep>();
  step->id = run_->step.id;
  step->world_size = run_->world_size;
  step->chunk_bytes = context_.store.chunk_bytes();
  step->metadata = run_->metadata;
  for (const RankWork& work : run_->ranks) step->ranks.push_back(work.stored);
  run_->writing_manifest = true;
  keeper_.Start(
      WriteManifest{step},
      [this, id = step->id, generation = generation_](const Status& status, const StorageDone&) {
        if (generation == generation_) OnManifest(id, status);
      },
      [this, id = step->id, generation = generation_] {
        if (generation != generation_ || !run_ || run_->step.id != id || !run_->writing_manifest) return;
        HaveTrouble("writing its manifest has made no progress for a minute");
        keeper_.PassOn(std::string(run_->trouble));
      });
}

void Persistence::OnManifest(const StepId& id, const Status& status) {
  if (!run_ || run_->step.id != id || !run_->writing_manifest) return;
  run_->writing_manifest = false;
  if (status.ok()) {
    LOG_INFO("%s is persisted", id.ToString().c_str());
    trouble_.clear();
    stored_.Add(id);
    // A node that was left alone has just seen the store. Later it may have deleted the step that it knew it by.
    if (context_.stored_with_others != StepId()) context_.stored_with_others = id;
    Prune();
    return EndRun();
  }
  if (status.code() == Code::kAlreadyExists) return Abandon("its manifest was refused: " + status.message());
  HaveTrouble("its manifest: " + status.ToString());
  const bool missing = WordOf(status.code()) == StoredWord::kNotHere;
  // Perhaps it is this node that does not see the files. kUnavailable: it no longer holds storage.
  if (missing ? run_->attempt != 0 : status.code() != Code::kUnavailable)
    keeper_.PassOn(std::string(run_->trouble));
  if (missing) {
    // Writing everything again costs, so the pauses grow also if each attempt makes progress.
    const uint32_t doubled = std::min(run_->attempt++, 5u);
    run_->manifest_at = context_.now + std::min(kRetryUs << doubled, kRetryMaxUs);
    const std::string trouble = run_->trouble;
    BeginPhase(Run::Phase::kWrite);
    run_->trouble = trouble;
    return;
  }
  run_->manifest_at = run_->confirm_at = context_.now + RetryAfter();
}

// Files left by a failure are deleted after the next step.
void Persistence::Prune() {
  prune_at_ = kNever;
  if (!context_.has_lease()) return;
  hold_.Confirm([this](const Status& status) {
    if (!status.ok()) return;
    const Result<uint64_t> keep = keep_();
    if (keep.ok()) return StartPruning(*keep);
    if (keep.status().code() == Code::kUnavailable) {
      prune_at_ = context_.now + kRetryUs;  // not at once: each attempt reads the hold on storage
      return;
    }
    LOG_WARNING("no step on storage is deleted: %s", keep.status().message().c_str());
  });
}

void Persistence::StartPruning(uint64_t keep) {
  pruning_.insert(keep);
  const auto done = [this, keep, generation = generation_](const Status& status, const StorageDone& result) {
    pruning_.erase(pruning_.find(keep));
    const auto* gone = std::get_if<StoredList>(&result.result);
    if (generation == generation_ && gone != nullptr) stored_.Remove(gone->steps);
    if (!status.ok())
      LOG_WARNING("steps on storage that no rule keeps are not deleted: %s", status.ToString().c_str());
  };
  keeper_.StartAt(keeper_.keeper(), PruneStored{in_use_(), keep}, done);
}

void Persistence::LookAtHomeless() {
  for (const Rank rank : std::exchange(run_->homeless, {})) Enqueue(rank);
  GiveOrders();
  if (run_->homeless.empty()) return;
  const StepTable::StepState* step = table_.Find(run_->step.id);
  const bool all_here = roster_.Missing() == 0;
  for (const Rank rank : run_->homeless) {
    if (step != nullptr && step->world_size == run_->world_size && step->ranks[rank].producible) continue;
    // An absent node with a copy may come back, but the wait is bounded.
    if (all_here || run_->progress_at + kStuckUs <= context_.now)
      return Abandon("no node has a good copy of rank " + std::to_string(rank));
  }
}

void Persistence::RepeatOrders() {
  run_->orders_due = kNever;
  std::set<NodeId> stalled;
  for (auto& [rank, order] : run_->orders) {
    if (order.given_at + kOrderStalledUs <= context_.now) {
      stalled.insert(order.node);
    } else if (order.again_at <= context_.now && MayOrder()) {
      SendOrder(rank, &order);
    } else {
      run_->orders_due = std::min(run_->orders_due, order.again_at);
    }
  }
  // One timer checks all orders, instead of one timer for each of ten thousand nodes.
  run_->orders_due = std::max(run_->orders_due, context_.now + kRepeatUs / 2);
  for (const NodeId node : stalled) {
    LOG_WARNING("%s has not written its shards of %s for %llu s, others do", context_.NameOf(node).c_str(),
                run_->step.id.ToString().c_str(),
                static_cast<unsigned long long>(kOrderStalledUs / 1'000'000));
    run_->avoid_until[node] = context_.now + kOrderStalledUs;
    RequeueFrom(node);
  }
}

void Persistence::OnTimer() {
  if (prune_at_ <= context_.now) Prune();
  if (!run_) return;
  if (!run_->confirming && run_->confirm_at <= context_.now) Confirm();
  if (run_->orders_due <= context_.now) RepeatOrders();
  if (look_at_ > context_.now) return;
  look_at_ = context_.now + kRetryUs;
  if (!run_->homeless.empty()) LookAtHomeless();
  // Without a failure, storage is slow but not stuck.
  const std::string trouble = RunTrouble();
  const bool stuck = !trouble.empty() && run_->progress_at + kStuckUs <= context_.now;
  if (stuck && waiting_)
    Abandon("nothing of it could be written for a minute, and " + waiting_->id.ToString() +
            " is newer: " + trouble);
}

std::string Persistence::RunTrouble() const {
  if (!run_ || !run_->trouble.empty()) return run_ ? run_->trouble : "";
  const bool at_manifest = run_->phase == Run::Phase::kManifest && !run_->writing_manifest;
  return run_->confirming && (!run_->held || at_manifest) ? hold_.trouble() : "";
}

std::string Persistence::trouble() const {
  const std::string trouble = RunTrouble();
  return trouble.empty() ? trouble_ : run_->step.id.ToString() + ", trying again: " + trouble;
}

TimeUs Persistence::NextTimer() const {
  if (!run_) return prune_at_;
  TimeUs due = std::min(look_at_, prune_at_);
  if (!run_->confirming) due = std::min(due, run_->confirm_at);
  return std::min(due, run_->orders_due);
}

}  // namespace ropeteam::engine
