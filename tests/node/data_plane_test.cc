// SPDX-License-Identifier: Apache-2.0
#include "node/data_plane.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <set>
#include <thread>

#include "node/event_loop.h"
#include "tests/node/dmabuf_transport.h"
#include "transport/inproc/inproc_transport.h"

namespace ropeteam {
namespace {

constexpr std::chrono::seconds kGiveUp(20);
constexpr uint64_t kBytes = 1 << 20;
constexpr uint64_t kTables = 4096;  // before the chunks

// The in-process transport, which claims to fence its peers: not every machine has a fabric that does.
class Fencing : public ForwardingTransport {
 public:
  explicit Fencing(std::unique_ptr<Transport> inner) : ForwardingTransport(std::move(inner)) {
    capabilities_.fences_peers = true;
  }
};

// As if every peer guarded its chunks and refused to read those that the plane asks for when it reconnects.
class Guarding : public Fencing {
 public:
  explicit Guarding(std::unique_ptr<Transport> inner) : Fencing(std::move(inner)) {
    capabilities_.guards_chunks = true;
  }
  size_t Poll(Completion* out, size_t capacity) override {
    const size_t count = Fencing::Poll(out, capacity);
    for (size_t i = 0; i < count; ++i)
      if (out[i].context == kProbeTag && out[i].code == Code::kOk) out[i].code = Code::kInvalidArgument;
    return count;
  }
};

// A plane over the in-process fabric, with an arena of its own.
class Plane {
 public:
  Plane(const std::shared_ptr<InprocFabric>& fabric, const std::string& name, bool fences = true,
        bool guards = false)
      : arena_(kTables + kBytes) {
    Result<std::unique_ptr<Transport>> created = fabric->CreateTransport(name);
    EXPECT_TRUE(created.ok());
    std::fill_n(arena_.data(), kTables, std::byte{0x5a});
    std::unique_ptr<Transport> transport = std::move(*created);
    if (guards) {
      transport = std::make_unique<Guarding>(std::move(transport));
    } else if (fences) {
      transport = std::make_unique<Fencing>(std::move(transport));
    }
    transport = std::make_unique<DmabufTransport>(std::move(transport), control_);
    Result<std::unique_ptr<DataPlane>> plane = DataPlane::Create(std::move(transport), arena_, kTables);
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
    callbacks.on_link = [this](NodeId node, bool up, const std::string& reason) {
      EXPECT_FALSE(reason.empty());
      const std::lock_guard lock(mutex_);
      links_.emplace_back(node, up);
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
  // All transitions so far: the member, and whether its link is up.
  std::vector<std::pair<NodeId, bool>> WaitLinks(size_t count) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kGiveUp, [&] { return links_.size() >= count; }));
    return links_;
  }
  Member As(NodeId id) const {
    Member member;
    member.id = id;
    member.data_address = plane_->address();
    return member;
  }

  std::vector<std::byte> arena_;
  std::byte* const chunks_ = arena_.data() + kTables;
  const std::shared_ptr<DmabufControl> control_ = std::make_shared<DmabufControl>();
  std::unique_ptr<DataPlane> plane_;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<TransferDone> done_;
  std::set<uint64_t> tags_;
  std::vector<NodeId> fenced_;
  std::vector<std::pair<NodeId, bool>> links_;
};

StartTransfer Transfer(uint64_t tag, NodeId peer, bool get, uint64_t local, uint64_t remote,
                       uint64_t length) {
  return {tag, peer, get, kTables + local, remote, length, 0};
}

TEST(DataPlane, PutsAndGetsBetweenArenas) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  a.chunks_[100] = std::byte{42};
  b.chunks_[500] = std::byte{43};
  a.plane_->Submit({Transfer(1, 2, false, 100, 200, 1), Transfer(2, 2, true, 300, 500, 1)});
  for (const TransferDone& done : a.WaitDone(2)) EXPECT_EQ(done.code, Code::kOk);
  EXPECT_EQ(b.chunks_[200], std::byte{42});
  EXPECT_EQ(a.chunks_[300], std::byte{43});
}

TEST(DataPlane, PeersReachTheChunksAndNothingElse) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  std::fill_n(a.chunks_, kBytes, std::byte{42});
  a.plane_->Submit({Transfer(1, 2, false, 0, 0, kBytes)});
  EXPECT_EQ(a.WaitDone(1)[0].code, Code::kOk);
  for (uint64_t i = 0; i < kTables; ++i)
    ASSERT_EQ(b.arena_[i], std::byte{0x5a}) << "a put reached the tables";
  EXPECT_EQ(b.arena_.back(), std::byte{42});
  a.plane_->Submit({Transfer(2, 2, true, 0, kBytes, 1), Transfer(3, 2, false, 0, kBytes, 1),
                    Transfer(4, 2, true, 0, UINT64_MAX - kTables + 1, kTables)});
  for (size_t i = 1; i < 4; ++i) EXPECT_EQ(a.WaitDone(4)[i].code, Code::kInvalidArgument);
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
  a.plane_->Submit({Transfer(2, 2, false, 0, 0, 1)});  // answered after the departure
  EXPECT_EQ(a.WaitDone(2)[1].code, Code::kPeerGone);
  a.plane_->Stop();
  EXPECT_TRUE(a.WaitFenced(0).empty());
}

using Links = std::vector<std::pair<NodeId, bool>>;

TEST(DataPlane, AMemberWhoseConnectionFailedIsConnectedToAgainWithoutATransfer) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  // The transfer fails, and so do the first two attempts to read from b again.
  fabric->FailNext("b", 3, Code::kPeerGone);
  a.plane_->Submit({Transfer(1, 2, false, 100, 200, 1)});
  EXPECT_EQ(a.WaitDone(1)[0].code, Code::kPeerGone);
  EXPECT_EQ(a.WaitLinks(2), (Links{{2, false}, {2, true}}));
  a.chunks_[100] = std::byte{42};
  a.plane_->Submit({Transfer(2, 2, false, 100, 200, 1)});
  EXPECT_EQ(a.WaitDone(2)[1].code, Code::kOk);
  EXPECT_EQ(b.chunks_[200], std::byte{42});
  EXPECT_EQ(a.WaitLinks(2).size(), 2u);
  EXPECT_TRUE(a.WaitFenced(0).empty()) << "it is a member all the time";
}

TEST(DataPlane, ALinkIsUpAgainThoughThePeersGuardRefusesTheProbe) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a", /*fences=*/true, /*guards=*/true);
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  fabric->FailNext("b", 1, Code::kPeerGone);
  a.plane_->Submit({Transfer(1, 2, false, 100, 200, 1)});
  EXPECT_EQ(a.WaitDone(1)[0].code, Code::kPeerGone);
  EXPECT_EQ(a.WaitLinks(2), (Links{{2, false}, {2, true}}));
}

TEST(DataPlane, ALinkThatBreaksAndIsReestablishedByTheFabricIsNotLost) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  fabric->FailNext("b", 1, Code::kLinkFailed);
  a.plane_->Submit({Transfer(1, 2, false, 0, 0, 1)});
  EXPECT_EQ(a.WaitDone(1)[0].code, Code::kLinkFailed);
  a.plane_->Submit({Transfer(2, 2, false, 0, 0, 1)});
  EXPECT_EQ(a.WaitDone(2)[1].code, Code::kOk);
  EXPECT_TRUE(a.WaitLinks(0).empty());
}

TEST(DataPlane, TransfersWithALostMemberAreAnsweredAtOnceAndItCanLeave) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  const Member member = b.As(2);
  a.plane_->SetMembers({member});
  a.plane_->Submit({Transfer(1, 2, false, 0, 0, 1)});
  EXPECT_EQ(a.WaitDone(1)[0].code, Code::kOk);
  fabric->Kill("b");
  a.plane_->Submit({Transfer(2, 2, false, 0, 0, 1)});
  EXPECT_EQ(a.WaitLinks(1), (Links{{2, false}}));
  a.plane_->Submit({Transfer(3, 2, false, 0, 0, 1), Transfer(4, 2, true, 0, 0, 1)});
  for (size_t i = 1; i < 4; ++i) EXPECT_EQ(a.WaitDone(4)[i].code, Code::kPeerGone);
  a.plane_->SetMembers({});
  EXPECT_THAT(a.WaitFenced(1), ::testing::ElementsAre(2));
  a.plane_->Stop();
  EXPECT_EQ(a.WaitLinks(1).size(), 1u) << "a member that has left is not connected to again";
}

TEST(DataPlane, PutsNeedALeaseWhereTheFabricDoesNotFence) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a", /*fences=*/false);
  Plane b(fabric, "b", /*fences=*/false);
  a.plane_->SetMembers({b.As(2)});
  a.chunks_[0] = std::byte{42};
  b.chunks_[5] = std::byte{43};
  a.plane_->Submit({Transfer(1, 2, false, 0, 0, 1)});
  EXPECT_EQ(a.WaitDone(1)[0].code, Code::kOk) << "before anybody speaks of leases";
  b.chunks_[0] = std::byte{0};
  a.plane_->SetLease(0);
  a.plane_->Submit({Transfer(2, 2, false, 0, 0, 1), Transfer(3, 2, true, 1, 5, 1)});
  EXPECT_EQ(a.WaitDone(3)[1].code, Code::kStale);
  EXPECT_EQ(a.WaitDone(3)[2].code, Code::kOk) << "a get does no harm";
  EXPECT_EQ(b.chunks_[0], std::byte{0});
  EXPECT_EQ(a.chunks_[1], std::byte{43});
  a.plane_->SetLease(EventLoop::Now() + 3'600'000'000);
  a.plane_->Submit({Transfer(4, 2, false, 0, 0, 1)});
  EXPECT_EQ(a.WaitDone(4)[3].code, Code::kOk);
  a.plane_->SetLease(EventLoop::Now());  // it expires by itself
  a.plane_->Submit({Transfer(5, 2, false, 0, 0, 1)});
  EXPECT_EQ(a.WaitDone(5)[4].code, Code::kStale);
}

TEST(DataPlane, PutsUnderWayAreCutOffWhenTheLeaseRunsOut) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a", /*fences=*/false);
  Plane b(fabric, "b", /*fences=*/false);
  a.plane_->SetMembers({b.As(2)});
  fabric->Hold("b");
  a.chunks_[0] = std::byte{42};
  a.plane_->SetLease(EventLoop::Now() + 3'600'000'000);
  a.plane_->Submit({Transfer(1, 2, false, 0, 0, 1)});
  a.plane_->SetLease(EventLoop::Now() + 20'000);  // nothing wakes the plane when it expires
  const TransferDone put = a.WaitDone(1)[0];
  EXPECT_THAT(put.code, ::testing::AnyOf(Code::kPeerGone, Code::kStale));
  fabric->Release("b");
  if (put.code == Code::kPeerGone) {
    EXPECT_EQ(a.WaitLinks(2), (Links{{2, false}, {2, true}}));
  }
  EXPECT_EQ(b.chunks_[0], std::byte{0});
  a.plane_->SetLease(EventLoop::Now() + 3'600'000'000);
  a.plane_->Submit({Transfer(2, 2, false, 0, 0, 1)});
  EXPECT_EQ(a.WaitDone(2)[1].code, Code::kOk);
}

TEST(DataPlane, AFabricThatFencesNeedsNoLease) {
  const auto fabric = InprocFabric::Create();
  Plane a(fabric, "a");
  Plane b(fabric, "b");
  a.plane_->SetMembers({b.As(2)});
  a.plane_->SetLease(0);
  a.plane_->Submit({Transfer(1, 2, false, 0, 0, 1)});
  EXPECT_EQ(a.WaitDone(1)[0].code, Code::kOk);
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

// Looks like GPU memory to the plane.
class Device {
 public:
  explicit Device(char fill) : fd_(memfd_create("device", MFD_CLOEXEC)) {
    const std::string bytes(kDeviceBytes, fill);
    EXPECT_EQ(write(fd_.get(), bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  }
  static constexpr uint64_t kDeviceBytes = 64 * 1024;
  UniqueFd Export() const { return UniqueFd(dup(fd_.get())); }

 private:
  UniqueFd fd_;
};

// Adds device memory and waits for the result.
class Adder {
 public:
  DeviceBufferId Add(DataPlane* plane, UniqueFd descriptor, uint64_t bytes = Device::kDeviceBytes) {
    return plane->device_buffers().Add(std::move(descriptor), bytes, [this](const Status& status) {
      const std::lock_guard lock(mutex_);
      results_.push_back(status);
      changed_.notify_all();
    });
  }
  Status Wait(size_t count = 1) {
    std::unique_lock lock(mutex_);
    EXPECT_TRUE(changed_.wait_for(lock, kGiveUp, [&] { return results_.size() >= count; }));
    return results_.back();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Status> results_;
};

StartTransfer FromDevice(uint64_t tag, DeviceBufferId buffer, uint64_t local, uint64_t remote,
                         uint64_t length) {
  return {tag, 2, false, local, remote, length, buffer};
}

class DevicePlane : public ::testing::Test {
 protected:
  DevicePlane() : fabric_(InprocFabric::Create()), a_(fabric_, "a"), b_(fabric_, "b") {
    a_.plane_->SetMembers({b_.As(2)});
  }
  DeviceBufferId Register(const Device& device) {
    const DeviceBufferId id = adder_.Add(a_.plane_.get(), device.Export());
    EXPECT_TRUE(adder_.Wait(++added_).ok());
    return id;
  }
  // Waits, because another thread deregisters.
  void ExpectRegistered(size_t count) {
    const auto give_up = std::chrono::steady_clock::now() + kGiveUp;
    while (a_.control_->registered() != count && std::chrono::steady_clock::now() < give_up)
      std::this_thread::yield();
    EXPECT_EQ(a_.control_->registered(), count);
    EXPECT_EQ(a_.plane_->device_buffers().registered(), count);
  }

  const std::shared_ptr<InprocFabric> fabric_;
  Adder adder_;
  size_t added_ = 0;
  Plane a_;
  Plane b_;
};

TEST_F(DevicePlane, PutsFromDeviceMemoryUntilItIsRemoved) {
  const DeviceBufferId id = Register(Device('d'));
  a_.plane_->Submit({FromDevice(1, id, 100, 200, 10)});
  EXPECT_EQ(a_.WaitDone(1)[0].code, Code::kOk);
  EXPECT_EQ(std::memcmp(b_.chunks_ + 199, "\0dddddddddd\0", 12), 0);
  a_.plane_->device_buffers().Remove(id);
  ExpectRegistered(0);
  a_.plane_->Submit({FromDevice(2, id, 100, 300, 10)});
  EXPECT_EQ(a_.WaitDone(2)[1].code, Code::kNotFound);
  EXPECT_EQ(b_.chunks_[300], std::byte{0});
}

TEST_F(DevicePlane, WhatIsNotThereOrOutsideOfItBeginsNothing) {
  const DeviceBufferId id = Register(Device('d'));
  a_.plane_->Submit({FromDevice(1, id + 1, 0, 0, 10), FromDevice(2, id, Device::kDeviceBytes - 5, 0, 10)});
  for (const TransferDone& done : a_.WaitDone(2)) EXPECT_EQ(done.code, Code::kNotFound) << done.tag;
  EXPECT_EQ(b_.chunks_[0], std::byte{0});
  a_.plane_->device_buffers().Remove(id);
  ExpectRegistered(0);  // the refused put does not keep it
}

TEST_F(DevicePlane, MemoryThatIsRemovedStaysUntilItsPutsAreOver) {
  const DeviceBufferId id = Register(Device('d'));
  fabric_->Hold("b");
  a_.plane_->Submit({FromDevice(1, id, 0, 0, 10)});
  const auto give_up = std::chrono::steady_clock::now() + kGiveUp;
  while (a_.control_->puts() == 0 && std::chrono::steady_clock::now() < give_up) std::this_thread::yield();
  a_.plane_->device_buffers().Remove(id);
  // The thread that deregisters has had time: it has registered other memory.
  Register(Device('e'));
  ExpectRegistered(2);
  fabric_->Release("b");
  EXPECT_EQ(a_.WaitDone(1)[0].code, Code::kOk);
  ExpectRegistered(1);
  EXPECT_EQ(b_.chunks_[9], std::byte{'d'});
}

TEST_F(DevicePlane, MemoryThatTheCardCannotReadIsNotTriedAgain) {
  const DeviceBufferId id = Register(Device('d'));
  a_.control_->FailPuts(Code::kIo);
  a_.plane_->Submit({FromDevice(1, id, 0, 0, 10)});
  EXPECT_EQ(a_.WaitDone(1)[0].code, Code::kIo);
  a_.control_->FailPuts(Code::kOk);
  a_.plane_->Submit({FromDevice(2, id, 0, 0, 10)});
  EXPECT_EQ(a_.WaitDone(2)[1].code, Code::kNotFound);
  EXPECT_EQ(a_.control_->puts(), 1u);
  // A peer's failure says nothing about the memory.
  const DeviceBufferId other = Register(Device('e'));
  a_.control_->FailPuts(Code::kLinkFailed);
  a_.plane_->Submit({FromDevice(3, other, 0, 0, 10)});
  EXPECT_EQ(a_.WaitDone(3)[2].code, Code::kLinkFailed);
  a_.control_->FailPuts(Code::kOk);
  a_.plane_->Submit({FromDevice(4, other, 0, 0, 10)});
  EXPECT_EQ(a_.WaitDone(4)[3].code, Code::kOk);
}

TEST_F(DevicePlane, ADescriptorThatIsNoSuchMemoryIsRefused) {
  adder_.Add(a_.plane_.get(), Device('d').Export(), Device::kDeviceBytes + 1);
  Status status = adder_.Wait(1);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("65537 bytes in a dmabuf of 65536"));
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const UniqueFd other_end(ends[1]);
  adder_.Add(a_.plane_.get(), UniqueFd(ends[0]));
  status = adder_.Wait(2);
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_THAT(status.message(), ::testing::HasSubstr("no dmabuf"));
  EXPECT_EQ(a_.control_->registrations(), 0u);
  a_.control_->Refuse(Error(Code::kIo, "the card does not like it"));
  adder_.Add(a_.plane_.get(), Device('d').Export());
  EXPECT_THAT(adder_.Wait(3).message(), ::testing::HasSubstr("does not like it"));
  EXPECT_EQ(a_.plane_->device_buffers().registered(), 0u);
}

TEST_F(DevicePlane, MemoryThatIsRevokedWhileItIsBeingRegisteredIsLetGo) {
  a_.control_->HoldRegistrations(true);
  const DeviceBufferId id = adder_.Add(a_.plane_.get(), Device('d').Export());
  const DeviceBufferId waiting = adder_.Add(a_.plane_.get(), Device('e').Export());
  ASSERT_TRUE(a_.control_->WaitForHeld());
  EXPECT_EQ(a_.plane_->device_buffers().Use(id).status().code(), Code::kNotFound);
  a_.plane_->device_buffers().Remove(id);
  a_.plane_->device_buffers().Remove(waiting);
  a_.control_->HoldRegistrations(false);
  EXPECT_EQ(adder_.Wait(2).code(), Code::kAborted);
  ExpectRegistered(0);
  EXPECT_EQ(a_.control_->registrations(), 1u);  // the second one was not begun
}

TEST_F(DevicePlane, StopLetsGoOfEverything) {
  const DeviceBufferId id = Register(Device('d'));
  Register(Device('e'));
  fabric_->Hold("b");
  a_.plane_->Submit({FromDevice(1, id, 0, 0, 10)});
  a_.plane_->Stop();
  EXPECT_EQ(a_.WaitDone(1)[0].code, Code::kPeerGone);
  EXPECT_EQ(a_.control_->registered(), 0u);
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
