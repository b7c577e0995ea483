// SPDX-License-Identifier: Apache-2.0
//
// Which member leads. The members report in their heartbeats which others do not answer them on the control plane. A
// leader that does not reach a member that the coordinator hears can commit nothing. So the lead moves to another
// member:
//
//   * A pair counts as apart if one of the two reports it, the coordinator hears both, and both have the present view.
//     The members ask again and again, so the report ends when the link works.
//   * The leader's successor must be apart from fewer members. What no member has tried is not known, so the candidates
//     (the best kLeaderCandidates by what is known) are first asked to try the members that the leader does not reach.
//     The lead moves once the best of them has an answer or a failure for each.
//   * Among equals the member leads that has been in the view longest, and the leader stays if none is better. So a
//     member that nobody reaches moves nothing, and of two members neither gives way.
//   * After a move the lead stays for kLeaderStaysUs, however the links change. The former leader does not lead again
//     when its link works: it is no better than the present one.
//
// coordinator.h says why the former leader, still a member, and its successor never act at the same time.
#include <algorithm>
#include <tuple>
#include <utility>

#include "core/base/log.h"
#include "membership/coordinator.h"

namespace ropeteam {

void Coordinator::NoteReach(Record* record, const Heartbeat& heartbeat) {
  const std::set<NodeId> unreached(heartbeat.unreached.begin(), heartbeat.unreached.end());
  const std::set<NodeId> reached(heartbeat.reached.begin(), heartbeat.reached.end());
  judge_leader_ |= unreached != record->unreached || reached != record->reached;
  record->unreached = unreached;
  record->reached = reached;
}

bool Coordinator::IsCurrent(const Record& record) const {
  return record.connection != kNoConnection && record.ours != 0 && record.seen >= view_->view.epoch &&
         now_ < record.heard_at + dead_after_ / 2;
}

std::map<NodeId, std::set<NodeId>> Coordinator::Apart() const {
  std::map<NodeId, std::set<NodeId>> apart;
  for (const auto& [id, record] : records_) {
    if (record.unreached.empty() || !IsCurrent(record)) continue;
    for (const NodeId other : record.unreached) {
      const auto found = records_.find(other);
      if (found == records_.end() || other == id || !IsCurrent(found->second)) continue;
      apart[id].insert(other);
      apart[other].insert(id);
    }
  }
  return apart;
}

void Coordinator::LogApart(const std::map<NodeId, std::set<NodeId>>& apart) {
  std::set<std::pair<NodeId, NodeId>> pairs;
  for (const auto& [one, others] : apart)
    for (const NodeId other : others)
      if (one < other && pairs.size() < kReachMax) pairs.insert({one, other});
  const auto name = [this](NodeId id) {
    const auto found = records_.find(id);
    if (found == records_.end()) return std::string("a node that has left");
    return found->second.member.name + (id == leader_ ? " (leader)" : "");
  };
  for (const auto& [one, other] : pairs)
    if (!apart_.contains({one, other}))
      LOG_WARNING("membership %s and %s do not reach each other (control), and both reach the coordinator",
                  name(one).c_str(), name(other).c_str());
  for (const auto& [one, other] : apart_)
    if (!pairs.contains({one, other}))
      LOG_INFO("membership %s and %s are not reported as apart any more", name(one).c_str(),
               name(other).c_str());
  apart_ = std::move(pairs);
}

// The best comes first.
std::vector<const Coordinator::Record*> Coordinator::Candidates(
    const std::map<NodeId, std::set<NodeId>>& apart) const {
  const auto missed = [&apart](const Record* record) {
    const auto found = apart.find(record->member.id);
    return found == apart.end() ? size_t{0} : found->second.size();
  };
  const size_t missed_now = missed(&records_.at(leader_));
  std::vector<const Record*> better;
  for (const auto& [id, record] : records_)
    if (IsCurrent(record) && missed(&record) < missed_now) better.push_back(&record);
  const size_t asked = std::min(better.size(), kLeaderCandidates);
  std::partial_sort(better.begin(), better.begin() + static_cast<std::ptrdiff_t>(asked), better.end(),
                    [&](const Record* a, const Record* b) {
                      return std::tuple(missed(a), a->joined, a->member.ordinal, a->member.name) <
                             std::tuple(missed(b), b->joined, b->member.ordinal, b->member.name);
                    });
  better.resize(asked);
  return better;
}

void Coordinator::Ask(NodeId member, const std::set<NodeId>& others) {
  std::vector<NodeId>& list = check_[member];
  for (const NodeId other : others)
    if (other != member && list.size() < kReachMax &&
        std::find(list.begin(), list.end(), other) == list.end())
      list.push_back(other);
}

void Coordinator::JudgeLeader() {
  if (holding_ || view_ == nullptr || !IsConfirmed() || !settled()) return;
  const std::map<NodeId, std::set<NodeId>> apart = Apart();
  LogApart(apart);
  check_.clear();
  // Both ends of a pair try, so that each says so in its own status.
  for (const auto& [id, others] : apart) Ask(id, others);
  const auto lost = apart.find(leader_);
  if (lost == apart.end()) return;
  const std::vector<const Record*> candidates = Candidates(apart);
  for (const Record* candidate : candidates) Ask(candidate->member.id, lost->second);
  if (candidates.empty() || now_ < move_from_) return;
  const Record& best = *candidates.front();
  const std::vector<NodeId>& asked = check_.at(best.member.id);
  const auto known = apart.find(best.member.id);
  const bool tried = std::all_of(asked.begin(), asked.end(), [&](NodeId id) {
    return best.reached.contains(id) || (known != apart.end() && known->second.contains(id));
  });
  if (!tried) return;
  LOG_WARNING("membership the lead moves from %s, which does not reach %zu members (control), to %s",
              records_.at(leader_).member.name.c_str(), lost->second.size(), best.member.name.c_str());
  successor_ = best.member.id;
  move_from_ = now_ + kLeaderStaysUs;
  changed_ = true;
}

void Coordinator::ChooseLeader(const std::vector<const Record*>& members, Epoch epoch) {
  const NodeId successor = std::exchange(successor_, kNoNode);
  const auto former = records_.find(leader_);
  if (former != records_.end() && !records_.contains(successor)) return;
  NodeId next = successor;
  if (!records_.contains(successor)) {
    const std::map<NodeId, std::set<NodeId>> apart =
        view_ != nullptr ? Apart() : std::map<NodeId, std::set<NodeId>>();
    const auto rank = [&apart](const Record* record) {
      const auto found = apart.find(record->member.id);
      return std::pair(found == apart.end() ? size_t{0} : found->second.size(), record->joined);
    };
    const auto best = std::min_element(members.begin(), members.end(),
                                       [&](const Record* a, const Record* b) { return rank(a) < rank(b); });
    next = best == members.end() ? kNoNode : (*best)->member.id;
  }
  if (former != records_.end()) {
    former->second.ours = epoch;
    out_lease_until_ = std::max(out_lease_until_, former->second.lease_until);
  }
  leader_ = next;
  led_since_ = epoch;
}

}  // namespace ropeteam
