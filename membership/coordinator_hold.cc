// SPDX-License-Identifier: Apache-2.0
//
// The coordinator's hold: from its start to its first view. It is needed when a coordinator returns after a crash. The
// daemon of its own node, which crashed with it, registers first and has seen no view. The others come within their
// reconnect pause. A view given out between the two would lack one side.
//
// If they come later than that, the coordinator has already given out a view of its own node alone. May it accept the
// members of the earlier view as the same instances? An instance must stay out if a process that knew it was given a
// view without it: that process has fenced it, and may have reused the memory that it was writing to. So:
//
//   * The reported views show which nodes knew each other. If an instance is in none of them, no node with a view from
//     here knows it, so a view without it has no effect.
//   * The first registrant with an earlier view that is newer than all reported so far starts the hold again. No view
//     is given out until that hold ends. So all members of the earlier view can come, and none of them gets a view
//     without the others. Members of the present view keep it, and their leases, meanwhile.
//   * When that hold ends, a member of the earlier view that has not come stays out: the next view goes to other nodes
//     that knew it.
//   * An instance has left if it reports a view that is not newer than an earlier report and is not in that earlier
//     one. If it reports a view of this coordinator and is no longer a member, it was removed here.
//   * A member of the present view may come back with a newer view of another coordinator. It knew the others here, so
//     it has fenced those that its view lacks: CheckFollowed().
//   * Of two instances of a name, the one that has seen no view with itself is newer. The other one stays out.
//
// Readmitted instances join as the youngest members, if there are others, so the leader of the present view stays. This
// coordinator grants them no lease before they have seen its view, and a predecessor's lease has expired or is covered
// by settle_us. So no leader of the earlier view can act any more.
#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "core/base/log.h"
#include "membership/coordinator.h"

namespace ropeteam {

bool Coordinator::HoldMayEnd() {
  // The view in the store has no members if all have sent leave messages.
  if (newest_ == nullptr || newest_->view.members.empty()) {
    if (config_.nodes_expected == 0) return false;
    if (records_.size() < config_.nodes_expected) return false;
    std::set<std::string> names;
    for (const auto& [id, record] : records_) names.insert(record.member.name);
    return names.size() >= config_.nodes_expected;
  }
  // Called at every input: it continues where it stopped.
  const std::vector<Member>& members = newest_->view.members;
  while (hold_accounted_ < members.size() && AccountedFor(members[hold_accounted_])) ++hold_accounted_;
  return hold_accounted_ == members.size();
}

bool Coordinator::WholeJobStarts() {
  if (view_ != nullptr || newest_ != nullptr || !HoldMayEnd()) return false;
  std::set<uint32_t> ordinals;
  for (const auto& [id, record] : records_) ordinals.insert(record.member.ordinal);
  return ordinals.size() >= config_.nodes_expected &&
         *std::next(ordinals.begin(), config_.nodes_expected - 1) == config_.nodes_expected - 1;
}

bool Coordinator::AccountedFor(const Member& member) const {
  // It has registered, is known to have left, or its node has registered as a new instance.
  if (records_.contains(member.id) || removed_.contains(member.id)) return true;
  // None of the members reached it before this coordinator started, so its probe counts from the start.
  if (member.id == deposed_ && now_ >= started_at_ + probe_) return true;
  const auto [begin, end] = names_.equal_range(member.name);
  return std::any_of(begin, end, [this](const auto& entry) { return !records_.at(entry.second).veteran; });
}

bool Coordinator::MayReturn(const ViewState& seen) const {
  return !IsOurs(seen.view.epoch) && seen.view.epoch > foreign_;
}

void Coordinator::HoldAgain(const ViewStatePtr& seen) {
  ROPETEAM_CHECK(!holding_ && newest_ == nullptr);
  LOG_INFO("membership coordinator waits for the members of view %llu, which reached it after its first view",
           static_cast<unsigned long long>(seen->view.epoch));
  holding_ = true;
  hold_until_ = now_ + dead_after_;
  newest_ = seen;
  hold_accounted_ = 0;
  for (const Member& member : seen->view.members) hold_ids_.insert(member.id);
}

void Coordinator::EndHold() {
  if (WholeJobStarts()) predecessor_until_ = out_lease_until_ = 0;
  holding_ = false;
  hold_until_ = kNever;
  if (newest_ != nullptr) {
    const std::set<NodeId> newest = IdsOf(newest_->view);
    for (const NodeId id : std::exchange(hold_ids_, {}))
      if (!newest.contains(id)) Remember(id);
    // A veteran that is not in the newest view has left, in a view that some node has seen.
    std::vector<NodeId> left;
    for (const auto& [id, record] : records_)
      if (removed_.contains(id) || (record.veteran && !newest.contains(id))) left.push_back(id);
    for (const NodeId id : left) {
      const std::string& name = records_.at(id).member.name;
      const auto [begin, end] = names_.equal_range(name);
      const bool replaced = std::any_of(begin, end, [&](const auto& entry) {
        return std::find(left.begin(), left.end(), entry.second) == left.end();
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
  if (newest_ != nullptr) ContinueNewest();
  newest_ = nullptr;
}

void Coordinator::ContinueNewest() {
  // Readmitted instances are younger than the members of the present view, if it has any.
  const bool eldest = std::none_of(records_.begin(), records_.end(),
                                   [](const auto& entry) { return entry.second.ours != 0; });
  if (eldest) {
    leader_ = newest_->view.leader;
    led_since_ = newest_->view.led_since;
  }
  size_t present = 0;
  for (size_t i = 0; i < newest_->view.members.size(); ++i) {
    const auto found = records_.find(newest_->view.members[i].id);
    if (found == records_.end()) {
      Remember(newest_->view.members[i].id);
      continue;
    }
    if (eldest) found->second.joined = newest_->joined[i];
    ++present;
  }
  LOG_INFO("membership coordinator goes on from view %llu, %zu of %zu members are back",
           static_cast<unsigned long long>(newest_->view.epoch), present, newest_->view.members.size());
  // A view read from the store may have reached no node, and has no names. So there is always a next view.
  if (term_us_ != 0 || view_ != nullptr || present != newest_->view.members.size()) return;
  // If all are back, the newest view stays in force unchanged. Nodes with an older one get it; new nodes join with the
  // next view.
  view_ = newest_;
  KeepView();
  published_at_ = now_;
  changed_ = records_.size() != present;
  for (const Member& member : view_->view.members) {
    Record& record = records_.at(member.id);
    record.ours = view_->view.epoch;
    if (ViewDue(record)) SendView(&record);
  }
}

void Coordinator::ResolveNames() {
  // A name has only one live daemon, so one of two instances is left over from before. An instance that was never in a
  // view is newer than one that was. Otherwise the one that registered last is newer.
  std::vector<const Record*> successors;
  for (const auto& [id, record] : records_) {
    const auto [begin, end] = names_.equal_range(record.member.name);
    const bool beaten = std::any_of(begin, end, [this, &record = record](const auto& entry) {
      const Record& other = records_.at(entry.second);
      if (other.member.id == record.member.id) return false;
      if (other.veteran != record.veteran) return record.veteran;
      return other.order > record.order;
    });
    if (!beaten) successors.push_back(&record);
  }
  for (const Record* successor : successors) RemoveName(successor->member.name, *successor);
}

}  // namespace ropeteam
