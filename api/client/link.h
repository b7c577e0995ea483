// SPDX-License-Identifier: Apache-2.0
//
// A Link is one connection between a rank and a daemon, with the daemon's hello and its arena. It ends with the daemon,
// and a new one is made. Saves and views keep the Link that they began with, so a grant of one daemon is never used to
// write into the arena of another.

#ifndef ROPETEAM_API_CLIENT_LINK_H_
#define ROPETEAM_API_CLIENT_LINK_H_

#include <memory>
#include <string>

#include "api/client/arena.h"
#include "api/client/channel.h"
#include "api/client/cuda_exports.h"
#include "api/client/deadline.h"
#include "api/client/local_protocol.h"
#include "core/base/status.h"

namespace ropeteam::client {

// Added to every deadline that the daemon has, for the way there and back. The daemon's own answer, which has its
// progress, is better than ours, which can only report that there was none. With a stopped daemon a call is this late.
inline constexpr int64_t kAnswerGraceMs = 1000;
// For requests that the daemon answers from its own memory. That takes microseconds. A daemon that is silent for this
// long is stopped or hangs, and training does not wait for it.
inline constexpr int64_t kLocalAnswerMs = 5000;

struct Link {
  std::unique_ptr<Channel> channel;
  local::HelloReply hello;
  std::shared_ptr<Arena> arena;  // null for an admin client that has not mapped it itself
  CudaExports exports;           // of device memory, to this daemon

  // A request that must not be left half done. If it is not answered in kLocalAnswerMs, the connection is ended, and
  // the daemon releases everything that belonged to it.
  template <HasFields Request, HasFields Answer>
  Status LocalCall(local::Type request_type, const Request& request, local::Type type, Answer* answer,
                   FrameBuffers* buffers) {
    return EndIfSilent(
        channel->Call(request_type, request, type, answer, Deadline::In(kLocalAnswerMs), buffers));
  }
  template <HasFields Request>
  Status LocalCall(local::Type request_type, const Request& request, FrameBuffers* buffers) {
    return EndIfSilent(channel->Call(request_type, request, Deadline::In(kLocalAnswerMs), buffers));
  }

 private:
  Status EndIfSilent(Status status);
};

// Connects, sends the hello, and maps the arena. If `known` (may be null) is the same arena, it is used instead. An
// admin client maps nothing. kUnsupported: it is not ropeteamd, or speaks another protocol version; the message has
// both.
Result<std::shared_ptr<Link>> MakeLink(const std::string& socket, local::Hello hello, Deadline deadline,
                                       const std::shared_ptr<Arena>& known);

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_LINK_H_
