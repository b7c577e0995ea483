// SPDX-License-Identifier: Apache-2.0
//
// The coordinator with a gRPC server around it. The Coordinator lives on a thread of its own; gRPC's threads
// only bring it messages and take its answers away. What a client can make it hold is bounded: one unread
// message per stream, a fixed number of streams, and an outbox in which a newer view replaces one that has
// not gone out yet.
//
// With a store (see Coordinator) the server is there before its coordinator is: it listens, and closes every stream while
// this process does not have the coordinator role.

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_COORDINATOR_SERVER_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_COORDINATOR_SERVER_H_

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>

#include "core/base/status.h"
#include "membership/coordinator.h"

namespace ropeteam::membership::v1 {
class CoordinatorFrame;
}

namespace ropeteam {

class CoordinatorServer {
 public:
  // For Coordinator::Store. Must not block, nor call back.
  using OnStore = std::function<void(const ViewStatePtr&)>;

  // `config` is valid (ValidateConfig). With `on_store` no coordinator runs before Elect().
  explicit CoordinatorServer(const MembershipConfig& config, OnStore on_store = {});
  ~CoordinatorServer();  // Stop()

  // Listens on config.coordinator_listen and nowhere else. kIo with the address when that cannot be.
  Status Start();
  // Gives out the last view, for a moment at most, and ends. Idempotent.
  void Stop();

  // The rest is for a server with a store. Any thread.
  // host:port, with the port that was chosen where the config has 0. After Start().
  const std::string& address() const { return address_; }
  void Elect(const Coordinator::Inheritance& inheritance);
  void Depose();  // ends the coordinator and all its streams; nothing without one
  void Stored(Epoch epoch);
  void Confirmed(TimeUs until);
  // Until nothing waits to be given out; for a moment at most.
  void Settle();

 private:
  class Service;
  struct Server;  // keeps gRPC's headers out of this one
  class Stream;
  friend class Stream;

  // From streams, on gRPC's threads.
  ConnectionId Adopt(Stream* stream);
  void OnMessage(ConnectionId connection, NodeMessage message);
  void OnEnd(ConnectionId connection);
  void Forget(ConnectionId connection);
  void OnIdle();

  // All under mutex_.
  void Perform(Coordinator::Outputs outputs);
  bool AllIdle();
  // Null for a message that is neither a view nor a delta.
  std::shared_ptr<const membership::v1::CoordinatorFrame> FrameOfView(const CoordinatorMessage& message);

  void KeepDeadlines();  // the thread

  const MembershipConfig config_;
  const OnStore on_store_;
  std::string address_;
  std::unique_ptr<Server> server_;

  // Taken before a stream's own lock, never after it. Guards all that follows.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Coordinator> coordinator_;  // null while this process does not have the role
  std::unordered_map<ConnectionId, Stream*> streams_;  // each owns itself until its OnDone()
  ConnectionId connections_made_ = 0;
  // The encoded frames of the view of epoch encoded_, shared by all streams. The key is the epoch of the view that a
  // delta is from, 0 for the whole view.
  Epoch encoded_ = 0;
  std::map<Epoch, std::shared_ptr<const membership::v1::CoordinatorFrame>> frames_;
  bool stopping_ = false;

  std::condition_variable timer_;
  TimeUs armed_ = 0;  // when the thread will wake by itself
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_COORDINATOR_SERVER_H_
