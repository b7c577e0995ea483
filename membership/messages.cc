// SPDX-License-Identifier: Apache-2.0
#include "membership/messages.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

namespace ropeteam {
namespace {

Status CheckLength(const char* what, const std::string& value, size_t limit) {
  if (value.size() <= limit) return OkStatus();
  // The value is cut, so that the message stays readable if the value is a megabyte of garbage.
  return Error(Code::kInvalidArgument, "%s of %zu bytes, limit %zu: \"%.40s\"", what, value.size(), limit,
               value.c_str());
}

bool HasControlOrSpace(const std::string& text) {
  return std::any_of(text.begin(), text.end(), [](char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte <= 0x20 || byte == 0x7f;
  });
}

}  // namespace

Status ValidateMember(const Member& member) {
  if (member.id == kNoNode) return Error(Code::kInvalidArgument, "node id 0 is reserved");
  if (member.name.empty()) return Error(Code::kInvalidArgument, "node name is empty");
  ROPETEAM_RETURN_IF_ERROR(CheckLength("node name", member.name, kNodeNameBytesMax));
  if (HasControlOrSpace(member.name))
    return Error(Code::kInvalidArgument, "node name has a space or a control character in it");
  ROPETEAM_RETURN_IF_ERROR(CheckLength("failure domain", member.domain, kDomainBytesMax));
  ROPETEAM_RETURN_IF_ERROR(CheckLength("control address", member.control_address, kAddressBytesMax));
  return CheckLength("data address", member.data_address, kAddressBytesMax);
}

Status ValidateCoordinatorAddress(const std::string& address) {
  ROPETEAM_RETURN_IF_ERROR(CheckLength("coordinator address", address, kAddressBytesMax));
  if (address.find(':') != std::string::npos && !HasControlOrSpace(address)) return OkStatus();
  return Error(Code::kInvalidArgument, "coordinator address \"%.80s\" is not host:port", address.c_str());
}

Status ValidateConfig(const MembershipConfig& config) {
  if (config.job.empty()) return Error(Code::kInvalidArgument, "job name is empty");
  ROPETEAM_RETURN_IF_ERROR(CheckLength("job name", config.job, kJobBytesMax));
  if (config.coordinator_addresses.size() > kCoordinatorsMax)
    return Error(Code::kInvalidArgument, "%zu coordinator addresses, limit %zu",
                 config.coordinator_addresses.size(), kCoordinatorsMax);
  for (const std::string& address : config.coordinator_addresses)
    ROPETEAM_RETURN_IF_ERROR(ValidateCoordinatorAddress(address));
  if (!config.coordinator_listen.empty())
    ROPETEAM_RETURN_IF_ERROR(ValidateCoordinatorAddress(config.coordinator_listen));
  if (config.heartbeat_ms == 0 || config.probe_ms == 0)
    return Error(Code::kInvalidArgument, "heartbeat of %u ms, probe of %u ms: neither may be 0",
                 config.heartbeat_ms, config.probe_ms);
  if (uint64_t{config.heartbeat_ms} * kHeartbeatsPerDeath > config.dead_after_ms)
    return Error(Code::kInvalidArgument, "heartbeat of %u ms needs dead-after of %u ms at least, it is %u ms",
                 config.heartbeat_ms, config.heartbeat_ms * kHeartbeatsPerDeath, config.dead_after_ms);
  const TimeUs lease_us = LeaseMs(config.dead_after_ms) * TimeUs{1000};
  if (lease_us == 0 || WithDrift(lease_us) >= config.dead_after_ms * TimeUs{1000} ||
      WithDrift(lease_us) >= kQuarantineMsMin * TimeUs{1000})
    return Error(Code::kInvalidArgument,
                 "dead-after of %u ms gives a lease of %llu us: it must be over 0 and, with clocks that are "
                 "off by %u ppm, "
                 "end before dead-after and before the quarantine of %u ms",
                 config.dead_after_ms, static_cast<unsigned long long>(lease_us), kClockDriftPpm,
                 kQuarantineMsMin);
  if (config.nodes_expected > kNodesMax)
    return Error(Code::kInvalidArgument, "%u nodes expected, limit %zu", config.nodes_expected, kNodesMax);
  return OkStatus();
}

Status ValidateViewState(const ViewState& state) {
  const View& view = state.view;
  if (view.epoch == 0 || view.epoch > kEpochMax)
    return Error(Code::kInvalidArgument, "view of epoch %llu, limits 1 and %llu",
                 static_cast<unsigned long long>(view.epoch), static_cast<unsigned long long>(kEpochMax));
  if (view.members.size() > kNodesMax)
    return Error(Code::kInvalidArgument, "view of %zu members, limit %zu", view.members.size(), kNodesMax);
  if (state.joined.size() != view.members.size())
    return Error(Code::kInvalidArgument, "view of %zu members with %zu join epochs", view.members.size(),
                 state.joined.size());
  if (state.removed.size() > kRemovedCarriedMax)
    return Error(Code::kInvalidArgument, "view with %zu removed ids, limit %zu", state.removed.size(),
                 kRemovedCarriedMax);
  if (view.settings.nodes > kNodesMax)
    return Error(Code::kInvalidArgument, "view of a job of %u nodes, limit %zu", view.settings.nodes,
                 kNodesMax);
  if (view.settle_us > kSettleUsMax)
    return Error(Code::kInvalidArgument, "view that settles for %llu us, limit %llu",
                 static_cast<unsigned long long>(view.settle_us),
                 static_cast<unsigned long long>(kSettleUsMax));
  if (view.led_since > view.epoch)
    return Error(Code::kInvalidArgument, "view of epoch %llu led since epoch %llu",
                 static_cast<unsigned long long>(view.epoch), static_cast<unsigned long long>(view.led_since));
  std::set<NodeId> ids;
  std::set<std::string> names;
  const Member* previous = nullptr;
  for (const Member& member : view.members) {
    ROPETEAM_RETURN_IF_ERROR(ValidateMember(member));
    if (!ids.insert(member.id).second || !names.insert(member.name).second)
      return Error(Code::kInvalidArgument, "view names node %s twice", member.name.c_str());
    if (previous != nullptr &&
        std::tie(member.ordinal, member.name) < std::tie(previous->ordinal, previous->name))
      return Error(Code::kInvalidArgument, "view is not ordered at node %s", member.name.c_str());
    previous = &member;
  }
  for (const Epoch joined : state.joined)
    if (joined == 0 || joined > view.epoch)
      return Error(Code::kInvalidArgument, "view with a join epoch out of range");
  if (view.members.empty() ? view.leader != kNoNode : !ids.contains(view.leader))
    return Error(Code::kInvalidArgument, "view led by a node that is not in it");
  return OkStatus();
}

std::set<NodeId> IdsOf(const View& view) {
  std::set<NodeId> ids;
  for (const Member& member : view.members) ids.insert(member.id);
  return ids;
}

ViewDeltaPtr MakeViewDelta(const ViewState& base, const ViewState& state) {
  std::set<NodeId> before = IdsOf(base.view);
  auto delta = std::make_shared<ViewDelta>();
  delta->base = base.view.epoch;
  ViewState& changed = delta->changed;
  changed.view.epoch = state.view.epoch;
  changed.view.leader = state.view.leader;
  changed.view.settings = state.view.settings;
  changed.view.settle_us = state.view.settle_us;
  changed.view.led_since = state.view.led_since;
  changed.removed = state.removed;
  for (size_t i = 0; i < state.view.members.size(); ++i) {
    if (before.erase(state.view.members[i].id) != 0) continue;
    changed.view.members.push_back(state.view.members[i]);
    changed.joined.push_back(state.joined[i]);
  }
  delta->left.assign(before.begin(), before.end());
  if (changed.view.members.size() + delta->left.size() >= state.view.members.size()) return nullptr;
  return delta;
}

ViewStatePtr ApplyViewDelta(const ViewState& base, const ViewDelta& delta) {
  if (base.view.epoch != delta.base) return nullptr;
  const std::set<NodeId> left(delta.left.begin(), delta.left.end());
  auto state = std::make_shared<ViewState>(delta.changed);
  std::vector<std::pair<Member, Epoch>> members;
  for (size_t i = 0; i < base.view.members.size(); ++i)
    if (!left.contains(base.view.members[i].id)) members.emplace_back(base.view.members[i], base.joined[i]);
  if (members.size() + left.size() != base.view.members.size()) return nullptr;
  if (delta.changed.joined.size() != delta.changed.view.members.size()) return nullptr;
  for (size_t i = 0; i < delta.changed.joined.size(); ++i)
    members.emplace_back(delta.changed.view.members[i], delta.changed.joined[i]);
  std::sort(members.begin(), members.end(), [](const auto& a, const auto& b) {
    return std::tie(a.first.ordinal, a.first.name) < std::tie(b.first.ordinal, b.first.name);
  });
  state->view.members.clear();
  state->joined.clear();
  for (auto& [member, joined] : members) {
    state->view.members.push_back(std::move(member));
    state->joined.push_back(joined);
  }
  if (!ValidateViewState(*state).ok()) return nullptr;
  return state;
}

}  // namespace ropeteam
