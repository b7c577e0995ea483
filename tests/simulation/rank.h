// SPDX-License-Identifier: Apache-2.0
//
// A training process and the launcher that starts a world of them, as torchrun does: all ranks together, and
// all again when one of them or its host dies.
//
// A rank: hello; latest; reads its shard of that step (or, in a world of another size, its share of all
// shards); then, step by step: waits for the others as a collective would, computes, saves, sometimes waits
// for a level or reads somebody's shard. When its daemon dies it connects again and goes on; when it is told
// that its incarnation is over, or cannot restore, it ends, and the launcher restarts the world.

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
  // It was told to stop and does not: it goes on saving, alone.
  void BecomeZombie() { zombie_ = true; }
  bool zombie() const { return zombie_; }
  size_t host() const { return client_.identity().host; }
  Step step() const { return step_; }  // that it has finished
  bool restored() const { return restored_; }
  // It saves nothing more: the launcher has silenced the world.
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
  std::string ended_;
};

class Launcher {
 public:
  explicit Launcher(Cluster* cluster);

  void Start();
  // Whatever is wrong is found out and the world started again.
  void Restart(const char* why);
  void KillZombies();
  // While held, no world runs.
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
  // Every rank saves up to the same step, one of the next few, and then no more. Some wait for their last steps at once.
  void Silence();
  void AskWaits();  // all of them, again
  void EndSilence() { silence_ = false; }
  // Whether the rank that has finished this step saves no more.
  bool Silences(Step done);
  bool AllSilent() const;
  // A rank has become silent.
  std::function<void()> on_silent;

  uint64_t launch() const { return launch_; }
  const std::vector<SimRank*>& ranks() const { return ranks_; }
  bool running() const { return running_; }

 private:
  void Poll();
  void Launch();
  bool MayGoOn(Step done) const;
  void Wake();

  Cluster& cluster_;
  const JobOptions& job_;
  uint64_t launch_ = 0;
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
  std::vector<std::unique_ptr<SimRank>> all_;  // of every launch: callbacks may still name them
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_RANK_H_
