// SPDX-License-Identifier: Apache-2.0
//
// A Node is one instance of this node among its peers: the Engine, and everything that feeds it and carries out its
// outputs. If it is declared dead while alive, it ends, and another Node with another NodeId begins over the same arena.
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
  // The data path saw this member fail: for Membership::ReportSuspect().
  using OnSuspect = std::function<void(NodeId member, const std::string& reason)>;

  // Membership::Relocate().
  using Relocate = std::function<void(const std::string& coordinator, bool now)>;

  // `ropeteam drain` asks for a drain within that time, 0: the daemon's own.
  using DrainAsked = std::function<void(TimeUs within_us)>;
  // This node must leave now. Called once.
  using OnDrained = std::function<void(const DrainReport& report)>;

  // Opens the data path: CreateFabric(), or a test's substitute.
  using OpenFabric = std::function<Result<FabricChoice>(const FabricConfig& config)>;

  // Takes the arena over, listens for control and data, not yet for ranks. `loop` and `arena` must outlive
  // the Node, and `arena` must serve no other Node meanwhile. `credentials` may be null: control connections in clear.
  static Result<std::unique_ptr<Node>> Create(const Options& options,
                                              std::shared_ptr<const Credentials> credentials, EventLoop* loop,
                                              ArenaFile* arena, OnSuspect on_suspect,
                                              OpenFabric open_fabric = CreateFabric);
  ~Node();  // as Stop(), then waits for storage for as long as it hangs; the arena keeps all sealed shards

  // Closes every session and stops the threads, once; nothing may be called after it. False: a thread hangs in storage and
  // uses this Node and the arena. They must not be destroyed then: the process must end by _exit().
  bool Stop();

  // Before Listen(): the knowledge about the coordinator, which several Nodes share in turn. Both must outlive the Node.
  void UseWatch(CoordinatorWatch* watch, Relocate relocate);
  // Before Listen(). The callbacks must not destroy the Node.
  void UseDrain(DrainAsked asked, OnDrained drained);
  // Drains: copies this node's shards to other nodes. OnDrained is called when that is done, or at the given time
  // (EventLoop::Now()); a later call may make the time earlier.
  void Drain(TimeUs until);
  // Answers the clients that wait for the end of a drain, and returns its outcome.
  DrainReport EndDrain();
  // Listens for ranks.
  Status Listen();
  const Member& self() const { return self_; }
  // The highest epoch that the arena knows of; MembershipConfig's.
  Epoch epoch_known() const;
  std::string transport_name() const { return data_->transport_name(); }
  std::string Describe() const;  // "socket PATH control HOST:PORT data DESCRIPTION"

  void OnView(const View& view);
  // The watch has been told of a contact.
  void OnContact();
  // Membership's lease lasts until then (EventLoop::Now()); 0: no lease.
  void OnLease(TimeUs valid_until);
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
  // Wraps a callback for another thread: posts it to the loop, where it is dropped if this Node is gone.
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
  Member self_;
  View view_;
  std::unordered_set<NodeId> members_;  // of the view
  std::unique_ptr<Store> store_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<CheckWorkers> checks_;
  std::unique_ptr<StorageWorkers> storage_;
  TimeUs storage_look_at_ = 0;  // next, for work that stalls
  CoordinatorWatch* watch_ = nullptr;
  Relocate relocate_;
  TimeUs ask_at_ = EventLoop::kNever;  // where the coordinator is
  std::string told_;                   // by a member, last; for the log
  uint64_t transfers_ = 0;             // under way
  DrainAsked drain_asked_;
  OnDrained on_drained_;
  TimeUs drain_until_ = EventLoop::kNever;
  Status storage_trouble_;  // why there is none though the job has storage
  std::unique_ptr<DataPlane> data_;
  std::string fallback_;  // why RDMA was passed over; empty when it was not
  std::unique_ptr<ControlPlane> control_;
  std::unique_ptr<LocalServer> local_;
  // Messages from instances that the next view may bring: it reaches nodes at different times.
  std::deque<Early> early_;
  size_t early_bytes_ = 0;
  bool carrying_ = false;
  NodeStats stats_;
  // When this node's first save of a step began, for the log's `after_ms`; the newest steps only.
  std::map<StepId, TimeUs> begun_;
  // A closure that was posted to the loop first checks whether this Node still exists. Other threads copy the constant
  // weak pointer, so that the destructor may reset the other one while they run.
  std::shared_ptr<int> alive_ = std::make_shared<int>(0);
  const std::weak_ptr<int> alive_for_others_ = alive_;
};

FabricConfig FabricConfigOf(const Options& options);

// Random, never kNoNode.
NodeId NewNodeId();

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_NODE_H_
