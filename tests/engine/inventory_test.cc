// SPDX-License-Identifier: Apache-2.0
//
// A node reports its inventory to the leader as changes. If the leader's copy does not match, it asks for the
// whole inventory.

#include "core/engine/inventory.h"

#include <gtest/gtest.h>

#include <random>

#include "core/base/bytes.h"

namespace ropeteam::engine {
namespace {

constexpr NodeId kLeader = 1;
constexpr NodeId kOther = 2;

CopyReport Copy(Step step, Rank rank) {
  CopyReport copy;
  copy.id = {1, step, rank};
  copy.world_size = 8;
  copy.replicas = 1;
  copy.stream_bytes = 100 + rank;
  return copy;
}

SessionReport Session(Rank rank, Step ended) {
  SessionReport session;
  session.rank = rank;
  session.world_size = 8;
  session.incarnation = 1;
  session.token = 100 + rank;
  session.has_ended = true;
  session.oldest_ended = session.newest_ended = ended;
  return session;
}

// The node's end, the leader's end, and the messages between them.
class InventoryTest : public ::testing::Test {
 protected:
  InventoryTest() {
    content_.incarnation.number = 1;
    content_.report.id = 7;
    content_.report.name = "node7";
    sender_.OnView(kLeader);
  }
  // Sends what is due, and lets the leader apply it. Returns whether it was a whole inventory.
  bool Tell() {
    const bool whole = Exchange();
    EXPECT_EQ(held_.sequence(), sequence_);
    Normalize(&content_);
    EXPECT_TRUE(held_.inventory().report.copies == content_.report.copies);
    EXPECT_TRUE(held_.inventory().report.sessions == content_.report.sessions);
    EXPECT_TRUE(held_.inventory().incarnation == content_.incarnation);
    EXPECT_EQ(DigestOf(held_.inventory()), DigestOf(content_));
    return whole;
  }
  bool Exchange() {
    now_ += 2'000'000;
    EXPECT_LE(sender_.Due(false, true), now_);
    const InventorySender::Message message = sender_.Send(now_, content_);
    EXPECT_EQ(sender_.Due(false, true), now_ + kRepeatUs) << "one is in flight";
    if (message.kind == Kind::kInventory) {
      Inventory whole;
      EXPECT_TRUE(Decode(message.payload, whole));
      sequence_ = whole.sequence;
      held_.Replace(std::move(whole));
      sender_.OnAck(leader_, {sequence_, false});
      return true;
    }
    InventoryDelta delta;
    EXPECT_TRUE(Decode(message.payload, delta));
    sequence_ = delta.sequence;
    change_ = held_.Apply(delta);
    bytes_ = message.payload.size();
    sender_.OnAck(leader_, {sequence_, !change_});
    return false;
  }

  TimeUs now_ = 0;
  NodeId leader_ = kLeader;
  Inventory content_;
  InventorySender sender_;
  HeldInventory held_;
  uint64_t sequence_ = 0;
  size_t bytes_ = 0;
  std::optional<InventoryChange> change_;
};

// A handle that reconnects has two sessions for a moment.
TEST_F(InventoryTest, OfTwoSessionsOfARankTheOlderSaysFromWhereOnItIsKnown) {
  SessionReport fresh = Session(0, 0);
  fresh.has_ended = false;
  content_.report.sessions = {fresh, Session(0, 5), Session(0, 3)};
  Normalize(&content_);
  ASSERT_EQ(content_.report.sessions.size(), 1u);
  EXPECT_TRUE(content_.report.sessions[0].has_ended);
  EXPECT_EQ(content_.report.sessions[0].oldest_ended, 3u);
  EXPECT_EQ(content_.report.sessions[0].newest_ended, 5u);
}

TEST_F(InventoryTest, AfterTheFirstOnlyWhatHasChangedIsTold) {
  for (Rank rank = 0; rank < 8; ++rank) content_.report.copies.push_back(Copy(1, rank));
  content_.report.sessions = {Session(0, 1), Session(1, 1)};
  EXPECT_TRUE(Tell());
  content_.report.copies[3].committed = true;
  content_.report.copies.erase(content_.report.copies.begin());
  content_.report.copies.push_back(Copy(2, 0));
  content_.report.sessions[1].newest_ended = 2;
  EXPECT_FALSE(Tell());
  ASSERT_TRUE(change_);
  EXPECT_EQ(change_->before.size(), 2u);
  EXPECT_EQ(change_->after.size(), 2u);
  EXPECT_EQ(change_->sessions.size(), 1u);
  EXPECT_FALSE(change_->seats);
  EXPECT_FALSE(change_->incarnation);
  content_.report.sessions.pop_back();
  content_.incarnation.token = "next";
  EXPECT_FALSE(Tell());
  EXPECT_TRUE(change_->seats);
  EXPECT_TRUE(change_->incarnation);
}

TEST_F(InventoryTest, AnyChangesAddUpToTheSame) {
  std::mt19937 random(1);
  const auto below = [&](size_t limit) { return static_cast<size_t>(random() % limit); };
  for (int round = 0; round < 300; ++round) {
    for (size_t i = below(4); i > 0; --i) {
      auto& copies = content_.report.copies;
      if (copies.empty() || below(2) == 0) {
        copies.push_back(Copy(below(9), static_cast<Rank>(below(8))));
      } else if (below(2) == 0) {
        copies.erase(copies.begin() + static_cast<ptrdiff_t>(below(copies.size())));
      } else {
        copies[below(copies.size())].stream_bytes = below(1000);
      }
      auto& sessions = content_.report.sessions;
      if (below(3) == 0) sessions.push_back(Session(static_cast<Rank>(below(8)), below(9)));
      if (!sessions.empty() && below(4) == 0) sessions.erase(sessions.begin());
    }
    Normalize(&content_);
    content_.asking_from = below(3);
    sender_.OnChange();
    EXPECT_EQ(Tell(), round == 0) << round;
  }
}

TEST_F(InventoryTest, TheSameLeaderIsToldInANewEpochWithoutTheListsAndAnotherAll) {
  for (Rank rank = 0; rank < 8; ++rank) content_.report.copies.push_back(Copy(1, rank));
  EXPECT_TRUE(Tell());
  sender_.OnView(kLeader);
  EXPECT_EQ(sender_.Due(true, false), 0u) << "it must be told in this epoch, though nothing has changed";
  EXPECT_FALSE(Tell());
  EXPECT_TRUE(change_->before.empty() && change_->after.empty());
  EXPECT_LT(bytes_, 400u);
  leader_ = kOther;
  held_ = HeldInventory();
  sender_.OnView(kOther);
  EXPECT_TRUE(Tell());
}

TEST_F(InventoryTest, ALeaderThatHoldsSomethingElseGetsAWholeOne) {
  content_.report.copies = {Copy(1, 0)};
  EXPECT_TRUE(Tell());
  held_ = HeldInventory();  // it stopped leading for a while
  sender_.OnChange();
  EXPECT_FALSE(Exchange());
  EXPECT_FALSE(change_);
  EXPECT_EQ(held_.sequence(), 0u);
  EXPECT_TRUE(Tell());
  // The base is right, but the leader's copy of it is not. The digest shows this.
  Inventory wrong = held_.inventory();
  wrong.sequence = 0;
  wrong.report.copies[0].stream_bytes = 99;
  HeldInventory other;
  wrong.sequence = held_.sequence();
  other.Replace(wrong);
  held_ = other;
  content_.report.copies.push_back(Copy(1, 1));
  sender_.OnChange();
  EXPECT_FALSE(Exchange());
  EXPECT_FALSE(change_);
  EXPECT_EQ(held_.inventory().report.copies.size(), 1u) << "what does not fit changes nothing";
  EXPECT_TRUE(Tell());
}

TEST_F(InventoryTest, WhatIsUnansweredIsRepeatedEverMoreSeldom) {
  now_ = 1'000'000;
  const std::string first = sender_.Send(now_, content_).payload;
  TimeUs before = 0;
  for (int repeat = 0; repeat < 8; ++repeat) {
    const TimeUs due = sender_.Due(false, false);
    EXPECT_GE(due - now_, before);
    EXPECT_LE(due - now_, kRepeatMaxUs);
    before = due - now_;
    now_ = due;
    EXPECT_EQ(sender_.Repeat(now_).payload, first);
  }
  EXPECT_EQ(before, kRepeatMaxUs);
  sender_.OnLease();
  EXPECT_LE(sender_.Due(false, false), now_);
}

TEST_F(InventoryTest, WhileCopiesAreBeingMadeChangesWaitForAWindowAndTheLastForNothing) {
  EXPECT_TRUE(Tell());
  sender_.OnChange();
  EXPECT_EQ(sender_.Due(true, false), now_ + kInventoryWindowUs);
  EXPECT_EQ(sender_.Due(false, false), 0u);
}

}  // namespace
}  // namespace ropeteam::engine
