// SPDX-License-Identifier: Apache-2.0
//
// The messages between daemons: gRPC, one stream for each direction. A stream is connected when there is a message to
// send, and again whenever it has broken. Messages may be lost: a full queue drops its oldest message, and a broken
// stream loses its messages. The Engine repeats unanswered messages. No message is kept for a peer that has left.
//
// In addition, a node can ask another one where its coordinator is (CoordinatorWatch).
//
// All but Create() from one thread (the loop's). Callbacks run on gRPC's threads.

#ifndef ROPETEAM_NODE_CONTROL_PLANE_H_
#define ROPETEAM_NODE_CONTROL_PLANE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "core/base/view.h"
#include "membership/credentials/credentials.h"

namespace ropeteam {

// Raised with every change of core's messages or of control.proto. Membership and the streams both refuse a node with
// another version.
inline constexpr uint32_t kControlProtocolVersion = 2;

// The largest message is the leader's report of a whole job, some 8 KiB per node.
inline constexpr size_t kControlMessageBytesMax = 128ull << 20;
static_assert(kControlMessageBytesMax >= kNodesMax * 8192);
// Unsent messages for one peer. The Engine repeats within a second, so older ones are useless.
inline constexpr size_t kControlQueueMessagesMax = 4096;
inline constexpr size_t kControlQueueBytesMax = 2 * kControlMessageBytesMax;
// Messages of one stream that are received but not handled. At this limit the stream is not read, and TCP stops the
// sender.
inline constexpr size_t kControlUnhandledMessagesMax = 64;
inline constexpr uint32_t kControlBackoffMsMin = 20;
// Half of the silence after which a node is declared dead.
inline constexpr uint32_t kControlBackoffMsMax = 500;

class ControlPlane {
 public:
  struct Config {
    NodeId self = kNoNode;
    std::string listen;  // numeric address; empty: on none, with port() 0
    uint16_t port = 0;   // 0: any
    std::shared_ptr<const Credentials> credentials = nullptr;  // null: unencrypted and open to everyone
  };
  // A member has answered where it is registered. The answer is not trusted.
  using OnAnswer = std::function<void(const std::string& coordinator)>;
  // A message has arrived. Call `handled` after it was processed, from any thread, even after Stop().
  using OnMessage = std::function<void(NodeId from, std::string envelope, std::function<void()> handled)>;

  // Listens when it returns. kIo: the port is taken, or the address is not this machine's.
  static Result<std::unique_ptr<ControlPlane>> Create(const Config& config, OnMessage on_message,
                                                      OnAnswer on_answer = nullptr);
  ~ControlPlane();  // Stop()

  uint16_t port() const;
  // Members of the view other than this node. Streams to nodes that left end.
  void SetMembers(const std::vector<Member>& members);
  // Dropped if `to` is not a member.
  void Send(NodeId to, std::string envelope);
  // Makes the link to the member again if it has a stream: its messages have no effect, and TCP may wait for minutes
  // before it sends them again.
  void Reconnect(NodeId to);
  // Asks the member where its coordinator is, now or when there is a stream to it.
  void Ask(NodeId to);
  // Sets the answer to nodes that ask this one; an empty address: no answer.
  void SetCoordinator(const std::string& address);
  // Members with messages waiting but without a stream, and since when.
  std::map<NodeId, TimeUs> Unreached() const;
  // No callback after the return. Idempotent.
  void Stop();

  ControlPlane(const ControlPlane&) = delete;
  ControlPlane& operator=(const ControlPlane&) = delete;

 private:
  class Impl;
  explicit ControlPlane(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_CONTROL_PLANE_H_
