// SPDX-License-Identifier: Apache-2.0
#include "node/data_plane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <set>

#include "transport/inproc/inproc_transport.h"

namespace ropeteam {
namespace {

constexpr std::chrono::seconds kGiveUp(20);
constexpr uint64_t kBytes = 1 << 20;

// The in-process transport, said to fence: no fabric that can is on every machine.
class Fencing : public Transport {
 public:
  explicit Fencing(std::unique_ptr<Transport> inner)
      : inner_(std::move(inner)), capabilities_(inner_->capabilities()) {
    capabilities_.fences_peers = true;
  }
  const TransportCapabilities& capabilities() const override { return capabilities_; }
  std::string LocalAddress() const override { return inner_->LocalAddress(); }
  std::string Describe() const override { return inner_->Describe(); }
  Result<RegionId> RegisterRegion(void* base, uint64_t length) override {
    return inner_->RegisterRegion(base, length);
  }
  Status DeregisterRegion(RegionId region) override { return inner_->DeregisterRegion(region); }
  std::string ExportRegion(RegionId region) const override { return inner_->ExportRegion(region); }
  Result<PeerId> Connect(const std::string& address) override { return inner_->Connect(address); }
  void Disconnect(PeerId peer) override { inner_->Disconnect(peer); }
  Result<RemoteRegionId> ImportRegion(PeerId peer, const std::string& key) override {
    return inner_->ImportRegion(peer, key);
  }
  Status Put(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    return inner_->Put(peer, local, local_offset, remote, remote_offset, length, context);
  }
  Status Get(PeerId peer, RegionId local, uint64_t local_offset, RemoteRegionId remote,
             uint64_t remote_offset, uint64_t length, uint64_t context) override {
    return inner_->Get(peer, local, local_offset, remote, remote_offset, length, context);
  }
  size_t Poll(Completion* out, size_t capacity) override { return inner_->Poll(out, capacity); }
  void Wait(uint64_t timeout_us) override { inner_->Wait(timeout_us); }
  void Wake() override { inner_->Wake(); }
  Counters counters() const override { return inner_->counters(); }

 private:
  const std::unique_ptr<Transport> inner_;
  TransportCapabilities capabilities_;
};

// A plane over the in-process fabric and an arena of its own.
class Plane {
 public:
  Plane(const std::shared_ptr<InprocFabric>& fabric, const std::string& name, bool fences = true)
      : arena_(kBytes) {
    Result<std::unique_ptr<Transport>> created = fabric->CreateTransport(name);
    EXPECT_TRUE(created.ok());
    std::unique_ptr<Transport> transport = std::move(*created);
    if (fences) transport = std::make_unique<Fencing>(std::move(transport));
    Result<std::unique_ptr<DataPlane>> plane = DataPlane::Create(std::move(transport), arena_);
    EXPECT_TRUE(plane.ok()) << plane.status().ToString();
    plane_ = std::move(*plane);
    DataPlane::Callbacks callbacks;
    callbacks.on_done = [this](const std::vector<TransferDone>& done) {
      const std::lock_guard lock(mutex_);
      for (const TransferDone& each : done) {
        EXPECT_TRUE(tags_.insert(each.tag).second) << "tag " << each.tag << " answered twice";
        done_.push_back(each);
      }
      changed_.notify_all();
    };
    callbacks.on_fenced = [this](NodeId node) {
      const std::lock_guard lock(mutex_);
      fenced_.push_back(node);
      changed_.notify_all();
    };
    plane_->Start(std::move(callbacks));
  }

  std::vector<TransferDone> WaitDone(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kGiveUp, [&] { return done_.size() >= count; }));
    return done_;
  }
  std::vector<NodeId> WaitFenced(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kGiveUp, [&] { return fenced_.size() >= count; }));
    return fenced_;
  }
  Member As(NodeId id) const {
    Member member;
    member.id = id;
    member.data_address = plane_->address();
    return member;
  }

  std::vector<std::byte> arena_;
  std::unique_ptr<DataPlane> plane_;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<TransferDone> done_;
  std::set<uint64_t> tags_;
  std::vector<NodeId> fenced_;
};

StartTransfer Transfer(uint64_t tag, NodeId peer, bool get, uint64_t local, uint64_t remote,
                       uint64_t length) {
  return {tag, peer, get, local, remote, length};
}

TEST(DataPlane, PutsAndGetsBetweenArenas) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  a.arena_[100] = std::byte{42};
  b.arena_[500] = std::byte{43};
  a.plane_->Submit({Transfer(1, 2, false, 100, 200, 1), Transfer(2, 2, true, 300, 500, 1)});
  for (const TransferDone& done : a.WaitDone(2)) EXPECT_EQ(done.code, Code::kOk);
  EXPECT_EQ(b.arena_[200], std::byte{42});
  EXPECT_EQ(a.arena_[300], std::byte{43});
}

TEST(DataPlane, AnswersForPeersThatAreNotInTheView) {
  Plane a(InprocFabric::Create(), "a");
  a.plane_->Submit({Transfer(7, 99, false, 0, 0, 10)});
  const auto done = a.WaitDone(1);
  EXPECT_EQ(done[0].tag, 7u);
  EXPECT_EQ(done[0].code, Code::kPeerGone);
}

TEST(DataPlane, RefusesRangesOutsideTheArenaAndAddressesThatAreNone) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  Member broken = b.As(3);
  broken.data_address = "garbage";
  a.plane_->SetMembers({b.As(2), broken});
  a.plane_->Submit({Transfer(1, 2, false, kBytes, 0, 1), Transfer(2, 3, false, 0, 0, 1)});
  for (const TransferDone& done : a.WaitDone(2)) EXPECT_EQ(done.code, Code::kInvalidArgument) << done.tag;
}

TEST(DataPlane, APeerThatLeavesGivesEverythingBackAndIsFenced) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  fabric->Hold("b");
  std::vector<StartTransfer> transfers;
  for (uint64_t i = 0; i < 100; ++i) transfers.push_back(Transfer(i, 2, false, i, i, 1));
  a.plane_->Submit(transfers);
  a.plane_->SetMembers({});
  EXPECT_EQ(a.WaitDone(100).size(), 100u);
  for (const TransferDone& done : a.WaitDone(100)) EXPECT_EQ(done.code, Code::kPeerGone);
  EXPECT_THAT(a.WaitFenced(1), ::testing::ElementsAre(2));
}

TEST(DataPlane, OneThatNeverWasConnectedIsFencedToo) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  a.plane_->SetMembers({});
  EXPECT_THAT(a.WaitFenced(1), ::testing::ElementsAre(2));
}

TEST(DataPlane, ATransportThatCannotTellFencesNobody) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a", /*fences=*/false);
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  a.plane_->Submit({Transfer(1, 2, false, 0, 0, 1)});
  a.WaitDone(1);
  a.plane_->SetMembers({});
  a.plane_->Submit({Transfer(2, 2, false, 0, 0, 1)});  // answered behind the departure
  EXPECT_EQ(a.WaitDone(2)[1].code, Code::kPeerGone);
  a.plane_->Stop();
  EXPECT_TRUE(a.WaitFenced(0).empty());
}

TEST(DataPlane, StopAnswersWhatIsOutstanding) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  fabric->Hold("b");
  a.plane_->Submit({Transfer(1, 2, false, 0, 0, 10), Transfer(2, 2, true, 0, 0, 10)});
  a.plane_->Stop();
  EXPECT_EQ(a.WaitDone(2).size(), 2u);
}

TEST(DataAddress, PacksAnyBytesAndRefusesAnythingElse) {
  const std::string endpoint("a\0b", 3);
  std::string out, key;
  ASSERT_TRUE(UnpackDataAddress(PackDataAddress(endpoint, ""), &out, &key));
  EXPECT_EQ(out, endpoint);
  EXPECT_EQ(key, "");
  const std::string packed = PackDataAddress(endpoint, "key");
  for (size_t i = 0; i < packed.size(); ++i)
    EXPECT_FALSE(UnpackDataAddress(packed.substr(0, i), &out, &key)) << i;
  EXPECT_FALSE(UnpackDataAddress(packed + "x", &out, &key));
}

}  // namespace
}  // namespace ropeteam
