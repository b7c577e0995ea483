// SPDX-License-Identifier: Apache-2.0
//
// The front that the fabrics share, without a fabric: its tables, counters, round-robin, wake-ups, and
// messages of refusals.

#include "transport/front/front.h"

#include <gmock/gmock.h>
#include <sys/resource.h>

#include <set>
#include <thread>
#include <vector>

namespace ropeteam::front {
namespace {

using testing::AllOf;
using testing::HasSubstr;

struct Region : LocalRegion {
  std::vector<int>* log = nullptr;
  int name = 0;
  ~Region() {
    if (log != nullptr) log->push_back(name);
  }
};
struct Remote : PeerRegion {};
struct Operation : Accepted<Operation, Region, Remote> {};

std::unique_ptr<Region> RegionOf(uint64_t length) {
  auto region = std::make_unique<Region>();
  region->length = length;
  return region;
}

RegionId AddTo(RegionTable<Region>* table, uint64_t length) {
  EXPECT_TRUE(table->Reserve().ok());
  return table->Add(RegionOf(length));
}

TEST(FrontRegions, ARegionInUseStaysUntilItIsReleased) {
  RegionTable<Region> table;
  const RegionId id = AddTo(&table, 100);
  Region* first = nullptr;
  Region* second = nullptr;
  ASSERT_TRUE(table.Acquire(id, 0, 100, &first).ok());
  ASSERT_TRUE(table.Acquire(id, 100, 0, &second).ok());
  EXPECT_EQ(first, second);
  const auto refused = table.Remove(id);
  EXPECT_EQ(refused.status().code(), Code::kInvalidArgument);
  EXPECT_THAT(refused.status().message(), HasSubstr("2 operations"));
  RegionTable<Region>::Release(first);
  EXPECT_FALSE(table.Remove(id).ok());
  RegionTable<Region>::Release(second);
  EXPECT_TRUE(table.Remove(id).ok());
  EXPECT_EQ(table.Remove(id).status().message(), NotRegistered(id).message());
  EXPECT_EQ(table.Acquire(id, 0, 0, &first).code(), Code::kInvalidArgument);
}

TEST(FrontRegions, ARangeOutsideIsRefusedWithValueAndLimit) {
  RegionTable<Region> table;
  const RegionId id = AddTo(&table, 100);
  Region* region = nullptr;
  for (const auto& [offset, length] : std::vector<std::pair<uint64_t, uint64_t>>{
           {0, 101}, {100, 1}, {101, 0}, {UINT64_MAX, 2}, {2, UINT64_MAX}}) {
    const Status refused = table.Acquire(id, offset, length, &region);
    EXPECT_EQ(refused.code(), Code::kInvalidArgument) << offset << " + " << length;
    EXPECT_THAT(refused.message(),
                AllOf(HasSubstr("offset " + std::to_string(offset)), HasSubstr("100 bytes")));
  }
  EXPECT_EQ(region, nullptr);
  EXPECT_TRUE(table.Remove(id).ok()) << "a refused operation holds nothing";
}

TEST(FrontRegions, PlacesThatAreReservedCountAndCanBeUnreserved) {
  RegionTable<Region> table;
  for (size_t i = 0; i + 1 < kRegionsMax; i++) AddTo(&table, 1);
  ASSERT_TRUE(table.Reserve().ok());
  const Status full = table.Reserve();
  EXPECT_EQ(full.code(), Code::kNoSpace);
  EXPECT_THAT(full.message(), HasSubstr("limit 64"));
  table.Unreserve();
  EXPECT_NE(AddTo(&table, 1), 0u);
  EXPECT_EQ(table.registrations(), kRegionsMax);
}

TEST(FrontRegions, OnlyWhatIsExportedHasAKey) {
  RegionTable<Region> table;
  ASSERT_TRUE(table.Reserve().ok());
  auto hidden = RegionOf(1);
  hidden->exported = false;
  const RegionId dmabuf = table.Add(std::move(hidden)), plain = AddTo(&table, 7);
  const auto encode = [](const Region& region) { return std::to_string(region.length); };
  EXPECT_EQ(table.Export(plain, encode), "7");
  EXPECT_EQ(table.Export(dmabuf, encode), "");
  EXPECT_EQ(table.Export(999, encode), "");
}

// Concurrent registration, use and release: no region is destroyed while an operation uses it.
TEST(FrontRegions, OtherThreadsMayRegisterWhileTheLoopUses) {
  RegionTable<Region> table;
  std::vector<int> gone;
  std::atomic<RegionId> current{0};
  std::atomic<bool> stop{false};
  std::thread registrar([&] {
    for (int i = 0; i < 2'000; i++) {
      auto region = RegionOf(10);
      region->log = &gone;
      region->name = i;
      ASSERT_TRUE(table.Reserve().ok());
      const RegionId id = table.Add(std::move(region));
      current = id;
      while (!table.Remove(id).ok()) std::this_thread::yield();
    }
    stop = true;
  });
  uint64_t used = 0;
  while (!stop) {
    Region* region = nullptr;
    if (!table.Acquire(current, 0, 10, &region).ok()) continue;
    used += region->length;
    RegionTable<Region>::Release(region);
  }
  registrar.join();
  EXPECT_EQ(gone.size(), 2'000u);
  EXPECT_EQ(used % 10, 0u);
}

TEST(FrontRemotes, ARegionIsItsPeersAndGoesWithIt) {
  RemoteTable<Remote> table;
  const RemoteRegionId a = table.Add({{1, 10}}), b = table.Add({{2, 20}});
  Remote* stays = table.Find(b, 2);
  ASSERT_NE(stays, nullptr);
  EXPECT_EQ(table.Find(a, 2), nullptr);
  for (int i = 0; i < 1'000; i++) table.Add({{1, 1}});
  EXPECT_EQ(table.Find(b, 2), stays) << "operations point to it";
  table.Drop(1);
  EXPECT_EQ(table.Find(a, 1), nullptr);
  EXPECT_EQ(table.Find(b, 2), stays);
}

TEST(OperationTable, EachOperationComesOutOnceInTheOrderOfFinishing) {
  RegionTable<Region> regions;
  const RegionId id = AddTo(&regions, 100);
  OperationTable<Operation> table;
  std::vector<Operation*> operations;
  for (uint64_t i = 0; i < 5; i++) {
    Region* region = nullptr;
    ASSERT_TRUE(regions.Acquire(id, 0, 1, &region).ok());
    operations.push_back(table.Accept(region));
    operations.back()->context = i;
    operations.back()->length = 10;
    operations.back()->kind = i == 4 ? OperationKind::kGet : OperationKind::kPut;
  }
  EXPECT_FALSE(table.finished());
  for (const size_t i : {3, 0, 4}) table.Finish(operations[i], i == 0 ? Code::kLinkFailed : Code::kOk);
  table.FinishDisconnect(7);
  Completion out[8];
  ASSERT_EQ(table.Take(out, 2), 2u);
  EXPECT_EQ(out[0].context, 3u);
  EXPECT_EQ(out[1].context, 0u);
  EXPECT_EQ(out[1].code, Code::kLinkFailed);
  EXPECT_EQ(table.accepted(), 3u);
  ASSERT_EQ(table.Take(out, 8), 2u);
  EXPECT_EQ(out[0].context, 4u);
  EXPECT_EQ(out[1].kind, OperationKind::kDisconnect);
  EXPECT_EQ(out[1].peer, 7u);
  EXPECT_EQ(table.accepted(), 2u);
  EXPECT_EQ(table.Take(out, 8), 0u);
  EXPECT_THAT(regions.Remove(id).status().message(), HasSubstr("2 operations"));
  const Transport::Counters counters = table.counts().Read(regions.registrations());
  EXPECT_EQ(counters.registrations, 1u);
  EXPECT_EQ(counters.puts, 2u);
  EXPECT_EQ(counters.gets, 1u);
  EXPECT_EQ(counters.failures, 1u);
  EXPECT_EQ(counters.put_bytes, 10u);
  EXPECT_EQ(counters.get_bytes, 10u);
}

TEST(OperationTableDeathTest, FinishingTwiceEndsTheProcess) {
  RegionTable<Region> regions;
  const RegionId id = AddTo(&regions, 1);
  Region* region = nullptr;
  ASSERT_TRUE(regions.Acquire(id, 0, 1, &region).ok());
  OperationTable<Operation> table;
  Operation* operation = table.Accept(region);
  table.Finish(operation, Code::kOk);
  EXPECT_DEATH(table.Finish(operation, Code::kPeerGone), "kAccepted");
  Completion out;
  ASSERT_EQ(table.Take(&out, 1), 1u);
  EXPECT_DEATH(table.Finish(operation, Code::kOk), "kAccepted");
}

TEST(FrontQueue, OnlyTheHeadIsCutAndAnAbandonedOneLeaves) {
  Operation a, b;
  a.length = 10;
  b.length = 5;
  Queue<Operation> queue;
  queue.Push(&a);
  queue.Push(&b);
  queue.Cut(4);
  EXPECT_EQ(queue.head(), &a);
  queue.Cut(6);
  EXPECT_EQ(queue.head(), &b);
  EXPECT_FALSE(a.queued);
  queue.Abandon(&a);  // it has left the queue already
  EXPECT_EQ(queue.head(), &b);
  queue.Abandon(&b);
  EXPECT_TRUE(queue.empty());
}

struct Turner {
  bool listed = false;
  int work = 0;
};

TEST(FrontTurns, GoRoundUntilNobodyPosts) {
  Turner a{false, 3}, b{false, 1}, blocked{false, 5};
  Turns<Turner> turns;
  for (Turner* each : {&a, &blocked, &b, &a}) turns.Add(each);
  std::vector<Turner*> order;
  turns.Go(
      [&](Turner* each) {
        if (each == &blocked) return false;
        order.push_back(each);
        each->work--;
        return true;
      },
      [](Turner* each) { return each->work == 0; });
  EXPECT_EQ(order, (std::vector<Turner*>{&a, &b, &a, &a}));
  EXPECT_EQ(std::vector<Turner*>(turns.begin(), turns.end()), std::vector<Turner*>{&blocked});
  EXPECT_FALSE(a.listed);
}

TEST(FrontTurns, ATurnMayEndItsOwnTurns) {
  Turner a{false, 9}, b{false, 1};
  Turns<Turner> turns;
  turns.Add(&a);
  turns.Add(&b);
  turns.Go(
      [&](Turner* each) {
        if (each == &a) turns.Remove(&a);
        each->work--;
        return true;
      },
      [](Turner* each) { return each->work == 0; });
  EXPECT_EQ(a.work, 8);
  EXPECT_TRUE(turns.empty());
}

TEST(FrontPool, AnElementComesBackAsNew) {
  Pool<Operation> pool;
  std::set<Operation*> seen;
  for (int i = 0; i < 2'000; i++) seen.insert(pool.New());
  EXPECT_EQ(seen.size(), 2'000u);
  Operation* used = *seen.begin();
  used->context = 5;
  pool.Free(used);
  bool again = false;
  for (int i = 0; i < 100 && !again; i++) {
    Operation* fresh = pool.New();
    EXPECT_EQ(fresh->context, 0u);
    again = seen.contains(fresh);
  }
}

TEST(FrontRoundClock, ALateRoundCountsAsTheLongestOne) {
  RoundClock rounds;
  const TimeUs start = rounds.Advance(1'000'000'000);
  EXPECT_EQ(rounds.Advance(1'000'000'500), start + 500);
  EXPECT_EQ(rounds.Advance(1'000'000'500 + kRoundMaxUs), start + 500 + kRoundMaxUs);
  EXPECT_EQ(rounds.Advance(9'000'000'000), start + 500 + 2 * kRoundMaxUs);
  EXPECT_EQ(rounds.Advance(8'000'000'000), start + 500 + 2 * kRoundMaxUs) << "the clock went back";
  EXPECT_EQ(rounds.Advance(9'000'000'001), start + 501 + 2 * kRoundMaxUs);
  EXPECT_EQ(rounds.time(), start + 501 + 2 * kRoundMaxUs);
}

TEST(FrontWake, IsSeenOnceByWhoeverSleepsNext) {
  WakeFd wake;
  ASSERT_TRUE(wake.Open().ok());
  std::vector<pollfd> items{wake.item()};
  EXPECT_EQ(SleepOn(&items, 0), 0);
  EXPECT_FALSE(wake.Consume());
  for (int i = 0; i < 3; i++) wake.Wake();
  EXPECT_EQ(SleepOn(&items, UINT64_MAX), 1);
  EXPECT_TRUE(wake.Consume());
  EXPECT_FALSE(wake.Consume());
  EXPECT_EQ(SleepOn(&items, 0), 0) << "three calls were one";
  std::thread other([&] { wake.Wake(); });
  EXPECT_EQ(SleepOn(&items, UINT64_MAX), 1);
  other.join();
  wake.AfterSleep(items[0]);
  EXPECT_FALSE(wake.Consume());
  EXPECT_EQ(SleepOn(&items, 0), 0);
}

TEST(FrontChecks, NameTheValueAndTheLimit) {
  EXPECT_THAT(TooManyOperations(65536).message(),
              AllOf(HasSubstr("65536 operations"), HasSubstr("limit 65536")));
  EXPECT_EQ(TooManyOperations(65536).code(), Code::kNoSpace);
  EXPECT_TRUE(CheckMemory(nullptr, 0).ok());
  EXPECT_THAT(CheckMemory(nullptr, 9).message(), HasSubstr("9 bytes at a null pointer"));
  EXPECT_TRUE(CheckRange(UINT64_MAX, 0, UINT64_MAX, "region", 1).ok());
  EXPECT_THAT(CheckRange(1, UINT64_MAX, 5, "remote region", 3).message(),
              HasSubstr("remote region 3 of 5 bytes"));
}

class FrontMemoryLimit : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_EQ(getrlimit(RLIMIT_MEMLOCK, &old_), 0);
    rlimit low = old_;
    low.rlim_cur = std::min<rlim_t>(old_.rlim_max, 65536);
    limit_ = low.rlim_cur;
    ASSERT_EQ(setrlimit(RLIMIT_MEMLOCK, &low), 0);
  }
  void TearDown() override { setrlimit(RLIMIT_MEMLOCK, &old_); }
  rlimit old_{};
  uint64_t limit_ = 0;
};

TEST_F(FrontMemoryLimit, IsNamedWithWhatIsNeededAndWhatToSet) {
  for (const int error : {ENOMEM, EAGAIN}) {
    const Status refused = RegistrationError(error, "words of the library", "efa_0", uint64_t{1} << 40);
    EXPECT_EQ(refused.code(), Code::kNoSpace);
    EXPECT_THAT(
        refused.message(),
        AllOf(HasSubstr("1099511627776 bytes with efa_0"), HasSubstr("words of the library"),
              HasSubstr("is " + std::to_string(limit_) + " bytes"), HasSubstr("needed are 1099511627776"),
              HasSubstr("ulimit -l"), HasSubstr("LimitMEMLOCK=infinity")));
  }
  const Status other = RegistrationError(EFAULT, "bad address", "efa_0", 1);
  EXPECT_EQ(other.code(), Code::kIo);
  EXPECT_THAT(other.message(), AllOf(HasSubstr("bad address"), HasSubstr("14"), Not(HasSubstr("ulimit"))));
}

}  // namespace
}  // namespace ropeteam::front
