// SPDX-License-Identifier: Apache-2.0
//
// Lists the transports of this build and what each sees on this machine, and chooses one. Upper code names a
// transport only here; after that it knows only transport.h and the capabilities.
//
// Only for start-up: calls may open devices and take tens of milliseconds. Not thread-safe; call
// SetOfiEnvironment() before the process has other threads.

#ifndef ROPETEAM_TRANSPORT_FABRICS_H_
#define ROPETEAM_TRANSPORT_FABRICS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "transport/transport.h"

namespace ropeteam {

// One thing that a transport could use: a network card's port, a network interface, a shared memory.
struct FabricDevice {
  std::string name;      // what --device takes: "mlx5_0", "rdmap0s6-rdm", "eth0"
  std::string provider;  // ofi: libfabric's provider; ucx: UCX's transports; verbs: "InfiniBand" or "RoCE v2"
  std::string address;   // GID, LID or IP address, for people; empty when there is none
  uint64_t link_mbps = 0;  // megabits per second, 0: unknown
  int numa_node = -1;      // -1: unknown, or the machine has one
  bool rdma = false;
  std::string unusable;  // why it cannot be used now ("port 1 is down"); empty: it can
};

// One transport.
struct FabricListing {
  std::string transport;  // "verbs", "ucx", "ofi"
  std::string library;    // "libfabric 1.17.0"; empty when this build is without
  std::string missing;    // why this build is without; empty when it is not
  std::vector<FabricDevice> devices;
};

// In the order in which "auto" prefers them. Never fails: a listing says if its transport cannot be queried.
std::vector<FabricListing> ListFabrics();
// The parts of it, each in its transport's folder.
FabricListing ListVerbsDevices();
FabricListing ListUcxDevices();
FabricListing ListOfiDevices();

struct FabricConfig {
  // "auto": on a --listen address that is loopback ofi over tcp, because the nodes are on one machine; else
  // verbs where a card speaks InfiniBand or RoCE, ofi over efa where there is EFA, ofi over tcp otherwise. A
  // build without libfabric takes ucx in the place of ofi over tcp.
  std::string transport = "auto";
  std::string provider;              // ofi only; empty: efa or tcp;ofi_rxm
  std::vector<std::string> devices;  // empty: the transport's own choice, printed
  std::string listen_address =
      "127.0.0.1";     // numeric IP with an optional port, for transports that have IP addresses
  int gid_index = -1;  // verbs, ucx: which entry of the port's GID table; -1: RoCE v2 preferred
  // A transport that checks no keys may listen where other hosts reach it.
  bool insecure = false;
  bool require_rdma = false;  // what does not end at a card that moves the bytes is kUnsupported
};

// Chooses the transport for a configuration on a machine with these listings. A pure function.
struct FabricPlan {
  std::string transport;  // "verbs", "ucx", "ofi"
  std::string provider;   // of libfabric, for ofi
  std::string fallback;   // why auto could not choose RDMA, for a warning; else empty
};
// Errors: kInvalidArgument (no such transport, or a provider with another than ofi), kUnsupported
// (require_rdma cannot be met: what is missing).
Result<FabricPlan> PlanFabric(const FabricConfig& config, const std::vector<FabricListing>& listings);

// The devices that UCX is limited to when none was named: the interface that has the listen address, and the RDMA devices
// unless that is loopback. By default UCX would listen on every interface of the machine.
Result<std::vector<std::string>> UcxDevices(const FabricConfig& config, const FabricListing& ucx);

// UCX's tcp transport writes to whatever address a packet names. kInvalidArgument where `devices`, of those that UCX shows,
// has an interface with it that other hosts reach: the message says what to do. config.insecure lets it pass.
Status CheckUcxListens(const FabricConfig& config, const std::vector<std::string>& devices,
                       const FabricListing& ucx);

struct FabricChoice {
  std::unique_ptr<Transport> transport;
  std::string fallback;  // see FabricPlan; also when the device that was planned for could not be opened
};

// Errors: kInvalidArgument (no such transport or device: the message lists those there are), kUnsupported
// (not in this build, or require_rdma cannot be met, in words), and those of the transport's factory.
Result<FabricChoice> CreateFabric(const FabricConfig& config);

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_FABRICS_H_
