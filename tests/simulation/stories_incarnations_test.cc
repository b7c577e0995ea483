// SPDX-License-Identifier: Apache-2.0
//
// Failure stories of incarnations: what they restore, and which of their steps are committed. The comment
// before each story says what it is about. The Checker finds everything else that goes wrong (bytes, copies,
// chunks with two users, unanswered calls).
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

// The ranks restart twice in quick succession, and ranks of the former incarnations are still saving. Each is
// told that it is stale, and nothing of theirs gets into a step of the third incarnation.
TEST_F(Story, WorldRestartsTwiceWithZombies) {
  lengths_ = {2 * 4096};
  StartNodes(3);
  StartWorld(1);
  SaveEverywhere(1, 1);
  // In the middle of a save when the next incarnation begins.
  SaveScript slow;
  slow.chunk_us = 200 * kMs;
  std::optional<Status> late;
  RankOf(1, 0).Save(2, ContentOf(1, 2, 0), slow, [&](const Status& status) { late = status; });
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  EXPECT_EQ(Save(1, 2, 1).code(), Code::kStale);
  ASSERT_TRUE(Save(2, 2, 0).ok());
  StartWorld(3);
  for (Rank rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(Save(1, 2, rank).code(), Code::kStale);
    EXPECT_EQ(Save(2, 2, rank).code(), Code::kStale);
    EXPECT_EQ(LatestStep(3, rank), 1u);
  }
  EXPECT_TRUE(Until([&] { return late.has_value(); }));
  EXPECT_EQ(late->code(), Code::kStale) << late->ToString();
  // A zombie that connects again does not get in either.
  RankOf(1, 1).Close();
  EXPECT_EQ(Hello(1, 1).code(), Code::kStale);
  // Nor does a new process of an incarnation that is over.
  RankOf(1, 2).Close();
  AddRank(1, 2, 3, 2);
  EXPECT_EQ(Hello(1, 2).code(), Code::kStale);
  SaveEverywhere(3, 2);
  for (Rank rank = 0; rank < 3; ++rank) EXPECT_TRUE(Read(3, rank, 2, rank).ok());
}

// An incomplete step is never `latest`, and does not prevent a later step of the same number.
TEST_F(Story, LatestIsDerivedFromWhatIsThere) {
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_TRUE(Save(1, 2, 0).ok());
  ASSERT_TRUE(Wait(1, 2, 0, Level::kReplicated).ok());
  StopWorld(1);
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 1u);
  SaveEverywhere(2, 2);
  EXPECT_EQ(Latest(2, 1), StepIn(2, 2));
  EXPECT_TRUE(Read(2, 0, 2, 1).ok());
}

// A rank has been told `latest`. Then a node leaves and returns with its memory. All ranks of this
// incarnation are told the same step as the first one.
TEST_F(Story, AllRanksOfAnIncarnationRestoreTheSameStep) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  StopWorld(1);
  // A saver and its replica are both away.
  const size_t buddy = HoldersBeside(0, ShardOf(1, 2, 0)).at(0);
  cluster_->StopHost(0, true);
  cluster_->StopHost(buddy, true);
  std::vector<size_t> left;
  for (size_t host = 0; host < 4; ++host)
    if (host != 0 && host != buddy) left.push_back(host);
  ASSERT_TRUE(Until([&] { return cluster_->host(left[0]).view.members.size() == 2; }));
  cluster_->StartHost(0);
  cluster_->StartHost(buddy);
  AwaitOneView();
  StartWorld(2);
  const StepId first = Latest(2, 0).value();
  cluster_->StopHost(left[0], true);
  cluster_->StartHost(left[0]);
  AwaitOneView();
  for (Rank rank = 1; rank < 4; ++rank)
    if (rank != left[0]) {
      EXPECT_EQ(Latest(2, rank), first);
    }
}

// One rank of an incarnation is told a step to restore, which then can no longer be produced. The other ranks
// must not be told an older one, because the incarnation would continue from two steps. They get an error.
// The next incarnation is told the older step.
TEST_F(Story, NoRankOfAnIncarnationFallsBackAlone) {
  lengths_ = {4096};
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  StopWorld(1);
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 0), 2u);
  EXPECT_TRUE(Read(2, 0, 2, 0).ok());
  for (const size_t host : {size_t{0}, size_t{1}}) ASSERT_TRUE(cluster_->FlipBit(host, ShardOf(1, 2, 1), 0));
  EXPECT_EQ(Read(2, 1, 2, 1).code(), Code::kCorrupt);
  std::optional<Code> told;
  RankOf(2, 1).Latest(5 * kSecond, [&](const Status& status, const AnswerLatest&) { told = status.code(); });
  ASSERT_TRUE(Until([&] { return told.has_value(); }));
  EXPECT_NE(*told, Code::kOk);
  EXPECT_NE(*told, Code::kNotFound);  // with this code a rank would begin from scratch
  StopWorld(2);
  StartWorld(3);
  for (Rank rank = 0; rank < 2; ++rank) EXPECT_EQ(LatestStep(3, rank), 1u);
}

// The nodes that know the first incarnation are away, while a node without memory leads alone and begins
// another. When they return, the third incarnation gets a third number, and no steps are confused.
TEST_F(Story, NoTwoIncarnationsHaveOneNumber) {
  StartNodes(3);
  StartWorld(1, {0, 1});
  SaveEverywhere(1, 1);
  StopWorld(1);
  for (const size_t host : {size_t{0}, size_t{1}}) cluster_->StopHost(host, true);
  LoseHost(2);
  cluster_->StartHost(2);
  ASSERT_TRUE(Until([&] { return cluster_->host(2).view.members.size() == 1; })) << Trouble();
  StartWorld(2, {2, 2});
  EXPECT_GT(IncarnationOf(2), IncarnationOf(1));
  StopWorld(2);
  for (const size_t host : {size_t{0}, size_t{1}}) cluster_->StartHost(host);
  AwaitOneView();
  StartWorld(3, {0, 1});
  EXPECT_GT(IncarnationOf(3), IncarnationOf(2));
  for (Rank rank = 0; rank < 2; ++rank) {
    EXPECT_EQ(Latest(3, rank), StepIn(1, 1));
    EXPECT_TRUE(Read(3, rank, 1, rank).ok());
  }
}

// A node comes from another coordinator, whose numbers were higher, and only its memory has them. Later
// incarnations get higher numbers, even if that memory is lost.
TEST_F(Story, NumbersOfIncarnationsGoOnAboveWhatAnyMemoryKnew) {
  StartNodes(2);
  cluster_->StartCoordinator();
  cluster_->membership().Route(1, 1, true);
  ASSERT_TRUE(Until([&] { return cluster_->host(1).view.members.size() == 1; })) << Trouble();
  StartWorld(1, {1});
  StopWorld(1);
  cluster_->CrashDaemon(1);
  cluster_->membership().Route(1, 0, false);
  cluster_->StartDaemon(1);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.Contains(cluster_->host(1).id); })) << Trouble();
  for (const size_t host : {size_t{0}, size_t{1}}) LoseHost(host);
  for (const size_t host : {size_t{0}, size_t{1}}) cluster_->StartHost(host);
  AwaitOneView();
  StartWorld(2);
  EXPECT_GT(IncarnationOf(2), IncarnationOf(1));
}

// A node dies and comes back at once under its name, as another instance. It is used again.
TEST_F(Story, NodeComesBackUnderItsName) {
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const NodeId before = cluster_->host(1).id;
  LoseHost(1);
  cluster_->StartHost(1);
  AwaitOneView();
  EXPECT_NE(cluster_->host(1).id, before);
  StopWorld(1);
  StartWorld(2);
  EXPECT_EQ(LatestStep(2, 1), 1u);
  EXPECT_TRUE(Read(2, 1, 1, 1).ok());
  SaveEverywhere(2, 2);
}

// A spare joins in the middle of a save. No rank notices it.
TEST_F(Story, JoiningDisturbsNobody) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  for (const Rank rank : {0u, 1u}) ASSERT_TRUE(Save(1, 2, rank).ok());
  const Incarnation incarnation = IncarnationOf(1);
  const size_t spare = cluster_->AddHost();
  cluster_->StartHost(spare);
  ASSERT_TRUE(Save(1, 2, 2).ok());
  AwaitOneView();
  ASSERT_TRUE(Save(1, 2, 3).ok());
  for (Rank rank = 0; rank < 4; ++rank) EXPECT_TRUE(Wait(1, 2, rank, Level::kCommitted).ok());
  SaveEverywhere(1, 3);
  EXPECT_EQ(RankOf(1, 0).incarnation(), incarnation);
}

// The leader tells a rank that a step is committed, and is then cut off together with one of the copies. The
// others have marked their copies before that. So they know that the step is committed, and keep it.
TEST_F(Story, ACommitIsKnownToEveryMemberBeforeARankIsTold) {
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {1, 2});
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  ASSERT_EQ(HoldersBeside(2, ShardOf(1, 2, 1)), std::vector<size_t>{0});
  cluster_->on_event = [&](size_t host, const LevelEvent& event) {
    if (host != 0 || event.level != Level::kCommitted || event.shard.step != 3) return;
    for (const size_t other : {size_t{1}, size_t{2}, kCoordinatorHost}) {
      cluster_->network().Cut(0, other, kForever);
      cluster_->network().Cut(other, 0, kForever);
    }
  };
  // The owner's replacement for the lost copy takes a while.
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (transfer.initiator != 2 || transfer.target != 1) return;
    cluster_->on_transfer = nullptr;
    cluster_->network().Cut(2, 1, cluster_->now() + 1 * kMs);
  };
  for (Rank rank = 0; rank < 2; ++rank) ASSERT_TRUE(Save(1, 3, rank).ok());
  ASSERT_TRUE(Until([&] { return cluster_->host(1).view.members.size() == 2 && !cluster_->on_transfer; }));
  EXPECT_EQ(cluster_->checker().newest_committed(), StepIn(1, 3));
  EXPECT_EQ(LatestStep(1, 0), 3u);
  for (Rank rank = 0; rank < 2; ++rank) ASSERT_TRUE(Save(1, 4, rank).ok());
  EXPECT_TRUE(Wait(1, 4, 0, Level::kCommitted).ok()) << Trouble();
  for (const Step step : {3u, 4u}) EXPECT_TRUE(Holds(1, ShardOf(1, step, 0))) << step;
  EXPECT_FALSE(Holds(1, ShardOf(1, 2, 0)));
}

// A member does not receive the leader's messages, so it has not marked the step. No rank is told COMMITTED,
// and no older step is released.
TEST_F(Story, ACommitThatAMemberHasNotMarkedIsToldToNobody) {
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {1});
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  cluster_->network().Cut(0, 2, cluster_->now() + 700 * kMs);
  ASSERT_TRUE(Save(1, 3, 0).ok());
  EXPECT_EQ(Wait(1, 3, 0, Level::kCommitted, 500 * kMs).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(cluster_->checker().newest_committed(), StepIn(1, 2));
  EXPECT_TRUE(Holds(1, ShardOf(1, 1, 0)));
  EXPECT_TRUE(Wait(1, 3, 0, Level::kCommitted).ok()) << Trouble();
  EXPECT_TRUE(Until([&] { return !Holds(1, ShardOf(1, 1, 0)); }));
}

// A step gets its last copy when a newer one is already committed and the order to release it is in flight.
// It must not be committed any more: an older one would be released because of it, and it is itself released.
TEST_F(Story, AStepThatIsBeingReleasedIsNotCommitted) {
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {1});
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  ASSERT_EQ(HoldersBeside(1, ShardOf(1, 2, 0)), std::vector<size_t>{2});
  cluster_->on_transfer = [&](const Transfer& transfer) {
    if (transfer.initiator != 1) return;
    cluster_->on_transfer = nullptr;
    cluster_->network().Clog(1, 2, cluster_->now() + 60 * kMs);  // this put, and nothing else
    cluster_->scheduler().After(0, [&] { cluster_->network().HealLinks(); });
  };
  cluster_->on_event = [&](size_t host, const LevelEvent& event) {
    if (host != 0 || event.level != Level::kCommitted || event.shard.step != 4) return;
    for (const size_t member : {size_t{1}, size_t{2}})
      cluster_->network().Clog(0, member, cluster_->now() + 150 * kMs);
  };
  ASSERT_TRUE(Save(1, 3, 0).ok());
  ASSERT_TRUE(Until([&] { return !cluster_->on_transfer; }));
  ASSERT_TRUE(Save(1, 4, 0).ok());
  EXPECT_TRUE(Wait(1, 3, 0, Level::kReplicated).ok()) << Trouble();
  EXPECT_TRUE(Wait(1, 4, 0, Level::kCommitted).ok()) << Trouble();
  cluster_->RunFor(1 * kSecond);
  for (const size_t host : {size_t{1}, size_t{2}}) {
    EXPECT_TRUE(Holds(host, ShardOf(1, 4, 0)));
    EXPECT_FALSE(Holds(host, ShardOf(1, 3, 0)));
    EXPECT_TRUE(Holds(host, ShardOf(1, 2, 0)));
  }
  EXPECT_EQ(Wait(1, 3, 0, Level::kCommitted).code(), Code::kAborted);
}

// Without tokens: a hello crosses a stuck link and arrives when its process is long dead and the next launch
// has begun. It does not keep a rank's place, and ends no incarnation.
TEST_F(Story, ALateHelloOfTheDeadEndsNoIncarnation) {
  named_incarnations_ = false;
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  cluster_->network().Clog(1, 0, cluster_->now() + 800 * kMs);
  AddRank(1, 1, 2, 1);
  RankOf(1, 1).Hello(5 * kSecond, [](const Status&) {});
  cluster_->RunFor(50 * kMs);
  cluster_->network().HealLinks();  // later messages of its node overtake the hello
  RankOf(1, 1).Close();
  StartWorld(2, {0, 2});
  const Incarnation incarnation = IncarnationOf(2);
  cluster_->RunFor(2 * kSecond);
  EXPECT_EQ(cluster_->host(0).engine->incarnation(), incarnation);
  SaveEverywhere(2, 1);
}

// The same, but the place is still free when the dead process's hello arrives. The living rank gets it.
TEST_F(Story, ALateHelloOfTheDeadKeepsNobodyOut) {
  named_incarnations_ = false;
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  AddRank(2, 0, 2, 0);
  ASSERT_TRUE(Hello(2, 0).ok());
  const Incarnation incarnation = IncarnationOf(2);
  cluster_->network().Clog(1, 0, cluster_->now() + 300 * kMs);
  AddRank(1, 1, 2, 1);
  RankOf(1, 1).Hello(5 * kSecond, [](const Status&) {});
  cluster_->RunFor(50 * kMs);
  RankOf(1, 1).Close();
  cluster_->RunFor(255 * kMs);
  AddRank(2, 1, 2, 2);
  ASSERT_TRUE(Hello(2, 1).ok()) << Trouble();
  EXPECT_EQ(RankOf(2, 1).incarnation(), incarnation);
  SaveEverywhere(2, 1);
}

// Without tokens: a rank is admitted and dies before it gets the answer. Another rank on its node, which has
// died, too, had asked for `latest` with a timeout of a minute. The next incarnation need not wait for that.
TEST_F(Story, AQuestionOfTheDeadKeepsNoSeatTaken) {
  named_incarnations_ = false;
  StartNodes(3);
  ASSERT_EQ(LeaderHost(), 0u);
  LoseHost(2);  // the first rank waits for its shards
  ASSERT_TRUE(Until([&] { return cluster_->host(1).view.members.size() == 2; })) << Trouble();
  for (const Rank rank : {0u, 1u}) AddRank(1, rank, 3, 1);
  ASSERT_TRUE(Hello(1, 0).ok()) << Trouble();
  RankOf(1, 0).Latest(60 * kSecond, [](const Status&, const AnswerLatest&) {});
  cluster_->RunFor(10 * kMs);
  cluster_->network().Cut(0, 1, cluster_->now() + 100 * kMs);
  RankOf(1, 1).Hello(5 * kSecond, [](const Status&) {});
  cluster_->RunFor(50 * kMs);
  StopWorld(1);
  StartWorld(2, {0});
  EXPECT_NE(IncarnationOf(2), IncarnationOf(1));
}

// The leader is lost when the first rank has been told which step the incarnation restores. The ranks that
// ask later are told the same step.
TEST_F(Story, TheStepToRestoreOutlivesItsLeader) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  for (Rank rank = 0; rank < 4; ++rank) ASSERT_TRUE(Save(1, 2, rank).ok());
  StopWorld(1);
  const size_t leader = LeaderHost();
  ASSERT_EQ(leader, 0u);
  // Rank 1's shard of step 2 is away while the first rank asks.
  StartWorld(2, {1, 2, 3, 1});
  cluster_->network().Cut(0, 2, kForever);
  cluster_->network().Cut(0, 3, kForever);
  std::optional<StepId> first;
  RankOf(2, 0).Latest(3 * kSecond, [&](const Status& status, const AnswerLatest& answer) {
    if (status.ok()) first = answer.step;
  });
  cluster_->RunFor(500 * kMs);
  EXPECT_FALSE(first.has_value()) << "a step was given out that only two nodes know of";
  cluster_->network().HealLinks();
  EXPECT_TRUE(Until([&] { return first.has_value(); }));
  LoseHost(0);
  for (Rank rank = 1; rank < 4; ++rank) EXPECT_EQ(Latest(2, rank), first);
}

// Every daemon is restarted, so only the number of the ranks' incarnation survives. No node knows which step
// it restores. So its ranks are told no step, because two of them might get two. The next incarnation
// restores.
TEST_F(Story, OfAnIncarnationThatNobodyRemembersNoRankIsToldAStep) {
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  StopWorld(1);
  StartWorld(2);
  ASSERT_EQ(LatestStep(2, 0), 1u);
  for (const size_t host : {size_t{0}, size_t{1}}) cluster_->CrashDaemon(host);
  for (const size_t host : {size_t{0}, size_t{1}}) cluster_->StartDaemon(host);
  AwaitOneView();
  cluster_->RunFor(10 * kMs);
  for (const Rank rank : {0u, 1u}) ASSERT_TRUE(Hello(2, rank).ok()) << Trouble();
  const Status asked = AskLatest(2, 1, kSecond);
  EXPECT_EQ(asked.code(), Code::kDeadlineExceeded);
  EXPECT_NE(asked.message().find("no node remembers what incarnation 2 restores"), std::string::npos)
      << asked.message();
  StopWorld(2);
  StartWorld(3);
  for (const Rank rank : {0u, 1u}) EXPECT_EQ(LatestStep(3, rank), 1u);
}

// A retry loop inside one step of SLURM: all processes end and begin again with the same token. Only one rank had
// saved step 2. The second run's step 2 has no shard of the first run.
TEST_F(Story, TwoRunsWithOneTokenAreTwoIncarnations) {
  keeps_token_ = true;
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  ASSERT_TRUE(Save(1, 2, 0).ok());
  ASSERT_TRUE(Wait(1, 2, 0, Level::kReplicated).ok());
  StopWorld(1);
  StartWorld(2);
  EXPECT_GT(IncarnationOf(2), IncarnationOf(1));
  for (const Rank rank : {0u, 1u}) EXPECT_EQ(Latest(2, rank), StepIn(1, 1));
  SaveEverywhere(2, 2);
  RestoreEverywhere(2, 2);
}

// The same, but each process is started again as soon as it ends, so the runs overlap. The first rank of the second
// run begins an incarnation. The ranks of the first run are told so.
TEST_F(Story, ARankThatOpensAgainWithItsTokenBeginsAnIncarnation) {
  keeps_token_ = true;
  StartNodes(3);
  StartWorld(1);
  SaveEverywhere(1, 1);
  for (const Rank rank : {0u, 1u}) ASSERT_TRUE(Save(1, 2, rank).ok());
  RankOf(1, 2).Close();
  cluster_->RunFor(100 * kMs);
  AddRank(2, 2, 3, 2);
  ASSERT_TRUE(Hello(2, 2).ok()) << Trouble();
  EXPECT_GT(RankOf(2, 2).incarnation(), IncarnationOf(1));
  EXPECT_EQ(Latest(2, 2), StepIn(1, 1));
  EXPECT_EQ(Save(1, 3, 0).code(), Code::kStale);
  for (const Rank rank : {0u, 1u}) {
    RankOf(1, rank).Close();
    AddRank(2, rank, 3, rank);
    ASSERT_TRUE(Hello(2, rank).ok()) << Trouble();
    EXPECT_EQ(RankOf(2, rank).incarnation(), RankOf(2, 2).incarnation());
    EXPECT_EQ(Latest(2, rank), StepIn(1, 1));
  }
  SaveEverywhere(2, 2);
  RestoreEverywhere(2, 2);
}

// The same, but the leader that had seen the rank leave is lost. Its node tells the next leader.
TEST_F(Story, ANewLeaderKnowsThatARankOfATokenHasLeft) {
  keeps_token_ = true;
  StartNodes(4);
  ASSERT_EQ(LeaderHost(), 0u);
  AddRank(1, 0, 2, 1);
  AddRank(1, 1, 2, 2);
  for (const Rank rank : {0u, 1u}) ASSERT_TRUE(Hello(1, rank).ok());
  RankOf(1, 1).Close();
  cluster_->RunFor(100 * kMs);
  LoseHost(0);
  ASSERT_TRUE(Until([&] { return cluster_->host(1).view.members.size() == 3; })) << Trouble();
  AddRank(2, 1, 2, 2);
  ASSERT_TRUE(Hello(2, 1).ok()) << Trouble();
  EXPECT_GT(RankOf(2, 1).incarnation(), IncarnationOf(1));
}

// The same, but the rank's node is lost with it, and then the leader. Only the copies of the rank's shards tell that it
// was open.
TEST_F(Story, ARankWhoseShardsAreHereOpensAgain) {
  keeps_token_ = true;
  StartNodes(4);
  ASSERT_EQ(LeaderHost(), 0u);
  StartWorld(1, {1, 2, 3});
  SaveEverywhere(1, 1);
  cluster_->StopHost(3, false);
  CloseClientsOn(3);
  ASSERT_TRUE(Until([&] { return cluster_->host(1).view.members.size() == 3; })) << Trouble();
  LoseHost(0);
  ASSERT_TRUE(Until([&] { return cluster_->host(1).view.members.size() == 2; })) << Trouble();
  cluster_->StartHost(3);
  ASSERT_TRUE(Until([&] { return cluster_->host(1).view.members.size() == 3; })) << Trouble();
  AddRank(2, 2, 3, 3);
  ASSERT_TRUE(Hello(2, 2).ok()) << Trouble();
  EXPECT_GT(RankOf(2, 2).incarnation(), IncarnationOf(1));
}

// The first run ended before all of its ranks were opened. A rank that was never opened begins the second run.
TEST_F(Story, WhenAllRanksOfATokenHaveLeftItsIncarnationHasEnded) {
  keeps_token_ = true;
  StartNodes(2);
  AddRank(1, 0, 2, 0);
  ASSERT_TRUE(Hello(1, 0).ok());
  StopWorld(1);
  AddRank(2, 1, 2, 1);
  ASSERT_TRUE(Hello(2, 1).ok());
  EXPECT_GT(RankOf(2, 1).incarnation(), IncarnationOf(1));
  AddRank(2, 0, 2, 0);
  ASSERT_TRUE(Hello(2, 0).ok());
  EXPECT_EQ(RankOf(2, 1).incarnation(), IncarnationOf(2));
  SaveEverywhere(2, 1);
}

// A daemon dies. Its rank comes back to the next daemon, and stays in the incarnation of its token.
TEST_F(Story, ARankThatReconnectsStaysInTheIncarnationOfItsToken) {
  keeps_token_ = true;
  StartNodes(3);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const Incarnation incarnation = IncarnationOf(1);
  cluster_->CrashDaemon(2);
  cluster_->StartDaemon(2);
  AwaitOneView();
  ASSERT_TRUE(Hello(1, 2).ok()) << Trouble();
  EXPECT_EQ(RankOf(1, 2).incarnation(), incarnation);
  SaveEverywhere(1, 2);
}

}  // namespace
}  // namespace ropeteam::simulation
