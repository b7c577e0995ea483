// SPDX-License-Identifier: Apache-2.0
//
// One leader and many nodes, to measure the cost of the leader. The leader is a real Engine, and every
// message to and from it is real and encoded. Time is simulated, so a large cluster costs only memory.
//
// A node is a model (ModelNode) or a real Engine (EngineNode). The model keeps no shards, but reports them
// with the real codec. The Engine saves and replicates; the model is checked against it.

#ifndef ROPETEAM_BENCH_CONTROL_CLUSTER_H_
#define ROPETEAM_BENCH_CONTROL_CLUSTER_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/engine/engine.h"
#include "core/engine/messages.h"

namespace ropeteam::bench {

constexpr uint32_t kRanksPerNode = 8;
constexpr uint32_t kControlReplicas = 1;
constexpr TimeUs kControlStepUs = 10'000'000;  // the job saves a step this often

// An engine with its own memory and store.
class EngineHost {
 public:
  EngineHost(NodeId id, uint64_t chunks);
  ~EngineHost();
  EngineHost(const EngineHost&) = delete;
  EngineHost& operator=(const EngineHost&) = delete;
  Engine& engine() { return *engine_; }
  Store& store() { return *store_; }
  static constexpr uint64_t kChunkBytes = 4096;

 private:
  size_t bytes_;
  std::byte* memory_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<Engine> engine_;
};

// Runs functions one after the other on a thread of its own. The leader runs on such a thread: it then has
// its own heap, as in a daemon, and the thread's processor time is the leader's.
class Worker {
 public:
  Worker();
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  // Waits until `work` is done and returns the processor time that it took, in seconds.
  double Run(const std::function<void()>& work);

 private:
  void Loop();
  std::mutex mutex_;
  std::condition_variable changed_;
  const std::function<void()>* work_ = nullptr;
  double seconds_ = 0;
  bool ending_ = false;
  std::thread thread_;
};

// A node of the cluster. Messages that it sends are appended to `out`.
class ControlNode {
 public:
  virtual ~ControlNode() = default;
  virtual void OnView(TimeUs now, const View& view, std::vector<SendMessage>* out) = 0;
  virtual void OnMessage(TimeUs now, NodeId from, const std::string& envelope,
                         std::vector<SendMessage>* out) = 0;
  virtual void OnTimer(TimeUs now, std::vector<SendMessage>* out) = 0;
  virtual TimeUs NextTimer() const = 0;
  // All its ranks begin to save the step.
  virtual void BeginStep(TimeUs now, Step step, std::vector<SendMessage>* out) = 0;
  // The node's local rank ends its save of the step; its shard has no payload.
  virtual void Save(TimeUs now, Step step, uint32_t local_rank, std::vector<SendMessage>* out) = 0;
  // A copy of that rank's shard is sealed here. EngineNode ignores this, since engines replicate by
  // themselves.
  virtual void Hold(TimeUs now, Step step, Rank rank, std::vector<SendMessage>* out) = 0;
  // The newest step that the leader has announced as committed.
  virtual Step committed() const = 0;
};

struct ControlOptions {
  uint32_t nodes = 16;  // nodes with ranks; the leader is an additional node without ranks
  bool engines = false;
};

struct StepCost {
  double leader_cpu_s = 0;
  uint64_t leader_bytes = 0;  // of envelopes, to and from the leader
};

class ControlCluster {
 public:
  explicit ControlCluster(const ControlOptions& options);
  ~ControlCluster();

  // All ranks save the next step. Throws BenchError if it is not committed and announced to every node.
  StepCost RunStep();
  // Removes the last node with its copies; the ranks of the others form the next incarnation. Models only.
  StepCost LoseNode();
  // The lost node returns without copies, and the world has its former size, in a new incarnation.
  StepCost ReturnNode();

 private:
  struct Delivery {
    NodeId from;
    std::string envelope;
  };
  void ShowView();
  StepCost RunUntil(TimeUs end);
  // Carries out the leader's outbox, and notes when its timer is due.
  void DrainLeader(std::vector<SendMessage>* messages);
  void Arm(uint32_t node);
  void Take(NodeId from, std::vector<SendMessage>* messages);

  const ControlOptions options_;
  uint32_t members_;  // nodes in the view, without the leader
  TimeUs now_ = 1'000'000;
  Epoch epoch_ = 0;
  Step step_ = 0;
  Incarnation incarnation_ = 0;
  Worker worker_;
  std::unique_ptr<EngineHost> leader_;  // used on the worker only
  TimeUs leader_due_ = 0;
  std::vector<std::unique_ptr<ControlNode>> nodes_;
  std::vector<TimeUs> armed_;
  std::multimap<TimeUs, uint32_t> timers_;
  std::multimap<TimeUs, std::pair<uint32_t, uint32_t>> saves_;     // node, local rank
  std::multimap<TimeUs, std::pair<uint32_t, uint32_t>> replicas_;  // holder, rank of the world
  std::deque<Delivery> to_leader_;
  std::deque<std::pair<uint32_t, Delivery>> to_nodes_;
  StepCost cost_;
};

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_CONTROL_CLUSTER_H_
