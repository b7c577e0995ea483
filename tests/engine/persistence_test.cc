// SPDX-License-Identifier: Apache-2.0
//
// The leader's part in persisting. Members and storage exist only as the messages that a test sends.
#include "core/engine/persistence.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <memory>
#include <string>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/log.h"

namespace ropeteam::engine {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr Incarnation kCurrent = 5;
constexpr uint32_t kWorld = 2;

// Nodes 1 (the leader) to 3. Rank r is saved on node 2 + r and copied to the other one of nodes 2 and 3.
class PersistenceTest : public ::testing::Test {
 protected:
  PersistenceTest()
      : memory_(static_cast<std::byte*>(mmap(nullptr, Store::MemoryFor(4, 4096), PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))),
        store_(Store::Format({memory_, Store::MemoryFor(4, 4096)}, 4096, {"job", "a"}).value()),
        context_(Config(), store_.get()),
        works_(&context_),
        desk_(&context_, &works_),
        keeper_(&context_, &desk_),
        hold_(&keeper_, [] { return StepId(); }),
        stored_(&context_, &keeper_, &incarnation_),
        roster_(&context_),
        policy_(&context_),
        persistence_(
            &context_, &keeper_, &hold_, &roster_, &table_, &stored_, &policy_,
            [] {
              return std::vector<StepId>{{kCurrent, 1}};
            },
            [this] { return keep_; }) {
    SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kOff);
    incarnation_.number = kCurrent;
    settings_.nodes = 3;
    settings_.storage = "somewhere";
    settings_.persist_every = 10;
    context_.lease_until = kNever;
    context_.now = 1'000'000;
    Members({1, 2, 3});
    stored_.Begin();
    persistence_.Begin();
    keeper_.Begin();
  }
  ~PersistenceTest() override {
    store_.reset();
    munmap(memory_, Store::MemoryFor(4, 4096));
    SetLogSink(nullptr, LogLevel::kWarning);
  }
  static EngineConfig Config() {
    EngineConfig config;
    config.self = 1;
    config.node = "a";
    return config;
  }
  void Members(const std::vector<NodeId>& nodes) {
    View view;
    view.epoch = ++epoch_;
    view.leader = 1;
    view.settings = settings_;
    for (const NodeId node : nodes) {
      Member member;
      member.id = node;
      member.name = "node";
      member.name += std::to_string(node);
      view.members.push_back(member);
    }
    context_.SetView(view);
    for (NodeId node = 1; node <= 3; ++node)
      if (!context_.Contains(node)) table_.Replace(node, std::exchange(held_[node], {}), {});
  }
  // Both ranks of the step are on nodes 2 and 3, and committed.
  void Commit(Step step) {
    for (const NodeId node : {2, 3}) {
      std::vector<CopyReport> added;
      for (Rank rank = 0; rank < kWorld; ++rank) {
        CopyReport copy;
        copy.id = {kCurrent, step, rank};
        copy.world_size = kWorld;
        copy.replicas = 1;
        copy.stream_bytes = 100;
        copy.role = node == 2 + rank ? Role::kOwn : Role::kReplica;
        copy.committed = true;
        added.push_back(copy);
      }
      table_.Replace(node, {}, added);
      held_[node].insert(held_[node].end(), added.begin(), added.end());
    }
    told_.insert({kCurrent, step});
    persistence_.SetKept(told_);
    persistence_.Judge(told_, incarnation_);
  }
  // Answers the requests for the hold with `hold_says_`; null: no answer yet.
  void AnswerHolds() {
    while (hold_says_ && !context_.out.storage.empty() &&
           std::get_if<HoldStorage>(&context_.out.storage.back().work) != nullptr) {
      const uint64_t tag = context_.out.storage.back().tag;
      context_.out.storage.pop_back();
      ++holds_;
      Hold(tag, *hold_says_);
    }
  }
  // The request for the lock is answered, and the other members see the lock.
  void Hold(uint64_t tag, const Status& status = OkStatus()) {
    StorageDone done;
    if (status.ok()) done.result = StorageProof{"1:token"};
    std::vector<SendMessage> others = std::exchange(context_.out.messages, {});
    works_.OnDone(tag, status, done);
    for (const SendMessage& message : std::exchange(context_.out.messages, {})) {
      Envelope envelope;
      StorageOrder order;
      EXPECT_TRUE(Decode(message.envelope, envelope));
      if (envelope.kind != Kind::kStorageOrder) {
        others.push_back(message);
      } else if (Decode(envelope.payload, order, context_.protocol) &&
                 std::holds_alternative<ProveStorage>(order.work)) {
        keeper_.OnResult(message.to, {order.number, false, Code::kOk, "", {}});
      }
    }
    others.insert(others.end(), context_.out.messages.begin(), context_.out.messages.end());
    context_.out.messages = std::move(others);
  }
  // Takes the one other work that storage has to do for the leader.
  StartStorage TakeWork() {
    AnswerHolds();
    EXPECT_EQ(context_.out.storage.size(), 1u);
    StartStorage work = std::move(context_.out.storage.back());
    context_.out.storage.clear();
    return work;
  }
  void Listed(const std::vector<StepId>& steps = {}, const std::vector<StepId>& source_steps = {}) {
    const uint32_t protocol =
        std::exchange(context_.protocol, 8);  // only the leader lists; the stories have others
    stored_.OnTimer();
    StorageDone done;
    StoredList list;
    list.steps = steps;
    list.source_steps = source_steps;
    done.result = list;
    works_.OnDone(TakeWork().tag, OkStatus(), done);
    context_.protocol = protocol;
  }
  std::vector<std::pair<NodeId, PersistOrder>> TakeOrders() {
    AnswerHolds();
    std::vector<std::pair<NodeId, PersistOrder>> orders;
    for (const SendMessage& message : std::exchange(context_.out.messages, {})) {
      Envelope envelope;
      PersistOrder order;
      EXPECT_TRUE(Decode(message.envelope, envelope) && Decode(envelope.payload, order, context_.protocol));
      orders.emplace_back(message.to, order);
    }
    return orders;
  }
  void Answer(NodeId from, const PersistOrder& order, Code code = Code::kOk,
              std::vector<std::string> names = {}, std::string metadata = {}) {
    PersistResult result;
    result.shard = order.shard;
    result.phase = order.phase;
    result.code = code;
    result.names = std::move(names);
    result.stored.stream_bytes = 100;
    result.stored.metadata = std::move(metadata);
    persistence_.OnResult(from, result);
  }
  void AnswerAll() {
    for (const auto& [node, order] : TakeOrders()) Answer(node, order);
  }
  // Writes the current step, from naming to its manifest.
  void Write(const Status& manifest = OkStatus()) {
    AnswerAll();
    AnswerAll();
    works_.OnDone(TakeWork().tag, manifest, {});
  }
  void Finish(const Status& manifest = OkStatus()) {
    Write(manifest);
    if (manifest.ok()) works_.OnDone(TakeWork().tag, OkStatus(), {});  // the deletion finds nothing to delete
  }
  // Writes step 10 while it is unknown which steps are to be kept: no deletion begins.
  void WriteInDoubt(const Status& doubt) {
    Listed({{kCurrent, 1}});
    keep_ = doubt;
    Commit(10);
    Write();
    AnswerHolds();
    EXPECT_THAT(context_.out.storage, IsEmpty());
  }
  void PassTime(TimeUs time) {
    context_.now += time;
    persistence_.OnTimer();
    AnswerHolds();
  }
  std::vector<Step> Persisting() const {
    std::vector<Step> steps;
    for (const StepId& id : persistence_.persisting()) steps.push_back(id.step);
    return steps;
  }
  std::string Why(Step step) const {
    for (const NotPersisted& note : persistence_.not_persisted())
      if (note.step == StepId{kCurrent, step}) return note.why;
    return "";
  }

  std::byte* memory_;
  std::unique_ptr<Store> store_;
  Context context_;
  StorageWorks works_;
  StepTable table_;
  StorageDesk desk_;
  StorageKeeper keeper_;
  StorageHold hold_;
  StoredSteps stored_;
  Roster roster_;
  Policy policy_;
  Result<uint64_t> keep_ = uint64_t{0};  // set by ranks
  Persistence persistence_;
  JobSettings settings_;
  IncarnationState incarnation_;
  Epoch epoch_ = 0;
  std::map<NodeId, std::vector<CopyReport>> held_;
  std::set<StepId> told_;
  std::optional<Status> hold_says_ = OkStatus();
  int holds_ = 0;
};

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
