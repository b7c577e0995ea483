// SPDX-License-Identifier: Apache-2.0
//
// A Channel is one connection to the daemon: it sends requests and returns each answer to its call. It has no thread of
// its own. Of the waiting calls, one reads the socket for all, and passes the task on when it leaves. So an idle
// channel costs nothing, and any waiting call notices the daemon's death at once.
//
// Safe from any thread. Every call returns by its deadline, even if the daemon is stopped. A channel breaks if the
// daemon ends it or violates the protocol. Then every call, waiting ones included, returns the reason. A broken channel
// is not repaired.

#ifndef ROPETEAM_API_CLIENT_CHANNEL_H_
#define ROPETEAM_API_CLIENT_CHANNEL_H_

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "api/client/deadline.h"
#include "api/client/local_protocol.h"
#include "api/client/unique_fd.h"
#include "core/base/bytes.h"
#include "core/base/status.h"

namespace ropeteam::client {

// The bytes of a request and of its answer. Frequent callers keep them, so that nothing is allocated again.
struct FrameBuffers {
  std::string out;
  std::string in;
  local::Type in_type = local::Type::kReply;  // of what is in `in`
};

class Channel {
 public:
  // See ConnectUnix().
  static Result<std::unique_ptr<Channel>> Connect(const std::string& socket, Deadline deadline);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // Sends `request` and waits for its answer, of type `type` or a failed Reply. `answer` is unspecified after an error.
  // kDeadlineExceeded: not answered; a later answer is dropped (a view that is granted too late is closed).
  template <HasFields Request, HasFields Answer>
  Status Call(local::Type request_type, const Request& request, local::Type type, Answer* answer,
              Deadline deadline, FrameBuffers* buffers) {
    EncodeFrame(request, &buffers->out);
    ROPETEAM_RETURN_IF_ERROR(Exchange(request_type, type, deadline, buffers));
    if (!Decode(buffers->in, *answer)) return BreakFor("sent an answer that cannot be decoded");
    return OkStatus();
  }
  // The same for requests that are answered by a bare Reply. A non-negative descriptor is sent with it.
  template <HasFields Request>
  Status Call(local::Type request_type, const Request& request, Deadline deadline, FrameBuffers* buffers,
              int descriptor = -1) {
    EncodeFrame(request, &buffers->out);
    return Exchange(request_type, local::Type::kReply, deadline, buffers, descriptor);
  }
  // Sends and does not wait. If the request has an answer, it is dropped.
  template <HasFields Request>
  Status Post(local::Type request_type, const Request& request, Deadline deadline, FrameBuffers* buffers) {
    EncodeFrame(request, &buffers->out);
    return Send(request_type, NextId(), deadline, &buffers->out);
  }

  // kOk while the daemon's end is open. It asks the kernel, so it is current and not as of the last call.
  Status Check();
  // Ends the connection: all calls return `reason`, which is not kOk. The first reason stays.
  void Break(Status reason);
  Status BreakFor(const char* what);

  // The descriptor that came with an answer; invalid if none did.
  UniqueFd TakeDescriptor();
  const std::string& socket() const { return socket_; }

 private:
  struct Pending {
    uint64_t id = 0;
    std::string* payload = nullptr;
    local::Type type = local::Type::kReply;
    bool done = false;
  };

  Channel(UniqueFd fd, std::string socket);

  template <HasFields Request>
  static void EncodeFrame(const Request& request, std::string* frame) {
    frame->assign(sizeof(local::FrameHeader), '\0');
    Encoder(frame).Put(request);
  }
  uint64_t NextId();
  Status Exchange(local::Type request_type, local::Type expected, Deadline deadline, FrameBuffers* buffers,
                  int descriptor = -1);
  Status Send(local::Type type, uint64_t id, Deadline deadline, std::string* frame, int descriptor = -1);
  Status SendBytes(const std::string& frame, int descriptor, Deadline deadline, bool* partly);
  Status WaitFor(Pending* pending, Deadline deadline);
  Status Receive(Deadline deadline);
  Status Dispatch();
  void Deliver(const local::FrameHeader& header, std::string_view payload);
  void CloseLateViews();

  const std::string socket_;
  const UniqueFd fd_;

  std::mutex mutex_;
  std::condition_variable changed_;
  // Guarded by mutex_:
  Status broken_;
  uint64_t next_id_ = 1;
  bool reading_ = false;
  bool sending_ = false;
  std::vector<Pending*> pending_;
  std::vector<uint64_t> late_views_;
  UniqueFd descriptor_;
  // Owned by the one call that reads:
  std::vector<char> buffer_;
  size_t buffered_ = 0;
};

// The status in a Reply; kInternal for an unknown code.
Status StatusOf(const local::Reply& reply);

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_CHANNEL_H_
