// SPDX-License-Identifier: Apache-2.0
//
// The coordinator's hold: from its start to its first view. What it must get right is its own return after a
// crash. Its own node's daemon, which crashed with it, registers first and has seen nothing; the others come
// within their reconnect pause. A view given out between the two would show each a world without the other.
#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "core/base/log.h"
#include "membership/coordinator.h"

namespace ropeteam {

bool Coordinator::HoldMayEnd() const {
  if (newest_ == nullptr) {
    if (config_.nodes_expected == 0) return false;
    if (records_.size() < config_.nodes_expected) return false;
    std::set<std::string> names;
    for (const auto& [id, record] : records_) names.insert(record.member.name);
    return names.size() >= config_.nodes_expected;
  }
  // Accounted for is who registered, whose node has registered as a new instance, and who is known to have
  // left.
  return std::all_of(newest_->view.members.begin(), newest_->view.members.end(),
                     [this](const Member& member) {
                       if (records_.contains(member.id) || removed_.contains(member.id)) return true;
                       return std::any_of(records_.begin(), records_.end(), [&member](const auto& entry) {
                         return entry.second.member.name == member.name && !entry.second.veteran;
                       });
                     });
}

void Coordinator::EndHold() {
  holding_ = false;
  if (newest_ != nullptr) {
    leap_ = true;
    for (const NodeId id : std::exchange(hold_ids_, {}))
      if (!InNewest(id)) Remember(id);
    // A veteran that the newest view does not show left in a view that somebody has seen.
    std::vector<NodeId> left;
    for (const auto& [id, record] : records_)
      if (removed_.contains(id) || (record.veteran && !InNewest(id))) left.push_back(id);
    for (const NodeId id : left) {
      const std::string& name = records_.at(id).member.name;
      const bool replaced = std::any_of(records_.begin(), records_.end(), [&](const auto& entry) {
        return entry.second.member.name == name &&
               std::find(left.begin(), left.end(), entry.first) == left.end();
      });
      Remove(id,
             Error(replaced ? Code::kAlreadyExists : Code::kStale,
                   "instance %016llx of node %s %s before the coordinator restarted",
                   static_cast<unsigned long long>(id), name.c_str(),
                   replaced ? "was replaced by another" : "was declared dead"),
             "it had left before the coordinator restarted");
    }
  }
  ResolveNames();
  changed_ = !records_.empty();
  if (newest_ == nullptr) return;

  size_t present = 0;
  for (size_t i = 0; i < newest_->view.members.size(); ++i) {
    const auto found = records_.find(newest_->view.members[i].id);
    if (found == records_.end()) {
      Remember(newest_->view.members[i].id);
      continue;
    }
    found->second.joined = newest_->joined[i];
    ++present;
  }
  LOG_INFO("membership coordinator goes on from view %llu, %zu of %zu members are back",
           static_cast<unsigned long long>(newest_->view.epoch), present, newest_->view.members.size());
  if (present != newest_->view.members.size()) return;
  // All are back: the newest view stays in force as it is. Who has an older one gets it; newcomers come with
  // the next.
  view_ = newest_;
  published_at_ = now_;
  changed_ = records_.size() != present;
  if (changed_) return;
  for (auto& [id, record] : records_)
    if (record.connection != kNoConnection) SendView(&record);
}

void Coordinator::ResolveNames() {
  // One name has one living daemon, so of two instances one is a zombie. An instance that was never in a view
  // is newer than one that was; among equals the one that registered last is.
  std::vector<const Record*> successors;
  for (const auto& [id, record] : records_) {
    const bool beaten = std::any_of(records_.begin(), records_.end(), [&record](const auto& entry) {
      const Record& other = entry.second;
      if (other.member.name != record.member.name || other.member.id == record.member.id) return false;
      if (other.veteran != record.veteran) return record.veteran;
      return other.order > record.order;
    });
    if (!beaten) successors.push_back(&record);
  }
  for (const Record* successor : successors) RemoveName(successor->member.name, *successor);
}

}  // namespace ropeteam
