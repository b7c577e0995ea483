// SPDX-License-Identifier: Apache-2.0
#include "membership/standalone/wire.h"

#include <algorithm>
#include <set>
#include <utility>

namespace ropeteam {
namespace {

using membership::v1::CoordinatorFrame;
using membership::v1::MemberInfo;
using membership::v1::NodeFrame;
using membership::v1::RefusalInfo;
using membership::v1::SettingsInfo;
using membership::v1::ViewInfo;

constexpr size_t kRefusalBytesMax = 4096;  // a sentence with two names in it; the rest is cut

// The first kReachMax of a list.
template <typename List>
std::vector<NodeId> FirstOf(const List& list) {
  return {list.begin(), list.begin() + std::min<int>(list.size(), static_cast<int>(kReachMax))};
}

void EncodeMember(const Member& member, MemberInfo* info) {
  info->set_id(member.id);
  info->set_name(member.name);
  info->set_ordinal(member.ordinal);
  info->set_domain(member.domain);
  info->set_control_address(member.control_address);
  info->set_data_address(member.data_address);
  info->set_protocol(member.protocol);
}

Member DecodeMember(MemberInfo* info) {
  Member member;
  member.id = info->id();
  member.name = std::move(*info->mutable_name());
  member.ordinal = info->ordinal();
  member.domain = std::move(*info->mutable_domain());
  member.control_address = std::move(*info->mutable_control_address());
  member.data_address = std::move(*info->mutable_data_address());
  member.protocol = info->protocol();
  return member;
}

void EncodeSettings(const JobSettings& settings, SettingsInfo* info) {
  info->set_replicas(settings.replicas);
  info->set_keep_steps(settings.keep_steps);
  info->set_nodes(settings.nodes);
  info->set_storage(settings.storage);
  info->set_persist_every(settings.persist_every);
  info->set_persist_every_seconds(settings.persist_every_seconds);
  info->set_restore_from(settings.restore_from);
  info->set_wait_for_missing_us(settings.wait_for_missing_us);
}

JobSettings DecodeSettings(const SettingsInfo& info) {
  return {info.replicas(),     info.keep_steps(),         info.nodes(),
          info.storage(),      info.persist_every(),      info.persist_every_seconds(),
          info.restore_from(), info.wait_for_missing_us()};
}

void EncodeView(const ViewState& state, ViewInfo* info) {
  info->set_epoch(state.view.epoch);
  info->set_leader(state.view.leader);
  for (size_t i = 0; i < state.view.members.size(); ++i) {
    MemberInfo* member = info->add_members();
    EncodeMember(state.view.members[i], member);
    member->set_joined(state.joined[i]);
  }
  for (const NodeId id : state.removed) info->add_removed(id);
  EncodeSettings(state.view.settings, info->mutable_settings());
  info->set_settle_us(state.view.settle_us);
  info->set_led_since(state.view.led_since);
}

// Checks the sizes before anything is built. ValidateViewState() checks the rest.
Result<std::shared_ptr<ViewState>> DecodeUnchecked(ViewInfo* info) {
  if (info->members_size() > static_cast<int>(kNodesMax))
    return Error(Code::kInvalidArgument, "view of %d members, limit %zu", info->members_size(), kNodesMax);
  auto state = std::make_shared<ViewState>();
  state->view.epoch = info->epoch();
  state->view.leader = info->leader();
  for (MemberInfo& member : *info->mutable_members()) {
    state->joined.push_back(member.joined());
    state->view.members.push_back(DecodeMember(&member));
  }
  state->removed.assign(info->removed().begin(), info->removed().end());
  state->view.settings = DecodeSettings(info->settings());
  state->view.settle_us = info->settle_us();
  state->view.led_since = info->led_since();
  return state;
}

Result<ViewStatePtr> DecodeView(ViewInfo* info) {
  Result<std::shared_ptr<ViewState>> state = DecodeUnchecked(info);
  if (!state.ok()) return state.status();
  ROPETEAM_RETURN_IF_ERROR(ValidateViewState(**state));
  return ViewStatePtr(std::move(*state));
}

// ApplyViewDelta() checks the resulting view.
Result<CoordinatorMessage> DecodeDelta(membership::v1::ViewDeltaInfo* info) {
  if (info->left_size() > static_cast<int>(kNodesMax))
    return Error(Code::kInvalidArgument, "view that %d members left, limit %zu", info->left_size(),
                 kNodesMax);
  Result<std::shared_ptr<ViewState>> changed = DecodeUnchecked(info->mutable_view());
  if (!changed.ok()) return changed.status();
  auto delta = std::make_shared<ViewDelta>();
  delta->base = info->base();
  delta->changed = std::move(**changed);
  delta->left.assign(info->left().begin(), info->left().end());
  return CoordinatorMessage(ViewDeltaPtr(std::move(delta)));
}

Result<NodeMessage> DecodeRegistration(membership::v1::RegistrationInfo* info) {
  Registration registration;
  registration.job = std::move(*info->mutable_job());
  registration.protocol_version = info->protocol_version();
  registration.protocol_oldest = info->protocol_oldest();
  registration.chunk_bytes = info->chunk_bytes();
  registration.data_transport = std::move(*info->mutable_data_transport());
  registration.member = DecodeMember(info->mutable_member());
  registration.attempt = info->attempt();
  registration.settings = DecodeSettings(info->settings());
  registration.named = {info->settings().replicas_named(),        info->settings().keep_steps_named(),
                        info->settings().nodes_named(),           info->settings().storage_named(),
                        info->settings().persist_every_named(),   info->settings().restore_from_named(),
                        info->settings().wait_for_missing_named()};
  registration.beat = info->beat();
  registration.lease_us_max = info->lease_us_max();
  registration.epoch_known = info->epoch_known();
  if (info->has_seen()) {
    Result<ViewStatePtr> seen = DecodeView(info->mutable_seen());
    if (!seen.ok()) return seen.status();
    registration.seen = std::move(*seen);
  }
  return NodeMessage(std::move(registration));
}

Result<CoordinatorMessage> DecodeRefusal(RefusalInfo* info) {
  if (info->code() == 0 || info->code() > static_cast<uint32_t>(Code::kInternal))
    return Error(Code::kInvalidArgument, "refusal with code %u", info->code());
  std::string message = info->message().substr(0, kRefusalBytesMax);
  return CoordinatorMessage(Refusal{Status(static_cast<Code>(info->code()), std::move(message))});
}

}  // namespace

NodeFrame Encode(const NodeMessage& message) {
  NodeFrame frame;
  if (const auto* registration = std::get_if<Registration>(&message)) {
    auto* info = frame.mutable_registration();
    info->set_job(registration->job);
    info->set_protocol_version(registration->protocol_version);
    info->set_protocol_oldest(registration->protocol_oldest);
    info->set_chunk_bytes(registration->chunk_bytes);
    info->set_data_transport(registration->data_transport);
    EncodeMember(registration->member, info->mutable_member());
    if (registration->seen != nullptr) EncodeView(*registration->seen, info->mutable_seen());
    info->set_attempt(registration->attempt);
    SettingsInfo* settings = info->mutable_settings();
    EncodeSettings(registration->settings, settings);
    settings->set_replicas_named(registration->named.replicas);
    settings->set_keep_steps_named(registration->named.keep_steps);
    settings->set_nodes_named(registration->named.nodes);
    settings->set_storage_named(registration->named.storage);
    settings->set_persist_every_named(registration->named.persist_every);
    settings->set_restore_from_named(registration->named.restore_from);
    settings->set_wait_for_missing_named(registration->named.wait_for_missing);
    info->set_beat(registration->beat);
    info->set_lease_us_max(registration->lease_us_max);
    info->set_epoch_known(registration->epoch_known);
  } else if (const auto* heartbeat = std::get_if<Heartbeat>(&message)) {
    frame.mutable_heartbeat()->set_seen(heartbeat->seen);
    frame.mutable_heartbeat()->set_beat(heartbeat->beat);
    frame.mutable_heartbeat()->set_whole(heartbeat->whole);
    for (const NodeId id : heartbeat->unreached) frame.mutable_heartbeat()->add_unreached(id);
    for (const NodeId id : heartbeat->reached) frame.mutable_heartbeat()->add_reached(id);
  } else if (const auto* answer = std::get_if<ProbeAnswer>(&message)) {
    frame.mutable_probe_answer()->set_nonce(answer->nonce);
  } else if (const auto* suspicion = std::get_if<Suspicion>(&message)) {
    frame.mutable_suspicion()->set_member(suspicion->member);
    frame.mutable_suspicion()->set_reason(suspicion->reason);
  } else {
    frame.mutable_leave();
  }
  return frame;
}

CoordinatorFrame Encode(const CoordinatorMessage& message) {
  CoordinatorFrame frame;
  if (const auto* view = std::get_if<ViewStatePtr>(&message)) {
    EncodeView(**view, frame.mutable_view());
  } else if (const auto* delta = std::get_if<ViewDeltaPtr>(&message)) {
    frame.mutable_delta()->set_base((*delta)->base);
    EncodeView((*delta)->changed, frame.mutable_delta()->mutable_view());
    for (const NodeId id : (*delta)->left) frame.mutable_delta()->add_left(id);
  } else if (const auto* probe = std::get_if<Probe>(&message)) {
    frame.mutable_probe()->set_nonce(probe->nonce);
  } else if (const auto* refusal = std::get_if<Refusal>(&message)) {
    frame.mutable_refusal()->set_code(static_cast<uint32_t>(refusal->status.code()));
    frame.mutable_refusal()->set_message(refusal->status.message());
  } else {
    const auto& answer = std::get<HeartbeatAnswer>(message);
    frame.mutable_heartbeat_answer()->set_beat(answer.beat);
    frame.mutable_heartbeat_answer()->set_lease_us(answer.lease_us);
    for (const NodeId id : answer.check) frame.mutable_heartbeat_answer()->add_check(id);
  }
  return frame;
}

Result<NodeMessage> Decode(NodeFrame&& frame) {
  switch (frame.content_case()) {
    case NodeFrame::kRegistration:
      return DecodeRegistration(frame.mutable_registration());
    case NodeFrame::kHeartbeat:
      return NodeMessage(Heartbeat{frame.heartbeat().seen(), frame.heartbeat().beat(),
                                   frame.heartbeat().whole(), FirstOf(frame.heartbeat().unreached()),
                                   FirstOf(frame.heartbeat().reached())});
    case NodeFrame::kProbeAnswer:
      return NodeMessage(ProbeAnswer{frame.probe_answer().nonce()});
    case NodeFrame::kSuspicion:
      return NodeMessage(
          Suspicion{frame.suspicion().member(), frame.suspicion().reason().substr(0, kReasonBytesMax)});
    case NodeFrame::kLeave:
      return NodeMessage(LeaveMessage{});
    case NodeFrame::CONTENT_NOT_SET:
      break;
  }
  return Error(Code::kInvalidArgument, "frame of a kind unknown here");
}

Result<CoordinatorMessage> Decode(CoordinatorFrame&& frame) {
  switch (frame.content_case()) {
    case CoordinatorFrame::kHeartbeatAnswer:
      return CoordinatorMessage(HeartbeatAnswer{frame.heartbeat_answer().beat(),
                                                frame.heartbeat_answer().lease_us(),
                                                FirstOf(frame.heartbeat_answer().check())});
    case CoordinatorFrame::kView: {
      Result<ViewStatePtr> view = DecodeView(frame.mutable_view());
      if (!view.ok()) return view.status();
      return CoordinatorMessage(std::move(*view));
    }
    case CoordinatorFrame::kDelta:
      return DecodeDelta(frame.mutable_delta());
    case CoordinatorFrame::kProbe:
      return CoordinatorMessage(Probe{frame.probe().nonce()});
    case CoordinatorFrame::kRefusal:
      return DecodeRefusal(frame.mutable_refusal());
    case CoordinatorFrame::CONTENT_NOT_SET:
      break;
  }
  return Error(Code::kInvalidArgument, "frame of a kind unknown here");
}

std::string EncodeStoredView(const ViewState& state, TimeUs settle_us) {
  ViewInfo info;
  info.set_epoch(state.view.epoch);
  info.set_leader(state.view.leader);
  info.set_led_since(state.view.led_since);
  for (size_t i = 0; i < state.view.members.size(); ++i) {
    MemberInfo* member = info.add_members();
    member->set_id(state.view.members[i].id);
    member->set_joined(state.joined[i]);
  }
  for (const NodeId id : state.removed) info.add_removed(id);
  EncodeSettings(state.view.settings, info.mutable_settings());
  info.set_settle_us(settle_us);
  return info.SerializeAsString();
}

Result<ViewStatePtr> DecodeStoredView(const std::string& bytes) {
  ViewInfo info;
  if (!info.ParseFromString(bytes))
    return Error(Code::kInvalidArgument, "stored view of %zu bytes cannot be read", bytes.size());
  Result<std::shared_ptr<ViewState>> state = DecodeUnchecked(&info);
  if (!state.ok()) return state.status();
  const View& view = (*state)->view;
  const std::set<NodeId> ids = IdsOf(view);
  const bool joined = std::all_of((*state)->joined.begin(), (*state)->joined.end(),
                                  [&view](Epoch at) { return at != 0 && at <= view.epoch; });
  // The epochs of its successors must also be below kEpochMax.
  if (view.epoch == 0 || view.epoch > kEpochKnownMax || (*state)->removed.size() > kRemovedCarriedMax ||
      !joined || ids.size() != view.members.size() || ids.contains(kNoNode))
    return Error(Code::kInvalidArgument, "stored view of epoch %llu with %zu members is not valid",
                 static_cast<unsigned long long>(view.epoch), view.members.size());
  return ViewStatePtr(std::move(*state));
}

}  // namespace ropeteam
