// SPDX-License-Identifier: Apache-2.0
//
// The state machine of one copy alone: every row of its two tables, and random events against a holder that
// keeps to the protocol.

#include "core/engine/outgoing_copy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

namespace ropeteam::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using State = OutgoingCopy::State;
using Chunk = OutgoingCopy::Chunk;

// Records what the copy asks for. A put stays queued until the test lets it leave.
class Recorder final : public CopyEffects {
 public:
  struct Put {
    uint32_t chunk = 0;
    bool device = false;
    bool queued = true;
  };
  void SendReserve(uint64_t chunks) override { reserved.push_back(chunks); }
  uint64_t StartPut(uint32_t chunk, const SaveDirectInput* device) override {
    puts[++last] = {chunk, device != nullptr, true};
    return last;
  }
  bool Withdraw(uint64_t transfer) override {
    const auto put = puts.find(transfer);
    if (put == puts.end() || !put->second.queued) return false;
    puts.erase(put);
    ++withdrawn;
    return true;
  }
  void SendArrived(const std::vector<uint32_t>& chunks) override {
    told.insert(told.end(), chunks.begin(), chunks.end());
  }
  void SendSeal(uint32_t attempt) override { seals.push_back(attempt); }
  void SendAbort(bool put_failed) override { aborts.push_back(put_failed); }

  std::vector<uint32_t> Chunks() const {
    std::vector<uint32_t> chunks;
    for (const auto& [transfer, put] : puts) chunks.push_back(put.chunk);
    return chunks;
  }

  std::vector<uint64_t> reserved;
  std::map<uint64_t, Put> puts;  // not ended yet
  uint64_t last = 0;
  int withdrawn = 0;
  std::vector<uint32_t> told;
  std::vector<uint32_t> seals;
  std::vector<bool> aborts;
};

class OutgoingCopyTest : public ::testing::Test {
 protected:
  explicit OutgoingCopyTest(size_t chunks = 6) { source_.ready.resize(chunks); }

  void Advance() {
    copy_.Advance(now_, source_, &effects_);
    copy_.CheckInvariants();
  }
  void Grant(uint32_t chunks) {
    copy_.Granted(1, 4096, {{100, chunks}});
    Advance();
  }
  void Fill(uint32_t first, uint32_t count) {
    for (uint32_t chunk = first; chunk < first + count; ++chunk) source_.ready[chunk] = true;
    copy_.ChecksumsKnown(first, count);
    Advance();
  }
  void Arrive(uint32_t chunk) {
    Ended(chunk);
    copy_.PutArrived(chunk, source_.ready[chunk]);
  }
  void ArriveAll() {
    while (!effects_.puts.empty()) {
      for (const uint32_t chunk : effects_.Chunks()) Arrive(chunk);
      Advance();
    }
  }
  void Ended(uint32_t chunk) {
    const auto put = std::find_if(effects_.puts.begin(), effects_.puts.end(),
                                  [&](const auto& each) { return each.second.chunk == chunk; });
    ASSERT_NE(put, effects_.puts.end());
    effects_.puts.erase(put);
  }
  void Leave() {
    for (auto& [transfer, put] : effects_.puts) put.queued = false;
  }
  // Every chunk is at the holder and the seal has been sent.
  void ToSealing() {
    Grant(6);
    Fill(0, 6);
    ArriveAll();
    source_.sealed = true;
    Advance();
    ASSERT_EQ(copy_.state(), State::kSealing);
  }

  TimeUs now_ = 1000;
  CopySource source_;
  Recorder effects_;
  OutgoingCopy copy_{{1, 7}, 2};
};

TEST_F(OutgoingCopyTest, GoesFromReservingToGone) {
  Advance();
  EXPECT_EQ(copy_.state(), State::kReserving);
  EXPECT_THAT(effects_.reserved, ElementsAre(6));
  Fill(0, 2);
  EXPECT_THAT(effects_.puts, IsEmpty());  // no holder has granted chunks yet
  Grant(6);
  EXPECT_EQ(copy_.state(), State::kSending);
  EXPECT_THAT(effects_.Chunks(), ElementsAre(0, 1));
  Fill(2, 4);
  ArriveAll();
  EXPECT_EQ(copy_.state(), State::kSending);  // the save is not sealed
  EXPECT_THAT(effects_.seals, IsEmpty());
  source_.sealed = true;
  Advance();
  EXPECT_EQ(copy_.state(), State::kSealing);
  EXPECT_THAT(effects_.seals, ElementsAre(0));
  copy_.Matched();
  EXPECT_EQ(copy_.state(), State::kGone);
  EXPECT_THAT(effects_.aborts, IsEmpty());
  EXPECT_EQ(copy_.NextSend(), kNever);
}

TEST_F(OutgoingCopyTest, WhatIsNotAnsweredIsRepeated) {
  Advance();
  EXPECT_EQ(copy_.NextSend(), now_ + kRepeatUs);
  Advance();
  EXPECT_EQ(effects_.reserved.size(), 1u);
  now_ += kRepeatUs;
  Advance();
  EXPECT_EQ(effects_.reserved.size(), 2u);
  ToSealing();
  EXPECT_EQ(effects_.seals.size(), 1u);
  now_ += kRepeatUs;
  Advance();
  EXPECT_THAT(effects_.seals, ElementsAre(0, 0));
  copy_.RepeatNow();
  Advance();
  EXPECT_THAT(effects_.seals, ElementsAre(0, 0, 0));
}

TEST_F(OutgoingCopyTest, ASaveThatGrowsExtendsTheReservation) {
  Advance();
  Grant(6);
  EXPECT_EQ(copy_.NextSend(), kNever);
  source_.ready.resize(8);
  Advance();
  EXPECT_THAT(effects_.reserved, ElementsAre(6, 8));
  EXPECT_NE(copy_.NextSend(), kNever);
  Fill(6, 2);
  EXPECT_THAT(effects_.puts, IsEmpty());  // no chunk is granted for them yet
  Grant(4);                               // a repeat of an earlier answer
  EXPECT_EQ(ChunkCount(copy_.extents()), 6u);
  Grant(8);
  EXPECT_THAT(effects_.Chunks(), ElementsAre(6, 7));
}

TEST_F(OutgoingCopyTest, AShardThatTheHolderHasIsSealedWithoutAByte) {
  source_.ready.assign(6, true);
  source_.sealed = true;
  Advance();
  copy_.HolderHasIt();
  Advance();
  EXPECT_EQ(copy_.state(), State::kSealing);
  EXPECT_EQ(effects_.last, 0u);
  EXPECT_THAT(effects_.seals, ElementsAre(0));
  // The holder's bytes are not from this copy, so there is nothing to put again.
  std::vector<uint32_t> from_arena;
  EXPECT_EQ(copy_.Mismatched({0}, &from_arena), 0u);
  EXPECT_EQ(copy_.state(), State::kSealing);
}

TEST_F(OutgoingCopyTest, TheSealWaitsForPutsWhoseBytesNobodyNeeds) {
  Grant(6);
  Fill(0, 6);
  Leave();
  source_.sealed = true;
  copy_.HolderHasIt();
  Advance();
  EXPECT_EQ(copy_.state(), State::kSending);
  ArriveAll();
  EXPECT_EQ(copy_.state(), State::kSealing);
}

TEST_F(OutgoingCopyTest, ChunksArePutAgainUntilTheyMatchButNotForEver) {
  ToSealing();
  std::vector<uint32_t> from_arena;
  for (uint32_t round = 1; round <= OutgoingCopy::kRoundsBadMax; ++round) {
    // The holder's answer may name a chunk twice, and chunks that do not exist.
    EXPECT_EQ(copy_.Mismatched({3, 1, 3, 6, UINT32_MAX}, &from_arena), 2u);
    EXPECT_THAT(from_arena, ElementsAre(1, 3));
    EXPECT_EQ(copy_.state(), State::kSending);
    EXPECT_EQ(copy_.attempt(), round);
    Advance();
    EXPECT_THAT(effects_.Chunks(), ElementsAre(1, 3));
    ArriveAll();
    EXPECT_EQ(copy_.state(), State::kSealing);
    EXPECT_EQ(effects_.seals.back(), round);
  }
  EXPECT_EQ(copy_.Mismatched({1}, &from_arena), 0u);
  EXPECT_EQ(copy_.Mismatched({6}, &from_arena), 0u);
  EXPECT_EQ(copy_.Mismatched({}, &from_arena), 0u);
  EXPECT_EQ(copy_.state(), State::kSealing);
  copy_.Drop(&effects_);
  Advance();
  EXPECT_EQ(copy_.state(), State::kGone);
  EXPECT_THAT(effects_.aborts, ElementsAre(false));
}

TEST_F(OutgoingCopyTest, ADroppedCopyWithdrawsWhatWaitsAndWaitsForWhatHasLeft) {
  Grant(6);
  Fill(0, 2);
  Leave();
  Fill(2, 4);
  EXPECT_EQ(copy_.on_way(), 6u);
  copy_.Drop(&effects_);
  EXPECT_EQ(effects_.withdrawn, 4);
  EXPECT_EQ(copy_.on_way(), 2u);
  EXPECT_EQ(copy_.chunk(2), Chunk::kWaiting);
  Advance();
  EXPECT_EQ(copy_.state(), State::kDropping);
  EXPECT_THAT(effects_.aborts, IsEmpty());
  Arrive(0);
  Advance();
  EXPECT_EQ(copy_.state(), State::kDropping);
  Arrive(1);
  Advance();
  EXPECT_EQ(copy_.state(), State::kGone);
  EXPECT_THAT(effects_.aborts, ElementsAre(false));
  EXPECT_THAT(effects_.puts, IsEmpty());  // none was started meanwhile
}

TEST_F(OutgoingCopyTest, AnAbortSaysThatAPutHasFailed) {
  Grant(6);
  Fill(0, 2);
  Leave();
  Ended(0);
  copy_.PutFailed(0);
  copy_.Drop(&effects_);
  Advance();
  EXPECT_EQ(copy_.state(), State::kDropping);
  Arrive(1);
  Advance();
  EXPECT_THAT(effects_.aborts, ElementsAre(true));
}

TEST_F(OutgoingCopyTest, APutThatNeverLeftIsStartedAgain) {
  Grant(6);
  Fill(0, 1);
  Leave();
  Ended(0);
  copy_.PutNotSent(0);
  EXPECT_EQ(copy_.chunk(0), Chunk::kWaiting);
  Advance();
  EXPECT_EQ(copy_.chunk(0), Chunk::kFromArena);
  EXPECT_EQ(effects_.last, 2u);
}

TEST_F(OutgoingCopyTest, AChunkFromDeviceMemoryIsReportedWhenItsChecksumIsKnown) {
  source_.device[0] = {1, 77, 0, 0, 6};
  Grant(6);
  EXPECT_EQ(copy_.chunk(0), Chunk::kFromDevice);
  EXPECT_EQ(copy_.device_on_way(), 6u);
  Leave();
  for (uint32_t chunk = 0; chunk < 5; ++chunk) Arrive(chunk);
  Advance();
  EXPECT_EQ(copy_.chunk(0), Chunk::kUnsummed);
  EXPECT_THAT(effects_.told, IsEmpty());
  Fill(0, 3);
  EXPECT_EQ(copy_.chunk(0), Chunk::kUnreported);
  EXPECT_EQ(copy_.chunk(3), Chunk::kUnsummed);
  Fill(5, 1);
  EXPECT_EQ(copy_.chunk(5), Chunk::kFromDevice);
  Arrive(5);  // its checksum was known before it arrived
  Advance();
  EXPECT_THAT(effects_.told, ElementsAre(0, 1, 2, 5));
  EXPECT_EQ(copy_.chunk(0), Chunk::kReported);
  // The seal reports the others.
  source_.ready.assign(6, true);
  source_.sealed = true;
  Advance();
  EXPECT_EQ(copy_.state(), State::kSealing);
  EXPECT_EQ(copy_.chunk(3), Chunk::kReported);
}

TEST_F(OutgoingCopyTest, RoundsWithChunksFromDeviceMemoryAloneAreNotCounted) {
  source_.device[0] = {1, 77, 0, 0, 6};
  Grant(6);
  ArriveAll();
  source_.device.clear();
  Fill(0, 6);
  source_.sealed = true;
  Advance();
  std::vector<uint32_t> from_arena;
  for (uint32_t chunk = 0; chunk < 6; ++chunk) {
    EXPECT_EQ(copy_.Mismatched({chunk}, &from_arena), 1u);
    EXPECT_THAT(from_arena, IsEmpty());
    Advance();
    EXPECT_EQ(copy_.chunk(chunk), Chunk::kFromArena);
    ArriveAll();
  }
  EXPECT_EQ(copy_.Mismatched({0}, &from_arena), 1u);
  EXPECT_THAT(from_arena, ElementsAre(0));  // its second put was from the arena
}

TEST_F(OutgoingCopyTest, DevicePutsThatWaitAreLeftToTheArena) {
  source_.device[0] = {1, 77, 0, 0, 4};
  Grant(6);
  Leave();
  source_.device[4] = {1, 77, 0, 4, 2};
  Advance();
  source_.device.clear();
  copy_.WithdrawDevicePuts(&effects_);
  EXPECT_EQ(copy_.device_on_way(), 4u);
  Fill(4, 2);
  EXPECT_EQ(copy_.chunk(4), Chunk::kFromArena);
  copy_.WithdrawDevicePuts(&effects_);
  EXPECT_EQ(copy_.chunk(4), Chunk::kFromArena);
}

TEST_F(OutgoingCopyTest, NoMoreIsOnItsWayThanTheLimit) {
  source_.ready.assign(20, true);
  Advance();
  Grant(20);
  EXPECT_EQ(copy_.on_way(), OutgoingCopy::kOutstandingMax);
  Arrive(0);
  Advance();
  EXPECT_EQ(copy_.on_way(), OutgoingCopy::kOutstandingMax);
}

TEST_F(OutgoingCopyTest, ASealedStreamMayBeShorterThanTheReservation) {
  Advance();
  Grant(6);
  Fill(0, 4);
  ArriveAll();
  source_.ready.resize(4);
  source_.sealed = true;
  Advance();
  EXPECT_EQ(copy_.state(), State::kSealing);
}

using OutgoingCopyDeathTest = OutgoingCopyTest;

TEST_F(OutgoingCopyDeathTest, AnEventThatTheTableDoesNotHaveEndsTheProcess) {
  std::vector<uint32_t> from_arena;
  EXPECT_DEATH(copy_.Matched(), "check failed");
  EXPECT_DEATH((void)copy_.Mismatched({0}, &from_arena), "check failed");
  ToSealing();
  EXPECT_DEATH(copy_.Granted(1, 0, {{0, 8}}), "check failed");
  EXPECT_DEATH(copy_.HolderHasIt(), "check failed");
  EXPECT_DEATH(copy_.PutArrived(0, true), "check failed");
  EXPECT_DEATH(copy_.PutNotSent(0), "check failed");
  copy_.Drop(&effects_);
  EXPECT_DEATH(copy_.Drop(&effects_), "check failed");
  Advance();
  EXPECT_DEATH(Advance(), "check failed");
}

TEST_F(OutgoingCopyDeathTest, AFailedPutMustDropTheCopy) {
  Grant(6);
  Fill(0, 1);
  Ended(0);
  copy_.PutFailed(0);
  EXPECT_DEATH(Advance(), "check failed");
}

TEST_F(OutgoingCopyDeathTest, AChunkFromTheArenaHasAChecksum) {
  Grant(6);
  Fill(0, 1);
  EXPECT_DEATH(copy_.PutArrived(0, false), "check failed");
}

// Random events. A copy matches only when the holder has every byte of the arena.
TEST(OutgoingCopyAtRandom, EveryCopyThatMatchesHasEveryByteAndEveryOtherIsAborted) {
  int matched = 0;
  int dropped = 0;
  for (uint64_t seed = 1; seed <= 2000; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const auto below = [&](uint64_t bound) { return random() % bound; };
    const auto chunks = static_cast<uint32_t>(1 + below(20));
    CopySource source;
    source.ready.resize(chunks);
    Recorder effects;
    OutgoingCopy copy({1, seed}, 2);
    std::vector<int> there(chunks, 0);  // at the holder: 0 nothing, 1 right bytes, 2 wrong bytes
    uint32_t granted = 0;
    TimeUs now = 0;
    for (int turn = 0; turn < 2000 && copy.state() != State::kGone; ++turn) {
      now += below(20'000);
      const bool asked = copy.state() == State::kReserving || copy.state() == State::kSending;
      switch (below(8)) {
        case 0:
          granted = std::min<uint32_t>(chunks, granted + static_cast<uint32_t>(below(chunks + 1)));
          if (asked) copy.Granted(1, 0, {{0, granted}});
          break;
        case 1:
        case 2: {
          const auto chunk = static_cast<uint32_t>(below(chunks));
          source.ready[chunk] = true;
          copy.ChecksumsKnown(chunk, 1);
          break;
        }
        case 3:
          if (!source.sealed)
            source.device.try_emplace(static_cast<uint32_t>(below(chunks)), SaveDirectInput{});
          for (auto& [first, device] : source.device) device = {1, 77, 0, first, 1};
          break;
        case 4:
          if (below(3) != 0) break;
          source.device.clear();
          copy.WithdrawDevicePuts(&effects);
          if (below(3) != 0) break;
          source.sealed = true;
          source.ready.assign(chunks, true);
          break;
        case 5:
        case 6: {
          if (effects.puts.empty()) break;
          auto put = effects.puts.begin();
          std::advance(put, static_cast<ptrdiff_t>(below(effects.puts.size())));
          if (put->second.queued) {
            put->second.queued = false;
            break;
          }
          const Recorder::Put ended = put->second;
          effects.puts.erase(put);
          if (below(40) == 0) {
            copy.PutFailed(ended.chunk);
            if (copy.active()) copy.Drop(&effects);
          } else if (below(10) == 0) {
            copy.PutNotSent(ended.chunk);
          } else {
            there[ended.chunk] = below(20) == 0 ? 2 : 1;
            copy.PutArrived(ended.chunk, source.ready[ended.chunk]);
          }
          break;
        }
        default: {
          if (copy.state() != State::kSealing) {
            if (copy.active() && below(300) == 0) copy.Drop(&effects);
            break;
          }
          std::vector<uint32_t> bad;
          for (uint32_t chunk = 0; chunk < chunks; ++chunk)
            if (there[chunk] != 1) bad.push_back(chunk);
          std::vector<uint32_t> from_arena;
          if (bad.empty()) {
            copy.Matched();
            ++matched;
          } else if (copy.Mismatched(bad, &from_arena) == 0) {
            copy.Drop(&effects);
          }
          break;
        }
      }
      copy.CheckInvariants();
      if (copy.state() == State::kGone) break;
      copy.Advance(now, source, &effects);
      copy.CheckInvariants();
      ASSERT_EQ(copy.on_way(), effects.puts.size());
      for (const auto& [transfer, put] : effects.puts) ASSERT_LT(put.chunk, granted);
      // No seal is sent before bytes have arrived in every chunk.
      for (uint32_t chunk = 0; copy.state() == State::kSealing && chunk < chunks; ++chunk)
        ASSERT_NE(there[chunk], 0);
    }
    ASSERT_EQ(copy.state(), State::kGone);
    ASSERT_TRUE(effects.puts.empty());
    dropped += static_cast<int>(effects.aborts.size());
  }
  EXPECT_EQ(matched + dropped, 2000);
  EXPECT_GT(matched, 200);
  EXPECT_GT(dropped, 200);
}

}  // namespace
}  // namespace ropeteam::engine
