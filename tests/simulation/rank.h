// SPDX-License-Identifier: Apache-2.0
//
// A training process, and the launcher that starts all ranks together, as torchrun does. If a rank or its
// host dies, the launcher restarts all of them.
//
// A rank says hello, asks for `latest`, and reads its shard of that step (if the world size has changed, its
// share of all shards). Then, for each step, it waits for the others as a collective would, computes and
// saves. Sometimes it waits for a level or reads another rank's shard. If its daemon dies, it connects again
// and continues. If its incarnation is over or it cannot restore, it ends, and the launcher restarts all.

#ifndef ROPETEAM_TESTS_SIMULATION_RANK_H_
#define ROPETEAM_TESTS_SIMULATION_RANK_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/simulation/client.h"
#include "tests/simulation/cluster.h"

namespace ropeteam::simulation {

class Launcher;

class SimRank {
 public:
  SimRank(Cluster* cluster, Launcher* launcher, const Client::Identity& identity);

  void Start();
  void Kill();  // at once
  bool alive() const { return alive_; }
  // It was told to stop, but continues to save, alone.
  void BecomeZombie() { zombie_ = true; }
  bool zombie() const { return zombie_; }
  size_t host() const { return client_.identity().host; }
  Step step() const { return step_; }  // the last finished one
  bool restored() const { return restored_; }
  // It saves nothing more, because the launcher has silenced all ranks.
  bool silent() const { return silent_; }
  // Waits for every level of its last steps.
  void AskWaits();

 private:
  void After(TimeUs delay, std::function<void()> action);  // unless it is dead by then
  void End(const char* why);                               // its process exits with an error
  void SayHello(uint32_t attempt);
  void AskLatest(uint32_t attempt);
  void Restore(const AnswerLatest& latest);
  void RestoreNext(const AnswerLatest& latest, size_t index, uint32_t attempt);
  void NextStep();
  void Compute();
  void SetRestored();
  void SaveStep();
  void Saved(const Status& status);
  void AfterSave();
  void GoOn(const Status& status);
  void DropOne();
  void SayPolicy(Client::StatusDone done);
  void Reconnect();
  void ReadSomebody();
  void BeSilent();

  Cluster& cluster_;
  Launcher& launcher_;
  Client client_;
  bool alive_ = false;
  bool zombie_ = false;
  bool restored_ = false;
  bool silent_ = false;
  Incarnation incarnation_ = 0;
  std::vector<Rank> to_restore_;
  Step step_ = 0;
};

class Launcher {
 public:
  explicit Launcher(Cluster* cluster);

  void Start();
  // Stops all ranks, and starts them again after some time. Some of them may become zombies.
  void Restart(const char* why);
  // Every rank closes and opens again in its own process, when it is ready: some while others still save.
  void Reopen();
  void KillZombies();
  // While held, no ranks run.
  void Hold(bool hold);
  // Stops all ranks, zombies too, for good.
  void StopForGood();
  void OnHost(size_t host, bool up);
  void OnRankEnded(SimRank* rank);
  // Calls `go_on`, later, when a rank may begin its step after `done`: no other is more than the job's lag
  // behind.
  void Await(Step done, std::function<void()> go_on);
  void OnProgress();           // a rank has restored or finished a step
  void KillOne(size_t index);  // of the running ranks
  // Every rank saves up to the same step, one of the next few, and then stops saving. Some ranks wait for
  // their last steps at once.
  void Silence();
  void AskWaits();  // all ranks wait, again
  void EndSilence() { silence_ = false; }
  // Whether the rank that has finished this step saves no more.
  bool Silences(Step done);
  bool AllSilent() const;
  // Called when a rank has become silent.
  std::function<void()> on_silent;

  uint64_t launch() const { return launch_; }
  const std::vector<SimRank*>& ranks() const { return ranks_; }
  bool running() const { return running_; }

 private:
  void Poll();
  void Launch(const std::vector<size_t>& hosts);
  void MakeRanks(const std::vector<size_t>& hosts);
  bool MayGoOn(Step done) const;
  void Wake();

  Cluster& cluster_;
  const JobOptions& job_;
  uint64_t launch_ = 0;
  uint64_t token_ = 0;         // the launch that its token is named after
  std::vector<size_t> hosts_;  // of the ranks, in order
  bool running_ = false;
  bool stopped_ = false;
  bool held_ = false;
  bool polling_ = false;
  bool silence_ = false;
  std::optional<Step> last_step_;  // before the silence; none: the next rank that asks decides
  TimeUs trouble_at_ = 0;          // 0: none
  TimeUs start_at_ = 0;
  uint32_t world_size_ = 0;
  std::vector<SimRank*> ranks_;
  std::vector<std::pair<Step, std::function<void()>>> waiting_;
  std::vector<std::unique_ptr<SimRank>> all_;  // of every launch, because callbacks may still use them
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_RANK_H_
