// SPDX-License-Identifier: Apache-2.0
//
// One attempt of a node to reach the coordinator: a channel, one call on it, and the messages to send. A stream is used
// once, and stays alive until gRPC is done with it.

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_NODE_STREAM_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_NODE_STREAM_H_

#include <grpcpp/grpcpp.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "membership/messages.h"
#include "membership/standalone/membership.grpc.pb.h"

namespace ropeteam {

class NodeStream final
    : public grpc::ClientBidiReactor<membership::v1::NodeFrame, membership::v1::CoordinatorFrame> {
 public:
  // Both are called on gRPC's threads.
  struct Handler {
    // The next message is read only after ReadNext().
    std::function<void(uint64_t attempt, CoordinatorMessage)> on_message;
    // The last call. The calling thread must not destroy the stream: its channel may be the last to hold gRPC's
    // threads, and would wait for itself.
    std::function<void(std::shared_ptr<NodeStream>, const std::string& reason)> on_done;
  };

  static std::shared_ptr<NodeStream> Open(const std::shared_ptr<grpc::Channel>& channel, uint64_t attempt,
                                          Handler handler);

  // Any thread. Messages after the end are dropped.
  void Send(const NodeMessage& message);
  void ReadNext();
  void Cancel();

  uint64_t attempt() const { return attempt_; }

 private:
  NodeStream(const std::shared_ptr<grpc::Channel>& channel, uint64_t attempt, Handler handler);
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  void Advance();  // under mutex_
  void Release();  // under mutex_

  const uint64_t attempt_;
  const Handler handler_;
  std::shared_ptr<NodeStream> self_;  // until OnDone()
  std::unique_ptr<membership::v1::Coordinator::Stub> stub_;
  grpc::ClientContext context_;
  membership::v1::CoordinatorFrame in_;  // gRPC's from StartRead() to OnReadDone()
  membership::v1::NodeFrame out_;        // gRPC's while writing_

  std::mutex mutex_;
  bool held_ = true;  // operations may be started; gRPC delays OnDone() until it is released
  bool writing_ = false;
  std::string nonsense_;  // what was wrong with a message from the coordinator
  // Messages to send. A newer heartbeat or probe answer replaces an older one. The Agent bounds suspicions.
  std::optional<Registration> registration_;
  std::optional<Heartbeat> heartbeat_;
  std::optional<ProbeAnswer> answer_;
  std::deque<Suspicion> suspicions_;
  bool leave_ = false;
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_NODE_STREAM_H_
