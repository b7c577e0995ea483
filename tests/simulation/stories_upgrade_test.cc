// SPDX-License-Identifier: Apache-2.0
//
// Stories of a rolling restart: daemons of two versions of the protocol in one job.
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

class UpgradeStory : public Story {
 protected:
  // Three nodes that speak the oldest version.
  void StartOld() {
    SetLogLevel(LogLevel::kOff);
    options_.seed = 7;
    options_.nodes = 3;
    options_.invariants_ppm = invariants_ppm_;
    cluster_ = std::make_unique<Cluster>(options_);
    cluster_->KeepTrace(kTraceLines);
    for (size_t host = 0; host < 3; ++host) {
      cluster_->SetProtocol(host, kProtocolOldest);
      cluster_->StartHost(host);
    }
    AwaitOneView();
  }
  // The host's daemon ends and comes back over the same memory.
  void Restart(size_t host, uint32_t protocol) {
    cluster_->StopHost(host, true);
    cluster_->RunFor(2 * kSecond);
    cluster_->SetProtocol(host, protocol);
    cluster_->StartHost(host);
    AwaitOneView();
  }
  uint32_t Spoken() { return cluster_->host(0).view.protocol(); }
};

TEST_F(UpgradeStory, ARollingRestartLosesNothingAndEndsInTheNewerVersion) {
  StartOld();
  Step step = 0;
  for (uint64_t launch = 1; launch <= 4; ++launch) {
    EXPECT_EQ(Spoken(), launch == 4 ? kProtocolVersion : kProtocolOldest);
    StartWorld(launch);
    if (step != 0) RestoreEverywhere(launch, step);
    for (int i = 0; i < 2; ++i) SaveEverywhere(launch, ++step);
    EXPECT_EQ(BadIn(Verify(step)), 0u);
    StopWorld(launch);
    if (launch < 4) Restart(launch - 1, kProtocolVersion);
  }
}

// A leader of the older version does not know agreements. It must not commit a step if the ranks disagree.
TEST_F(UpgradeStory, NoAgreementIsOverlookedByTheOlderVersion) {
  SaveScript script;
  script.agreement = 7;
  StartOld();
  StartWorld(1, {0, 1});
  EXPECT_EQ(Save(1, 1, 0, script).code(), Code::kUnsupported);
  StopWorld(1);
  for (const size_t host : {0, 1, 2}) Restart(host, kProtocolVersion);
  StartWorld(2, {0, 1});
  ASSERT_TRUE(Save(2, 1, 0, script).ok());
  Restart(2, kProtocolOldest);
  ASSERT_TRUE(Save(2, 1, 1).ok());
  EXPECT_EQ(Wait(2, 1, 1, Level::kCommitted, 2 * kSecond).code(), Code::kDeadlineExceeded);
  Restart(2, kProtocolVersion);
  for (const Rank rank : {0, 1})
    EXPECT_EQ(Wait(2, 1, rank, Level::kCommitted).code(), Code::kAborted) << "rank " << rank;
}

// A quarantine was acknowledged, and forgotten when the leader was restarted: the older nodes do not repeat it.
TEST_F(UpgradeStory, AQuarantineThatAnOlderNodeWouldForgetIsRefused) {
  StartOld();
  for (const size_t host : {0, 1}) Restart(host, kProtocolVersion);
  StartWorld(1);
  SaveEverywhere(1, 1);
  const auto quarantine = [this] {
    return Sync([&](Client::StatusDone done) { Person().Quarantine(1, false, 5 * kSecond, std::move(done)); });
  };
  EXPECT_EQ(quarantine().code(), Code::kUnsupported);
  StopWorld(1);
  Restart(2, kProtocolVersion);
  EXPECT_TRUE(quarantine().ok());
}

// Ranks and their saves continue meanwhile.
TEST_F(UpgradeStory, ANodeOfTheOlderVersionMayComeBack) {
  StartOld();
  for (const size_t host : {0, 1, 2}) Restart(host, kProtocolVersion);
  ASSERT_EQ(Spoken(), kProtocolVersion);
  StartWorld(1, {0, 1});
  SaveEverywhere(1, 1);
  Restart(2, kProtocolOldest);
  EXPECT_EQ(Spoken(), kProtocolOldest);
  SaveEverywhere(1, 2);
  Restart(2, kProtocolVersion);
  EXPECT_EQ(Spoken(), kProtocolVersion);
  SaveEverywhere(1, 3);
  for (const Rank rank : {0, 1}) EXPECT_TRUE(Read(1, rank, 3, 1 - rank).ok());
}

}  // namespace
}  // namespace ropeteam::simulation
