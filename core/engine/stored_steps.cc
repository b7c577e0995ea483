// SPDX-License-Identifier: Apache-2.0
#include "core/engine/stored_steps.h"

#include <algorithm>
#include <utility>

#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::engine {

void StoredSteps::Begin() {
  was_known_ = false;
  unknown_since_ = 0;
  incarnation_max_ = source_incarnation_max_ = 0;
  has_own_ = false;
  steps_.clear();
  reading_.clear();
  ListAgain();
}

void StoredSteps::ListAgain() {
  ++generation_;
  known_ = false;
  listers_.clear();
  listed_at_ = 0;
  best_newest_ = StepId();
  best_ = kNoNode;
  trouble_.clear();
  ++version_;
}

void StoredSteps::OnView() {
  std::erase_if(listers_, [this](const auto& lister) { return !context_.Contains(lister.first); });
  Decide();
}

void StoredSteps::Hurry() {
  for (auto& [node, lister] : listers_) lister.again.at = std::min(lister.again.at, context_.now + kAgainUs);
}

void StoredSteps::List(NodeId node, Lister* lister) {
  lister->running = true;
  keeper_.StartAt(
      node, ListStored{},
      [this, node, generation = generation_](const Status& status, const StorageDone& done) {
        if (generation == generation_) OnListed(node, status, done);
      },
      [this, node, generation = generation_] {
        const auto at = listers_.find(node);
        if (generation != generation_ || at == listers_.end()) return;
        at->second.trouble = "listing it on " + context_.NameOf(node) + " has made no progress for a minute";
        LOG_WARNING("storage hangs: %s", at->second.trouble.c_str());
        if (!known_) trouble_ = at->second.trouble;
      });
}

void StoredSteps::OnListed(NodeId node, const Status& status, const StorageDone& done) {
  const auto at = listers_.find(node);
  if (at == listers_.end()) return;  // it has left
  Lister& lister = at->second;
  lister.running = false;
  ++version_;
  const auto* list = std::get_if<StoredList>(&done.result);
  if (status.ok() && list != nullptr) {
    lister.listed = true;
    lister.trouble.clear();
    if (listed_at_ == 0) listed_at_ = context_.now;
    if (unknown_since_ == 0) unknown_since_ = context_.now;
    Learn(node, *list);
    return Decide();
  }
  lister.trouble = status.ToString();
  if (lister.again.after == kAgainUs)
    LOG_WARNING("storage cannot be listed by %s, trying again: %s", context_.NameOf(node).c_str(),
                lister.trouble.c_str());
  lister.again.Fail(context_.now);
  if (!known_) trouble_ = lister.trouble;
}

void StoredSteps::Learn(NodeId node, const StoredList& list) {
  StepId newest;
  incarnation_max_ = std::max(incarnation_max_, list.incarnation_max);
  const auto learn = [&](const StepId& id, bool of_source) {
    if (id.incarnation >= kIncarnationMax) return;
    Incarnation& max = of_source ? source_incarnation_max_ : incarnation_max_;
    max = std::max(max, id.incarnation);
    const auto [entry, fresh] = steps_.try_emplace(id);
    if (fresh) entry->second.of_source = of_source;
    if (fresh) entry->second.lister = node;
    has_own_ = has_own_ || !of_source;
    newest = std::max(newest, id);
  };
  for (const StepId& id : list.steps) learn(id, false);
  for (const StepId& id : list.source_steps) learn(id, true);
  if (best_ == kNoNode || best_newest_ < newest || (best_newest_ == newest && node == keeper_.keeper())) {
    best_ = node;
    best_newest_ = newest;
  }
}

// An empty directory says little while another member may see the steps. Every new incarnation lists them again; that
// does not begin this wait again.
TimeUs StoredSteps::DecidesAt() const {
  if (listed_at_ == 0) return kNever;
  if (has_own_ || was_known_) return listed_at_ + kOthersUs;
  return std::max(listed_at_, unknown_since_ + context_.view.settings.wait_for_missing_us);
}

void StoredSteps::Decide() {
  if (known_ || listed_at_ == 0) return;
  std::string others;
  for (const NodeId node : keeper_.nodes()) {
    const auto lister = listers_.find(node);
    if (lister != listers_.end() && lister->second.listed) continue;
    if (others.empty())
      others = context_.NameOf(node) + (lister == listers_.end() || lister->second.trouble.empty()
                                            ? " has not listed it"
                                            : ": " + lister->second.trouble);
  }
  // Nobody remembers anything, and nobody knows what the nodes see that are not here yet.
  if (others.empty() && !has_own_ && !was_known_ && current_.number == 0 &&
      context_.view.members.size() < context_.view.settings.nodes)
    others = std::to_string(context_.view.settings.nodes - context_.view.members.size()) +
             " nodes are not here yet";
  if (!others.empty()) trouble_ = others;
  if (!others.empty() && context_.now < DecidesAt()) return;
  known_ = was_known_ = true;
  unknown_since_ = 0;
  ++version_;
  trouble_.clear();
  if (!others.empty()) LOG_WARNING("storage is listed, but not by every node: %s", others.c_str());
  if (context_.Contains(best_)) keeper_.Appoint(best_, "it has listed the newest step");
  const std::optional<StepId> newest = Newest();
  const bool of_source = newest && IsOfSource(*newest);
  LOG_INFO("storage has %zu steps, newest %s%s, as %s sees it", steps_.size(),
           newest ? newest->ToString().c_str() : "none",
           of_source ? (", of " + context_.view.settings.restore_from).c_str() : "",
           context_.NameOf(keeper_.keeper()).c_str());
}

// Another job's steps are offered only if no member has seen one of this job's own.
bool StoredSteps::Fits(const StepId& id, const Entry& entry) const {
  return !(entry.of_source && (has_own_ || (current_.number != 0 && current_.number <= id.incarnation)));
}

bool StoredSteps::IsOfSource(const StepId& id) const {
  const auto at = steps_.find(id);
  return at != steps_.end() && at->second.of_source;
}

bool StoredSteps::Has(const StepId& id) const {
  const auto at = steps_.find(id);
  return at != steps_.end() && Offers(id, at->second);
}

std::string StoredSteps::Damage(const std::set<StepId>& given_up) const {
  for (auto at = steps_.rbegin(); at != steps_.rend(); ++at)
    if (!at->second.damage.empty() && Fits(at->first, at->second) && !given_up.contains(at->first))
      return at->first.ToString() + ": " + at->second.damage;
  return {};
}

std::optional<StepId> StoredSteps::Newest() const {
  const std::vector<StepId> newest = NewestFirst(1);
  return newest.empty() ? std::nullopt : std::optional(newest.front());
}

std::optional<StepId> StoredSteps::NewestBefore(const StepId& end) const {
  for (auto at = steps_.lower_bound(end); at != steps_.begin();) {
    --at;
    if (Offers(at->first, at->second)) return at->first;
  }
  return std::nullopt;
}

std::optional<StepId> StoredSteps::NewestOf(Step step) const {
  std::optional<StepId> damaged;
  for (auto at = steps_.rbegin(); at != steps_.rend(); ++at) {
    if (at->first.step != step || !Fits(at->first, at->second)) continue;
    if (at->second.damage.empty()) return at->first;
    if (!damaged) damaged = at->first;
  }
  return damaged;
}

std::vector<StepId> StoredSteps::NewestFirst(size_t count) const {
  std::vector<StepId> newest;
  for (auto at = steps_.rbegin(); at != steps_.rend() && newest.size() < count; ++at)
    if (Offers(at->first, at->second)) newest.push_back(at->first);
  return newest;
}

std::shared_ptr<const StoredStep> StoredSteps::Manifest(const StepId& id) {
  const auto at = steps_.find(id);
  if (at == steps_.end() || !Offers(id, at->second)) return nullptr;
  at->second.used_at = ++use_;
  if (at->second.manifest != nullptr) return at->second.manifest;
  // If members have left, those that are here may all have spoken: then the step may be gone after this.
  if (at->second.reader == kNoNode && at->second.again.at <= context_.now) ReadManifest(id);
  return nullptr;
}

bool StoredSteps::CannotBeRead(const StepId& id) const {
  const auto at = steps_.find(id);
  return at != steps_.end() && at->second.manifest == nullptr && at->second.again.after > kAgainUs;
}

// The keeper first, then the member that has listed it, then the others.
NodeId StoredSteps::ReaderOf(const Entry& entry) const {
  if (entry.said.size() >= entry.said_before + kReadersMax) return kNoNode;
  std::vector<NodeId> nodes = keeper_.nodes();
  const auto lister = std::find(nodes.begin(), nodes.end(), entry.lister);
  if (lister != nodes.begin() && lister != nodes.end()) std::rotate(nodes.begin() + 1, lister, lister + 1);
  const auto reader =
      std::find_if(nodes.begin(), nodes.end(), [&entry](NodeId node) { return !entry.said.contains(node); });
  return reader == nodes.end() ? kNoNode : *reader;
}

void StoredSteps::ReadManifest(const StepId& id) {
  Entry& entry = steps_.at(id);
  const NodeId node = ReaderOf(entry);
  if (node == kNoNode) return EndRound(id);
  entry.reader = node;
  reading_[id] = context_.now + kReadUs;
  keeper_.StartAt(node, ReadStored{id}, [this, id, node](const Status& status, const StorageDone& done) {
    const auto at = steps_.find(id);
    if (at != steps_.end() && (at->second.reader == node || (status.ok() && at->second.manifest == nullptr)))
      OnRead(id, node, status, done);
  });
}

void StoredSteps::OnRead(const StepId& id, NodeId node, const Status& read, const StorageDone& done) {
  Entry& entry = steps_.at(id);
  const auto* step = std::get_if<StoredStep>(&done.result);
  Status status = read;
  if (status.ok() &&
      (step == nullptr || step->id != id || step->world_size == 0 || step->ranks.size() != step->world_size))
    status = Error(Code::kCorrupt, "its manifest is of another step");
  entry.reader = kNoNode;
  reading_.erase(id);
  ++version_;
  if (status.ok()) {
    if (!entry.bad.empty())
      LOG_WARNING("%s on storage is good when %s reads it: the memory of %s may be bad",
                  id.ToString().c_str(), context_.NameOf(node).c_str(), entry.bad.begin()->c_str());
    entry.said.clear();
    entry.said_before = 0;
    entry.bad.clear();
    entry.bad_before = false;
    entry.unseen_since = 0;
    entry.again = Pause();
    if (known_) trouble_.clear();
    entry.manifest = std::make_shared<const StoredStep>(*step);
    return ForgetOldManifests();
  }
  const StoredWord word = WordOf(status.code());
  entry.said[node] = word;
  if (known_) trouble_ = status.ToString();
  if (word == StoredWord::kBad) entry.bad.insert(context_.NameOf(node));
  if (entry.bad.size() >= 2) return MarkDamaged(id, status.ToString());
  ReadManifest(id);
}

// Every member has said that it is not here. If the one that has listed it has left, it may come back.
bool StoredSteps::IsGone(Entry* entry) const {
  if (entry->unseen_since == 0) entry->unseen_since = context_.now;
  const TimeUs wait = context_.Contains(entry->lister) ? kGoneUs : context_.view.settings.wait_for_missing_us;
  return entry->unseen_since + wait <= context_.now;
}

void StoredSteps::EndRound(const StepId& id) {
  Entry& entry = steps_.at(id);
  entry.said_before = entry.said.size();
  if (ReaderOf(entry) == kNoNode) {  // all members have spoken
    const auto all = [&entry](StoredWord word, StoredWord other) {
      return std::all_of(entry.said.begin(), entry.said.end(),
                         [&](const auto& said) { return said.second == word || said.second == other; });
    };
    if (!all(StoredWord::kNotHere, StoredWord::kNotHere)) {
      entry.unseen_since = 0;
      const bool bad = all(StoredWord::kBad, StoredWord::kNotHere);
      if (bad && entry.bad_before) return MarkDamaged(id, trouble_);
      entry.bad_before = bad;
    } else if (IsGone(&entry)) {
      LOG_WARNING("%s is not on storage any more: %s", id.ToString().c_str(), trouble_.c_str());
      steps_.erase(id);
      return;
    }
    entry.said.clear();
    entry.said_before = 0;
  }
  if (entry.again.after == kAgainUs)
    LOG_WARNING("the manifest of %s on storage cannot be read, trying again: %s", id.ToString().c_str(),
                trouble_.c_str());
  entry.again.Fail(context_.now);
}

void StoredSteps::ForgetOldManifests() {
  std::vector<std::pair<uint64_t, StepId>> held;
  for (const auto& [id, entry] : steps_)
    if (entry.manifest != nullptr) held.emplace_back(entry.used_at, id);
  if (held.size() <= kManifestsMax) return;
  std::sort(held.begin(), held.end());
  for (size_t i = 0; i + kManifestsMax < held.size(); ++i) steps_.at(held[i].second).manifest = nullptr;
}

void StoredSteps::Add(const StepId& id) {
  incarnation_max_ = std::max(incarnation_max_, id.incarnation);
  Entry& entry = steps_[id] = Entry();
  entry.lister = keeper_.keeper();
  has_own_ = true;
  ++version_;
}

void StoredSteps::Remove(const std::vector<StepId>& steps) {
  for (const StepId& id : steps) version_ += steps_.erase(id);
}

void StoredSteps::MarkDamaged(const StepId& id, const std::string& why) {
  const auto at = steps_.find(id);
  if (at == steps_.end() || !at->second.damage.empty()) return;
  LOG_WARNING("%s on storage is passed over: %s", id.ToString().c_str(), why.c_str());
  at->second.damage = why.empty() ? "damaged" : why;
  at->second.manifest = nullptr;
  ++version_;
}

void StoredSteps::OnTimer() {
  for (const auto& [id, until] : std::map(reading_)) {
    const auto at = steps_.find(id);
    if (at == steps_.end()) {
      reading_.erase(id);
    } else if (until <= context_.now) {
      const NodeId node = at->second.reader;
      OnRead(id, node,
             Error(Code::kDeadlineExceeded, "%s has not read the manifest of %s for %llu s",
                   context_.NameOf(node).c_str(), id.ToString().c_str(),
                   static_cast<unsigned long long>(kReadUs / 1'000'000)),
             {});
    }
  }
  if (!used() || known_ || generation_ == 0) return;
  for (const NodeId node : keeper_.nodes()) {
    Lister& lister = listers_[node];
    if (!lister.listed && !lister.running && lister.again.at <= context_.now) List(node, &lister);
  }
  Decide();
}

TimeUs StoredSteps::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [id, until] : reading_) due = std::min(due, until);
  if (!used() || known_ || generation_ == 0) return due;
  due = std::min(due, DecidesAt());
  for (const NodeId node : keeper_.nodes()) {
    const auto lister = listers_.find(node);
    if (lister == listers_.end()) return context_.now;
    if (!lister->second.listed && !lister->second.running) due = std::min(due, lister->second.again.at);
  }
  return due;
}

}  // namespace ropeteam::engine
