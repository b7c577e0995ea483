// SPDX-License-Identifier: Apache-2.0

#include "tests/transport/kinds.h"
#include "transport/fabrics.h"
#include "transport/ucx/ucx_transport.h"

namespace ropeteam::test {
namespace {

#ifdef ROPETEAM_HAVE_UCX
constexpr const char* kMissing = "";
#else
constexpr const char* kMissing = "this build is without UCX";
#endif

TransportKind Kind(const std::string& name, const UcxConfig& config) {
  TransportKind kind;
  kind.name = name;
  kind.make = [config](const std::string&) { return CreateUcxTransport(config); };
  // A UCX node has no address that it could take again.
  kind.name_of = [](const Transport&) { return "ucx"; };
  kind.absent = [] { return kMissing; };
  return kind;
}

bool SeesRdma() {
  for (const FabricDevice& device : ListUcxDevices().devices)
    if (device.rdma) return true;
  return false;
}

}  // namespace

std::vector<TransportKind> UcxKinds() {
  TransportKind shm = Kind("ucx_shm", {.transports = "posix,cma,self"});
  shm.describes = "posix/memory";
  shm.refuses_revoked = false;
  shm.serves_stopped = true;  // by the kernel
  TransportKind tcp = Kind("ucx_tcp", {.devices = {"lo"}, .transports = "tcp"});
  tcp.describes = "tcp/lo";
  tcp.refuses_revoked = false;
  TransportKind rc = Kind("ucx_rc", {.transports = "rc,self", .gid_index = 0});
  rc.describes = "rc_verbs/";
  rc.serves_stopped = true;
  rc.absent = [] { return *kMissing != '\0' || SeesRdma() ? kMissing : "UCX sees no RDMA device"; };
  return {shm, tcp, rc};
}

}  // namespace ropeteam::test
