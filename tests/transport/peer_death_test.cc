// SPDX-License-Identifier: Apache-2.0
//
// Peers that die, hang and return, on every transport in this build.

#include <gmock/gmock.h>
#include <unistd.h>

#include <set>

#include "tests/transport/rig.h"

namespace ropeteam::test {
namespace {

using testing::AnyOf;

constexpr uint32_t kSource = 1, kTarget = 2, kOther = 3;
constexpr uint64_t kLength = 8 << 20;

// A transport with a region, and a region for its peer.
struct Initiator {
  explicit Initiator(const std::string& kind) : rig_(Rig::Make(kind)) {
    memory_.Fill(kSource);
    target_.Fill(kTarget);
    region_ = transport_->RegisterRegion(memory_.data(), kLength).value();
  }

  void Meet(const RemotePeer& peer) {
    peer_ = transport_->Connect(peer.address).value();
    remote_ = transport_->ImportRegion(peer_, peer.key).value();
  }
  bool Drive(size_t count, uint64_t limit_ms = 20'000) {
    return PollUntil(
        rig_.get(), {transport_.get()}, &done_, [&] { return done().size() >= count; }, limit_ms);
  }
  std::vector<Completion>& done() { return done_[transport_.get()]; }
  // Completes one put and returns its code.
  Code PutOne(uint64_t offset, uint64_t length) {
    const size_t before = done().size();
    EXPECT_TRUE(transport_->Put(peer_, region_, offset, remote_, offset, length, 77).ok());
    EXPECT_TRUE(Drive(before + 1));
    return done().back().code;
  }
  // Polls for a while: no completion may come.
  void ExpectSilence() {
    const size_t before = done().size();
    Drive(before + 1, 30);
    EXPECT_EQ(done().size(), before);
  }

  std::unique_ptr<Rig> rig_;
  Memory memory_{kLength}, target_{kLength};
  std::unique_ptr<Transport> transport_ = rig_->NewTransport();
  RegionId region_ = 0;
  PeerId peer_ = 0;
  RemoteRegionId remote_ = 0;
  Completions done_;
};

class PeerTest : public testing::TestWithParam<std::string>, protected Initiator {
 protected:
  PeerTest() : Initiator(GetParam()) {}
};

TEST_P(PeerTest, KilledWithAThousandInFlightGivesEveryBufferBackOnce) {
  if (!rig_->deaf().empty()) GTEST_SKIP() << rig_->deaf();
  auto peer = rig_->NewPeer(&target_);
  Meet(*peer);
  ASSERT_EQ(PutOne(0, 4096), Code::kOk);
  done().clear();
  peer->Stop();
  constexpr uint64_t kCount = 1000;
  for (uint64_t i = 0; i < kCount; i++) {
    const uint64_t at = i % 8 * (1 << 20), length = i % 3 == 0 ? 4 << 20 : 1 << 20;
    const uint64_t offset = std::min(at, kLength - length);
    ASSERT_TRUE(i % 4 == 3 ? transport_->Get(peer_, region_, offset, remote_, offset, length, i).ok()
                           : transport_->Put(peer_, region_, offset, remote_, offset, length, i).ok());
  }
  // Gives the device time to take as much as it can.
  if (rig_->serves_stopped()) {
    ASSERT_TRUE(Drive(1));
  } else {
    ExpectSilence();
  }
  peer->Kill();
  const uint64_t killed = NowUs();
  ASSERT_TRUE(Drive(kCount));
  EXPECT_LT(NowUs() - killed, rig_->gone_within_us());
  std::set<uint64_t> contexts;
  uint64_t failures = 0;
  for (const Completion& completion : done()) {
    // A card may have served some before the death.
    if (!rig_->serves_stopped() || completion.code != Code::kOk) {
      EXPECT_EQ(completion.code, Code::kPeerGone);
      failures++;
    }
    contexts.insert(completion.context);
  }
  EXPECT_EQ(done().size(), kCount);
  EXPECT_EQ(contexts.size(), kCount);
  EXPECT_GT(failures, 0u);
  EXPECT_EQ(transport_->counters().failures, failures);

  // Later operations fail at once.
  const uint64_t later = NowUs();
  EXPECT_EQ(PutOne(0, 4096), Code::kPeerGone);
  EXPECT_LT(NowUs() - later, rig_->gone_within_us());
  transport_->Disconnect(peer_);
  ASSERT_TRUE(Drive(kCount + 2));
  EXPECT_EQ(done().back().kind, OperationKind::kDisconnect);
  EXPECT_TRUE(transport_->DeregisterRegion(region_).ok()) << "a buffer was not given back";
  ExpectSilence();
}

TEST_P(PeerTest, KilledUnderFullLoadDisturbsNobodyElse) {
  if (!rig_->deaf().empty()) GTEST_SKIP() << rig_->deaf();
  auto victim = rig_->NewPeer(&target_);
  Memory other_memory(kLength);
  auto other = rig_->NewPeer(&other_memory);
  Meet(*other);
  const PeerId other_peer = peer_;
  const RemoteRegionId other_remote = remote_;
  Meet(*victim);
  const uint64_t count_each = InGuest() ? 16 : 64;
  for (uint64_t i = 0; i < count_each; i++) {
    const uint64_t at = i % 8 << 20;
    ASSERT_TRUE(transport_->Put(peer_, region_, at, remote_, at, 1 << 20, i).ok());
    ASSERT_TRUE(transport_->Put(other_peer, region_, at, other_remote, at, 1 << 20, i).ok());
  }
  ASSERT_TRUE(Drive(8));
  victim->Kill();
  ASSERT_TRUE(Drive(2 * count_each));
  for (const Completion& completion : done()) {
    if (completion.peer == other_peer)
      EXPECT_EQ(completion.code, Code::kOk);
    else
      EXPECT_THAT(completion.code, AnyOf(Code::kOk, Code::kPeerGone));
  }
  EXPECT_EQ(done().size(), 2 * count_each);
  EXPECT_TRUE(other_memory.Holds(kSource, 0, kLength, 0));
}

// As when a node dies while another fetches from it: some bytes of a get have arrived, more are on their way.
TEST_P(PeerTest, KilledInTheMiddleOfGetsGivesEveryBufferBackOnce) {
  if (!rig_->deaf().empty()) GTEST_SKIP() << rig_->deaf();
  constexpr uint64_t kGets = 8;
  const uint64_t get_bytes = InGuest() ? 128 << 10 : kLength / kGets;
  for (size_t turn = 0; turn < kGets; turn++) {
    auto peer = rig_->NewPeer(&target_);
    Meet(*peer);
    ASSERT_EQ(PutOne(0, 4096), Code::kOk);
    done().clear();
    for (uint64_t i = 0; i < kGets; i++)
      ASSERT_TRUE(transport_->Get(peer_, region_, i * get_bytes, remote_, i * get_bytes, get_bytes, i).ok());
    ASSERT_TRUE(Drive(turn));
    peer->Kill();
    ASSERT_TRUE(Drive(kGets)) << "turn " << turn;
    std::set<uint64_t> contexts;
    for (const Completion& completion : done()) {
      EXPECT_THAT(completion.code, AnyOf(Code::kOk, Code::kPeerGone)) << "turn " << turn;
      contexts.insert(completion.context);
    }
    EXPECT_EQ(contexts.size(), kGets);
    transport_->Disconnect(peer_);
    ASSERT_TRUE(Drive(kGets + 1));
    EXPECT_EQ(done().size(), kGets + 1);
  }
}

TEST_P(PeerTest, ReturnsUnderItsAddressAsANewInstance) {
  if (!rig_->deaf().empty()) GTEST_SKIP() << rig_->deaf();
  auto peer = rig_->NewPeer(&target_);
  Meet(*peer);
  ASSERT_EQ(PutOne(0, 4096), Code::kOk);
  const std::string name = peer->name, old_key = peer->key;
  const PeerId old_peer = peer_;
  const RemoteRegionId old_remote = remote_;
  peer->Kill();
  Memory fresh(kLength);
  fresh.Fill(kOther);
  auto returned = rig_->NewPeer(&fresh, name);
  ASSERT_EQ(returned->name, name);
  // The dead instance's id never reaches the new instance.
  EXPECT_EQ(PutOne(0, 4096), Code::kPeerGone);
  EXPECT_TRUE(fresh.HoldsOutside(kOther, 0, 0));
  Meet(*returned);
  EXPECT_NE(peer_, old_peer);
  EXPECT_FALSE(transport_->ImportRegion(peer_, old_key).ok());
  if (!rig_->reconnects()) {
    EXPECT_EQ(PutOne(100, 100'000), Code::kPeerGone);
    return;
  }
  EXPECT_EQ(PutOne(100, 100'000), Code::kOk);
  EXPECT_TRUE(fresh.Holds(kSource, 100, 100'000, 100));
  EXPECT_TRUE(fresh.HoldsOutside(kOther, 100, 100'000));
  // Disconnecting the old peer does not affect the new one.
  transport_->Disconnect(old_peer);
  const size_t before = done().size();
  ASSERT_TRUE(Drive(before + 1));
  EXPECT_EQ(PutOne(0, 4096), Code::kOk);
  EXPECT_EQ(transport_->Put(old_peer, region_, 0, old_remote, 0, 1, 0).code(), Code::kInvalidArgument);
}

TEST_P(PeerTest, ASlowTargetDelaysAndNothingMore) {
  auto peer = rig_->NewPeer(&target_);
  Meet(*peer);
  ASSERT_EQ(PutOne(0, 1), Code::kOk);
  done().clear();
  target_.Fill(kTarget);
  peer->Stop();
  // These fit into any buffer on the way, so an early completion would be for bytes that have not arrived.
  ASSERT_TRUE(transport_->Put(peer_, region_, 0, remote_, 0, 100, 1).ok());
  ASSERT_TRUE(transport_->Get(peer_, region_, 4096, remote_, 8192, 100, 2).ok());
  ASSERT_TRUE(transport_->Put(peer_, region_, 1 << 20, remote_, 1 << 20, 4 << 20, 3).ok());
  if (!rig_->serves_stopped()) ExpectSilence();
  peer->Continue();
  ASSERT_TRUE(Drive(3));
  for (const Completion& completion : done()) EXPECT_EQ(completion.code, Code::kOk);
  EXPECT_TRUE(target_.Holds(kSource, 0, 100, 0));
  EXPECT_TRUE(target_.Holds(kSource, 1 << 20, 4 << 20, 1 << 20));
  EXPECT_TRUE(memory_.Holds(kTarget, 4096, 100, 8192));
}

TEST_P(PeerTest, DisconnectTakesBuffersBackFromAPeerThatHangs) {
  if (!rig_->cancels_one_peer())
    GTEST_SKIP()
        << "libfabric cannot take back what is outstanding to one peer of an endpoint that serves all";
  auto peer = rig_->NewPeer(&target_);
  Meet(*peer);
  ASSERT_EQ(PutOne(0, 1), Code::kOk);
  done().clear();
  peer->Stop();
  constexpr uint64_t kCount = 50;
  for (uint64_t i = 0; i < kCount; i++)
    ASSERT_TRUE(transport_->Put(peer_, region_, 0, remote_, 0, 1 << 20, i).ok());
  if (!rig_->serves_stopped()) ExpectSilence();
  const uint64_t start = NowUs();
  transport_->Disconnect(peer_);
  ASSERT_TRUE(Drive(kCount + 1));
  EXPECT_LT(NowUs() - start, rig_->gone_within_us());
  for (uint64_t i = 0; i < kCount; i++) {
    if (!rig_->serves_stopped() || done()[i].code != Code::kOk) {
      EXPECT_EQ(done()[i].code, Code::kPeerGone);
    }
  }
  EXPECT_EQ(done()[kCount].kind, OperationKind::kDisconnect);
  EXPECT_TRUE(transport_->DeregisterRegion(region_).ok());
  peer->Continue();
  ExpectSilence();
}

TEST_P(PeerTest, ARegionRevokedInAnotherProcessIsRefusedThere) {
  if (!rig_->deaf().empty()) GTEST_SKIP() << rig_->deaf();
  auto peer = rig_->NewPeer(&target_);
  Meet(*peer);
  ASSERT_EQ(PutOne(0, 4096), Code::kOk);
  peer->Deregister();
  target_.Fill(kTarget);
  if (!rig_->refuses_revoked()) {
    EXPECT_EQ(PutOne(0, 1 << 20), Code::kOk);
    EXPECT_TRUE(target_.HoldsOutside(kTarget, 0, 1 << 20)) << "no bytes outside the range, at least";
    return;
  }
  const auto refused = rig_->reconnects() ? AnyOf(Code::kInvalidArgument, Code::kLinkFailed)
                                          : AnyOf(Code::kPeerGone, Code::kPeerGone);
  EXPECT_THAT(PutOne(0, 1 << 20), refused);
  EXPECT_THAT(PutOne(0, 10), refused);
  EXPECT_TRUE(target_.HoldsOutside(kTarget, 0, 0));
}

// Initiators of all kinds pause at once, for longer than the timeout of any of them for a peer's first
// answer.
TEST(PeerPauseTest, APauseBeforeThePeersAreAskedIsNotTheirSilence) {
  std::vector<std::unique_ptr<Initiator>> initiators;
  std::vector<std::unique_ptr<RemotePeer>> peers;
  for (const std::string& kind : TransportKinds()) {
    auto initiator = std::make_unique<Initiator>(kind);
    if (!initiator->rig_->deaf().empty()) continue;
    peers.push_back(initiator->rig_->NewPeer(&initiator->target_));
    initiator->Meet(*peers.back());
    Initiator& one = *initiators.emplace_back(std::move(initiator));
    ASSERT_TRUE(one.transport_->Put(one.peer_, one.region_, 0, one.remote_, 0, 4096, 1).ok());
  }
  usleep(5'100'000);
  for (const auto& initiator : initiators) {
    ASSERT_TRUE(initiator->Drive(1));
    EXPECT_EQ(initiator->done()[0].code, Code::kOk) << initiator->transport_->Describe();
  }
}

INSTANTIATE_TEST_SUITE_P(Every, PeerTest, testing::ValuesIn(TransportKinds()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ropeteam::test
