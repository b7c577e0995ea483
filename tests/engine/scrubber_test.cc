// SPDX-License-Identifier: Apache-2.0
//
// The scrub finds bad chunks that are never read, and repairs them from the other node.

#include "core/engine/scrubber.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "core/store/format.h"
#include "tests/engine/engines_for_test.h"

namespace ropeteam {
namespace {

using engine::Scrubber;

constexpr uint64_t kRate = 1'000'000;
constexpr TimeUs kSecond = 1'000'000;
constexpr TimeUs kPass = Scrubber::kPassIntervalUs;

class ScrubberTest : public ::testing::Test, protected Engines {
 protected:
  ScrubberTest() : Engines(2, 256, kRate) {}
};
class ScrubberOff : public ::testing::Test, protected Engines {
 protected:
  ScrubberOff() : Engines(2, 256, 0) {}
};
class ScrubberAlone : public ::testing::Test, protected Engines {
 protected:
  ScrubberAlone() : Engines(1, 256, kRate) {}
};

TEST_F(ScrubberTest, AFlippedBitOfEitherCopyIsFoundAndRepairedFromTheOther) {
  const TestShard shard(6, 'a');
  Save(1, 1, shard);
  const ShardId id = Id(1, 0);
  ASSERT_TRUE(Replicated(id));
  PassTime(2 * kPass);
  EXPECT_EQ(node(1).counters().chunks_bad, 0u);
  node(1).Flip(id, 2);
  node(2).Flip(id, 5);
  ASSERT_NE(node(1).Copy(id), shard.stream);
  ASSERT_NE(node(2).Copy(id), shard.stream);
  PassTime(kPass + kSecond);
  EXPECT_TRUE(node(1).Copy(id) == shard.stream);
  EXPECT_TRUE(node(2).Copy(id) == shard.stream);
  for (const NodeId each : {1, 2}) {
    EXPECT_EQ(node(each).counters().chunks_bad, 1u);
    EXPECT_EQ(node(each).counters().chunks_repaired, 1u);
    EXPECT_TRUE(node(each).store->Find(id)->bad.empty());
  }
}

TEST_F(ScrubberTest, ManyFlippedChunksAreRepairedInOnePass) {
  const TestShard shard(60, 'b');
  Save(1, 1, shard);
  Save(1, 2, shard);
  PassTime(kPass);
  for (uint32_t chunk = 0; chunk < 60; chunk += 3) node(2).Flip(Id(1, 0), chunk);
  node(2).Flip(Id(2, 0), 60);
  PassTime(kPass + kSecond);
  EXPECT_TRUE(node(2).Copy(Id(1, 0)) == shard.stream);
  EXPECT_TRUE(node(2).Copy(Id(2, 0)) == shard.stream);
  EXPECT_EQ(node(2).counters().chunks_repaired, 21u);
}

TEST_F(ScrubberOff, ItNeverReadsAndNeverWakes) {
  Save(1, 1, TestShard(6, 'c'));
  PassTime(kSecond);
  uint64_t checks = 0;
  on_check_ = [&](TestNode&, const StartCheck&) { ++checks; };
  const uint64_t timers = node(2).timers;
  node(2).Flip(Id(1, 0), 2);
  node(2).store->ExpectTableDamage();
  PassTime(1000 * kSecond);
  EXPECT_EQ(checks, 0u);
  EXPECT_EQ(node(2).timers, timers);
  EXPECT_EQ(node(2).engine->Report().scrub.bytes_per_s, 0u);
  EXPECT_EQ(node(2).engine->Report().scrub.passes, 0u);
}

TEST_F(ScrubberTest, AnEmptyArenaCostsAFewTimersAPass) {
  PassTime(kSecond);
  const uint64_t timers = node(2).timers;
  const uint64_t passes = node(2).engine->Report().scrub.passes;
  PassTime(10 * kPass);
  EXPECT_LE(node(2).timers - timers, 30u);  // the table check, the pass, and reports to the leader
  EXPECT_EQ(node(2).engine->Report().scrub.passes - passes, 10u);
}

// The leading node has other timers too; node 2 has only those of the scrub.
TEST_F(ScrubberTest, ItReadsOnePieceAtATimeAndNoFasterThanTheRate) {
  const TestShard shard(100, 'd');
  Save(1, 1, shard);
  Save(1, 2, shard);  // 202 chunks, 827 KB; the next pass begins ten seconds later
  PassTime(kPass);
  const TimeUs begin = now_;
  uint64_t bytes = 0;
  TimeUs last = 0;
  on_check_ = [&](TestNode& at, const StartCheck& check) {
    if (at.id != 2) return;
    uint64_t piece = 0;
    for (const StartCheck::Range& range : check.ranges) piece += range.length;
    EXPECT_LE(piece, kRate * Scrubber::kPieceIntervalUs / kSecond);
    if (last != 0) {
      EXPECT_GE(now_ - last, Scrubber::kPieceIntervalUs);
    }
    last = now_;
    EXPECT_LE(bytes, kRate * (now_ - begin) / kSecond);  // without this piece
    bytes += piece;
    EXPECT_EQ(
        std::count_if(checks_.begin(), checks_.end(), [](const auto& each) { return each.first->id == 2; }),
        1);
  };
  PassTime(kPass);
  EXPECT_EQ(bytes, 2 * shard.stream.size());
  const ScrubReport scrub = node(2).engine->Report().scrub;
  EXPECT_EQ(scrub.pass_bytes, bytes);
  EXPECT_GE(scrub.pass_us, bytes * kSecond / kRate - 2 * Scrubber::kPieceIntervalUs);
  EXPECT_LE(scrub.pass_us, bytes * kSecond / kRate * 12 / 10);
}

TEST_F(ScrubberTest, TheNextPieceWaitsForTheLast) {
  Save(1, 1, TestShard(100, 'e'));
  PassTime(kPass - kSecond);
  hold_checks_ = true;
  PassTime(60 * kSecond);
  EXPECT_EQ(checks_.size(), 2u);  // one per node
  hold_checks_ = false;
  EndChecks();
  const uint64_t passes = node(2).engine->Report().scrub.passes;
  PassTime(kPass);
  EXPECT_GT(node(2).engine->Report().scrub.passes, passes);
}

// When the result of the check comes, the shard's chunks have been reused.
TEST_F(ScrubberTest, AShardThatIsReleasedWhileItIsReadIsNotRepaired) {
  Save(1, 1, TestShard(9, 'f'));
  PassTime(kPass - kSecond);
  const ShardId id = Id(1, 0);
  const uint32_t first = node(2).store->Find(id)->extents[0].first;
  hold_checks_ = true;
  PassTime(3 * kSecond);
  ASSERT_FALSE(checks_.empty());
  node(1).store->Remove(id);
  node(2).store->Remove(id);
  const auto grant = *node(2).store->Allocate(10);
  ASSERT_EQ(grant[0].first, first);
  std::memset(node(2).store->chunk(first), 0x5a, kTestChunk);
  hold_checks_ = false;
  Carry();
  EXPECT_EQ(node(2).counters().chunks_bad, 0u);
  node(2).store->Free(grant);
}

TEST_F(ScrubberTest, ADamagedTableIsRepairedWithinTenSecondsAndCounted) {
  Save(1, 1, TestShard(9, 'g'));
  PassTime(kPass / 2);
  Store& store = *node(2).store;
  const uint32_t first = store.Find(Id(1, 0))->extents[0].first;
  auto* slots = reinterpret_cast<arena::Slot*>(node(2).memory + sizeof(arena::Superblock));
  store.ExpectTableDamage();
  slots[first].step ^= 1;
  slots[first + 1].state = 0x80;
  ASSERT_EQ(store.CountTableDamage(), 2u);
  PassTime(kPass);
  EXPECT_EQ(store.CountTableDamage(), 0u);
  EXPECT_EQ(node(2).counters().table_repairs, 2u);
  EXPECT_EQ(node(1).counters().table_repairs, 0u);
}

// No other copy exists. The chunk stays marked as bad and is not read again; its repair is tried once a
// minute.
TEST_F(ScrubberAlone, WhatCannotBeRepairedIsTriedOnceAMinute) {
  const TestShard shard(6, 'h');
  Save(1, 1, shard);
  const ShardId id = Id(1, 0);
  PassTime(kPass);
  node(1).Flip(id, 3);
  PassTime(kPass + kSecond);
  EXPECT_THAT(node(1).store->Find(id)->bad, ::testing::ElementsAre(3));
  EXPECT_EQ(node(1).counters().chunks_bad, 1u);
  PassTime(300 * kSecond);
  EXPECT_GE(node(1).counters().chunks_bad, 5u);
  EXPECT_LE(node(1).counters().chunks_bad, 7u);
  // If the chunk becomes good by other means (for example a bit flips back), it is no longer marked as bad.
  node(1).Flip(id, 3);
  PassTime(Scrubber::kRepairAgainUs + 2 * kPass);
  EXPECT_TRUE(node(1).store->Find(id)->bad.empty());
}

TEST_F(ScrubberTest, TheReportTellsWhenTheLastPassEnded) {
  EXPECT_EQ(node(1).engine->Report().scrub.bytes_per_s, kRate);
  PassTime(kSecond);
  const ScrubReport first = node(1).engine->Report().scrub;
  EXPECT_EQ(first.passes, 1u);
  PassTime(3 * kSecond);
  node(1).engine->OnTimer(now_);  // the report's times are those of the last input
  const ScrubReport later = node(1).engine->Report().scrub;
  EXPECT_EQ(later.passes, 1u);
  EXPECT_GE(later.pass_ended_us_ago, 3 * kSecond);
  EXPECT_LE(later.pass_ended_us_ago, 4 * kSecond);
}

}  // namespace
}  // namespace ropeteam
