// SPDX-License-Identifier: Apache-2.0
#include "core/engine/drainer.h"

#include <algorithm>

#include "core/base/log.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

void Drainer::Begin() {
  if (report_.begun) return;
  Context& context = parts_.context;
  report_.begun = true;
  begun_at_ = ask_at_ = context.now;
  context.leaving = true;
  context.inventory_dirty = true;
  LOG_INFO("leaving: no save begins here, and the shards that are held here are copied to other nodes");
}

bool Drainer::Settled() const {
  const Context& context = parts_.context;
  if (begun_at_ + kSettleUs <= context.now) return true;
  if (parts_.sessions.saving() || parts_.holder.granted_chunks() != 0) return false;
  const std::set<StepId>& told = context.announced.told;
  const auto& shards = context.store.shards();
  return std::none_of(shards.begin(), shards.end(), [&](const auto& entry) {
    return Counts(entry.second->role) && entry.first.incarnation == context.incarnation.number &&
           (told.empty() || *told.rbegin() < StepOf(entry.first));
  });
}

void Drainer::OnTimer(bool known) {
  if (!report_.begun || asking_ || ask_at_ > parts_.context.now) return;
  if (parts_.context.protocol <
      9) {  // no leader of version 8 knows the question; the next view may have none
    ask_at_ = parts_.context.now + kAskEveryUs;
    return;
  }
  asking_ = true;
  const bool settled = known && Settled();
  parts_.asker.Ask(Question::Topic::kDrain, Encode(DrainQuestion{awaited_}),
                   parts_.context.now + kAskTimeoutUs, [this, settled](const Result<std::string>& answer) {
                     asking_ = false;
                     ask_at_ = parts_.context.now + kAskEveryUs;
                     DrainReply reply;
                     if (answer.ok() && Decode(*answer, reply)) OnReply(reply, settled);
                   });
}

void Drainer::OnReply(const DrainReply& reply, bool settled) {
  report_.heard = true;
  report_.shards_left = reply.shards_left;
  report_.bytes_left = reply.bytes_left;
  report_.bytes_most = std::max(report_.bytes_most, reply.bytes_left);
  report_.shards_short = reply.shards_short;
  report_.latest_safe = reply.latest_safe;
  report_.no_room = reply.no_room;
  report_.others_leave = reply.others_leave;
  if (settled && !awaits_) {
    awaits_ = true;
    awaited_ = reply.persisting;
    report_.steps_left = awaited_.size();
    if (!awaited_.empty()) return;  // the next answer has their outcome
  }
  std::erase_if(awaited_, [&](const StepId& id) {
    if (reply.persisting.contains(id)) return false;
    if (!reply.persisted.contains(id)) report_.persist_failed = true;
    return true;
  });
  report_.steps_left = awaited_.size();
  report_.done = settled && awaited_.empty() && reply.shards_left == 0;
}

}  // namespace ropeteam::engine
