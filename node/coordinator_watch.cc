// SPDX-License-Identifier: Apache-2.0
#include "node/coordinator_watch.h"

#include <algorithm>
#include <set>

namespace ropeteam {

void CoordinatorWatch::OnView(TimeUs now, NodeId self, const View& view) {
  self_ = self;
  if (first_view_at_ == 0) first_view_at_ = now;
  for (const Member& member : view_.members)
    if (!view.Contains(member.id)) lost_.emplace(member.id, Lost{member, now});
  view_ = view;
  std::set<std::string> names;
  std::set<uint32_t> ordinals;
  for (const Member& member : view.members) {
    names.insert(member.name);
    ordinals.insert(member.ordinal);
  }
  std::erase_if(lost_, [&](const auto& entry) {
    const Member& member = entry.second.member;
    return names.contains(member.name) || ordinals.contains(member.ordinal);
  });
  while (lost_.size() > kAskedMax)
    lost_.erase(std::min_element(lost_.begin(), lost_.end(), [](const auto& a, const auto& b) {
      return a.second.since < b.second.since;
    }));
}

void CoordinatorWatch::OnContact(const Contact& contact) {
  trouble_ = contact.trouble;
  if (contact.registered || tried_.size() >= 2 * kCoordinatorsMax) tried_.clear();
  if (!contact.registered && !contact.address.empty()) tried_[contact.address] = contact.reason;
  // Reports show the coordinator that answered last, not the one that was tried last.
  if (contact.registered || coordinator_.empty()) coordinator_ = contact.address;
  registered_ = contact.registered;
  since_ = contact.since;
}

std::vector<Member> CoordinatorWatch::ToAsk() const {
  std::vector<Member> members;
  if (registered_) {
    if (AloneWithOwn())
      for (const auto& [id, lost] : lost_) members.push_back(lost.member);
    return members;
  }
  const size_t count = view_.members.size();
  size_t at = 0;
  while (at < count && view_.members[at].id != self_) ++at;
  for (size_t distance = 1; distance < count; distance = count <= kAskedMax ? distance + 1 : distance * 2)
    members.push_back(view_.members[(at + distance) % count]);
  return members;
}

bool CoordinatorWatch::Follows(const std::string& coordinator, bool* now) const {
  *now = AloneWithOwn();
  return coordinator != coordinator_ || !registered_;
}

MembershipReport CoordinatorWatch::Report(TimeUs now, const std::map<NodeId, TimeUs>& unreached) const {
  MembershipReport report;
  if (moves_) report.kind = "etcd";
  report.coordinator = coordinator_;
  report.registered = registered_;
  report.for_us = now - since_;
  for (const auto& [address, reason] : tried_) report.tried.push_back({address, reason});
  const auto add = [&](const std::string& name, TimeUs since, bool in_view) {
    if (++report.missing_total <= kMissingShownMax) report.missing.push_back({name, now - since, in_view});
  };
  std::set<uint32_t> present;
  for (const Member& member : view_.members) {
    present.insert(member.ordinal);
    // While this node is registered, the coordinator decides which nodes are missing.
    if (const auto found = unreached.find(member.id); !registered_ && found != unreached.end())
      add(member.name, found->second, true);
  }
  for (const auto& [id, lost] : lost_) {
    present.insert(lost.member.ordinal);
    add(lost.member.name, lost.since, false);
  }
  if (view_.epoch != 0)
    for (uint32_t ordinal = 0; ordinal < view_.settings.nodes; ++ordinal)
      if (!present.contains(ordinal)) add("ordinal " + std::to_string(ordinal), first_view_at_, false);
  Explain(unreached.contains(view_.leader), &report);
  return report;
}

void CoordinatorWatch::Explain(bool leader_lost, MembershipReport* report) const {
  if (!registered_) {
    report->blocked = view_.epoch == 0 ? "this node has not joined the job: nothing can be saved or read here"
                                       : "new saves stay local, nothing is committed, and no node can join; ";
    if (view_.epoch != 0)
      report->blocked += leader_lost ? "the leader is lost, too: reads and loads wait" : "reads go on";
    if (!trouble_.empty()) report->blocked = trouble_ + "; " + report->blocked;
    report->advice =
        !trouble_.empty() ? "put etcd right: then all goes on by itself"
        : moves_          ? "wait some seconds: another node takes the coordinator's place"
                          : "start the coordinator's node again at " +
                       (coordinator_.empty() ? "its address" : coordinator_) +
                       "; or start a replacement for it anywhere (its --ordinal, --embed-coordinator, "
                       "--coordinator HOST:PORT) and "
                       "run `ropeteam rejoin --coordinator HOST:PORT` on one of the nodes that are left";
  } else if (!trouble_.empty()) {
    report->blocked = trouble_;
    report->advice = "put etcd right: then all goes on by itself";
  } else if (!report->missing.empty()) {
    report->blocked =
        "a step needs all ranks: those of the missing nodes must run again somewhere before a new one "
        "commits";
    report->advice = "start a replacement for each missing node: its --ordinal, " +
                     (moves_ ? "and --membership as on the others" : "--coordinator " + coordinator_);
  }
}

}  // namespace ropeteam
