// SPDX-License-Identifier: Apache-2.0
//
// A scripted cluster with storage.

#ifndef ROPETEAM_TESTS_SIMULATION_STORAGE_STORY_H_
#define ROPETEAM_TESTS_SIMULATION_STORAGE_STORY_H_

#include <string>
#include <vector>

#include "tests/simulation/story.h"

namespace ropeteam::simulation {

class StorageStory : public Story {
 protected:
  void StartStored(uint32_t nodes, uint64_t every = 1, uint64_t chunks = 128) {
    options_.storage.used = true;
    options_.storage.persist_every = every;
    StartNodes(nodes, 1, chunks);
  }
  void AwaitPersisted(uint64_t launch, Step step) {
    // A former leader may have died while it held storage.
    ASSERT_TRUE(Until([&] { return cluster_->storage().Has(StepIn(launch, step)); }, 60 * kSecond))
        << Trouble();
    for (const Rank rank : RanksOf(launch))
      ASSERT_TRUE(Wait(launch, step, rank, Level::kPersisted).ok()) << Trouble();
  }
  void SavePersisted(uint64_t launch, Step step) {
    SaveEverywhere(launch, step);
    AwaitPersisted(launch, step);
  }
  std::string PolicyTrouble() {
    std::string trouble;
    const Status answered = Sync([&](Client::StatusDone done) {
      Person().Report(5 * kSecond, [&trouble, done](const Status& status, const ClusterReport& report) {
        trouble = report.policy.trouble;
        done(status);
      });
    });
    EXPECT_TRUE(answered.ok()) << answered.ToString();
    return trouble;
  }
  void LoseAll() {
    for (size_t host = 0; host < cluster_->host_count(); ++host) LoseHost(host);
    cluster_->RunFor(2 * kSecond);
    for (size_t host = 0; host < cluster_->host_count(); ++host) cluster_->StartHost(host);
    AwaitOneView();
  }
  void LoseAndReplace(const std::vector<size_t>& hosts) {
    for (const size_t host : hosts) LoseHost(host);
    const size_t left = cluster_->host_count() - hosts.size();
    ASSERT_TRUE(Until([&] {
      return LeaderHost() != SIZE_MAX && cluster_->host(LeaderHost()).view.members.size() == left;
    }));
    for (const size_t host : hosts) cluster_->StartHost(host);
    AwaitOneView();
  }
  // Hosts 2 and 3, which had another coordinator, come back without memory to the first one.
  void LoseTheOtherHalf() {
    LoseHost(2);
    LoseHost(3);
    cluster_->network().HealLinks();
    for (const size_t host : {2, 3}) cluster_->membership().Route(host, 0, true);
    cluster_->RunFor(2 * kSecond);
    for (const size_t host : {2, 3}) cluster_->StartHost(host);
    AwaitOneView();
  }
  Status Persist(Rank rank, Step step) {
    return Sync(
        [&](Client::StatusDone done) { RankOf(1, rank).Persist(step, 5 * kSecond, std::move(done)); });
  }
  Status LatestBy(uint64_t launch, Level level, StepId* step = nullptr) {
    return Sync([&](Client::StatusDone done) {
      RankOf(launch, 0).Latest(level, 5 * kSecond,
                               [step, done](const Status& status, const AnswerLatest& latest) {
                                 if (step != nullptr) *step = latest.step;
                                 done(status);
                               });
    });
  }
  // Two nodes, three committed steps, and storage that hangs.
  void HangWhileTheFirstOfThreeIsWritten() {
    StartStored(2, 0);
    StartWorld(1);
    cluster_->RunFor(kSecond);  // storage is listed
    for (const size_t host : {0, 1}) cluster_->storage().Hang(host);
    SaveEverywhere(1, 1);
    ASSERT_TRUE(Persist(0, 1).ok());
    SaveEverywhere(1, 2);
    SaveEverywhere(1, 3);
  }
  // The incarnation of the shard that a reader of this step and rank gets; 0: the read fails.
  Incarnation Given(uint64_t launch, Rank reader, Step step, Rank rank) {
    Incarnation given = 0;
    const Status ignored = Sync([&](Client::StatusDone done) {
      RankOf(launch, reader)
          .Read(step, rank, 5 * kSecond, 0, [&given, done](const Status& status, const ShardMeta& meta) {
            if (status.ok()) given = meta.id.incarnation;
            done(status);
          });
    });
    EXPECT_EQ(ignored.ok(), given != 0);
    return given;
  }
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_STORAGE_STORY_H_
