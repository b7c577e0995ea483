// SPDX-License-Identifier: Apache-2.0
//
// The promise of Disconnect() on every transport that fences its peers: no put that the departed peer has
// started, or starts later, lands in our memory any more.

#include <gmock/gmock.h>

#include "tests/transport/rig.h"

namespace ropeteam::test {
namespace {

constexpr uint32_t kSource = 1, kTarget = 2, kOther = 3;
constexpr uint64_t kLength = 8 << 20;
// A departed peer is watched for this long. It is longer than any timeout after which a peer connects again,
// and than the engine's quarantine of 5 s.
constexpr uint64_t kWatchedMs = 6'000;
// Many times longer than a peer needs from its first request to its first put over loopback.
constexpr uint64_t kStrangerWatchedMs = 1'000;

class FencingTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    ASSERT_EQ(target_->capabilities().fences_peers, rig_->fences());
    if (!rig_->fences()) GTEST_SKIP() << GetParam() << " does not fence its peers";
    memory_.Fill(kTarget);
    region_ = target_->RegisterRegion(memory_.data(), kLength).value();
  }
  void DisconnectAndWait(PeerId peer) {
    const size_t before = disconnects_;
    target_->Disconnect(peer);
    ASSERT_TRUE(Poll([&] { return disconnects_ > before; }));
  }
  // Polls the target until `done`.
  bool Poll(const std::function<bool()>& done, uint64_t limit_ms = 20'000) {
    return PollUntil(
        rig_.get(), {target_.get()}, &done_,
        [&] {
          disconnects_ = static_cast<size_t>(
              std::count_if(done_[target_.get()].begin(), done_[target_.get()].end(),
                            [](const Completion& each) { return each.kind == OperationKind::kDisconnect; }));
          return done();
        },
        limit_ms);
  }
  bool Untouched() { return memory_.HoldsOutside(kTarget, 0, 0); }

  std::unique_ptr<Rig> rig_ = Rig::Make(GetParam());
  Memory memory_{kLength};
  std::unique_ptr<Transport> target_ = rig_->NewTransport();
  RegionId region_ = 0;
  Completions done_;
  size_t disconnects_ = 0;
};

// The peer is a process that is not told. It goes on putting, and connects again whenever it must.
TEST_P(FencingTest, AZombiesLatePutsChangeNothing) {
  if (!rig_->has_processes()) GTEST_SKIP() << "peers live in this process";
  Memory source(kLength);
  source.Fill(kSource);
  auto zombie = rig_->NewPeer(&source);
  const PeerId peer = target_->Connect(zombie->address).value();
  zombie->Bombard(target_->LocalAddress(), target_->ExportRegion(region_));
  ASSERT_TRUE(Poll([&] { return memory_.Holds(kSource, 0, kLength, 0); })) << "its puts never arrived";
  DisconnectAndWait(peer);
  memory_.Fill(kTarget);
  Poll([&] { return false; }, kWatchedMs);
  EXPECT_TRUE(Untouched());
  // A peer that is connected to again has access again, and may still be putting.
  target_->Connect(zombie->address).value();
  EXPECT_TRUE(Poll([&] { return memory_.Holds(kSource, 0, kLength, 0); })) << "it was not let in again";
}

// The peer is stopped during a put, and continues it long after its memory range was reused.
TEST_P(FencingTest, APutThatWasInterruptedIsNotFinished) {
  if (!rig_->has_processes()) GTEST_SKIP() << "peers live in this process";
  const int turns = InGuest() ? 4 : 12;
  for (int turn = 0; turn < turns; turn++) {
    Memory source(kLength);
    source.Fill(kSource);
    memory_.Fill(kTarget);
    auto zombie = rig_->NewPeer(&source);
    const PeerId peer = target_->Connect(zombie->address).value();
    zombie->Bombard(target_->LocalAddress(), target_->ExportRegion(region_));
    // Each turn stops it at another point of its first puts.
    const uint64_t reached = kLength / static_cast<uint64_t>(turns) * static_cast<uint64_t>(turn);
    ASSERT_TRUE(Poll([&] { return memory_.Holds(kSource, reached, 64, reached); }));
    zombie->Stop();
    if (turn % 2 == 0) Poll([&] { return false; }, 2);
    DisconnectAndWait(peer);
    memory_.Fill(kTarget);
    zombie->Continue();
    Poll([&] { return false; }, 100);
    ASSERT_TRUE(Untouched()) << "turn " << turn;
  }
}

// The same with a peer in this process. The put is cut at every stage: its bytes are in the kernel's buffers,
// or partly in memory.
TEST_P(FencingTest, WhatHasLeftThePeerDoesNotLand) {
  const int turns = InGuest() ? 10 : 60;
  for (int turn = 0; turn < turns; turn++) {
    Memory source(kLength);
    source.Fill(kSource);
    memory_.Fill(kTarget);
    auto initiator = rig_->NewTransport();
    const RegionId local = initiator->RegisterRegion(source.data(), kLength).value();
    const PeerId to = initiator->Connect(target_->LocalAddress()).value();
    const RemoteRegionId remote = initiator->ImportRegion(to, target_->ExportRegion(region_)).value();
    const PeerId peer = target_->Connect(initiator->LocalAddress()).value();
    Completions done;
    for (uint64_t i = 0; i < 4; i++)
      ASSERT_TRUE(initiator->Put(to, local, i * kLength / 4, remote, i * kLength / 4, kLength / 4, i).ok());
    ASSERT_TRUE(PollUntil(rig_.get(), {initiator.get(), target_.get()}, &done,
                          [&] { return memory_.Holds(kSource, 0, 64, 0); }));
    int polls = 0;
    PollUntil(rig_.get(), {initiator.get(), target_.get()}, &done, [&] { return polls++ == turn; });
    polls = 0;  // from here on only the initiator makes progress
    PollUntil(rig_.get(), {initiator.get()}, &done, [&] { return polls++ == turn % 7; });
    DisconnectAndWait(peer);
    memory_.Fill(kTarget);
    for (uint64_t i = 0; i < 4; i++) (void)initiator->Put(to, local, 0, remote, 0, kLength, 10 + i);
    PollUntil(
        rig_.get(), {initiator.get(), target_.get()}, &done, [] { return false; }, 30);
    ASSERT_TRUE(Untouched()) << "turn " << turn;
    // A transport's destructor completes nothing, so disconnect first.
    initiator->Disconnect(to);
    ASSERT_TRUE(PollUntil(rig_.get(), {initiator.get(), target_.get()}, &done, [&] {
      const auto& list = done[initiator.get()];
      return !list.empty() && list.back().kind == OperationKind::kDisconnect;
    }));
  }
}

TEST_P(FencingTest, OtherPeersAreNotDisturbed) {
  constexpr uint64_t kPuts = 24;
  Memory source(kLength), unused(kLength);
  source.Fill(kOther);
  auto departing = rig_->NewTransport(), other = rig_->NewTransport();
  const RegionId local = other->RegisterRegion(source.data(), kLength).value();
  const std::string key = target_->ExportRegion(region_);
  const PeerId to = other->Connect(target_->LocalAddress()).value();
  const RemoteRegionId remote = other->ImportRegion(to, key).value();
  const RegionId departing_local = departing->RegisterRegion(unused.data(), kLength).value();
  const PeerId departing_to = departing->Connect(target_->LocalAddress()).value();
  const RemoteRegionId departing_remote = departing->ImportRegion(departing_to, key).value();
  const PeerId departing_peer = target_->Connect(departing->LocalAddress()).value();
  ASSERT_TRUE(target_->Connect(other->LocalAddress()).ok());
  const std::vector<Transport*> all = {target_.get(), departing.get(), other.get()};
  // Both are connected, so the puts run during the fence: none is polled for before it.
  ASSERT_TRUE(departing->Put(departing_to, departing_local, 0, departing_remote, 0, 1, 1).ok());
  ASSERT_TRUE(other->Put(to, local, 0, remote, 0, 1, 1).ok());
  ASSERT_TRUE(PollUntil(rig_.get(), all, &done_,
                        [&] { return !done_[departing.get()].empty() && !done_[other.get()].empty(); }));
  for (uint64_t i = 0; i < kPuts; i++)
    ASSERT_TRUE(other->Put(to, local, 0, remote, 0, kLength / (InGuest() ? 16 : 1), i).ok());
  target_->Disconnect(departing_peer);
  ASSERT_TRUE(PollUntil(rig_.get(), all, &done_, [&] { return done_[other.get()].size() == kPuts + 1; }));
  for (const Completion& completion : done_[other.get()]) EXPECT_EQ(completion.code, Code::kOk);
}

// The stranger has all that a view contains: the address and the region's key.
TEST_P(FencingTest, AStrangerReachesNothing) {
  if (!target_->capabilities().admits_peers) GTEST_SKIP() << GetParam() << " does not tell peers apart";
  if (!rig_->has_processes()) GTEST_SKIP() << "peers live in this process";
  Memory source(kLength);
  source.Fill(kSource);
  auto stranger = rig_->NewPeer(&source);
  const auto member = rig_->NewTransport();
  target_->SetPeers({member->LocalAddress()});
  stranger->Bombard(target_->LocalAddress(), target_->ExportRegion(region_));
  Poll([&] { return false; }, kStrangerWatchedMs);
  EXPECT_TRUE(Untouched());
  target_->SetPeers({member->LocalAddress(), stranger->address});
  ASSERT_TRUE(Poll([&] { return memory_.Holds(kSource, 0, kLength, 0); })) << "named, it has access";
  // A node does this with a member that has left.
  const PeerId peer = target_->Connect(stranger->address).value();
  target_->SetPeers({member->LocalAddress()});
  DisconnectAndWait(peer);
  memory_.Fill(kTarget);
  target_->Connect(stranger->address).value();  // must not admit it
  Poll([&] { return false; }, kStrangerWatchedMs);
  EXPECT_TRUE(Untouched());
}

INSTANTIATE_TEST_SUITE_P(Every, FencingTest, testing::ValuesIn(TransportKinds()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ropeteam::test
