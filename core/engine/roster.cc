// SPDX-License-Identifier: Apache-2.0
#include "core/engine/roster.h"

#include <algorithm>
#include <tuple>

#include "core/base/check.h"
#include "core/base/log.h"

namespace ropeteam::engine {

std::vector<std::string> RosterNames(const View& view) {
  std::vector<std::string> names;
  for (const Member& member : view.members)
    if (names.size() < kRosterNamesMax) names.push_back(member.name);
  return names;
}

void Roster::Begin() {
  record_ = {};
  newest_committed_ = {};
  forgotten_.clear();
  members_.clear();
  counts_.reset();
  ++version_;
}

void Roster::OnView() {
  std::erase_if(members_, [this](const auto& member) { return !context_.Contains(member.first); });
  counts_.reset();
}

void Roster::Learn(NodeId member, const Inventory& inventory) {
  const Standing now{inventory.roster.revision, inventory.roster.epoch, inventory.joined,
                     inventory.report.leaving};
  const auto [known, fresh] = members_.try_emplace(member, now);
  if (fresh || !(known->second == now)) counts_.reset();
  known->second = now;
  newest_committed_ = std::max(newest_committed_, inventory.newest_committed);
  const auto age = [](const RosterRecord& record) {
    return std::tuple(record.revision, record.epoch, record.names.size());
  };
  if (age(inventory.roster) <= age(record_)) return;
  record_ = inventory.roster;
  counts_.reset();
  forgotten_.clear();
  ++version_;
}

bool Roster::Continuous(const Standing& standing) const {
  return standing.joined != 0 && standing.joined <= record_.epoch;
}

bool Roster::Present(const Standing& standing) const {
  const bool same = standing.revision == record_.revision && standing.epoch == record_.epoch;
  return same || (!standing.leaving && Continuous(standing));
}

const Roster::Counts& Roster::Counted() const {
  if (!counts_ || counted_in_ != context_.view.epoch) counts_ = Count();
  counted_in_ = context_.view.epoch;
  return *counts_;
}

Roster::Counts Roster::Count() const {
  const std::vector<Member>& members = context_.view.members;
  const auto staying = static_cast<uint32_t>(std::count_if(
      members_.begin(), members_.end(), [](const auto& member) { return !member.second.leaving; }));
  if (record_.revision == 0 || context_.protocol < kRosterSince)
    return {context_.view.settings.nodes, members.size(), 0, false, staying};
  Counts counts{record_.nodes, 0, 0, false, staying};
  for (const Member& member : members) {
    const auto known = members_.find(member.id);
    const bool present = known != members_.end() && Present(known->second);
    const auto& names = record_.names;
    counts.present += present ? 1 : 0;
    counts.replaced += !present && std::find(names.begin(), names.end(), member.name) != names.end() ? 1 : 0;
    counts.continuous = counts.continuous || (present && Continuous(known->second));
  }
  return counts;
}

size_t Roster::Missing() const {
  const Counts& counts = Counted();
  return counts.nodes - std::min(counts.nodes, counts.present);
}

bool Roster::MayChoose() const {
  const Counts& counts = Counted();
  const size_t missing = Missing();
  const uint32_t replicas = context_.view.settings.replicas;
  const bool few = missing <= replicas;
  const bool replaced = record_.revision != 0 && missing <= counts.replaced;
  return missing == 0 || (few && counts.present > replicas) || (counts.continuous && (few || replaced)) ||
         (few && replaced);
}

std::vector<std::string> Roster::MissingNames() const {
  std::vector<std::string> missing = record_.names;
  for (const Member& member : context_.view.members) {
    const auto known = members_.find(member.id);
    if (known != members_.end() && Present(known->second)) std::erase(missing, member.name);
  }
  if (missing.size() > Missing()) missing.clear();  // a node has come back under another name
  return missing;
}

std::string Roster::NamesOfMissing() const {
  const std::vector<std::string> missing = MissingNames();
  std::string text;
  for (const std::string& name : missing) text += (text.empty() ? "" : ", ") + name;
  const size_t more = Missing() - missing.size();
  if (more == 0) return text;
  return (text.empty() ? "" : text + " and ") + std::to_string(more) +
         (text.empty() ? " node" : " more node") + (more == 1 ? "" : "s");
}

bool Roster::Behind() const {
  return record_.revision == 0 || record_.epoch != context_.view.epoch || record_.nodes > Counted().staying;
}

void Roster::Renew() {
  if (!Behind()) return;
  record_ = {record_.revision + 1, context_.view.epoch, Counted().staying, RosterNames(context_.view)};
  counts_.reset();
  forgotten_.clear();
  ++version_;
}

Status Roster::Forget(const std::string& node) {
  const bool repeated = node.empty()
                            ? !forgotten_.empty()
                            : std::find(forgotten_.begin(), forgotten_.end(), node) != forgotten_.end();
  const size_t missing = Missing();
  if (repeated && (!node.empty() || missing == 0)) return OkStatus();
  if (record_.revision == 0 || missing == 0)
    return Error(Code::kNotFound, "no node that may know of a newer commit is missing");
  std::vector<std::string> gone = MissingNames();
  const size_t unnamed = missing - gone.size();
  if (!node.empty()) {
    const auto named = [&](const Member& member) { return member.name == node; };
    const auto& members = context_.view.members;
    if (std::find(gone.begin(), gone.end(), node) == gone.end())
      return Error(
          std::any_of(members.begin(), members.end(), named) ? Code::kInvalidArgument : Code::kNotFound,
          "node %s is not missing; missing: %s", node.c_str(), NamesOfMissing().c_str());
    gone = {node};
  } else if (unnamed != 0) {
    gone.push_back(std::to_string(unnamed) + " without a known name");
  }
  record_.nodes -= static_cast<uint32_t>(node.empty() ? missing : 1);
  for (const std::string& name : gone) std::erase(record_.names, name);
  forgotten_.insert(forgotten_.end(), gone.begin(), gone.end());
  counts_.reset();
  record_.revision += gone.size();  // members that have missed an announcement compare it with forgotten()
  ++version_;
  LOG_WARNING("an operator gives up %s: what only these nodes know is lost",
              node.empty() ? "all missing nodes" : node.c_str());
  return OkStatus();
}

}  // namespace ropeteam::engine
