// SPDX-License-Identifier: Apache-2.0
//
// Which nodes are missing follows from who had the newest commit, and not from the size of the view.
#include <gmock/gmock.h>

#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

using ::testing::HasSubstr;

class Roster : public Story {
 protected:
  // Hosts in addition to those of the job, which do not run yet.
  size_t AddSpare() { return cluster_->AddHost(); }
  void StopKeepingMemory(const std::vector<size_t>& hosts) {
    for (const size_t host : hosts) {
      CloseClientsOn(host);
      cluster_->StopHost(host, true);
    }
  }
  // These hosts run, and all of them are the members of one view.
  void AwaitMembers(const std::vector<size_t>& hosts) {
    for (const size_t host : hosts) cluster_->StartHost(host);
    ASSERT_TRUE(Until([&] {
      return std::all_of(hosts.begin(), hosts.end(), [&](size_t host) {
        const auto& daemon = cluster_->host(host);
        return daemon.daemon_runs() && daemon.view.members.size() == hosts.size() &&
               daemon.engine->view().epoch == cluster_->host(hosts.front()).engine->view().epoch;
      });
    })) << Trouble();
  }
  ClusterReport Report(size_t host) {
    Client client(
        cluster_.get(),
        Client::Identity{.host = host, .launch = 0, .rank = 0, .world_size = 1, .incarnation_token = ""});
    ClusterReport found;
    const Status status = Sync([&](Client::StatusDone done) {
      client.Report(5 * kSecond, [&found, done](const Status& answered, const ClusterReport& report) {
        found = report;
        done(answered);
      });
    });
    EXPECT_TRUE(status.ok()) << status.ToString();
    return found;
  }
  Status Forget(size_t host, const std::string& node) {
    Client client(
        cluster_.get(),
        Client::Identity{.host = host, .launch = 0, .rank = 0, .world_size = 1, .incarnation_token = ""});
    return Sync([&](Client::StatusDone done) { client.Forget(node, 5 * kSecond, std::move(done)); });
  }
};

// "All missing nodes" means those that the operator saw. The leader dies before every node has recorded them, and is
// missing itself when the next leader is asked.
TEST_F(Roster, AForgetOfAllDoesNotMeanALeaderThatDiesMeanwhile) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  StopWorld(1);
  LoseHost(1);
  ASSERT_TRUE(Until([&] { return cluster_->host(0).view.members.size() == 3; }));
  ASSERT_EQ(LeaderHost(), 0u);
  Client client(
      cluster_.get(),
      Client::Identity{.host = 2, .launch = 0, .rank = 0, .world_size = 1, .incarnation_token = ""});
  cluster_->PauseDaemon(3);  // it records nothing
  std::optional<Status> answered;
  client.Forget("", 20 * kSecond, [&](const Status& status) { answered = status; });
  cluster_->RunFor(100 * kMs);
  EXPECT_FALSE(answered.has_value());
  StopKeepingMemory({0});
  cluster_->ResumeDaemon(3);
  ASSERT_TRUE(Until([&] { return answered.has_value(); })) << Trouble();
  EXPECT_EQ(answered->code(), Code::kUnavailable);
  EXPECT_THAT(answered->message(), HasSubstr("the leader has changed"));
  EXPECT_THAT(Report(2).roster.missing_names, HasSubstr("node0"));
}

// Two of four nodes crash with their memory, and two spares fill the view. The view had as many members as the job
// has nodes, so the committed step, which only the two could complete, was given up at once.
TEST_F(Roster, SparesDoNotStandForNodesThatAreAway) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  StopWorld(1);
  const std::vector<size_t> spares = {AddSpare(), AddSpare()};
  StopKeepingMemory({0, 1});
  AwaitMembers({2, 3, spares[0], spares[1]});
  StartWorld(2, {2, 3, spares[0], spares[1]});
  const Status waits = AskLatest(2, 0, 5 * kSecond);
  EXPECT_THAT(waits.message(), HasSubstr("missing node0, node1: committed"));
  EXPECT_THAT(Report(2).roster.waiting, HasSubstr("missing node0, node1"));
  AwaitMembers({0, 1, 2, 3, spares[0], spares[1]});
  RestoreEverywhere(2, 2);
}

// The same after all daemons were restarted: what the roster needs is in the arenas.
TEST_F(Roster, IsKnownAfterEveryDaemonWasRestarted) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  StopWorld(1);
  const std::vector<size_t> spares = {AddSpare(), AddSpare()};
  StopKeepingMemory({0, 1, 2, 3});
  AwaitMembers({2, 3, spares[0], spares[1]});
  StartWorld(2, {2, 3, spares[0], spares[1]});
  EXPECT_THAT(AskLatest(2, 0, 5 * kSecond).message(), HasSubstr("missing node0, node1: committed"));
  AwaitMembers({0, 1, 2, 3, spares[0], spares[1]});
  RestoreEverywhere(2, 1);
}

// A node comes back after the job has continued without it, while those that know of the newer commit are away. It
// counted as one of few missing nodes and offered its older step.
TEST_F(Roster, ANodeThatWasAwayKnowsThatItMayNotKnow) {
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  StopWorld(1);
  StopKeepingMemory({1});
  const size_t spare = AddSpare();
  AwaitMembers({0, spare});
  StartWorld(2, {0, spare});
  RestoreEverywhere(2, 1);
  SaveEverywhere(2, 2);
  StopWorld(2);
  StopKeepingMemory({0, spare});
  const size_t other = AddSpare();
  AwaitMembers({1, other});
  StartWorld(3, {1, other});
  EXPECT_THAT(AskLatest(3, 0, 5 * kSecond).message(), HasSubstr("they may know of a newer commit"));
  StopKeepingMemory({other});
  AwaitMembers({0, 1, spare});
  StartWorld(4, {0, spare});
  RestoreEverywhere(4, 2);
}

// Nothing is known to an empty replacement. With two nodes and R = 1 it said that nothing was saved.
TEST_F(Roster, AnEmptyReplacementAloneDoesNotSayThatNothingIsSaved) {
  StartNodes(2);
  StartWorld(1);
  SaveEverywhere(1, 1);
  StopWorld(1);
  StopKeepingMemory({0});
  LoseHost(1);
  AwaitMembers({1});
  StartWorld(2, {1, 1});
  EXPECT_EQ(AskLatest(2, 0, 5 * kSecond).code(), Code::kDeadlineExceeded);
  AwaitMembers({0, 1});
  RestoreEverywhere(2, 1);
}

// Ranks whose copies are all away lack none on the members that stay. So the drain of a spare made the members the
// roster, and the step that was told was given up.
TEST_F(Roster, ADrainDoesNotMakeThoseTheRosterWhoLackTheCommit) {
  StartNodes(4);
  StartWorld(1);
  EXPECT_EQ(Latest(1, 0), std::nullopt);
  SaveEverywhere(1, 1);
  StopWorld(1);
  const std::vector<size_t> spares = {AddSpare(), AddSpare()};
  StopKeepingMemory({2, 3});  // the leader stays
  AwaitMembers({0, 1, spares[0], spares[1]});
  cluster_->Drain(spares[1], 30 * kSecond);
  AwaitMembers({0, 1, spares[0]});
  StartWorld(2, {0, 1, spares[0], spares[0]});
  EXPECT_THAT(AskLatest(2, 0, 5 * kSecond).message(), HasSubstr("missing node2, node3: committed"));
  AwaitMembers({0, 1, 2, 3, spares[0]});
  RestoreEverywhere(2, 1);
}

// Memory is lost for good: after the wait the job goes on with the older step that is left.
TEST_F(Roster, AfterTheWaitAnOlderStepIsOffered) {
  options_.storage.used = true;
  options_.storage.persist_every = 2;
  StartNodes(4);
  StartWorld(1);
  for (Step step = 1; step <= 3; ++step) SaveEverywhere(1, step);
  ASSERT_TRUE(Wait(1, 2, 0, Level::kPersisted, 20 * kSecond).ok()) << Trouble();
  StopWorld(1);
  LoseHost(0);
  LoseHost(1);
  AwaitMembers({0, 1, 2, 3});
  StartWorld(2);
  const TimeUs asked = cluster_->now();
  EXPECT_THAT(AskLatest(2, 0, 5 * kSecond).message(), HasSubstr("cannot be produced without them"));
  ASSERT_TRUE(Until([&] { return cluster_->now() >= asked + options_.wait_for_missing_us; }, 60 * kSecond));
  RestoreEverywhere(2, 2);
}

// "Nothing is saved" is not the answer while a commit is known, until an operator gives the nodes up.
TEST_F(Roster, AnOperatorGivesMissingNodesUp) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  StopWorld(1);
  LoseHost(0);
  LoseHost(1);
  AwaitMembers({0, 1, 2, 3});
  StartWorld(2);
  cluster_->RunFor(options_.wait_for_missing_us);
  EXPECT_EQ(AskLatest(2, 0, 5 * kSecond).code(), Code::kDeadlineExceeded);
  EXPECT_EQ(Forget(2, "node2").code(), Code::kInvalidArgument);
  EXPECT_EQ(Forget(2, "node7").code(), Code::kNotFound);
  ASSERT_TRUE(Forget(2, "node0").ok());
  EXPECT_EQ(Report(2).roster.missing, 1u);
  EXPECT_EQ(AskLatest(2, 0, 5 * kSecond).code(), Code::kDeadlineExceeded);
  ASSERT_TRUE(Forget(2, "").ok());
  EXPECT_EQ(Report(2).roster.missing, 0u);
  EXPECT_EQ(Latest(2, 0), std::nullopt);
}

// `--nodes` is the least number of an elastic job. Two of four nodes are away, and the other two are all that it asks
// for.
TEST_F(Roster, AnElasticJobMissesTheNodesThatItHad) {
  StartNodes(2);
  const std::vector<size_t> more = {AddSpare(), AddSpare()};
  AwaitMembers({0, 1, more[0], more[1]});
  StartWorld(1, {0, 1, more[0], more[1]});
  SaveEverywhere(1, 1);
  StopWorld(1);
  StopKeepingMemory({more[0], more[1]});
  AwaitMembers({0, 1});
  StartWorld(2, {0, 1});
  EXPECT_THAT(AskLatest(2, 0, 5 * kSecond).message(), HasSubstr("missing node2, node3"));
  AwaitMembers({0, 1, more[0], more[1]});
  RestoreEverywhere(2, 1);
}

// Node 3 is drained in the view in which the roster was made, and returns while node 0 is away. Of a step that was told
// COMMITTED the other members have no good copy of one shard. Node 3 counted as one of the nodes of the roster that was
// made without it, so no node seemed to be missing, and the older step was offered at once.
TEST_F(Roster, ANodeThatWasDrainedDoesNotStandForOneThatIsAway) {
  StartNodes(4);
  StartWorld(1);
  SaveEverywhere(1, 1);
  SaveEverywhere(1, 2);
  StopWorld(1);
  bool left = false;
  cluster_->on_drained = [&left](size_t, const DrainReport&) { left = true; };
  cluster_->Drain(3, 30 * kSecond);
  ASSERT_TRUE(Until([&] { return left; })) << Trouble();
  StopKeepingMemory({3});
  ASSERT_TRUE(Until([&] { return Report(1).roster.nodes == 3; })) << Trouble();
  const std::vector<size_t> holders = HoldersBeside(0, ShardOf(1, 2, 0));
  ASSERT_EQ(holders.size(), 1u);
  ASSERT_TRUE(cluster_->FlipBit(holders[0], ShardOf(1, 2, 0), 0));
  StopKeepingMemory({0});
  AwaitMembers({1, 2, 3});
  // The order to copy the shard finds the flipped bit.
  const Store& store = *cluster_->host(holders[0]).store;
  ASSERT_TRUE(Until([&] { return !store.Find(ShardOf(1, 2, 0))->bad.empty(); })) << Trouble();
  EXPECT_EQ(Report(1).roster.missing, 1u);
  StartWorld(2, {1, 2, 3, 3});
  EXPECT_THAT(AskLatest(2, 0, 5 * kSecond).message(),
              HasSubstr("committed step 2 incarnation 1 cannot be produced without them"));
  AwaitMembers({0, 1, 2, 3});
  RestoreEverywhere(2, 2);
}

// One lost node is within R. The job goes on at once, and misses nobody when its copies are made again.
TEST_F(Roster, IsRenewedWhenRedundancyIsWhole) {
  StartNodes(3);
  StartWorld(1);
  SaveEverywhere(1, 1);
  LoseHost(2);
  StopWorld(1);
  AwaitMembers({0, 1});
  ASSERT_TRUE(Until([&] { return Report(0).roster.nodes == 2; })) << Trouble();
  EXPECT_EQ(Report(0).roster.missing, 0u);
  StartWorld(2, {0, 1});
  RestoreEverywhere(2, 1);
}

}  // namespace
}  // namespace ropeteam::simulation
