// SPDX-License-Identifier: Apache-2.0
//
// The promises of transport.h, tested on every transport in this build. peer_death_test.cc has peers that
// die, hang and return.

#include <gmock/gmock.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <set>
#include <thread>

#include "tests/transport/rig.h"

namespace ropeteam::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr uint32_t kSource = 1, kTarget = 2;

// Two transports of this process, each with one region that the other has imported.
class TransportTest : public testing::TestWithParam<std::string> {
 protected:
  struct Side {
    std::unique_ptr<Transport> transport;
    std::unique_ptr<Memory> memory;
    RegionId region = 0;
    PeerId peer = 0;
    RemoteRegionId remote = 0;
    std::string key;
  };

  void SetUpSides(uint64_t length) {
    for (Side* side : {&a_, &b_}) {
      side->transport = rig_->NewTransport();
      side->memory = std::make_unique<Memory>(length);
      side->region = side->transport->RegisterRegion(side->memory->data(), length).value();
      side->key = side->transport->ExportRegion(side->region);
    }
    Introduce(&a_, b_);
    Introduce(&b_, a_);
    a_.memory->Fill(kSource);
    b_.memory->Fill(kTarget);
  }
  static void Introduce(Side* from, const Side& to) {
    from->peer = from->transport->Connect(to.transport->LocalAddress()).value();
    from->remote = from->transport->ImportRegion(from->peer, to.key).value();
  }

  // Polls both sides until `a` and `b` have that many completions in all.
  bool Drive(size_t a, size_t b = 0, uint64_t limit_ms = 20'000) {
    return PollUntil(
        rig_.get(), {a_.transport.get(), b_.transport.get()}, &done_,
        [&] { return done_[a_.transport.get()].size() >= a && done_[b_.transport.get()].size() >= b; },
        limit_ms);
  }
  std::vector<Completion>& DoneAtA() { return done_[a_.transport.get()]; }

  std::unique_ptr<Rig> rig_ = Rig::Make(GetParam());
  Side a_, b_;
  Completions done_;
};

TEST_P(TransportTest, SaysWhoItIs) {
  SetUpSides(4096);
  EXPECT_FALSE(a_.transport->capabilities().name.empty());
  EXPECT_GT(a_.transport->capabilities().operation_bytes, 0u);
  EXPECT_THAT(a_.transport->Describe(), HasSubstr(rig_->describes()));
  EXPECT_LE(a_.transport->LocalAddress().size(), 512u);
  EXPECT_LE(a_.key.size(), 512u);
  EXPECT_EQ(a_.transport->LocalAddress(), a_.transport->LocalAddress());
  EXPECT_NE(a_.transport->LocalAddress(), b_.transport->LocalAddress());
}

TEST_P(TransportTest, PutAndGetMoveAnySizeAtAnyAlignmentAndNothingElse) {
  constexpr uint64_t kMiB = 1 << 20;
  SetUpSides(3 * kMiB);
  size_t expected = 0;
  for (uint64_t length :
       {uint64_t{1}, uint64_t{7}, uint64_t{64}, uint64_t{65}, uint64_t{4097}, kMiB, kMiB + 1, 2 * kMiB + 5}) {
    for (uint64_t skew : {0, 1, 4093}) {
      const uint64_t from = 4096 + skew, to = 2 * 4096 - skew;
      ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, from, a_.remote, to, length, expected).ok());
      ASSERT_TRUE(Drive(++expected));
      EXPECT_EQ(DoneAtA().back().code, Code::kOk);
      EXPECT_EQ(DoneAtA().back().kind, OperationKind::kPut);
      EXPECT_TRUE(b_.memory->Holds(kSource, to, length, from)) << length << " skew " << skew;
      EXPECT_TRUE(b_.memory->HoldsOutside(kTarget, to, length)) << length << " skew " << skew;
      // And back, with bytes that only the target has had.
      b_.memory->Fill(kTarget);
      ASSERT_TRUE(a_.transport->Get(a_.peer, a_.region, from, a_.remote, to, length, expected).ok());
      ASSERT_TRUE(Drive(++expected));
      EXPECT_EQ(DoneAtA().back().code, Code::kOk);
      EXPECT_EQ(DoneAtA().back().kind, OperationKind::kGet);
      EXPECT_TRUE(a_.memory->Holds(kTarget, from, length, to)) << length << " skew " << skew;
      EXPECT_TRUE(a_.memory->HoldsOutside(kSource, from, length)) << length << " skew " << skew;
      a_.memory->Fill(kSource);
    }
  }
  const Transport::Counters counters = a_.transport->counters();
  EXPECT_EQ(counters.puts, expected / 2);
  EXPECT_EQ(counters.gets, expected / 2);
  EXPECT_EQ(counters.put_bytes, counters.get_bytes);
  EXPECT_EQ(counters.failures, 0u);
  EXPECT_EQ(counters.registrations, 1u);
}

TEST_P(TransportTest, OperationsOfNoBytesComplete) {
  SetUpSides(4096);
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 0, 1).ok());
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 4096, a_.remote, 4096, 0, 2).ok());
  ASSERT_TRUE(a_.transport->Get(a_.peer, a_.region, 4096, a_.remote, 4096, 0, 3).ok());
  ASSERT_TRUE(Drive(3));
  for (const Completion& completion : DoneAtA()) EXPECT_EQ(completion.code, Code::kOk);
  EXPECT_TRUE(b_.memory->HoldsOutside(kTarget, 0, 0));
}

TEST_P(TransportTest, RegionOfNoBytesServesOperationsOfNoBytesOnly) {
  SetUpSides(4096);
  const RegionId empty = a_.transport->RegisterRegion(nullptr, 0).value();
  const RegionId empty_too = b_.transport->RegisterRegion(b_.memory->data(), 0).value();
  const RemoteRegionId remote =
      a_.transport->ImportRegion(a_.peer, b_.transport->ExportRegion(empty_too)).value();
  EXPECT_TRUE(a_.transport->Put(a_.peer, empty, 0, remote, 0, 0, 7).ok());
  EXPECT_TRUE(a_.transport->Get(a_.peer, empty, 0, remote, 0, 0, 8).ok());
  EXPECT_EQ(a_.transport->Put(a_.peer, a_.region, 0, remote, 0, 1, 9).code(), Code::kInvalidArgument);
  EXPECT_EQ(a_.transport->Get(a_.peer, empty, 0, a_.remote, 0, 1, 10).code(), Code::kInvalidArgument);
  ASSERT_TRUE(Drive(2));
  EXPECT_EQ(DoneAtA().size(), 2u);
  EXPECT_TRUE(a_.transport->DeregisterRegion(empty).ok());
}

// `length` bytes of address space that map a window of shared memory repeatedly, followed by a guard page of
// their own. So a test of 3 GiB needs only the window's memory. The window's size is an odd number of MiB, so
// an offset that 32-bit arithmetic gets wrong hits other bytes.
class Repeated {
 public:
  static constexpr uint64_t kWindow = 61 << 20;
  explicit Repeated(uint64_t length) : window_(kWindow), guard_(4096) {
    space_ = (length + kWindow - 1) / kWindow * kWindow;
    void* base = mmap(nullptr, space_ + guard_.length(), PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(base, MAP_FAILED);
    data_ = static_cast<uint8_t*>(base);
    for (uint64_t at = 0; at < space_; at += kWindow) Map(at, window_);
    Map(space_, guard_);
  }
  ~Repeated() { munmap(data_, space_ + guard_.length()); }
  // The offset at which a range of `length` bytes ends at the guard page.
  uint64_t Offset(uint64_t length) const { return space_ - length; }
  uint8_t* data() { return data_; }
  uint64_t length() const { return space_ + guard_.length(); }
  Memory& window() { return window_; }
  Memory& guard() { return guard_; }

 private:
  void Map(uint64_t at, Memory& memory) {
    EXPECT_NE(
        mmap(data_ + at, memory.length(), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memory.fd(), 0),
        MAP_FAILED);
  }
  Memory window_, guard_;
  uint64_t space_ = 0;
  uint8_t* data_ = nullptr;
};

TEST_P(TransportTest, MovesMoreThanThreeGiBInOneOperation) {
  constexpr uint64_t kLength = (uint64_t{3} << 30) + 1;
  if (GetParam() == "ofi_tcp_two_rails") GTEST_SKIP() << "the same paths as ofi_tcp and ofi_shm";
  if (MemoryAvailable() < uint64_t{1} << 30) GTEST_SKIP() << "less than 1 GiB of memory is free";
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "too slow under a sanitizer";
#endif
  a_.transport = rig_->NewTransport();
  b_.transport = rig_->NewTransport();
  Repeated source(kLength), target(kLength);
  source.window().Fill(kSource);
  target.window().Fill(kTarget);
  target.guard().Fill(kTarget);
  a_.region = a_.transport->RegisterRegion(source.data(), source.length()).value();
  b_.region = b_.transport->RegisterRegion(target.data(), target.length()).value();
  b_.key = b_.transport->ExportRegion(b_.region);
  Introduce(&a_, b_);
  const uint64_t offset = source.Offset(kLength);
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, offset, a_.remote, offset, kLength, 5).ok());
  ASSERT_TRUE(Drive(1, 0, 60'000));
  EXPECT_EQ(DoneAtA().size(), 1u);
  EXPECT_EQ(DoneAtA()[0].code, Code::kOk);
  EXPECT_TRUE(target.window().HoldsOutside(kSource, 0, 0));
  EXPECT_TRUE(target.guard().HoldsOutside(kTarget, 0, 0));
  EXPECT_EQ(a_.transport->counters().put_bytes, kLength);
  a_.transport.reset();
  b_.transport.reset();
}

TEST_P(TransportTest, TenThousandOutstandingCompleteOnceEach) {
  constexpr uint64_t kCount = 10'000, kSize = 96;
  SetUpSides(kCount * kSize);
  for (uint64_t i = 0; i < kCount; i++)
    ASSERT_TRUE(
        a_.transport->Put(a_.peer, a_.region, i * kSize, a_.remote, (kCount - 1 - i) * kSize, kSize, i).ok());
  ASSERT_TRUE(Drive(kCount));
  std::set<uint64_t> contexts;
  for (const Completion& completion : DoneAtA()) {
    EXPECT_EQ(completion.code, Code::kOk);
    EXPECT_EQ(completion.peer, a_.peer);
    contexts.insert(completion.context);
  }
  EXPECT_EQ(DoneAtA().size(), kCount);
  EXPECT_EQ(contexts.size(), kCount);
  EXPECT_EQ(*contexts.rbegin(), kCount - 1);
  for (uint64_t i = 0; i < kCount; i++)
    ASSERT_TRUE(b_.memory->Holds(kSource, (kCount - 1 - i) * kSize, kSize, i * kSize)) << i;
}

TEST_P(TransportTest, RefusesMoreThanTheLimitOutstanding) {
  SetUpSides(4096);
  for (size_t i = 0; i < kOperationsOutstandingMax; i++)
    ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 0, i).ok());
  const Status refused = a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 0, 0);
  EXPECT_EQ(refused.code(), Code::kNoSpace);
  EXPECT_THAT(refused.message(), HasSubstr("65536"));
  ASSERT_TRUE(Drive(kOperationsOutstandingMax));
  EXPECT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 0, 0).ok());
  ASSERT_TRUE(Drive(kOperationsOutstandingMax + 1));
}

TEST_P(TransportTest, BothDirectionsAtOnce) {
  constexpr uint64_t kPieces = 24, kPiece = 200'000;
  SetUpSides(kPieces * kPiece * 2);
  const uint64_t half = kPieces * kPiece;
  for (uint64_t i = 0; i < kPieces; i++) {
    // a's first half goes to b's second half, and b's first half to a's second half: one half by puts, the
    // other by gets.
    Transport* a = a_.transport.get();
    Transport* b = b_.transport.get();
    const uint64_t at = i * kPiece;
    ASSERT_TRUE(i % 2 == 0 ? a->Put(a_.peer, a_.region, at, a_.remote, half + at, kPiece, i).ok()
                           : b->Get(b_.peer, b_.region, half + at, b_.remote, at, kPiece, i).ok());
    ASSERT_TRUE(i % 2 == 0 ? b->Put(b_.peer, b_.region, at, b_.remote, half + at, kPiece, i).ok()
                           : a->Get(a_.peer, a_.region, half + at, a_.remote, at, kPiece, i).ok());
  }
  ASSERT_TRUE(Drive(kPieces, kPieces));
  for (auto& [transport, list] : done_)
    for (const Completion& completion : list) EXPECT_EQ(completion.code, Code::kOk);
  EXPECT_TRUE(b_.memory->Holds(kSource, half, half, 0));
  EXPECT_TRUE(a_.memory->Holds(kTarget, half, half, 0));
  EXPECT_TRUE(a_.memory->Holds(kSource, 0, half, 0));
  EXPECT_TRUE(b_.memory->Holds(kTarget, 0, half, 0));
}

TEST_P(TransportTest, TwoTargetsShareTheLink) {
  if (!rig_->shares_bandwidth())
    GTEST_SKIP() << GetParam() << " has no link to share: it copies in the order of acceptance";
  constexpr uint64_t kSize = 1 << 20;
  const uint64_t count_each = InGuest() ? 24 : 48;
  SetUpSides(4 * kSize);
  Side c;
  c.transport = rig_->NewTransport();
  c.memory = std::make_unique<Memory>(4 * kSize);
  c.region = c.transport->RegisterRegion(c.memory->data(), c.memory->length()).value();
  const PeerId peer_c = a_.transport->Connect(c.transport->LocalAddress()).value();
  const RemoteRegionId remote_c =
      a_.transport->ImportRegion(peer_c, c.transport->ExportRegion(c.region)).value();
  // Both are connected before the measurement.
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 1, 0).ok());
  ASSERT_TRUE(a_.transport->Put(peer_c, a_.region, 0, remote_c, 0, 1, 0).ok());
  const std::vector<Transport*> all = {a_.transport.get(), b_.transport.get(), c.transport.get()};
  ASSERT_TRUE(PollUntil(rig_.get(), all, &done_, [&] { return DoneAtA().size() == 2; }));
  DoneAtA().clear();
  // All of b's work is queued before the first of c's.
  for (uint64_t i = 0; i < count_each; i++)
    ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, (i % 4) * kSize, kSize, i).ok());
  for (uint64_t i = 0; i < count_each; i++)
    ASSERT_TRUE(a_.transport->Put(peer_c, a_.region, 0, remote_c, (i % 4) * kSize, kSize, i).ok());
  auto finished = [&](PeerId peer) {
    return static_cast<uint64_t>(
        std::count_if(DoneAtA().begin(), DoneAtA().end(), [&](auto& d) { return d.peer == peer; }));
  };
  ASSERT_TRUE(PollUntil(rig_.get(), all, &done_,
                        [&] { return finished(a_.peer) == count_each || finished(peer_c) == count_each; }));
  EXPECT_GE(std::min(finished(a_.peer), finished(peer_c)), count_each / 3);
  ASSERT_TRUE(PollUntil(rig_.get(), all, &done_, [&] { return DoneAtA().size() == 2 * count_each; }));
}

TEST_P(TransportTest, DeregisteredRegionIsRefusedAndTheRestGoesOn) {
  if (!rig_->deaf().empty()) GTEST_SKIP() << rig_->deaf();
  SetUpSides(1 << 20);
  Memory other(4096);
  other.Fill(kTarget);
  const RegionId other_region = b_.transport->RegisterRegion(other.data(), other.length()).value();
  const RemoteRegionId other_remote =
      a_.transport->ImportRegion(a_.peer, b_.transport->ExportRegion(other_region)).value();
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 100, 1).ok());
  ASSERT_TRUE(Drive(1));
  EXPECT_EQ(DoneAtA()[0].code, Code::kOk);
  ASSERT_TRUE(b_.transport->DeregisterRegion(b_.region).ok());
  b_.memory->Fill(kTarget);
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 1 << 20, 2).ok());
  ASSERT_TRUE(Drive(2));
  ASSERT_TRUE(a_.transport->Get(a_.peer, a_.region, 0, a_.remote, 0, 4096, 3).ok());
  ASSERT_TRUE(Drive(3));
  for (int i : {1, 2}) {
    if (rig_->names_refusals())
      EXPECT_EQ(DoneAtA()[i].code, Code::kInvalidArgument);
    else if (!rig_->refuses_revoked())
      EXPECT_EQ(DoneAtA()[i].code, Code::kOk);
    else if (!rig_->reconnects())
      EXPECT_EQ(DoneAtA()[i].code, Code::kPeerGone);
    else
      EXPECT_THAT(DoneAtA()[i].code, AnyOf(Code::kInvalidArgument, Code::kLinkFailed));
  }
  if (rig_->refuses_revoked()) {
    EXPECT_TRUE(b_.memory->HoldsOutside(kTarget, 0, 0));
  }
  if (!rig_->reconnects()) return;
  // Another region of the same peer still works.
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 5, other_remote, 9, 1000, 4).ok());
  ASSERT_TRUE(Drive(4));
  EXPECT_EQ(DoneAtA()[3].code, Code::kOk);
  EXPECT_TRUE(other.Holds(kSource, 9, 1000, 5));
  // So does the other direction.
  ASSERT_TRUE(b_.transport->Get(b_.peer, other_region, 0, b_.remote, 0, 4096, 5).ok());
  ASSERT_TRUE(Drive(4, 1));
  EXPECT_EQ(done_[b_.transport.get()][0].code, Code::kOk);
}

TEST_P(TransportTest, RegionInUseIsNotDeregistered) {
  SetUpSides(1 << 20);
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 1 << 20, 1).ok());
  EXPECT_EQ(a_.transport->DeregisterRegion(a_.region).code(), Code::kInvalidArgument);
  ASSERT_TRUE(Drive(1));
  EXPECT_TRUE(a_.transport->DeregisterRegion(a_.region).ok());
  EXPECT_EQ(a_.transport->DeregisterRegion(a_.region).code(), Code::kInvalidArgument);
  EXPECT_TRUE(a_.transport->ExportRegion(a_.region).empty());
}

TEST_P(TransportTest, RegionsHaveALimit) {
  auto transport = rig_->NewTransport();
  Memory memory(4096);
  std::vector<RegionId> regions;
  for (size_t i = 0; i < kRegionsMax; i++)
    regions.push_back(transport->RegisterRegion(memory.data(), memory.length()).value());
  const auto refused = transport->RegisterRegion(memory.data(), memory.length());
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kNoSpace);
  EXPECT_THAT(refused.status().message(), HasSubstr("64"));
  EXPECT_TRUE(transport->DeregisterRegion(regions[3]).ok());
  EXPECT_TRUE(transport->RegisterRegion(memory.data(), memory.length()).ok());
}

TEST_P(TransportTest, RefusesWhatMakesNoSense) {
  SetUpSides(4096);
  Transport& t = *a_.transport;
  EXPECT_EQ(t.Put(a_.peer + 100, a_.region, 0, a_.remote, 0, 1, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(t.Put(a_.peer, a_.region + 100, 0, a_.remote, 0, 1, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(t.Put(a_.peer, a_.region, 0, a_.remote + 100, 0, 1, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(t.Put(a_.peer, a_.region, 4096, a_.remote, 0, 1, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(t.Put(a_.peer, a_.region, 0, a_.remote, 4096, 1, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(t.Get(a_.peer, a_.region, 0, a_.remote, 1, 4096, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(t.Get(a_.peer, a_.region, UINT64_MAX, a_.remote, 0, 2, 0).code(), Code::kInvalidArgument);
  EXPECT_EQ(t.Put(a_.peer, a_.region, 2, a_.remote, 0, UINT64_MAX - 1, 0).code(), Code::kInvalidArgument);
  EXPECT_THAT(t.Put(a_.peer, a_.region, 0, a_.remote, 4000, 97, 0).message(), HasSubstr("4000"));
  EXPECT_FALSE(t.RegisterRegion(nullptr, 1).ok());
  // A region of another peer is refused.
  const PeerId again = t.Connect(b_.transport->LocalAddress()).value();
  EXPECT_EQ(t.Put(again, a_.region, 0, a_.remote, 0, 1, 0).code(), Code::kInvalidArgument);
  Completion completion;
  EXPECT_EQ(t.Poll(&completion, 1), 0u) << "a refused operation must not complete";
}

TEST_P(TransportTest, RefusesBytesThatAreNoAddressAndNoKey) {
  SetUpSides(4096);
  Transport& t = *a_.transport;
  const std::string address = b_.transport->LocalAddress();
  for (const std::string& bad :
       {std::string(), std::string("hello"), std::string(5000, 'x'), address.substr(1),
        address.substr(0, address.size() - 1), address + "x", b_.key}) {
    const auto refused = t.Connect(bad);
    ASSERT_FALSE(refused.ok()) << bad.size() << " bytes";
    EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
    EXPECT_FALSE(refused.status().message().empty());
  }
  for (const std::string& bad :
       {std::string(), std::string("hello"), std::string(5000, 'x'), b_.key.substr(1),
        b_.key.substr(0, b_.key.size() - 1), b_.key + "x", address}) {
    const auto refused = t.ImportRegion(a_.peer, bad);
    ASSERT_FALSE(refused.ok()) << bad.size() << " bytes";
    EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  }
  // So are a key of another instance and an invalid peer.
  EXPECT_EQ(t.ImportRegion(a_.peer, a_.key).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(t.ImportRegion(a_.peer + 100, b_.key).status().code(), Code::kInvalidArgument);
}

TEST_P(TransportTest, DisconnectCompletesItselfAndEndsThePeer) {
  SetUpSides(4096);
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 10, 1).ok());
  ASSERT_TRUE(Drive(1));
  a_.transport->Disconnect(a_.peer);
  ASSERT_TRUE(Drive(2));
  EXPECT_EQ(DoneAtA()[1].kind, OperationKind::kDisconnect);
  EXPECT_EQ(DoneAtA()[1].peer, a_.peer);
  EXPECT_EQ(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 10, 1).code(), Code::kInvalidArgument);
  a_.transport->Disconnect(a_.peer);  // no effect
  const PeerId old = a_.peer;
  Introduce(&a_, b_);
  EXPECT_NE(a_.peer, old);
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 4096, 2).ok());
  ASSERT_TRUE(Drive(3));
  EXPECT_EQ(DoneAtA()[2].code, Code::kOk);
  EXPECT_TRUE(b_.memory->Holds(kSource, 0, 4096, 0));
  EXPECT_EQ(DoneAtA().size(), 3u);
}

TEST_P(TransportTest, DisconnectGivesQueuedOperationsBackFirst) {
  SetUpSides(1 << 20);
  for (uint64_t i = 0; i < 100; i++)
    ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 1 << 20, i).ok());
  a_.transport->Disconnect(a_.peer);
  ASSERT_TRUE(Drive(101));
  EXPECT_EQ(DoneAtA().size(), 101u);
  for (size_t i = 0; i < 100; i++) EXPECT_EQ(DoneAtA()[i].code, Code::kPeerGone);
  EXPECT_EQ(DoneAtA()[100].kind, OperationKind::kDisconnect);
}

// At every stage: nothing posted yet, bytes arriving, most of it done.
TEST_P(TransportTest, DisconnectInTheMiddleGivesEachOperationBackOnce) {
  if (GetParam() == "ucx_tcp")
    GTEST_SKIP() << "UCX 1.13's tcp may end the process that others were connecting to: docs/ucx.md";
  const uint64_t operation_bytes = InGuest() ? 256 << 10 : 2 << 20;
  constexpr uint64_t kOperations = 8;
  const int turns = InGuest() ? 20 : 60;
  SetUpSides(kOperations * operation_bytes);
  for (int turn = 0; turn < turns; turn++) {
    if (turn > 0) Introduce(&a_, b_);
    DoneAtA().clear();
    for (uint64_t i = 0; i < kOperations; i++) {
      const uint64_t at = i * operation_bytes;
      const Status started =
          i % 2 == 0 ? a_.transport->Get(a_.peer, a_.region, at, a_.remote, at, operation_bytes, i)
                     : a_.transport->Put(a_.peer, a_.region, at, a_.remote, at, operation_bytes, i);
      ASSERT_TRUE(started.ok()) << started.ToString();
    }
    // The first operation connects, which takes a while. After it, `turn` more polls.
    ASSERT_TRUE(Drive(turn % 2 == 0 ? 0 : 1));
    int polls = 0;
    PollUntil(
        rig_.get(), {a_.transport.get(), b_.transport.get()}, &done_, [&] { return ++polls > turn; }, 20'000);
    a_.transport->Disconnect(a_.peer);
    ASSERT_TRUE(Drive(kOperations + 1)) << "turn " << turn;
    std::set<uint64_t> contexts;
    for (const Completion& completion : DoneAtA()) {
      if (completion.kind == OperationKind::kDisconnect) continue;
      EXPECT_TRUE(completion.code == Code::kOk || completion.code == Code::kPeerGone)
          << CodeName(completion.code) << " turn " << turn;
      contexts.insert(completion.context);
    }
    EXPECT_EQ(DoneAtA().size(), kOperations + 1) << "turn " << turn;
    EXPECT_EQ(contexts.size(), kOperations) << "turn " << turn;
    EXPECT_EQ(DoneAtA().back().kind, OperationKind::kDisconnect);
  }
}

TEST_P(TransportTest, AnUnreachablePeerIsGoneOnTheFirstOperation) {
  if (!rig_->deaf().empty()) GTEST_SKIP() << rig_->deaf();
  SetUpSides(4096);
  const std::string address = b_.transport->LocalAddress();
  b_.transport.reset();
  Completion completion;
  ASSERT_TRUE(a_.transport->Get(a_.peer, a_.region, 0, a_.remote, 0, 4096, 42).ok());
  ASSERT_TRUE(PollUntil(rig_.get(), {}, nullptr, [&] { return a_.transport->Poll(&completion, 1) == 1; }));
  EXPECT_EQ(completion.code, Code::kPeerGone);
  EXPECT_EQ(completion.context, 42u);
}

TEST_P(TransportTest, WakeEndsWaitOnceOrInAdvance) {
  auto transport = rig_->NewTransport();
  transport->Wake();
  transport->Wait(UINT64_MAX);  // must return at once, or this test never ends
  std::atomic<int> rounds{0};
  std::atomic<bool> ended{false};
  std::thread loop([&] {
    while (!ended) {
      Completion completion;
      if (transport->Poll(&completion, 1) == 0) transport->Wait(UINT64_MAX);
      rounds++;
    }
  });
  for (int i = 0; i < 200; i++) {
    const int before = rounds;
    transport->Wake();
    while (rounds == before) std::this_thread::yield();
  }
  ended = true;
  transport->Wake();
  loop.join();
}

TEST_P(TransportTest, WaitTimesOut) {
  auto transport = rig_->NewTransport();
  const uint64_t start = NowUs();
  for (int i = 0; i < 5; i++) transport->Wait(2'000);
  transport->Wait(0);
  EXPECT_LT(NowUs() - start, 2'000'000u);
}

TEST_P(TransportTest, ATargetThatSleepsInWaitIsReached) {
  constexpr uint64_t kCount = 200, kSize = 64 << 10;
  SetUpSides(kCount * kSize);
  std::atomic<bool> ended{false};
  std::thread target([&] {
    Completion completion;
    while (!ended)
      if (b_.transport->Poll(&completion, 1) == 0) b_.transport->Wait(UINT64_MAX);
  });
  for (uint64_t i = 0; i < kCount; i++)
    ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, i * kSize, a_.remote, i * kSize, kSize, i).ok());
  size_t completed = 0;
  const uint64_t end = NowUs() + 20'000'000;
  while (completed < kCount && NowUs() < end) {
    Completion batch[16];
    const size_t count = a_.transport->Poll(batch, 16);
    if (count == 0) a_.transport->Wait(1'000'000);
    for (size_t i = 0; i < count; i++) EXPECT_EQ(batch[i].code, Code::kOk);
    completed += count;
  }
  EXPECT_EQ(completed, kCount);
  ended = true;
  b_.transport->Wake();
  target.join();
  EXPECT_TRUE(b_.memory->Holds(kSource, 0, kCount * kSize, 0));
}

// No Poll() between the call and Wait(), and so long after the last work that Wait() does not spin.
TEST_P(TransportTest, WaitStartsWhatWasSubmitted) {
  SetUpSides(4096);
  ASSERT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 8, 0).ok());
  ASSERT_TRUE(Drive(1));
  constexpr uint64_t kIdleUs = 20'000;
  for (const uint64_t end = NowUs() + kIdleUs; NowUs() < end;) a_.transport->Wait(kIdleUs);
  std::atomic<bool> ended{false};
  std::thread target([&] {
    Completion completion;
    while (!ended)
      if (b_.transport->Poll(&completion, 1) == 0) b_.transport->Wait(UINT64_MAX);
  });
  constexpr uint64_t kLimitUs = 30'000'000;
  const uint64_t start = NowUs();
  EXPECT_TRUE(a_.transport->Put(a_.peer, a_.region, 0, a_.remote, 0, 8, 1).ok());
  Completion completion{.code = Code::kInternal};
  do a_.transport->Wait(kLimitUs);
  while (a_.transport->Poll(&completion, 1) == 0 && NowUs() - start < kLimitUs);
  EXPECT_EQ(completion.code, Code::kOk);
  EXPECT_LT(NowUs() - start, kLimitUs);
  ended = true;
  b_.transport->Wake();
  target.join();
}

#ifndef ROPETEAM_HAVE_OFI
TEST(AbsentTransportTest, Ofi) { GTEST_SKIP() << "this build is without libfabric"; }
#endif

// Transports that cannot run here are counted as skipped tests, with the reason.
class AbsentTransport : public testing::TestWithParam<std::string> {};
TEST_P(AbsentTransport, CannotRunHere) { GTEST_SKIP() << FindKind(GetParam())->absent(); }
INSTANTIATE_TEST_SUITE_P(Of, AbsentTransport, testing::ValuesIn(AbsentKindNames()),
                         [](const auto& info) { return info.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(AbsentTransport);

INSTANTIATE_TEST_SUITE_P(Every, TransportTest, testing::ValuesIn(TransportKinds()),
                         [](const auto& info) { return info.param; });

}  // namespace
}  // namespace ropeteam::test
