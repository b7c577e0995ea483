// SPDX-License-Identifier: Apache-2.0
#include "core/engine/stored_damage.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"

namespace ropeteam::engine {

void StoredDamage::Begin() {
  ++generation_;
  cases_.clear();
  closed_.clear();
}

void StoredDamage::OnHoldReleased() {
  for (auto& [id, found] : cases_) found.again_at = std::min(found.again_at, context_.now + kAgainUs);
}

void StoredDamage::OnBad(NodeId from, const StoredBad& bad) {
  // Every reader of the manifest sees missing data. Data that cannot be read now may be readable later.
  if (bad.code != Code::kCorrupt) return;
  const StepId id = StepOf(bad.shard.id);
  if (const auto known = cases_.find(id); known != cases_.end()) {
    const bool second = known->second.shard == bad.shard.id && known->second.accuser != from;
    if (second && !known->second.confirmed) Confirm(&known->second);
    return;
  }
  if (closed_.contains(id) || cases_.size() >= kCasesMax) return;
  Case& found = cases_[id];
  found.shard = bad.shard.id;
  found.stream_bytes = bad.stream_bytes;
  found.why = bad.why;
  found.accuser = from;
  found.again_at = context_.now;
}

// The node that reported the damage checks it only if there is no other node.
NodeId StoredDamage::CheckerOf(const Case& found) const {
  NodeId checker = kNoNode;
  for (const Member& member : context_.view.members) {
    if (found.could_not.contains(member.id)) continue;
    if (member.id != found.accuser) return member.id;
    checker = member.id;
  }
  return checker;
}

void StoredDamage::OnChecked(NodeId from, const StoredChecked& checked) {
  const auto at = cases_.find(StepOf(checked.shard.id));
  if (at == cases_.end()) return;
  Case& found = at->second;
  if (found.confirmed || found.shard != checked.shard.id || found.checker != from) return;
  if (checked.code == Code::kCorrupt || checked.code == Code::kNotFound) return Confirm(&found);
  if (checked.code == Code::kOk) {
    LOG_WARNING("%s on storage is good when %s reads it: the memory of %s may be bad",
                found.shard.ToString().c_str(), context_.NameOf(from).c_str(),
                context_.NameOf(found.accuser).c_str());
    closed_.insert(at->first);
    cases_.erase(at);
    return;
  }
  found.could_not.insert(from);
  found.checker = kNoNode;
  found.again_at = context_.now;
}

void StoredDamage::Confirm(Case* found) {
  found->confirmed = true;
  found->tries = 0;
  found->again_at = context_.now;
}

void StoredDamage::Mark(const StepId& id, Case* found) {
  found->again_at = kNever;
  hold_.Confirm([this, id, generation = generation_](const Status& held) {
    const auto at = cases_.find(id);
    if (generation != generation_ || at == cases_.end()) return;
    if (!held.ok()) return OnMarked(id, held);
    works_.Start(MarkStored{id, at->second.why},
                 [this, id, generation](const Status& status, const StorageDone&) {
                   if (generation == generation_) OnMarked(id, status);
                 });
  });
}

void StoredDamage::OnMarked(const StepId& id, const Status& status) {
  const auto at = cases_.find(id);
  if (at == cases_.end()) return;
  if (status.ok()) {
    LOG_INFO("%s is marked on storage as damaged", id.ToString().c_str());
    closed_.insert(id);
    cases_.erase(at);
    return;
  }
  at->second.again_at = context_.now + kAgainUs;
  if (at->second.tries == 1)
    LOG_WARNING("%s cannot be marked on storage as damaged, trying again: %s", id.ToString().c_str(),
                status.ToString().c_str());
}

void StoredDamage::OnTimer() {
  for (auto at = cases_.begin(); at != cases_.end();) {
    auto& [id, found] = *at;
    if (found.again_at > context_.now) {
      ++at;
      continue;
    }
    if (found.checker == kNoNode || !context_.Contains(found.checker)) found.checker = CheckerOf(found);
    if (++found.tries > kTriesMax || (!found.confirmed && found.checker == kNoNode)) {
      LOG_WARNING("%s is not marked on storage as damaged: %s", id.ToString().c_str(),
                  found.confirmed ? "storage refused the mark" : "no other node could read it");
      closed_.insert(id);
      at = cases_.erase(at);
      continue;
    }
    found.again_at = context_.now + kAgainUs;
    if (found.confirmed) {
      Mark(id, &found);
    } else {
      context_.Send(found.checker, CheckStored{{found.shard}, found.stream_bytes});
    }
    ++at;
  }
}

TimeUs StoredDamage::NextTimer() const {
  TimeUs due = kNever;
  for (const auto& [id, found] : cases_) due = std::min(due, found.again_at);
  return due;
}

}  // namespace ropeteam::engine
