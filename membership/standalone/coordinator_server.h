// SPDX-License-Identifier: Apache-2.0
//
// The coordinator with a gRPC server around it. The Coordinator runs on its own thread. gRPC's threads only deliver
// messages to it and take its answers. The memory that a client can cause is bounded: one unread message per stream, a
// fixed number of streams, and an outbox in which a newer view replaces an unsent one.
//
// With a store (see Coordinator), the server starts before its coordinator. It listens, and closes every stream while
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

namespace grpc {
class Channel;
}
namespace ropeteam::membership::v1 {
class CoordinatorFrame;
}

namespace ropeteam {

class CoordinatorServer {
 public:
  // For Coordinator::Store. Must not block or call back.
  using OnStore = std::function<void(const ViewStatePtr&)>;

  // `config` is valid (ValidateConfig). With `on_store` no coordinator runs before Elect().
  explicit CoordinatorServer(const MembershipConfig& config, OnStore on_store = {});
  ~CoordinatorServer();  // Stop()

  // Listens on config.coordinator_listen only, or nowhere (config.alone). kIo with the address if that is not possible.
  Status Start();
  // A connection to it within the process. After Start().
  std::shared_ptr<grpc::Channel> Channel() const;
  // Gives out the last view, for a short time at most, and ends. Idempotent.
  void Stop();

  // The rest is for a server with a store. Any thread.
  // host:port; the chosen port if the config has 0. After Start().
  const std::string& address() const { return address_; }
  void Elect(const Coordinator::Inheritance& inheritance);
  void Depose();  // ends the coordinator and all its streams; nothing without one
  void Stored(Epoch epoch);
  void Confirmed(TimeUs until);
  // Waits, for a short time at most, until no view waits to be given out.
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

  // Locked before a stream's own lock, never after it. Guards everything below.
  std::mutex mutex_;
  std::condition_variable changed_;
  std::unique_ptr<Coordinator> coordinator_;           // null while this process does not have the role
  std::unordered_map<ConnectionId, Stream*> streams_;  // each owns itself until its OnDone()
  ConnectionId connections_made_ = 0;
  // The encoded frames of the view of epoch encoded_, shared by all streams. The key is the epoch of a delta's base, or
  // 0 for the whole view.
  Epoch encoded_ = 0;
  std::map<Epoch, std::shared_ptr<const membership::v1::CoordinatorFrame>> frames_;
  bool stopping_ = false;

  std::condition_variable timer_;
  TimeUs armed_ = 0;  // when the thread wakes on its own
  bool ending_ = false;
  std::thread thread_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_COORDINATOR_SERVER_H_
