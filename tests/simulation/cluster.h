// SPDX-License-Identifier: Apache-2.0
//
// A whole cluster in one thread: hosts with real Engines over real Stores, membership's real state machines,
// a simulated network, storage and clock, and the Checker, which sees everything. Ranks and the launcher
// (rank.h) and the faults (faults.h) act through it.

#ifndef ROPETEAM_TESTS_SIMULATION_CLUSTER_H_
#define ROPETEAM_TESTS_SIMULATION_CLUSTER_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/simulation/checker.h"
#include "tests/simulation/host.h"
#include "tests/simulation/network.h"
#include "tests/simulation/options.h"
#include "tests/simulation/random.h"
#include "tests/simulation/scheduler.h"
#include "tests/simulation/sim_membership.h"
#include "tests/simulation/storage.h"

namespace ropeteam::simulation {

class Cluster : private NetworkEnds {
 public:
  explicit Cluster(const Options& options);
  ~Cluster() override;

  const Options& options() const { return options_; }
  Scheduler& scheduler() { return scheduler_; }
  Random& random() { return random_; }
  Network& network() { return network_; }
  Checker& checker() { return checker_; }
  SimMembership& membership() { return *membership_; }
  SimStorage& storage() { return storage_; }
  TimeUs now() const { return scheduler_.now(); }

  // ---- hosts
  size_t host_count() const { return hosts_.size(); }
  const Host& host(size_t index) const { return *hosts_[index]; }
  // Adds a machine with the next ordinal. It is off.
  size_t AddHost();
  // The machine stops for good. An empty one takes its place, and is off. `same_name`: it has the name of the old one.
  size_t ReplaceHost(size_t index, bool same_name, bool keep_memory);
  void Returns(size_t index) { hosts_[index]->returns = true; }
  std::optional<size_t> LeaderHost() const;
  size_t hosts_in_job() const;  // those that are not gone
  // Switches the machine on. Its memory is as it was.
  void StartHost(size_t index);
  // Kills every process on it. `keep_memory`: a reboot of containers, not of the machine.
  void StopHost(size_t index, bool keep_memory);
  // The newest protocol version of the host's next daemon.
  void SetProtocol(size_t index, uint32_t protocol) { hosts_[index]->protocol = protocol; }
  // kill -9; the memory stays.
  void CrashDaemon(size_t index);
  void StartDaemon(size_t index);
  // They apply from the next start of its daemon.
  void SetOwnSettings(size_t index, const SimMembership::OwnSettings& own) { hosts_[index]->own = own; }
  // The daemon is stopped (SIGSTOP), and continues. Its transfers in flight go on meanwhile. Everything that
  // the process must handle waits.
  void PauseDaemon(size_t index);
  void ResumeDaemon(size_t index);
  // `ropeteam drain`: the daemon leaves when its engine says so, or when the time has passed. Then
  // on_drained() is called while the daemon still runs. The callee must end it.
  void Drain(size_t index, TimeUs within);
  // Replaces the host's key file, and restarts its daemon if one runs.
  void SetKeys(size_t index, const std::vector<KeyId>& keys);
  std::function<void(size_t host, const DrainReport&)> on_drained;
  // Flips one bit of a chunk outside of sealed shards. False: it is in a sealed shard, or no daemon runs.
  bool FlipUnsealed(size_t index, uint32_t chunk);
  // Flips one bit of the arena's tables. A running daemon repairs it. A starting one may reject the arena.
  void FlipTable(size_t index);
  // A rank continues to write into a chunk that a dead daemon has granted.
  void StrayWrite(size_t index, uint64_t memory_generation, uint32_t chunk, const std::string& bytes);
  // Flips one bit of the `chunk`th chunk of the copy that this host has.
  bool FlipBit(size_t index, const ShardId& shard, uint32_t chunk);
  // Called when a machine stops or starts.
  std::function<void(size_t host, bool up)> on_host;
  // For the stories: called at the moment of the event. They must react by After(0), not inside the call.
  std::function<void(size_t host, const LevelEvent&)> on_event;
  std::function<void(const Transfer&)> on_transfer;

  // ---- clients
  // 0: no daemon runs there.
  SessionId OpenSession(size_t host, Client* client, uint64_t launch, Rank rank, uint32_t world_size);
  // The client closes: its requests are not answered any more.
  void CloseSession(SessionId session);
  // `input` gives the request to the engine, later and in order. `request.done` is called once, unless the
  // client closes.
  using Input = std::function<void(Engine&, TimeUs, const Session&, RequestId)>;
  void Ask(SessionId session, Pending request, Input input);
  void Tell(SessionId session, Input input);  // without an answer
  const Session* FindSession(SessionId session) const;
  // Waits that a running daemon has not answered.
  std::vector<OpenWait> OpenWaits() const;
  // Memory that the client may write to; null: the session is cut.
  std::byte* ClientMemory(SessionId session, uint32_t chunk);
  // Shares a GPU's memory: daemons can put from it, by the returned number, until DropDevice().
  DeviceBufferId ShareDevice(std::shared_ptr<const DeviceMemory> memory);
  void DropDevice(DeviceBufferId buffer) { device_buffers_.erase(buffer); }

  // ---- running
  // Runs until `done` returns true, but for at most `limit`. Calls `done` after every event, or at most once
  // per `every`. False: the time has passed, or the checker has failed.
  bool RunUntil(const std::function<bool()>& done, TimeUs limit, TimeUs every = 0);
  void RunFor(TimeUs time);
  void StartCoordinator();
  // No more faults from now on: links heal, losses end, everything that is down comes back.
  void Heal();
  bool healed() const { return healed_; }
  // Every host that is not gone is up, and every engine has the same view with all hosts.
  bool AllInOneView() const;

  // ---- the trace: the last lines. It is kept only on request; a run is the same with and without it
  void KeepTrace(size_t lines) { trace_lines_ = lines; }
  bool tracing() const { return trace_lines_ != 0; }
  void Trace(const char* format, ...) __attribute__((format(printf, 2, 3)));
  const std::deque<std::string>& trace() const { return trace_; }
  // Digest of everything that was sent and answered. Two runs of one seed have the same digest.
  uint64_t digest() const { return digest_; }
  uint64_t inputs() const { return inputs_; }

 private:
  using Drive = std::function<void(Engine&, TimeUs now)>;  // of the host's clock

  // Gives the engine one input, executes its outputs, and lets the Checker check everything.
  void Give(Host* host, const char* what, const Drive& drive);
  void CarryOut(Host* host, const Outbox& out, size_t limit, uint64_t free_before, uint64_t dropped_before);
  void CarryMessage(Host* host, const SendMessage& message);
  static bool TellsCommits(const std::string& envelope);
  void DeliverMessage(size_t to, NodeId from, NodeId instance, Epoch epoch,
                      const std::shared_ptr<const std::string>& envelope);
  void CarryTransfer(Host* host, const StartTransfer& start);
  void PostTransfer(size_t index, NodeId instance, const StartTransfer& start);
  void LoseLink(Host* host, NodeId peer);
  void Reconnect(size_t index, NodeId instance, NodeId peer);
  void CarryCheck(Host* host, const StartCheck& check);
  void ConnectStorage();
  void FinishCheck(size_t index, const StartCheck& check);
  void CarryAnswer(Host* host, const Answer& answer, uint64_t free_before, uint64_t dropped_before);
  void ArmTimer(Host* host);
  // Runs the action now, or when the stopped daemon continues; never if it dies before that.
  void WhenAwake(Host* host, std::function<void()> action);
  void EndDaemon(Host* host, bool reset);
  void LeaveJob(size_t index, NodeId instance);
  void OnView(size_t index, NodeId instance, const View& view);
  int DrawDrift(Random* random) const;
  void OnLease(size_t index, NodeId instance, TimeUs valid_until);
  void OnCheck(size_t index, NodeId instance, const std::vector<NodeId>& members);
  void MarkBadChunks(Host* host);
  void LoseMemory(Host* host);
  void WatchDeadline(SessionId session, RequestId request);
  void CheckDeadline(SessionId session, RequestId request, TimeUs time);
  void DeliverToEngine(SessionId id, const char* what, const Input& input, RequestId request);
  Host* FindInstance(NodeId instance);
  void Digest(uint64_t value) { digest_ = Mix(digest_, value); }

  // NetworkEnds
  bool Alive(size_t host, NodeId instance) const override {
    return hosts_[host]->id == instance && instance != kNoNode;
  }
  std::byte* Memory(size_t host, uint64_t offset, uint64_t length) override;
  void OnLanding(const Transfer& transfer, uint64_t offset, const std::string& bytes) override;
  void OnDeviceRead(const Transfer& transfer) override;
  void OnTransferDone(size_t host, NodeId instance, uint64_t tag, Code code) override;

  const Options options_;
  Scheduler scheduler_;
  Random random_;
  std::vector<std::unique_ptr<Host>> hosts_;
  Network network_;
  SimStorage storage_;
  Checker checker_;
  std::unique_ptr<SimMembership> membership_;
  std::map<NodeId, size_t> instances_;  // also former ones
  std::map<SessionId, Session> sessions_;
  SessionId next_session_ = 1;
  std::map<DeviceBufferId, std::shared_ptr<const DeviceMemory>> device_buffers_;
  DeviceBufferId next_device_buffer_ = 1;
  uint32_t crash_in_input_ppm_ = 0;
  bool healed_ = false;
  size_t trace_lines_ = 0;
  std::deque<std::string> trace_;
  uint64_t digest_ = 0;
  uint64_t inputs_ = 0;
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_CLUSTER_H_
