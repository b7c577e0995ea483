// SPDX-License-Identifier: Apache-2.0
//
// Lists the ports of this machine's RDMA devices with their properties, chooses those to use, and opens them.
// For start-up and the loop thread; no shared state.

#ifndef ROPETEAM_TRANSPORT_VERBS_DEVICE_H_
#define ROPETEAM_TRANSPORT_VERBS_DEVICE_H_

#include <infiniband/verbs.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "transport/verbs/codec.h"
#include "transport/verbs/verbs_transport.h"

namespace ropeteam::verbs {

// Destroys an object of libibverbs. libibverbs refuses while other objects use it, which would be our bug.
struct HandleCloser {
  void operator()(ibv_context* context) const;
  void operator()(ibv_pd* domain) const;
  void operator()(ibv_comp_channel* channel) const;
  void operator()(ibv_cq* queue) const;
  void operator()(ibv_qp* queue_pair) const;
  void operator()(ibv_mr* memory) const;
  void operator()(ibv_ah* address) const;
};
template <typename T>
using Handle = std::unique_ptr<T, HandleCloser>;

// One port.
struct Port {
  std::string device;    // "mlx5_0"
  uint8_t number = 1;    // from 1
  std::string name;      // for --device: the device's name, with ":2" for the second port
  std::string fabric;    // "InfiniBand", "RoCE v2", "RoCE v1"
  std::string address;   // for people: IP address, GID or LID
  std::string unusable;  // why it cannot be used; empty: it can
  uint64_t link_mbps = 0;
  int numa_node = -1;
  int gid_index = -1;      // the GID in use; -1: none
  bool needs_grh = false;  // even within its own subnet
  ibv_gid gid{};
  ibv_port_attr attributes{};
  ibv_device_attr limits{};

  bool ethernet() const { return attributes.link_layer == IBV_LINK_LAYER_ETHERNET; }
  PortAddress Address() const;
};

// Every port of every device. `gid_index` is as in VerbsConfig. If a port's table has no such entry,
// `unusable` says so.
std::vector<Port> ListPorts(int gid_index);

// The ports that `config` asks for, in its order. kUnsupported, kInvalidArgument: as CreateVerbsTransport().
Result<std::vector<Port>> ChoosePorts(const VerbsConfig& config);
// The same, from a given list of ports.
Result<std::vector<Port>> ChoosePorts(const VerbsConfig& config, std::vector<Port> all);

// Megabits per second of a link, from ibv_port_attr's codes; 0: unknown codes.
uint64_t LinkMbps(uint8_t active_width, uint8_t active_speed);

Result<Handle<ibv_context>> OpenDevice(const std::string& device);

// An IP address, GID or LID.
std::string AddressText(const PortAddress& address);

// The path from `port` to another port.
ibv_ah_attr PathTo(const Port& port, const PortAddress& to);

// An error with errno's text and number. If the limit of locked memory is the cause, the message says what to
// set.
Status RegistrationError(int errno_value, const std::string& device, uint64_t length);

}  // namespace ropeteam::verbs

#endif  // ROPETEAM_TRANSPORT_VERBS_DEVICE_H_
