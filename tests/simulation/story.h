// SPDX-License-Identifier: Apache-2.0
//
// A scripted cluster for failure stories. The network is calm, the only faults are the story's, and ranks do
// what the story says. Calls run virtual time until they are answered. The Checker works as in every run; if
// it fails, the story fails.

#ifndef ROPETEAM_TESTS_SIMULATION_STORY_H_
#define ROPETEAM_TESTS_SIMULATION_STORY_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/base/log.h"
#include "tests/simulation/client.h"
#include "tests/simulation/cluster.h"

namespace ropeteam::simulation {

class Story : public ::testing::Test {
 protected:
  // Afterwards hosts 0 … nodes - 1 are up and have one view.
  void StartNodes(uint32_t nodes, uint32_t replicas = 1, uint64_t chunks = 128, uint32_t domains = 1) {
    SetLogLevel(LogLevel::kOff);
    options_.seed = 7;
    options_.nodes = nodes;
    options_.replicas = replicas;
    options_.chunks = chunks;
    options_.domains = domains;
    options_.invariants_ppm = invariants_ppm_;
    cluster_ = std::make_unique<Cluster>(options_);
    cluster_->KeepTrace(kTraceLines);
    for (size_t host = 0; host < nodes; ++host) cluster_->StartHost(host);
    AwaitOneView();
  }
  void AwaitOneView() {
    ASSERT_TRUE(cluster_->RunUntil([this] { return cluster_->AllInOneView(); }, 10 * kSecond)) << Trouble();
  }
  // Starts launch number `launch`, with one rank on each of these hosts.
  void StartWorld(uint64_t launch, const std::vector<size_t>& hosts) {
    for (Rank rank = 0; rank < hosts.size(); ++rank) {
      AddRank(launch, rank, static_cast<uint32_t>(hosts.size()), hosts[rank]);
      ASSERT_TRUE(Hello(launch, rank).ok()) << Trouble();
    }
  }
  // Adds a rank that has not said hello yet.
  void AddRank(uint64_t launch, Rank rank, uint32_t world_size, size_t host) {
    Client::Identity identity;
    identity.host = host;
    identity.launch = launch;
    identity.rank = rank;
    identity.world_size = world_size;
    if (named_incarnations_) {
      identity.incarnation_token = "run-";
      identity.incarnation_token += std::to_string(keeps_token_ ? 0 : launch);
    }
    clients_[{launch, rank}] = std::make_unique<Client>(cluster_.get(), identity);
  }
  void StartWorld(uint64_t launch) {
    std::vector<size_t> hosts;
    for (size_t host = 0; host < options_.nodes; ++host) hosts.push_back(host);
    StartWorld(launch, hosts);
  }
  void StopWorld(uint64_t launch) {
    for (auto& [key, client] : clients_)
      if (key.first == launch) client->Close();
    cluster_->RunFor(10 * kMs);
  }

  Client& RankOf(uint64_t launch, Rank rank) { return *clients_.at({launch, rank}); }
  std::vector<Rank> RanksOf(uint64_t launch) const {
    std::vector<Rank> ranks;
    for (const auto& [key, client] : clients_)
      if (key.first == launch) ranks.push_back(key.second);
    return ranks;
  }
  // The incarnation that the launch's ranks were admitted to.
  Incarnation IncarnationOf(uint64_t launch) { return RankOf(launch, 0).incarnation(); }
  StepId StepIn(uint64_t launch, Step step) { return {IncarnationOf(launch), step}; }
  ShardId ShardOf(uint64_t launch, Step step, Rank rank) { return {IncarnationOf(launch), step, rank}; }
  Content ContentOf(uint64_t launch, Step step, Rank rank) {
    ContentShape shape = options_.job.content;
    shape.chunk_bytes = options_.chunk_bytes;
    return lengths_.empty() ? MakeContent(shape, launch, step, rank)
                            : MakeContent(shape, launch, step, rank, lengths_);
  }

  Status Hello(uint64_t launch, Rank rank) {
    return Sync([&](Client::StatusDone done) { RankOf(launch, rank).Hello(5 * kSecond, std::move(done)); });
  }
  Status Save(uint64_t launch, Step step, Rank rank, const SaveScript& script = {}) {
    return Sync([&](Client::StatusDone done) {
      RankOf(launch, rank).Save(step, ContentOf(launch, step, rank), script, std::move(done));
    });
  }
  // Begins a save and does not wait for its end.
  void SaveInBackground(uint64_t launch, Step step, Rank rank, const SaveScript& script = {}) {
    RankOf(launch, rank).Save(step, ContentOf(launch, step, rank), script, [](const Status&) {});
  }
  Status Wait(uint64_t launch, Step step, Rank rank, Level level, TimeUs timeout = 5 * kSecond) {
    return Sync(
        [&](Client::StatusDone done) { RankOf(launch, rank).Wait(step, level, timeout, std::move(done)); });
  }
  // All ranks save, and wait until the step is committed.
  void SaveEverywhere(uint64_t launch, Step step) {
    const std::vector<Rank> ranks = RanksOf(launch);
    for (const Rank rank : ranks) ASSERT_TRUE(Save(launch, step, rank).ok()) << Trouble();
    for (const Rank rank : ranks) ASSERT_TRUE(Wait(launch, step, rank, Level::kCommitted).ok()) << Trouble();
  }
  // No value: there is no step to restore.
  std::optional<StepId> Latest(uint64_t launch, Rank rank) {
    std::optional<StepId> latest;
    const Status status = Sync([&](Client::StatusDone done) {
      RankOf(launch, rank)
          .Latest(5 * kSecond, [&latest, done](const Status& answered, const AnswerLatest& answer) {
            if (answered.ok()) latest = answer.step;
            done(answered);
          });
    });
    EXPECT_TRUE(status.ok() || status.code() == Code::kNotFound) << status.ToString();
    return latest;
  }
  // The status of a `latest` that may be refused.
  Status AskLatest(uint64_t launch, Rank rank, TimeUs timeout) {
    return Sync([&](Client::StatusDone done) {
      RankOf(launch, rank).Latest(timeout, [done](const Status& status, const AnswerLatest&) {
        done(status);
      });
    });
  }
  Status Quarantine(Step step, bool undo = false) {
    return Sync(
        [&](Client::StatusDone done) { Person().Quarantine(step, undo, 5 * kSecond, std::move(done)); });
  }
  Step LatestStep(uint64_t launch, Rank rank) { return Latest(launch, rank).value_or(StepId()).step; }
  Status Read(uint64_t launch, Rank reader, Step step, Rank rank, TimeUs hold = 0) {
    return Sync([&](Client::StatusDone done) {
      RankOf(launch, reader)
          .Read(step, rank, 5 * kSecond, hold,
                [done](const Status& status, const ShardMeta&) { done(status); });
    });
  }
  // `latest` of every rank of the launch must be the step, and each must be able to read its own shard of it.
  void RestoreEverywhere(uint64_t launch, Step step) {
    for (const Rank rank : RanksOf(launch)) {
      EXPECT_EQ(LatestStep(launch, rank), step) << "rank " << rank;
      EXPECT_TRUE(Read(launch, rank, step, rank).ok()) << "rank " << rank;
    }
  }
  Client& Person() {
    if (person_ == nullptr) person_ = std::make_unique<Client>(cluster_.get(), Client::Identity{});
    return *person_;
  }
  VerifyReport Verify(Step step) {
    VerifyReport found;
    const Status status = Sync([&](Client::StatusDone done) {
      Person().Verify(&step, 5 * kSecond, [&found, done](const Status& answered, const VerifyReport& report) {
        found = report;
        done(answered);
      });
    });
    EXPECT_TRUE(status.ok()) << status.ToString();
    return found;
  }
  static size_t BadIn(const VerifyReport& report) {
    size_t bad = 0;
    for (const VerifiedCopy& copy : report.copies) bad += copy.bad.size();
    return bad;
  }

  uint64_t FreeChunks(size_t host) const { return cluster_->host(host).store->chunks_free(); }
  bool Holds(size_t host, const ShardId& shard) const {
    return cluster_->host(host).store->Find(shard) != nullptr;
  }
  // Hosts other than `host` that hold the shard.
  std::vector<size_t> HoldersBeside(size_t host, const ShardId& shard) const {
    std::vector<size_t> holders;
    for (size_t other = 0; other < cluster_->host_count(); ++other)
      if (other != host && cluster_->host(other).daemon_runs() && Holds(other, shard))
        holders.push_back(other);
    return holders;
  }
  size_t LeaderHost() const {
    for (size_t host = 0; host < cluster_->host_count(); ++host)
      if (cluster_->host(host).daemon_runs() && cluster_->host(host).engine->is_leader()) return host;
    return SIZE_MAX;
  }
  // Cuts these hosts, and the coordinator if `coordinator`, off from the other hosts, in both directions.
  void Isolate(const std::vector<size_t>& hosts, bool coordinator, TimeUs time) {
    const auto inside = [&](size_t host) {
      return host == kCoordinatorHost ? coordinator
                                      : std::find(hosts.begin(), hosts.end(), host) != hosts.end();
    };
    std::vector<size_t> all = {kCoordinatorHost};
    for (size_t host = 0; host < cluster_->host_count(); ++host) all.push_back(host);
    for (const size_t from : all)
      for (const size_t to : all)
        if (inside(from) != inside(to)) cluster_->network().Cut(from, to, cluster_->now() + time);
  }
  // Splits four hosts: 0 and 1 keep their coordinator, 2 and 3 find another. The halves cannot communicate.
  void SplitInTwo() {
    Isolate({0, 1}, true, 60 * kSecond);
    cluster_->StartCoordinator();
    for (const size_t host : {2, 3}) cluster_->membership().Route(host, 1, true);
    ASSERT_TRUE(Until([&] {
      return cluster_->host(0).view.members.size() == 2 && cluster_->host(2).view.members.size() == 2;
    })) << Trouble();
  }
  void LoseHost(size_t host) {
    CloseClientsOn(host);
    cluster_->StopHost(host, false);
  }
  void CloseClientsOn(size_t host) {
    for (auto& [key, client] : clients_)
      if (client->identity().host == host) client->Close();
  }
  template <typename Condition>
  bool Until(Condition condition, TimeUs limit = 20 * kSecond) {
    return cluster_->RunUntil(condition, limit);
  }

  // Makes a call by `start`, and waits for its answer. Until() limits the time.
  template <typename Start>
  Status Sync(Start start) {
    std::optional<Status> answer;
    start([&answer](const Status& status) { answer = status; });
    if (!Until([&] { return answer.has_value(); })) return Error(Code::kInternal, "never answered");
    return *answer;
  }

  std::string Trouble() const {
    std::string text = cluster_->checker().failure();
    for (const std::string& line : cluster_->trace()) {
      text += "\n  ";
      text += line;
    }
    return text;
  }
  void TearDown() override {
    if (cluster_ != nullptr) {
      EXPECT_FALSE(cluster_->checker().failed()) << Trouble();
    }
    SetLogLevel(LogLevel::kWarning);
  }

  static constexpr size_t kTraceLines = 60;
  bool named_incarnations_ = true;
  bool keeps_token_ = false;  // all launches have one token
  uint32_t invariants_ppm_ = kMillion;
  Options options_;
  std::vector<uint64_t> lengths_;  // of every shard's objects; empty: drawn for each rank
  std::unique_ptr<Cluster> cluster_;
  std::map<std::pair<uint64_t, Rank>, std::unique_ptr<Client>> clients_;
  std::unique_ptr<Client> person_;
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_STORY_H_
