// SPDX-License-Identifier: Apache-2.0
//
// AdminClient connects the command line to a daemon, for reports on the daemon, its cluster and its data. It is not a
// rank: it joins no incarnation, maps no memory and saves nothing.
//
// Safe from any thread.

#ifndef ROPETEAM_API_CLIENT_ADMIN_CLIENT_H_
#define ROPETEAM_API_CLIENT_ADMIN_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "api/client/link.h"
#include "api/client/local_protocol.h"
#include "core/base/status.h"

namespace ropeteam::client {

class AdminClient {
 public:
  // kInvalidArgument: the path is empty, too long or not a socket. kUnavailable: there is no daemon. kUnsupported: it
  // speaks another protocol version, or is not ropeteamd. kDeadlineExceeded: no answer within `timeout_ms` plus a
  // second.
  static Result<std::unique_ptr<AdminClient>> Connect(const std::string& socket, int64_t timeout_ms);

  // Returns the answer's JSON text. Waits at most request.timeout_ms plus a second. After kUnavailable: connect again.
  Result<std::string> Request(const local::Admin& request);

  // The events that one node has recorded. kNotFound: it is not in the view. kDeadlineExceeded: it did not answer.
  Result<local::TraceReply> Trace(const local::Trace& request);

  // Sends the daemon to the coordinator at that address. kAlreadyExists: its present coordinator answers, and `force`
  // is not set.
  Status Rejoin(const local::Rejoin& request, int64_t timeout_ms);

  // latest no longer offers the step or, with `undo`, offers it again. kNotFound: there is no such step.
  Status Quarantine(const local::Quarantine& request);

  // The job no longer waits for that missing node, or for any (empty). kNotFound: it is not missing.
  Status Forget(const local::Forget& request);

  // As ropeteam_drop().
  Status Drop(const local::Drop& request);

  // Drains the node and waits until it leaves. Returns JSON text that says what was saved. Waits at most `timeout_ms`.
  Result<std::string> Drain(const local::Drain& request, int64_t timeout_ms);

  // The daemon's hello; `incarnation` is 0.
  const local::HelloReply& hello() const { return link_->hello; }

 private:
  explicit AdminClient(std::shared_ptr<Link> link) : link_(std::move(link)) {}
  std::shared_ptr<Link> link_;
};

}  // namespace ropeteam::client

namespace ropeteam {
using client::AdminClient;
}  // namespace ropeteam

#endif  // ROPETEAM_API_CLIENT_ADMIN_CLIENT_H_
