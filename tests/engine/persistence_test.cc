// SPDX-License-Identifier: Apache-2.0
//
// Which steps are persisted, and each from its names to its manifest.
#include "tests/engine/persistence_fixture.h"

namespace ropeteam::engine {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST_F(PersistenceTest, AStepIsNamedThenWrittenByItsOwnersThenGetsItsManifest) {
  Listed();
  Commit(10);
  auto orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  for (Rank rank = 0; rank < kWorld; ++rank) {
    EXPECT_EQ(orders[rank].first, 2 + rank) << "the rank's own node";
    EXPECT_EQ(orders[rank].second.phase, PersistOrder::Phase::kName);
  }
  Answer(2, orders[0].second);
  EXPECT_THAT(TakeOrders(), IsEmpty()) << "nothing is written before all names are known";
  Answer(3, orders[1].second);
  orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  EXPECT_EQ(orders[0].second.phase, PersistOrder::Phase::kWrite);
  Answer(3, orders[1].second);
  EXPECT_THAT(context_.out.storage, IsEmpty()) << "no manifest before the last shard";
  const int holds = holds_;
  Answer(2, orders[0].second);
  const StartStorage work = TakeWork();
  EXPECT_EQ(holds_, holds + 1) << "asked again before the manifest";
  const auto* manifest = std::get_if<WriteManifest>(&work.work);
  ASSERT_NE(manifest, nullptr);
  EXPECT_EQ(manifest->step->id, (StepId{kCurrent, 10}));
  EXPECT_THAT(manifest->step->ranks, SizeIs(kWorld));
  EXPECT_FALSE(stored_.Has({kCurrent, 10}));
  works_.OnDone(work.tag, OkStatus(), {});
  EXPECT_TRUE(stored_.Has({kCurrent, 10}));
  EXPECT_THAT(Persisting(), IsEmpty());
}

TEST_F(PersistenceTest, WhatNoRuleKeepsIsDeletedAfterAStepWasPersistedAndNothingThatIsRead) {
  Listed({{kCurrent, 1}, {kCurrent, 2}});
  Commit(10);
  Write();
  const StartStorage work = TakeWork();
  const auto* prune = std::get_if<PruneStored>(&work.work);
  ASSERT_NE(prune, nullptr);
  EXPECT_THAT(prune->in_use, ElementsAre(StepId{kCurrent, 1}));
  StorageDone done;
  StoredList gone;
  gone.steps = {{kCurrent, 2}};
  done.result = gone;
  works_.OnDone(work.tag, OkStatus(), done);
  EXPECT_FALSE(stored_.Has({kCurrent, 2}));
  EXPECT_TRUE(stored_.Has({kCurrent, 1}));
}

TEST_F(PersistenceTest, NothingIsDeletedWhileItIsNotKnownWhatStays) {
  WriteInDoubt(Error(Code::kUnavailable, "a node has not told"));
  persistence_.OnTimer();
  EXPECT_THAT(context_.out.storage, IsEmpty()) << "storage is not asked again at once";
  context_.now = persistence_.NextTimer();
  keep_ = uint64_t{2};
  persistence_.OnTimer();
  const StartStorage work = TakeWork();
  const auto* prune = std::get_if<PruneStored>(&work.work);
  ASSERT_NE(prune, nullptr);
  EXPECT_EQ(prune->keep_newest, 2u);
  EXPECT_FALSE(persistence_.DeletesBeyond(2));
  EXPECT_TRUE(persistence_.DeletesBeyond(3));
  persistence_.Begin();
  EXPECT_TRUE(persistence_.DeletesBeyond(3)) << "the driver goes on";
  works_.OnDone(work.tag, OkStatus(), {});
  EXPECT_FALSE(persistence_.DeletesBeyond(3));
}

TEST_F(PersistenceTest, InDoubtNothingIsDeleted) {
  WriteInDoubt(Error(Code::kInvalidArgument, "a flag says otherwise"));
  EXPECT_EQ(persistence_.NextTimer(), kNever);
}

TEST_F(PersistenceTest, RanksSayWhatIsDueWhereTheFlagDoesNot) {
  settings_.persist_every = 0;
  Members({1, 2, 3});
  Listed();
  Commit(9);
  policy_.Learn({kCurrent - 1, 3, 0, 0, 0});
  Commit(10);
  EXPECT_THAT(Persisting(), IsEmpty()) << "of an incarnation that has ended";
  policy_.Learn({kCurrent, 7, 1, 0, 0});
  Commit(14);
  EXPECT_THAT(Persisting(), ElementsAre(14));
  settings_.persist_every = 10;
  Members({1, 2, 3});
  Finish();
  Commit(21);
  EXPECT_THAT(Persisting(), ElementsAre(21)) << "the flag's multiple";
  Finish();
  Commit(28);
  EXPECT_THAT(Persisting(), IsEmpty());
}

TEST_F(PersistenceTest, StepsAreDueByTheMultiplesThatArePassed) {
  Listed();
  Commit(9);
  EXPECT_THAT(Persisting(), IsEmpty());
  Commit(13);  // 10 was never saved
  EXPECT_THAT(Persisting(), ElementsAre(13));
  Finish();
  Commit(19);
  EXPECT_THAT(Persisting(), IsEmpty());
  Commit(20);
  EXPECT_THAT(Persisting(), ElementsAre(20));
}

TEST_F(PersistenceTest, WhatWasPersistedBeforeDecidesWhatIsDue) {
  Commit(12);
  EXPECT_THAT(Persisting(), IsEmpty()) << "storage has not been listed";
  EXPECT_EQ(persistence_.judged(), StepId());
  Listed({{kCurrent, 11}});
  persistence_.Judge(told_, incarnation_);
  EXPECT_THAT(Persisting(), IsEmpty());
  EXPECT_EQ(persistence_.judged(), (StepId{kCurrent, 12}));
}

TEST_F(PersistenceTest, StepsOfAnotherJobAreOfferedButForThoseOfThisIncarnationAndLaterOnes) {
  Listed({}, {{kCurrent - 1, 7}, {kCurrent, 10}, {kCurrent + 1, 1}});
  EXPECT_EQ(stored_.Newest(), (StepId{kCurrent - 1, 7}));
  EXPECT_TRUE(stored_.IsOfSource({kCurrent - 1, 7}));
  EXPECT_FALSE(stored_.Has({kCurrent, 10}));
  EXPECT_EQ(stored_.Manifest({kCurrent, 10}), nullptr);
  EXPECT_EQ(stored_.incarnation_floor(), kCurrent + 1) << "the next incarnation is above all of them";
  Commit(10);
  EXPECT_THAT(Persisting(), ElementsAre(10)) << "the other job's step of this number is not this one";
  Finish();
  EXPECT_TRUE(stored_.Has({kCurrent, 10}));
  EXPECT_FALSE(stored_.IsOfSource({kCurrent, 10}));
}

TEST_F(PersistenceTest, AJobThatOnlyRestoresFromAnotherPersistsNothing) {
  settings_.storage = "";
  settings_.restore_from = "elsewhere";
  Members({1, 2, 3});
  Listed({}, {{kCurrent - 1, 7}});
  EXPECT_TRUE(stored_.Has({kCurrent - 1, 7}));
  Commit(10);
  EXPECT_THAT(Persisting(), IsEmpty());
  EXPECT_THAT(TakeOrders(), IsEmpty());
}

TEST_F(PersistenceTest, WhatIsWrongWithTheNewestDamagedStepIsRemembered) {
  Listed({{kCurrent - 1, 8}, {kCurrent - 1, 9}}, {{kCurrent - 1, 10}});
  EXPECT_EQ(stored_.Damage({}), "");
  stored_.MarkDamaged({kCurrent - 1, 10}, "a newer version");
  EXPECT_EQ(stored_.Damage({}), "") << "the job has steps of its own";
  stored_.MarkDamaged({kCurrent - 1, 8}, "a file is missing");
  stored_.MarkDamaged({kCurrent - 1, 9}, "other bytes");
  EXPECT_THAT(stored_.Damage({}), HasSubstr("other bytes"));
  EXPECT_THAT(stored_.Damage({{kCurrent - 1, 9}}), HasSubstr("a file is missing"));
}

TEST_F(PersistenceTest, AStepThatWasAskedForNeedNotBeDue) {
  Listed();
  EXPECT_TRUE(persistence_.Request({kCurrent, 3}, incarnation_).ok());
  EXPECT_THAT(Persisting(), ElementsAre(3)) << "every node is told";
  EXPECT_THAT(TakeOrders(), IsEmpty()) << "it is not committed";
  Commit(3);
  EXPECT_THAT(TakeOrders(), SizeIs(2));
  Commit(4);
  EXPECT_TRUE(persistence_.Request({kCurrent, 4}, incarnation_).ok()) << "also after the commit";
  EXPECT_THAT(Persisting(), ElementsAre(3, 4));
  EXPECT_EQ(persistence_.Request({kCurrent - 1, 4}, incarnation_).code(), Code::kInvalidArgument);
}

TEST_F(PersistenceTest, ADueStepIsOvertakenByANewerOneAndOneThatWasAskedForIsNot) {
  Listed();
  Commit(10);
  Commit(20);
  Commit(30);
  EXPECT_THAT(Persisting(), ElementsAre(10, 30));
  EXPECT_THAT(Why(20), HasSubstr("overtaken by step 30"));
  EXPECT_EQ(persistence_.trouble(), "") << "which is not a failure";
  EXPECT_TRUE(persistence_.Request({kCurrent, 31}, incarnation_).ok());
  Commit(31);
  Commit(40);
  EXPECT_THAT(Persisting(), ElementsAre(10, 31));
  EXPECT_THAT(Why(40), HasSubstr("was requested"));
}

// A waiting step does not keep its memory.
TEST_F(PersistenceTest, WhereAWaitingStepWasReleasedTheNewestTakesItsPlace) {
  Listed();
  Commit(10);
  Commit(20);
  Commit(21);
  EXPECT_EQ(persistence_.pinned().size(), 1u);
  persistence_.SetKept({{kCurrent, 10}, {kCurrent, 21}});
  Finish();
  EXPECT_THAT(Persisting(), ElementsAre(21));
  EXPECT_THAT(Why(20), HasSubstr("overtaken by step 21"));
}

TEST_F(PersistenceTest, TheLowestRankHasANameAndNoFileIsAFolderOfAnother) {
  Listed();
  Commit(10);
  auto orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  Answer(2, orders[0].second, Code::kOk, {"model.pt", "a/b.json", "c.json"});
  Answer(3, orders[1].second, Code::kOk, {"model.pt", "a/b.json/c.json", "c.json2/x.pt", "own.pt"});
  orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  EXPECT_THAT(orders[0].second.taken, IsEmpty());
  EXPECT_THAT(orders[1].second.taken, ElementsAre("model.pt", "a/b.json/c.json"));
}

TEST_F(PersistenceTest, AHolderWritesWhereTheOwnerIsGoneOrHasFailed) {
  Listed();
  Commit(10);
  auto orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  EXPECT_EQ(persistence_.trouble(), "");
  Answer(2, orders[0].second, Code::kIo);
  EXPECT_THAT(persistence_.trouble(), AllOf(HasSubstr("step 10 incarnation"), HasSubstr("node2: i/o error")));
  orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(1));
  EXPECT_EQ(orders[0].first, 3u) << "the replica's node";
  EXPECT_EQ(orders[0].second.shard.rank, 0u);
  Members({1, 2});
  persistence_.OnView();
  PassTime(2'000'000);  // the failed node is asked again
  orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  for (const auto& [node, order] : orders) EXPECT_EQ(node, 2u);
}

TEST_F(PersistenceTest, AnOrderIsRepeatedUntilItIsAnswered) {
  Listed();
  Commit(10);
  const auto orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  PassTime(kRepeatUs);
  EXPECT_THAT(TakeOrders(), SizeIs(2));
  Answer(2, orders[0].second);
  Answer(2, orders[0].second);  // the answer to a repeated order
  PassTime(kRepeatMaxUs);
  EXPECT_THAT(TakeOrders(), SizeIs(1));
}

TEST_F(PersistenceTest, AManifestThatFailedIsWrittenAgainAndAnotherStepsIsNot) {
  Listed();
  Commit(10);
  Finish(Error(Code::kUnavailable, "away"));
  EXPECT_THAT(Persisting(), ElementsAre(10));
  EXPECT_THAT(persistence_.trouble(), HasSubstr("its manifest: unavailable: away"));
  PassTime(2'000'000);
  works_.OnDone(TakeWork().tag, Error(Code::kAlreadyExists, "another"), {});
  EXPECT_THAT(Persisting(), IsEmpty());
  EXPECT_THAT(Why(10), HasSubstr("its manifest was refused: another"));
  EXPECT_THAT(persistence_.trouble(), HasSubstr("its manifest was refused: another"));
  EXPECT_FALSE(stored_.Has({kCurrent, 10}));
  Commit(20);
  Finish();
  EXPECT_EQ(persistence_.trouble(), "") << "the next step was persisted";
}

TEST_F(PersistenceTest, AStepWhoseCopiesAreGoneIsAbandoned) {
  Listed();
  Commit(10);
  TakeOrders();
  settings_.nodes = 1;  // no node is away
  Members({1});
  persistence_.OnView();
  PassTime(2'000'000);
  EXPECT_THAT(Persisting(), IsEmpty());
  EXPECT_THAT(Why(10), HasSubstr("no node has a good copy of rank"));
}

TEST_F(PersistenceTest, AStepThatMakesNoProgressMakesRoomForTheNext) {
  Listed();
  Commit(10);
  Commit(20);
  for (int second = 0; second < 59; ++second) {
    for (const auto& [node, order] : TakeOrders()) Answer(node, order, Code::kUnavailable);
    PassTime(1'000'000);
  }
  EXPECT_THAT(Persisting(), ElementsAre(10, 20));
  PassTime(2'000'000);
  EXPECT_THAT(Persisting(), ElementsAre(20));
  EXPECT_THAT(Why(10), HasSubstr("nothing of it could be written"));
}

TEST_F(PersistenceTest, WhatTheFormerLeaderHadBegunIsBegunAgain) {
  persistence_.Learn({{kCurrent, 7}});
  EXPECT_THAT(Persisting(), ElementsAre(7)) << "its copies stay until storage has been listed";
  Commit(7);
  Listed();
  persistence_.Judge(told_, incarnation_);
  Finish();
  EXPECT_TRUE(stored_.Has({kCurrent, 7}));
  persistence_.Learn({{kCurrent, 7}});
  EXPECT_THAT(Persisting(), IsEmpty()) << "an older inventory";
}

TEST_F(PersistenceTest, AWorldOlderThanWhatStorageHasPersistsNothing) {
  Listed({{kCurrent + 1, 3}});
  Commit(10);
  EXPECT_THAT(Persisting(), IsEmpty());
  EXPECT_THAT(Why(10), HasSubstr("restart the world"));
}

TEST_F(PersistenceTest, TheManifestHasTheMetadataOfTheLowestRankThatGaveAny) {
  Listed();
  Commit(10);
  AnswerAll();
  auto orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(2));
  Answer(3, orders[1].second, Code::kOk, {}, "{\"rank\": 1}");
  Answer(2, orders[0].second, Code::kOk, {}, std::string(kStepMetadataBytesMax + 1, ' '));
  orders = TakeOrders();
  ASSERT_THAT(orders, SizeIs(1)) << "refused: it is too long";
  Answer(orders[0].first, orders[0].second, Code::kOk, {}, "{\"rank\": 0}");
  const StartStorage work = TakeWork();
  const auto* manifest = std::get_if<WriteManifest>(&work.work);
  ASSERT_NE(manifest, nullptr);
  EXPECT_EQ(manifest->step->metadata, "{\"rank\": 0}");
  for (const StoredRank& rank : manifest->step->ranks) EXPECT_EQ(rank.metadata, "");
}

// A hanging node's shards cannot be ordered from another node, because no other has a copy. Its late results
// count.
TEST_F(PersistenceTest, AResultThatNobodyWaitsForAnyMoreStillCounts) {
  Listed();
  Commit(10);
  Members({1, 2});
  persistence_.OnView();
  auto orders = TakeOrders();
  for (const auto& [node, order] : orders) EXPECT_EQ(node, 2u);
  Answer(2, orders[0].second, Code::kUnavailable);
  EXPECT_THAT(TakeOrders(), IsEmpty()) << "nobody else can";
  for (const Rank rank : {0u, 1u}) {
    orders[0].second.shard.rank = rank;
    Answer(2, orders[0].second);
  }
  orders = TakeOrders();
  EXPECT_THAT(orders, Each(Field(&std::pair<NodeId, PersistOrder>::second,
                                 Field(&PersistOrder::phase, PersistOrder::Phase::kWrite))));
}

}  // namespace
}  // namespace ropeteam::engine
