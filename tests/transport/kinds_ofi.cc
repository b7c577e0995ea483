// SPDX-License-Identifier: Apache-2.0

#include <fstream>

#include "tests/transport/kinds.h"
#include "transport/fabrics.h"
#include "transport/ofi/ofi_transport.h"

namespace ropeteam::test {
namespace {

// A dead peer is noticed when it does not answer its hello for 1 s; and time for a busy, emulated machine.
constexpr uint64_t kGoneWithinMs = 8'000;

TransportKind Kind(const std::string& name, const OfiConfig& config) {
  TransportKind kind;
  kind.name = name;
  kind.cancels_one_peer = false;
  kind.gone_within_ms = kGoneWithinMs;
  kind.make = [config](const std::string& address) {
    OfiConfig own = config;
    if (!address.empty()) own.listen_address = address;
    return CreateOfiTransport(own);
  };
#ifndef ROPETEAM_HAVE_OFI
  kind.absent = [] { return "this build is without libfabric"; };
#endif
  return kind;
}

TransportKind Tcp() {
  TransportKind kind = Kind("ofi_tcp", OfiConfig{});
  kind.describes = "tcp;ofi_rxm on lo 127.0.0.1:";
  return kind;
}

// libfabric's own reliable datagrams over TCP, without ofi_rxm: "tcp" since 1.18, "net" before. Empty: not
// available.
std::string NativeTcp() {
  std::string name;
  for (const FabricDevice& device : ListOfiDevices().devices)
    if (device.provider == "tcp" || (device.provider == "net" && name.empty())) name = device.provider;
  return name;
}

TransportKind Native() {
  OfiConfig config;
  TransportKind kind = Kind("ofi_tcp_native", config);
  kind.make = [config](const std::string& address) {
    OfiConfig own = config;
    own.provider = NativeTcp();
    if (!address.empty()) own.listen_address = address;
    return CreateOfiTransport(own);
  };
  kind.describes = " on lo 127.0.0.1:";
#ifdef ROPETEAM_HAVE_OFI
  kind.absent = [] { return NativeTcp().empty() ? "libfabric has TCP by way of ofi_rxm only" : ""; };
#endif
  return kind;
}

TransportKind TwoRails() {
  OfiConfig config;
  config.listen_address = "127.0.0.1,127.0.0.2";
  TransportKind kind = Kind("ofi_tcp_two_rails", config);
  kind.describes = "tcp;ofi_rxm on lo 127.0.0.1:";
  return kind;
}

TransportKind Shm() {
  OfiConfig config;
  config.provider = "shm";
  TransportKind kind = Kind("ofi_shm", config);
  kind.describes = "shm";
  kind.name_of = [](const Transport&) { return "shm"; };
  kind.deaf =
      "libfabric's shm neither notices a peer's death nor answers an operation that it refuses: "
      "transport/ofi/libfabric.md";
  return kind;
}

// The network interface of the first RDMA device; empty: none.
std::string RdmaInterface() {
  for (const FabricDevice& device : ListVerbsDevices().devices) {
    std::ifstream file("/sys/class/infiniband/" + device.name + "/ports/1/gid_attrs/ndevs/0");
    std::string interface;
    if (device.unusable.empty() && file >> interface) return interface;
  }
  return "";
}

TransportKind Verbs() {
  OfiConfig config;
  config.provider = "verbs;ofi_rxm";
  config.listen_address = "";
  TransportKind kind = Kind("ofi_verbs", config);
  kind.make = [config](const std::string& address) {
    OfiConfig own = config;
    if (address.empty())
      own.device = RdmaInterface();
    else
      own.listen_address = address;
    return CreateOfiTransport(own);
  };
  kind.describes = "verbs;ofi_rxm on ";
  kind.serves_stopped = true;
  kind.cancels_one_peer = true;  // the card serves a peer that hangs
  kind.reconnects = false;
#ifdef ROPETEAM_HAVE_OFI
  kind.absent = [] { return RdmaInterface().empty() ? "no RDMA device with a network interface" : ""; };
#endif
  return kind;
}

}  // namespace

std::vector<TransportKind> OfiKinds() { return {Tcp(), TwoRails(), Native(), Shm(), Verbs()}; }

}  // namespace ropeteam::test
