// SPDX-License-Identifier: Apache-2.0
//
// The transport over UCX: UCP puts and gets with packed remote keys. UCX chooses among its own transports
// (rc, cma, posix, tcp). Describe() shows the available ones, and UcxConfig can restrict them.

#ifndef ROPETEAM_TRANSPORT_UCX_UCX_TRANSPORT_H_
#define ROPETEAM_TRANSPORT_UCX_UCX_TRANSPORT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "transport/transport.h"

namespace ropeteam {

struct UcxConfig {
  // As UCX_NET_DEVICES: "mlx5_0:1", "eth0". Empty: UCX's choice, or that of the environment.
  std::vector<std::string> devices = {};
  // As UCX_TLS: "rc,self", "posix,cma,self". Empty: UCX's choice, or that of the environment.
  std::string transports = "";
  // The entry of a RoCE port's GID table, as UCX_IB_GID_INDEX. -1: UCX's choice.
  int gid_index = -1;
};

// Errors: kUnsupported (no UCX in this build, or it has no such transport), kInvalidArgument (no such device:
// the message lists those that exist), kNoSpace (locked memory), kIo.
Result<std::unique_ptr<Transport>> CreateUcxTransport(const UcxConfig& config);

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_UCX_UCX_TRANSPORT_H_
