// SPDX-License-Identifier: Apache-2.0
//
// A Node is one instance of this node among its peers: the Engine, and the parts that feed it and carry out its
// outputs. If the others declare it dead while it is alive, it ends, and a new Node with another NodeId begins over the
// same arena.
//
// Loop thread only.

#ifndef ROPETEAM_NODE_NODE_H_
#define ROPETEAM_NODE_NODE_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "core/engine/engine.h"
#include "core/store/store.h"
#include "node/arena_file.h"
#include "node/check_workers.h"
#include "node/control_plane.h"
#include "node/coordinator_watch.h"
#include "node/data_plane.h"
#include "node/event_loop.h"
#include "node/local_server.h"
#include "node/metrics.h"
#include "node/node_stats.h"
#include "node/options.h"
#include "node/storage_workers.h"
#include "transport/fabrics.h"

namespace ropeteam {

class Node {
 public:
  // The data path reports a failure of this member: for Membership::ReportSuspect().
  using OnSuspect = std::function<void(NodeId member, const std::string& reason)>;

  // A member answers control messages, or does not: for Membership::ReportReach().
  using OnReach = std::function<void(NodeId member, bool reached)>;

  // Membership::Relocate().
  using Relocate = std::function<void(const std::string& coordinator, bool now)>;

  // `ropeteam drain` requests a drain within that time; 0: the daemon's own limit.
  using DrainAsked = std::function<void(TimeUs within_us)>;
  // This node must leave now. Called once.
  using OnDrained = std::function<void(const DrainReport& report)>;

  // Opens the data path: CreateFabric(), or a test's substitute.
  using OpenFabric = std::function<Result<FabricChoice>(const FabricConfig& config)>;

  // Takes over the arena and listens for control and data, but not yet for ranks. `loop` and `arena` must outlive the
  // Node, and no other Node may use `arena` meanwhile. `credentials` may be null: unencrypted control connections.
  static Result<std::unique_ptr<Node>> Create(const Options& options,
                                              std::shared_ptr<const Credentials> credentials, EventLoop* loop,
                                              ArenaFile* arena, OnSuspect on_suspect,
                                              OpenFabric open_fabric = CreateFabric);
  ~Node();  // as Stop(), then waits for hanging storage; the arena keeps all sealed shards

  // Closes every session and stops the threads. Call it once, and nothing after it. False: a thread hangs in storage
  // and uses this Node and the arena. Then they must not be destroyed: end the process with _exit().
  bool Stop();

  // Call it before Listen(): sets the coordinator watch, which successive Nodes share. Both arguments must outlive the
  // Node.
  void UseWatch(CoordinatorWatch* watch, Relocate relocate);
  // Before Listen().
  void UseReach(OnReach on_reach) { on_reach_ = std::move(on_reach); }
  // Before Listen(). The callbacks must not destroy the Node.
  void UseDrain(DrainAsked asked, OnDrained drained);
  // Drains: copies this node's shards to other nodes. OnDrained is called when that is done, or at the given time
  // (EventLoop::Now()). A later call may only shorten the time.
  void Drain(TimeUs until);
  // Answers the clients that wait for the end of a drain, and returns its outcome.
  DrainReport EndDrain();
  // Listens for ranks.
  Status Listen();
  const Member& self() const { return self_; }
  // The highest epoch known from the arena; for MembershipConfig.
  Epoch epoch_known() const;
  // No shard is sealed in the arena.
  bool HoldsNothing() const { return store_->shards().empty(); }
  std::string transport_name() const { return data_->transport_name(); }
  std::string Describe() const;  // "socket PATH control HOST:PORT data DESCRIPTION"

  void OnView(const View& view);
  // The watch has recorded a contact.
  void OnContact();
  // Membership's lease is valid until `valid_until` (EventLoop::Now()); 0: no lease.
  void OnLease(TimeUs valid_until);
  // Membership::Callbacks::on_check.
  void OnCheckMembers(const std::vector<NodeId>& members);
  MetricsSnapshot Metrics() const;

  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;

 private:
  struct Early {
    NodeId from = kNoNode;
    std::string envelope;
  };

  Node(const Options& options, std::shared_ptr<const Credentials> credentials, EventLoop* loop,
       ArenaFile* arena, OnSuspect on_suspect);
  Status Init(const OpenFabric& open_fabric);
  Status InitPlanes(const OpenFabric& open_fabric);
  Status InitLocal();
  void OpenStorage(const JobSettings& settings);
  void ListStorage(uint32_t steps_max, TimeUs timeout_us, LocalServer::StorageListDone done);
  void OnStorageDone(uint64_t tag, Status status, StorageDone done);
  // Wraps a callback for another thread: posts it to the loop, which drops it if this Node is gone.
  void PostToSelf(std::function<void()> closure);
  void Drive(const std::function<void(Engine&, TimeUs)>& input);
  void CarryOut(Outbox& outbox);
  void ArmTimer();
  void LookAtStorage(Engine& engine, TimeUs now);
  void LookForCoordinator(TimeUs now);
  void LookAtDrain(TimeUs now);
  void OnTold(const std::string& coordinator);
  Status Rejoin(const std::string& coordinator, bool force);
  void OnControlMessage(NodeId from, std::string envelope);
  void LogView(const View& view, const std::unordered_set<NodeId>& members) const;
  void LogEvent(const LevelEvent& event);
  std::vector<ShardObjects> ListObjects(Step step) const;

  const Options options_;
  const std::shared_ptr<const Credentials> credentials_;
  EventLoop* const loop_;
  ArenaFile* const arena_;
  const OnSuspect on_suspect_;
  OnReach on_reach_;
  Member self_;
  View view_;
  std::unordered_set<NodeId> members_;  // of the view
  std::unique_ptr<Store> store_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<CheckWorkers> checks_;
  std::unique_ptr<StorageWorkers> storage_;
  TimeUs storage_look_at_ = 0;  // time of the next check for stalled work
  CoordinatorWatch* watch_ = nullptr;
  Relocate relocate_;
  TimeUs ask_at_ = EventLoop::kNever;  // time of the next question to members
  std::string told_;                   // a member's last answer; for the log
  uint64_t transfers_ = 0;             // running transfers
  DrainAsked drain_asked_;
  OnDrained on_drained_;
  TimeUs drain_until_ = EventLoop::kNever;
  Status storage_trouble_;  // why it is unavailable although the job has it
  std::unique_ptr<DataPlane> data_;
  std::string fallback_;  // why RDMA is not used; else empty
  std::unique_ptr<ControlPlane> control_;
  std::unique_ptr<LocalServer> local_;
  // Messages from instances that the next view may contain: a view reaches nodes at different times.
  std::deque<Early> early_;
  size_t early_bytes_ = 0;
  bool carrying_ = false;
  NodeStats stats_;
  // When this node's first save of a step began, for `after_ms` in the log. Only the newest steps.
  std::map<StepId, TimeUs> begun_;
  // A posted closure first checks whether this Node still exists. Other threads copy the constant weak pointer, so the
  // destructor may reset the other one meanwhile.
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);
  const std::weak_ptr<int> alive_for_others_ = alive_;
};

FabricConfig FabricConfigOf(const Options& options);

// Random, never kNoNode.
NodeId NewNodeId();

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_NODE_H_
