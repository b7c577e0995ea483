// SPDX-License-Identifier: Apache-2.0
//
// The transport over libibverbs: one-sided writes and reads over reliable connections of InfiniBand and RoCE,
// on one or several devices. It needs neither rdma_cm nor IP addresses. LocalAddress() names a datagram queue
// pair of each device. Over these, two transports exchange the numbers of the reliable queue pairs between
// them.

#ifndef ROPETEAM_TRANSPORT_VERBS_VERBS_TRANSPORT_H_
#define ROPETEAM_TRANSPORT_VERBS_VERBS_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "transport/transport.h"

namespace ropeteam {

struct VerbsConfig {
  // "mlx5_0", or "mlx5_0:2" for the second port. Empty: every device with an active port that supports
  // reliable connections.
  std::vector<std::string> devices;
  int gid_index = -1;  // of the port's GID table; -1: prefers RoCE v2 with an IPv4 address, then other
                       // RoCE v2, then any
  // A peer that does not answer for this long is gone. The time covers the device's own retries (0.5 to 1.9
  // s) and then at least 0.3 s of requests for a new connection. A smaller value is raised to that.
  uint32_t silence_ms = kSilenceMsDefault;
};

// Errors: kUnsupported (no libibverbs in this build, or no usable device: the message says what each lacks),
// kInvalidArgument (no such device or GID: the message lists those that exist), kNoSpace (locked memory: the
// message has the limit and what to set), kIo.
Result<std::unique_ptr<Transport>> CreateVerbsTransport(const VerbsConfig& config);

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_VERBS_VERBS_TRANSPORT_H_
