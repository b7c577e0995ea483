// SPDX-License-Identifier: Apache-2.0
#include "core/engine/stored_damage.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"

namespace ropeteam::engine {

void StoredDamage::Begin() {
  ++generation_;
  cases_.clear();
  markings_.clear();
}

void StoredDamage::OnHoldReleased() {
  for (auto& [id, marking] : markings_)
    marking.again_at = std::min(marking.again_at, context_.now + kAgainUs);
}

bool StoredDamage::Proven(const Case& found) const {
  const auto& members = context_.view.members;
  return found.bad.size() >= 2 ||
         (found.bad_loads >= 2 && std::all_of(members.begin(), members.end(), [&](const Member& member) {
            return found.bad.contains(member.name) || found.not_here.contains(member.name);
          }));
}

void StoredDamage::OnRead(NodeId from, const StoredRead& read) {
  const ShardId& shard = read.shard;
  const StepId id = StepOf(shard);
  const StoredWord word = context_.protocol < kStorageOrdersSince ? StoredWord::kBad : WordOf(read.code);
  if (word == StoredWord::kUnreadable || !stored_.Has(id)) return;
  const auto known = cases_.find(shard);
  if (word == StoredWord::kGood) {
    if (known == cases_.end()) return;
    if (!known->second.bad.empty())
      LOG_WARNING("%s on storage is good when %s reads it: the memory of %s may be bad",
                  shard.ToString().c_str(), context_.NameOf(from).c_str(),
                  known->second.bad.begin()->c_str());
    cases_.erase(known);
    return;
  }
  if (known == cases_.end() && cases_.size() >= kCasesMax) cases_.erase(cases_.begin());
  Case& found = cases_[shard];
  if (word == StoredWord::kBad && found.bad_loads++ == 0) found.not_here.clear();  // it may be there by now
  (word == StoredWord::kBad ? found.bad : found.not_here).insert(context_.NameOf(from));
  if (word == StoredWord::kBad) found.why = read.why;
  if (!Proven(found)) return;
  stored_.MarkDamaged(id, read.why);
  // Another job's steps (restore_from) are not marked.
  if (!stored_.IsOfSource(id)) markings_[id] = {read.why, 0, context_.now};
  std::erase_if(cases_, [&id](const auto& each) { return StepOf(each.first) == id; });
}

std::string StoredDamage::Found(const StepId& id) const {
  std::string found;
  for (const auto& [shard, each] : cases_) {
    if (StepOf(shard) != id) continue;
    if (!each.bad.empty())
      found = *each.bad.begin() + " finds it damaged (" + each.why + ")";
    else if (found.empty() && !each.not_here.empty())
      found = *each.not_here.begin() + " does not find it";
  }
  if (found.empty()) return {};
  return "; " + found + "; if no other node can read it, `ropeteam quarantine " + std::to_string(id.step) +
         "` gives the step up";
}

void StoredDamage::Mark(const StepId& id, Marking* marking) {
  marking->again_at = kNever;
  hold_.Confirm([this, id, generation = generation_](const Status& held) {
    const auto at = markings_.find(id);
    if (generation != generation_ || at == markings_.end()) return;
    if (!held.ok()) return OnMarked(id, held);
    keeper_.Start(
        MarkStored{id, at->second.why},
        [this, id, generation](const Status& status, const StorageDone&) {
          if (generation == generation_) OnMarked(id, status);
        },
        [this] { keeper_.PassOn("a mark of a damaged step has made no progress for a minute"); });
  });
}

void StoredDamage::OnMarked(const StepId& id, const Status& status) {
  const auto at = markings_.find(id);
  if (at == markings_.end()) return;
  const bool over = status.ok() || ++at->second.tries >= kTriesMax;
  if (status.ok()) LOG_INFO("%s is marked on storage as damaged", id.ToString().c_str());
  if (!status.ok() && (over || at->second.tries == 1))
    LOG_WARNING("%s cannot be marked on storage as damaged%s: %s", id.ToString().c_str(),
                over ? "" : ", trying again", status.ToString().c_str());
  if (over) {
    markings_.erase(at);
  } else {
    at->second.again_at = context_.now + kAgainUs;
  }
}

void StoredDamage::OnTimer() {
  for (auto& [id, marking] : markings_)
    if (marking.again_at <= context_.now) return Mark(id, &marking);  // it may change the list
}

TimeUs StoredDamage::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [id, marking] : markings_) due = std::min(due, marking.again_at);
  return due;
}

}  // namespace ropeteam::engine
