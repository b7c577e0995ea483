// SPDX-License-Identifier: Apache-2.0
//
// Steps that are persisted wait for the hold on storage, lose it and regain it.
#include "tests/engine/persistence_fixture.h"

namespace ropeteam::engine {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST_F(PersistenceTest, NothingIsOrderedBeforeStorageIsHeld) {
  Listed();
  hold_says_ = Error(Code::kUnavailable, "node x had it");
  Commit(10);
  EXPECT_THAT(TakeOrders(), IsEmpty());
  EXPECT_THAT(Persisting(), ElementsAre(10));
  const int holds = holds_;
  for (int second = 0; second < 60; ++second) PassTime(1'000'000);
  EXPECT_THAT(TakeOrders(), IsEmpty());
  EXPECT_GE(holds_, holds + 12);
  EXPECT_LE(holds_, holds + 15) << "about every 5 s";
  hold_says_ = OkStatus();
  PassTime(5'000'000);
  EXPECT_THAT(TakeOrders(), SizeIs(2));
}

TEST_F(PersistenceTest, AStepThatWaitsForTheHoldMakesRoomForTheNext) {
  Listed();
  hold_says_ = Error(Code::kUnavailable, "node x had it");
  Commit(10);
  Commit(20);
  for (int second = 0; second < 62; ++second) PassTime(1'000'000);
  EXPECT_THAT(Persisting(), ElementsAre(20));
  EXPECT_THAT(Why(10), HasSubstr("node x had it"));
}

TEST_F(PersistenceTest, StorageOfAnotherClusterIsRefusedAndAskedForByTheNextStep) {
  Listed();
  hold_says_ = Error(Code::kAlreadyExists, "node x of another cluster");
  Commit(10);
  EXPECT_THAT(TakeOrders(), IsEmpty());
  EXPECT_THAT(Persisting(), IsEmpty());
  EXPECT_THAT(Why(10), HasSubstr("node x of another cluster"));
  // A request for the step gets the error at once. It does not begin the step again.
  const Status asked = persistence_.Request({kCurrent, 10}, incarnation_);
  EXPECT_EQ(asked.code(), Code::kAborted);
  EXPECT_THAT(asked.message(), HasSubstr("node x of another cluster"));
  EXPECT_THAT(Persisting(), IsEmpty());
  hold_says_ = OkStatus();
  PassTime(6'000'000);
  EXPECT_TRUE(persistence_.Request({kCurrent, 10}, incarnation_).ok()) << "the other one may have gone";
  EXPECT_THAT(Persisting(), ElementsAre(10));
  Commit(20);
  EXPECT_THAT(TakeOrders(), SizeIs(2));
}

// The hold is lost while shards are written. Ordered writes may end, but no further write and no manifest is
// ordered.
TEST_F(PersistenceTest, AHoldThatIsLostStopsTheStep) {
  Listed();
  Commit(10);
  auto orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  hold_says_ = Error(Code::kUnavailable, "not known");
  PassTime(6'000'000);
  context_.out.messages.clear();
  for (const auto& [node, order] : orders) Answer(node, order);
  EXPECT_THAT(TakeOrders(), IsEmpty()) << "named, and not written";
  hold_says_ = OkStatus();
  PassTime(6'000'000);
  orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  hold_says_ = Error(Code::kAlreadyExists, "an operator has given it to node y");
  for (const auto& [node, order] : orders) Answer(node, order);
  AnswerHolds();
  EXPECT_THAT(context_.out.storage, IsEmpty()) << "no manifest";
  EXPECT_THAT(Persisting(), IsEmpty());
  EXPECT_THAT(Why(10), HasSubstr("given it to node y"));
}

// Both nodes have failed to write. Before they are asked again, the request of another part loses the hold.
TEST_F(PersistenceTest, AHoldThatAnotherPartHasLostIsRegainedForAllOrders) {
  Listed();
  Commit(10);
  Answer(2, TakeOrders()[0].second, Code::kIo);
  Answer(3, TakeOrders()[0].second, Code::kIo);
  hold_says_ = Error(Code::kUnavailable, "not known");
  hold_.Confirm([](const Status&) {});
  AnswerHolds();
  PassTime(2'000'000);
  EXPECT_THAT(TakeOrders(), IsEmpty());
  hold_says_ = OkStatus();
  PassTime(5'000'000);
  EXPECT_THAT(TakeOrders(), SizeIs(2));
}

TEST_F(PersistenceTest, AHoldThatHangsIsTrouble) {
  Listed();
  context_.protocol = 8;  // no other node can take storage over
  hold_says_ = std::nullopt;
  Commit(10);
  const uint64_t tag = TakeWork().tag;
  works_.OnStalled(tag);
  PassTime(1);
  EXPECT_THAT(persistence_.trouble(),
              AllOf(HasSubstr("step 10 incarnation"), HasSubstr("hold of storage has made no progress")));
  Hold(tag);
  EXPECT_EQ(persistence_.trouble(), "") << "it is being written";
}

// The step needs the hold once more before its manifest.
TEST_F(PersistenceTest, AHoldThatHangsBeforeTheManifestMakesRoomForTheNextStep) {
  Listed();
  Commit(10);
  Commit(20);
  AnswerAll();
  const auto orders = TakeOrders();
  hold_says_ = std::nullopt;
  for (const auto& [node, order] : orders) Answer(node, order);
  works_.OnStalled(TakeWork().tag);
  PassTime(61'000'000);
  EXPECT_THAT(Why(10), HasSubstr("hold of storage has made no progress"));
  EXPECT_THAT(Persisting(), ElementsAre(20));
}

TEST_F(PersistenceTest, AHoldThatComesLateIsNoLongerTrouble) {
  Listed();
  context_.protocol = 8;  // no other node can take storage over
  Commit(10);
  AnswerAll();
  const auto orders = TakeOrders();
  hold_says_ = std::nullopt;
  for (const auto& [node, order] : orders) Answer(node, order);
  const uint64_t hold = TakeWork().tag;
  works_.OnStalled(hold);
  PassTime(61'000'000);
  EXPECT_THAT(persistence_.trouble(), HasSubstr("hold of storage has made no progress"));
  Hold(hold);
  EXPECT_EQ(persistence_.trouble(), "") << "the manifest is being written";
  Commit(20);
  PassTime(1'000'000);
  EXPECT_THAT(Persisting(), ElementsAre(10, 20)) << "and is not given up for the next step";
}

TEST_F(PersistenceTest, AHoldThatIsRegainedBeforeTheManifestIsNoLongerTrouble) {
  Listed();
  Commit(10);
  AnswerAll();
  const auto orders = TakeOrders();
  hold_says_ = Error(Code::kUnavailable, "not known");
  for (const auto& [node, order] : orders) Answer(node, order);
  AnswerHolds();
  EXPECT_THAT(persistence_.trouble(), HasSubstr("storage is not held"));
  hold_says_ = OkStatus();
  PassTime(61'000'000);
  EXPECT_EQ(persistence_.trouble(), "");
  Commit(20);
  PassTime(1'000'000);
  EXPECT_THAT(Persisting(), ElementsAre(10, 20));
}

// A new incarnation has storage listed again while the first listing hangs.
TEST_F(PersistenceTest, AListingThatHangsKeepsTheNextOneWaiting) {
  context_.protocol = 8;
  stored_.OnTimer();
  const uint64_t listing = TakeWork().tag;
  works_.OnStalled(listing);
  EXPECT_THAT(stored_.trouble(), HasSubstr("no progress for a minute"));
  stored_.ListAgain();
  stored_.OnTimer();
  EXPECT_THAT(stored_.trouble(), HasSubstr("no progress for a minute"));
  EXPECT_THAT(context_.out.storage, IsEmpty()) << "each listing that hangs would occupy a thread";
  StorageDone done;
  done.result = StoredList();
  works_.OnDone(listing, OkStatus(), done);
  EXPECT_FALSE(stored_.known()) << "that was the former listing";
  works_.OnDone(TakeWork().tag, OkStatus(), done);
  EXPECT_TRUE(stored_.known());
  EXPECT_EQ(stored_.trouble(), "");
}

TEST_F(PersistenceTest, AManifestThatIsNotReadInTimeIsNamed) {
  Listed({{kCurrent, 10}});
  context_.protocol = 8;
  EXPECT_EQ(stored_.Manifest({kCurrent, 10}), nullptr);
  const uint64_t reading = TakeWork().tag;
  context_.now += 5'000'000;
  stored_.OnTimer();
  EXPECT_THAT(stored_.trouble(), HasSubstr("node1 has not read the manifest of step 10"));
  StoredStep step;
  step.id = {kCurrent, 10};
  step.world_size = 1;
  step.ranks.resize(1);
  StorageDone done;
  done.result = step;
  works_.OnDone(reading, OkStatus(), done);
  EXPECT_NE(stored_.Manifest({kCurrent, 10}), nullptr) << "late, and good";
  EXPECT_EQ(stored_.trouble(), "");
}

TEST_F(PersistenceTest, AReleaseThatHangsIsTrouble) {
  Listed();
  context_.protocol = 8;  // no other node can take storage over
  Commit(10);
  hold_.Release();
  persistence_.OnHoldReleased();
  const uint64_t release = TakeWork().tag;
  PassTime(1);  // it waits for the hold again
  works_.OnStalled(release);
  PassTime(1);
  EXPECT_THAT(persistence_.trouble(), HasSubstr("hold of storage has made no progress"));
}

TEST_F(PersistenceTest, ARefusedHoldIsTroubleEachTime) {
  Listed();
  hold_says_ = Error(Code::kAlreadyExists, "node y has it");
  for (const Step step : {10, 20}) {
    Commit(step);
    AnswerHolds();
    EXPECT_THAT(persistence_.trouble(),
                AllOf(HasSubstr("step " + std::to_string(step)), HasSubstr("node y")));
  }
}

TEST_F(PersistenceTest, AReleaseNeverOvertakesTheRequestBeforeIt) {
  hold_says_ = std::nullopt;
  int answers = 0;
  hold_.Confirm([&](const Status&) { ++answers; });
  const uint64_t first = TakeWork().tag;
  hold_.Release();  // it stops leading,
  EXPECT_THAT(context_.out.storage, IsEmpty());
  works_.OnDone(first, OkStatus(), {});
  StartStorage work = TakeWork();
  EXPECT_NE(std::get_if<ReleaseStorage>(&work.work), nullptr);
  EXPECT_EQ(answers, 0);
  hold_.Confirm([&](const Status&) { answers += 10; });  // and leads again
  EXPECT_THAT(context_.out.storage, IsEmpty());
  works_.OnDone(work.tag, OkStatus(), {});
  work = TakeWork();
  EXPECT_NE(std::get_if<HoldStorage>(&work.work), nullptr);
  Hold(work.tag);
  EXPECT_EQ(answers, 10);
}

TEST_F(PersistenceTest, WithoutALeaseStorageIsLetGoOfAndTheStepGoesOnLater) {
  Listed();
  Commit(10);
  auto orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  context_.lease_until = 0;
  hold_.Release();
  persistence_.OnHoldReleased();
  const StartStorage work = TakeWork();
  EXPECT_NE(std::get_if<ReleaseStorage>(&work.work), nullptr);
  works_.OnDone(work.tag, OkStatus(), {});
  for (const auto& [node, order] : orders) Answer(node, order);
  EXPECT_THAT(TakeOrders(), IsEmpty());
  context_.lease_until = kNever;
  PassTime(1);
  EXPECT_THAT(TakeOrders(), SizeIs(2));
}

}  // namespace
}  // namespace ropeteam::engine
