// SPDX-License-Identifier: Apache-2.0
//
// The daemons' messages to each other: gRPC, one stream for each direction, connected when there is a message to send
// and again whenever it broke. Messages may be lost: a full queue drops its oldest message, and a broken stream loses
// its messages; the Engine repeats unanswered ones. No message is kept for a peer that has left.
//
// Beside them, a node can ask another one where its coordinator is (CoordinatorWatch).
//
// All but Create() from one thread (the loop's); callbacks come on gRPC's threads.

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

// Raised with every change of core's messages or of control.proto. Membership refuses a node of another one;
// the streams refuse it as well.
inline constexpr uint32_t kControlProtocolVersion = 2;

// The largest message is the leader's report of a whole job, at some 8 KiB a node.
inline constexpr size_t kControlMessageBytesMax = 128ull << 20;
static_assert(kControlMessageBytesMax >= kNodesMax * 8192);
// Not yet sent to one peer. The Engine repeats within a second, so older ones are of no use.
inline constexpr size_t kControlQueueMessagesMax = 4096;
inline constexpr size_t kControlQueueBytesMax = 2 * kControlMessageBytesMax;
// Received from one stream and not yet handled: beyond it the stream is not read, and TCP holds the sender
// back.
inline constexpr size_t kControlUnhandledMessagesMax = 64;
inline constexpr uint32_t kControlBackoffMsMin = 20;
inline constexpr uint32_t kControlBackoffMsMax = 500;  // half of the time after which silence is death

class ControlPlane {
 public:
  struct Config {
    NodeId self = kNoNode;
    std::string listen;                                        // numeric address
    uint16_t port = 0;                                         // 0: any
    std::shared_ptr<const Credentials> credentials = nullptr;  // null: in clear, open to everybody
  };
  // A member that was asked says where it is registered. It may say anything.
  using OnAnswer = std::function<void(const std::string& coordinator)>;
  // A message arrived. `handled` must be called once it has been dealt with, from any thread, also after
  // Stop().
  using OnMessage = std::function<void(NodeId from, std::string envelope, std::function<void()> handled)>;

  // Listens when it returns. kIo: the port is taken, or the address is not this machine's.
  static Result<std::unique_ptr<ControlPlane>> Create(const Config& config, OnMessage on_message,
                                                      OnAnswer on_answer = nullptr);
  ~ControlPlane();  // Stop()

  uint16_t port() const;
  // Members of the view other than this node. Streams to nodes that left end.
  void SetMembers(const std::vector<Member>& members);
  // Dropped when `to` is not among the members.
  void Send(NodeId to, std::string envelope);
  // Asks the member where its coordinator is, now or when there is a stream to it.
  void Ask(NodeId to);
  // The answer to nodes that ask this one, from now on; no address: no answer.
  void SetCoordinator(const std::string& address);
  // Members to which something was to be sent and to which there is no stream, and since when.
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
