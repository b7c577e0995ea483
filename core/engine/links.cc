// SPDX-License-Identifier: Apache-2.0
#include "core/engine/links.h"

#include <algorithm>

#include "core/base/log.h"
#include "core/engine/parts.h"

namespace ropeteam::engine {

void Links::Set(NodeId peer, bool LostLink::*path, bool lost, const LostLink& why) {
  Context& context = parts_.context;
  const auto known = context.unreachable.find(peer);
  const bool was_lost = known != context.unreachable.end();
  if (lost == (was_lost && known->second.*path)) return;
  LostLink& link = was_lost ? known->second : (context.unreachable[peer] = why);
  link.*path = lost;
  context.local.links_lost += lost ? 1 : 0;
  context.inventory_dirty = true;
  const bool up = !link.data && !link.control;
  if (up) context.unreachable.erase(peer);
  if (up == !was_lost) return;
  parts_.replicator.OnPeerLink(peer, up);
  parts_.fetcher.OnPeerLink();
}

void Links::OnDataPath(NodeId peer, bool up, const std::string& reason) {
  const Context& context = parts_.context;
  if (!context.Contains(peer) || peer == context.config.self) return;
  Set(peer, &LostLink::data, !up, {context.now, reason});
}

void Links::OnMessage(NodeId from, Kind kind) {
  Context& context = parts_.context;
  if (!IsAnswer(kind)) return;
  context.asked.erase(from);
  const auto lost = context.unreachable.find(from);
  const bool regained = lost != context.unreachable.end() && lost->second.control;
  if (regained) {
    LOG_INFO("%s answers control messages again", context.NameOf(from).c_str());
    Set(from, &LostLink::control, false, {});
  }
  const bool first = check_.contains(from) && reached_.insert(from).second;
  if (regained || first) context.out.reached.push_back({from, true});
}

void Links::Check(const std::vector<NodeId>& members) {
  const Context& context = parts_.context;
  check_.clear();
  reached_.clear();
  for (const NodeId member : members)
    if (context.Contains(member) && member != context.config.self) check_.insert(member);
  for (const NodeId member : check_) Ask(member);
}

void Links::Ask(NodeId peer) { parts_.context.Send(peer, TraceQuestion{.asked_at = parts_.context.now}); }

void Links::OnView() {
  Context& context = parts_.context;
  const auto gone = [&](NodeId peer) { return !context.Contains(peer); };
  std::erase_if(context.unreachable, [&](const auto& link) { return gone(link.first); });
  std::erase_if(context.asked, [&](const auto& asked) { return gone(asked.first); });
  std::erase_if(check_, gone);
}

void Links::OnTimer() {
  Context& context = parts_.context;
  if (NextTimer() > context.now) return;
  // If this process was held up, answers may wait in its queue.
  if (context.now > context.asked_look_at + kAskAgainUs)
    for (auto& [peer, since] : context.asked) since = std::max(since, context.now - kAskAgainUs);
  std::vector<NodeId> asked;
  for (const auto& [peer, since] : context.asked)
    if (since + kAskAgainUs <= context.now) asked.push_back(peer);
  for (const NodeId peer : check_)
    if (!context.asked.contains(peer)) Ask(peer);
  context.asked_look_at = context.now + kAskAgainUs;
  for (const NodeId peer : asked) {
    Ask(peer);
    TimeUs& since = context.asked.at(peer);
    if (since + kUnansweredUs > context.now) continue;
    const auto known = context.unreachable.find(peer);
    if (known == context.unreachable.end() || !known->second.control)
      LOG_WARNING(
          "%s%s has answered no control message for %llu s: saves need another leader or holder, or the "
          "network between the two",
          context.NameOf(peer).c_str(), peer == context.view.leader ? " (leader)" : "",
          static_cast<unsigned long long>((context.now - since) / 1'000'000));
    Set(peer, &LostLink::control, true, {since, "no control message is answered"});
    context.out.reached.push_back({peer, false});
    since = context.now;  // said again after the same time
  }
}

TimeUs Links::NextTimer() const {
  return parts_.context.asked.empty() && check_.empty() ? kNever : parts_.context.asked_look_at;
}

}  // namespace ropeteam::engine
