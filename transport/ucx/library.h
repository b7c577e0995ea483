// SPDX-License-Identifier: Apache-2.0
//
// Sets UCX up as a library: its messages go to our log, and its signal handlers are removed. Its settings
// come from UcxConfig or, if that has none, from the environment.

#ifndef ROPETEAM_TRANSPORT_UCX_LIBRARY_H_
#define ROPETEAM_TRANSPORT_UCX_LIBRARY_H_

#include <ucp/api/ucp.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "transport/ucx/ucx_transport.h"

namespace ropeteam::ucx {

struct ContextCloser {
  void operator()(ucp_context_h context) const { ucp_cleanup(context); }
};
using Context = std::unique_ptr<ucp_context, ContextCloser>;

// Errors: kUnsupported (no such transports here), kInvalidArgument (no such device or setting).
Result<Context> OpenContext(const UcxConfig& config);

// One pair of UCX's transport and device in a context: "rc_verbs" and "mlx5_0:1", "posix" and "memory".
struct Resource {
  std::string transport, device;
  bool network() const;  // not shared memory, not self
  bool rdma() const;     // a network card carries out one-sided operations
};
std::vector<Resource> ResourcesOf(ucp_context_h context);

// The lanes of an endpoint, as UCX names them: "posix/memory.0, cma/memory.0".
std::string LanesOf(ucp_ep_h endpoint);

// Megabits per second of a network device ("eth0", "mlx5_0:1"); 0: unknown.
uint64_t LinkMbps(const std::string& device);
// -1: unknown.
int NumaNode(const std::string& device);

std::string Version();  // "1.13.1"
// Whether an endpoint may be closed while it is still being connected. Before 1.14, an assertion in Debian's
// builds (ucp_request_send_state_ff, openucx/ucx pull request 8175) then ends the process if messages of the
// wire-up wait for a peer that does not answer.
bool ClosesInWireup();

}  // namespace ropeteam::ucx

#endif  // ROPETEAM_TRANSPORT_UCX_LIBRARY_H_
