// SPDX-License-Identifier: Apache-2.0
//
// Makes membership's messages from a fuzzer's bytes.

#ifndef ROPETEAM_TESTS_FUZZ_MEMBERSHIP_VALUES_H_
#define ROPETEAM_TESTS_FUZZ_MEMBERSHIP_VALUES_H_

#include "membership/messages.h"
#include "tests/fuzz/values.h"

namespace ropeteam::fuzz {

inline Member GetMember(FromBytes* in) {
  Member member;
  member.id = in->Number();
  // Few names, so that two nodes sometimes have the same one.
  member.name = in->Byte() % 8 == 0 ? in->Text() : "n" + std::to_string(in->Byte() % 4);
  member.ordinal = static_cast<uint32_t>(in->Number());
  member.domain = in->Text();
  member.control_address = in->Text();
  member.data_address = in->Text();
  return member;
}

inline JobSettings GetSettings(FromBytes* in) {
  JobSettings settings;
  settings.replicas = static_cast<uint32_t>(in->Number());
  settings.keep_steps = static_cast<uint32_t>(in->Number());
  settings.nodes = static_cast<uint32_t>(in->Number());
  settings.storage = in->Text();
  settings.persist_every = in->Number();
  settings.persist_every_seconds = in->Get<bool>();
  settings.restore_from = in->Text();
  return settings;
}

inline ViewState GetViewState(FromBytes* in) {
  ViewState state;
  state.view.epoch = in->Number();
  state.view.leader = in->Number();
  state.view.settings = GetSettings(in);
  state.view.settle_us = in->Number();
  for (int i = in->Byte() % 8; i > 0; --i) {
    state.view.members.push_back(GetMember(in));
    state.joined.push_back(in->Number());
  }
  in->Get(state.removed);
  return state;
}

// `given`: the last view that the coordinator sent, or null.
inline Registration GetRegistration(FromBytes* in, const ViewStatePtr& given) {
  Registration registration;
  registration.job = in->Byte() % 8 == 0 ? in->Text() : "job";
  registration.protocol_version = in->Byte() % 16 == 0 ? 2 : 1;
  registration.chunk_bytes = in->Byte() % 16 == 0 ? in->Number() : 4096;
  registration.data_transport = in->Byte() % 16 == 0 ? in->Text() : "ofi";
  registration.settings = GetSettings(in);
  in->Get(registration.named.replicas);
  in->Get(registration.named.nodes);
  in->Get(registration.named.storage);
  registration.member = GetMember(in);
  switch (in->Byte() % 4) {
    case 0:
      registration.seen = given;
      break;
    case 1:
      registration.seen = std::make_shared<ViewState>(GetViewState(in));
      break;
    case 2:
      if (given != nullptr) {
        ViewState other = *given;
        other.view.epoch = in->Number();
        other.view.members.push_back(registration.member);
        other.joined.push_back(1);
        registration.seen = std::make_shared<ViewState>(std::move(other));
      }
      break;
    default:
      break;
  }
  registration.epoch_known = in->Number();
  registration.attempt = in->Number();
  registration.beat = in->Number();
  registration.lease_us_max = in->Number();
  return registration;
}

inline NodeMessage GetNodeMessage(FromBytes* in, const ViewStatePtr& given) {
  switch (in->Byte() % 6) {
    case 0:
    case 1:
      return GetRegistration(in, given);
    case 2:
      return Heartbeat{in->Number(), in->Number(), in->Get<bool>()};
    case 3:
      return ProbeAnswer{in->Number()};
    case 4:
      return Suspicion{in->Number(), in->Text()};
    default:
      return LeaveMessage{};
  }
}

inline CoordinatorMessage GetCoordinatorMessage(FromBytes* in) {
  switch (in->Byte() % 5) {
    case 0:
      return HeartbeatAnswer{in->Number(), in->Number()};
    case 1:
      return ViewStatePtr(std::make_shared<ViewState>(GetViewState(in)));
    case 2:
      return Probe{in->Number()};
    case 3:
      return Refusal{Status(static_cast<Code>(1 + in->Byte() % 14), in->Text())};
    default: {
      auto delta = std::make_shared<ViewDelta>();
      delta->base = in->Number();
      delta->changed = GetViewState(in);
      in->Get(delta->left);
      return ViewDeltaPtr(std::move(delta));
    }
  }
}

}  // namespace ropeteam::fuzz

#endif  // ROPETEAM_TESTS_FUZZ_MEMBERSHIP_VALUES_H_
