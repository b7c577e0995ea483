// SPDX-License-Identifier: Apache-2.0

#include "tests/transport/kinds.h"
#include "transport/ofi/ofi_transport.h"

namespace ropeteam::test {
namespace {

TransportKind Tcp(const std::string& name, bool shared_endpoint) {
  TransportKind kind;
  kind.name = name;
  kind.make = [shared_endpoint](const std::string& address) {
    OfiConfig config;
    config.shared_endpoint = shared_endpoint;
    if (!address.empty()) config.listen_address = address;
    return CreateOfiTransport(config);
  };
  kind.cancels_one_peer = !shared_endpoint;
  kind.describes = "tcp;ofi_rxm on lo 127.0.0.1:";
#ifndef ROPETEAM_HAVE_OFI
  kind.absent = "this build is without libfabric";
#endif
  return kind;
}

}  // namespace

std::vector<TransportKind> OfiKinds() {
  return {Tcp("ofi_tcp", false), Tcp("ofi_tcp_shared_endpoint", true)};
}

}  // namespace ropeteam::test
