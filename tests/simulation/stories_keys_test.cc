// SPDX-License-Identifier: Apache-2.0
//
// Stories of a key's replacement in a job that encrypts its replicas (docs/security.md), with losses between its
// steps. The Checker checks the bytes, and that no host uses a key that it lacks.
#include "tests/simulation/simulation.h"
#include "tests/simulation/story.h"

namespace ropeteam::simulation {
namespace {

constexpr KeyId kOld = kFirstKey;
constexpr KeyId kNew = kFirstKey + (KeyId{1} << 32);
const std::vector<std::vector<KeyId>> kSteps = {{kOld, kNew}, {kNew, kOld}, {kNew}};

class KeysStory : public Story {
 protected:
  void Begin() {
    options_.encrypts = true;
    StartNodes(4);
    StartWorld(launch_);
    SaveEverywhere(launch_, 1);
    step_ = StepIn(launch_, 1);
    StopWorld(launch_);
  }
  void SetKeys(size_t host, const std::vector<KeyId>& keys) {
    cluster_->SetKeys(host, keys);
    AwaitOneView();
  }
  size_t CopiesOf(KeyId key) const {
    size_t copies = 0;
    for (size_t host = 0; host < options_.nodes; ++host)
      if (cluster_->host(host).daemon_runs())
        for (const auto& [id, shard] : cluster_->host(host).store->shards())
          copies += shard->encryption.key == key ? 1 : 0;
    return copies;
  }
  // A host and its memory are lost, and the next launch restores the step.
  void LoseAndRestore(size_t host) {
    ASSERT_TRUE(Until([&] { return cluster_->checker().CopiesMin(step_) >= 2; })) << Trouble();
    LoseHost(host);
    cluster_->StartHost(host);
    AwaitOneView();
    StartWorld(++launch_);
    RestoreEverywhere(launch_, step_.step);
    StopWorld(launch_);
  }

  uint64_t launch_ = 1;
  StepId step_;
};

TEST_F(KeysStory, AHostIsLostAfterEveryStepOfAReplacement) {
  Begin();
  size_t lost = 0;
  for (const std::vector<KeyId>& keys : kSteps) {
    if (keys.size() == 1) {
      ASSERT_TRUE(Until([&] { return CopiesOf(kOld) == 0; })) << Trouble();
    }
    for (size_t host = 0; host < options_.nodes; ++host) {
      SetKeys(host, keys);
      LoseAndRestore(lost++ % options_.nodes);
    }
  }
  EXPECT_EQ(CopiesOf(kOld), 0u);
  EXPECT_GE(CopiesOf(kNew), 1u);
}

TEST_F(KeysStory, DaemonsDieWhileTheyEncryptAgain) {
  Begin();
  for (const size_t step : {0u, 1u})
    for (size_t host = 0; host < options_.nodes; ++host) SetKeys(host, kSteps[step]);
  // Each of them is killed as soon as it begins.
  for (size_t host = 0; host < options_.nodes; ++host) {
    ASSERT_TRUE(Until([&] {
      return CopiesOf(kOld) == 0 || cluster_->host(host).engine->Metrics().checks_running != 0;
    })) << Trouble();
    cluster_->CrashDaemon(host);
    cluster_->StartDaemon(host);
    AwaitOneView();
  }
  ASSERT_TRUE(Until([&] { return CopiesOf(kOld) == 0; })) << Trouble();
  EXPECT_GE(cluster_->checker().statistics().reencrypted, 1u);
  for (size_t host = 0; host < options_.nodes; ++host) SetKeys(host, {kNew});
  for (size_t host = 0; host < options_.nodes; ++host) LoseAndRestore(host);
}

}  // namespace
}  // namespace ropeteam::simulation
