// SPDX-License-Identifier: Apache-2.0
//
// membership_wire: frames as they come from gRPC. An accepted message must survive encoding and decoding.
// membership: a coordinator and an agent that receive any messages that Decode() accepts, from any sender.

#include "membership/agent.h"
#include "membership/coordinator.h"
#include "membership/standalone/wire.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/membership_values.h"

namespace ropeteam::fuzz {
namespace {

using ::ropeteam::membership::v1::CoordinatorFrame;
using ::ropeteam::membership::v1::NodeFrame;

template <typename Frame>
void RunFrame(const std::string& bytes) {
  Frame frame;
  if (!frame.ParseFromString(bytes)) return;
  const auto message = Decode(std::move(frame));
  if (!message.ok()) return;
  const std::string sent = Encode(*message).SerializeAsString();
  Frame again;
  ROPETEAM_CHECK(again.ParseFromString(sent));
  const auto received = Decode(std::move(again));
  ROPETEAM_CHECK(received.ok() && Encode(*received).SerializeAsString() == sent);
}

// Input: a byte for the direction, then the frame.
void RunWire(std::string_view input) {
  if (input.empty()) return;
  const std::string bytes(input.substr(1));
  if ((input[0] & 1) == 0) {
    RunFrame<NodeFrame>(bytes);
  } else {
    RunFrame<CoordinatorFrame>(bytes);
  }
}

MembershipConfig Config() {
  MembershipConfig config;
  config.job = "job";
  config.coordinator_addresses = {"127.0.0.1:1"};
  config.protocol_version = 1;
  config.chunk_bytes = 4096;
  config.data_transport = "ofi";
  return config;
}

Member Self() {
  Member self;
  self.id = 1;
  self.name = "n1";
  return self;
}

class World {
 public:
  void Run(std::string_view input) {
    Agent agent(Config(), Self());
    (void)agent.Start(now_);
    FromBytes in(input);
    while (!in.done()) Step(&in, &agent);
    for (int i = 0; i < kTicks; ++i) {
      now_ = coordinator_.NextDeadline();
      Take(coordinator_.Tick(now_));
      (void)agent.Tick(now_);
    }
  }

 private:
  enum Op : uint8_t { kOpened, kReceived, kClosed, kTime, kFlush, kAgent, kAgentBroken, kAgentSays, kOps };
  static constexpr int kTicks = 8;  // two dead_after

  void Step(FromBytes* in, Agent* agent) {
    const uint8_t op = in->Byte() % kOps;
    const ConnectionId connection = 1 + in->Byte() % 4;
    switch (op) {
      case kOpened:
        return Take(coordinator_.Opened(now_, connection));
      case kReceived: {
        // Decode() refuses messages that a caller must not give to the coordinator.
        auto message = Decode(Encode(GetNodeMessage(in, given_)));
        if (message.ok()) Take(coordinator_.Received(now_, connection, *message));
        return;
      }
      case kClosed:
        return Take(coordinator_.Closed(now_, connection));
      case kTime:
        now_ += std::min<uint64_t>(in->Number(), 2000) * 1000;
        Take(coordinator_.Tick(now_));
        return (void)agent->Tick(now_);
      case kFlush:
        return Take(coordinator_.Flush(now_));
      case kAgent: {
        auto message = Decode(Encode(GetCoordinatorMessage(in)));
        if (message.ok()) (void)agent->Received(now_, attempt_, *message);
        return;
      }
      case kAgentBroken:
        (void)agent->Broken(now_, attempt_++, "broken");
        return;
      default:
        (void)agent->Suspect(now_, in->Number(), in->Text());
        if (in->Byte() % 16 == 0) (void)agent->Leave(now_);
        return;
    }
  }

  void Take(const Coordinator::Outputs& outputs) {
    for (const Coordinator::Output& output : outputs) {
      const auto* send = std::get_if<Coordinator::Send>(&output);
      if (send == nullptr) continue;
      if (const auto* view = std::get_if<ViewStatePtr>(&send->message)) {
        ROPETEAM_CHECK(ValidateViewState(**view).ok());
        ROPETEAM_CHECK(given_ == nullptr || given_->view.epoch <= (*view)->view.epoch);
        given_ = *view;
      } else if (const auto* delta = std::get_if<ViewDeltaPtr>(&send->message)) {
        ROPETEAM_CHECK((*delta)->base < (*delta)->changed.view.epoch);
      }
    }
  }

  TimeUs now_ = 1'000'000;
  Coordinator coordinator_{Config(), now_, 1};
  ViewStatePtr given_;
  uint64_t attempt_ = 1;
};

void RunMembership(std::string_view input) { World().Run(input); }

std::vector<std::string> WireSeeds() {
  Registration registration;
  registration.job = "job";
  registration.member = Self();
  ViewState state;
  state.view.epoch = 1;
  state.view.leader = 1;
  state.view.members = {Self()};
  state.joined = {1};
  state.removed = {9};
  registration.seen = std::make_shared<ViewState>(state);
  auto delta = std::make_shared<ViewDelta>();
  delta->base = 1;
  delta->changed = state;
  delta->left = {2};
  std::vector<std::string> seeds;
  for (const NodeMessage& message :
       {NodeMessage(registration), NodeMessage(Heartbeat{1, 2, true}), NodeMessage(ProbeAnswer{3}),
        NodeMessage(Suspicion{4, "why"}), NodeMessage(LeaveMessage{})})
    seeds.push_back(std::string(1, '\0') + Encode(message).SerializeAsString());
  for (const CoordinatorMessage& message :
       {CoordinatorMessage(HeartbeatAnswer{1, 2}), CoordinatorMessage(registration.seen),
        CoordinatorMessage(Probe{3}), CoordinatorMessage(Refusal{Error(Code::kStale, "why")}),
        CoordinatorMessage(ViewDeltaPtr(delta))})
    seeds.push_back(std::string(1, '\1') + Encode(message).SerializeAsString());
  return seeds;
}

// Three nodes register, and one registers again as another instance. Then each connection sends a heartbeat.
std::vector<std::string> MembershipSeeds() {
  ToBytes bytes;
  for (size_t node = 1; node < 5; ++node) {
    bytes.Byte(1).Byte(node).Byte(0);              // received, connection, a registration
    for (size_t i = 0; i < 4; ++i) bytes.Byte(1);  // of this job, version, chunk size and transport
    bytes.Byte(1).Byte(2).Byte(3).Byte(0).Byte(0).Byte(0).Byte(0);               // settings
    bytes.Byte(0).Byte(0).Byte(0);                                               // none of them named
    bytes.Byte(node).Byte(1).Byte(node % 3).Byte(node).Byte(0).Byte(0).Byte(0);  // member
    bytes.Byte(0).Byte(0).Byte(1).Byte(node).Byte(0);                            // the last view
    bytes.Byte(3).Byte(0).Put(uint64_t{100 + node});                             // time
  }
  for (size_t node = 1; node < 5; ++node) bytes.Byte(1).Byte(node).Byte(2).Put(UINT64_MAX).Byte(2).Byte(0);
  return {bytes.bytes()};
}

const Target kWire("membership_wire", RunWire, WireSeeds);
const Target kMembership("membership", RunMembership, MembershipSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
