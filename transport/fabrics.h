// SPDX-License-Identifier: Apache-2.0
//
// Lists the transports of this build and the devices that each finds on this machine, and chooses one transport. Only
// here does upper code name a transport. After that it uses only transport.h and the capabilities.
//
// Only for start-up: calls may open devices and take tens of milliseconds. Not thread-safe. Call SetOfiEnvironment()
// before the process has other threads.

#ifndef ROPETEAM_TRANSPORT_FABRICS_H_
#define ROPETEAM_TRANSPORT_FABRICS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "transport/transport.h"

namespace ropeteam {

// A device that a transport could use: a port of a network card, a network interface, shared memory.
struct FabricDevice {
  std::string name;      // what --device takes: "mlx5_0", "rdmap0s6-rdm", "eth0"
  std::string provider;  // ofi: libfabric's provider; ucx: UCX's transports; verbs: "InfiniBand" or "RoCE v2"
  std::string address;   // GID, LID or IP address, for messages; empty if there is none
  uint64_t link_mbps = 0;  // megabits per second, 0: unknown
  int numa_node = -1;      // -1: unknown, or the machine has only one node
  bool rdma = false;
  std::string unusable;  // why it cannot be used now ("port 1 is down"); empty: it can be used
};

// One transport.
struct FabricListing {
  std::string transport;  // "verbs", "ucx", "ofi", "tcp"
  std::string library;    // "libfabric 1.17.0"; empty if this build does not have it
  std::string missing;    // why this build does not have it; empty if it has
  std::vector<FabricDevice> devices;
};

// In the order in which "auto" prefers them. Never fails: a listing says whether its transport can be queried.
std::vector<FabricListing> ListFabrics();
// The listings of the transports, each in its transport's folder.
FabricListing ListVerbsDevices();
FabricListing ListUcxDevices();
FabricListing ListOfiDevices();
FabricListing ListTcpDevices();

struct FabricConfig {
  // "auto": tcp if --listen is a loopback address, because the nodes are on one machine. Otherwise verbs if a card
  // speaks InfiniBand or RoCE, ofi over efa if there is EFA, or else tcp.
  std::string transport = "auto";
  std::string provider;              // ofi only; empty: efa
  std::vector<std::string> devices;  // empty: the transport chooses, and prints its choice
  std::string listen_address =
      "127.0.0.1";     // numeric IP with an optional port, for transports that have IP addresses
  int gid_index = -1;  // verbs, ucx: which entry of the port's GID table; -1: RoCE v2 preferred
  // Allows a transport that checks no keys, or trusts its peers, to listen where others can reach it.
  bool insecure = false;
  bool require_rdma = false;  // kUnsupported unless a card moves the bytes
  bool alone = false;  // there are no peers: no tcp, but a transport of this process that does not listen
};

// Chooses the transport for a configuration on a machine with these listings. A pure function.
struct FabricPlan {
  std::string transport;  // "verbs", "ucx", "ofi", "tcp"
  std::string provider;   // of libfabric, for ofi
  std::string fallback;   // why auto could not choose RDMA, for a warning; else empty
};
// Errors: kInvalidArgument (no such transport, a provider for a transport other than ofi, or a provider other than efa
// and shm, unless config.insecure permits it: the message says what to do), kUnsupported (require_rdma cannot be met;
// the message says what is missing).
Result<FabricPlan> PlanFabric(const FabricConfig& config, const std::vector<FabricListing>& listings);

// The devices for UCX if none was named: the interface with the listen address, and the RDMA devices unless that is
// loopback. By default UCX would listen on every interface of the machine.
Result<std::vector<std::string>> UcxDevices(const FabricConfig& config, const FabricListing& ucx);

// UCX's tcp transport writes to any address that a packet names. kInvalidArgument if one of `devices` is a tcp
// interface that other hosts can reach: the message says what to do. config.insecure permits it.
Status CheckUcxListens(const FabricConfig& config, const std::vector<std::string>& devices,
                       const FabricListing& ucx);

struct FabricChoice {
  std::unique_ptr<Transport> transport;
  std::string fallback;  // see FabricPlan; also set if the planned device could not be opened
};

// Errors: kInvalidArgument (no such transport or device; the message lists the existing ones), kUnsupported (not in
// this build, or require_rdma cannot be met; the message says why), and those of the transport's factory.
Result<FabricChoice> CreateFabric(const FabricConfig& config);

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_FABRICS_H_
