// SPDX-License-Identifier: Apache-2.0
#include "node/node_stats.h"

namespace ropeteam {

void NodeStats::OnLevel(const LevelEvent& event) {
  if (event.shard.rank != LevelEvent::kNoRank) {
    if (event.since_begin_us != 0) levels_[static_cast<size_t>(event.level)].Add(event.since_begin_us);
  } else if (event.level == Level::kCommitted) {
    ++steps_committed_;
  } else if (event.level == Level::kPersisted) {
    ++steps_persisted_;
  }
}

void NodeStats::OnView(TimeUs now, const View& before, const std::unordered_set<NodeId>& members) {
  ++views_;
  for (const Member& member : before.members) {
    if (members.contains(member.id)) continue;
    ++members_lost_;
    if (lost_at_ == 0) lost_at_ = now;
    if (const auto sign = signs_.find(member.id); sign != signs_.end()) detection_.Add(now - sign->second);
  }
  std::erase_if(signs_, [&](const auto& sign) { return !members.contains(sign.first); });
}

void NodeStats::OnLease(TimeUs now, TimeUs valid_until) {
  lease_renewed_at_ = valid_until == 0 ? 0 : now;
  lease_until_ = valid_until;
}

void NodeStats::AfterInput(TimeUs now, const Engine& engine) {
  if (lost_at_ == 0) return;
  if (engine.is_leader() && !engine.redundant()) return;
  if (engine.is_leader()) recovery_.Add(now - lost_at_);
  lost_at_ = 0;
}

}  // namespace ropeteam
