// SPDX-License-Identifier: Apache-2.0

#include "tests/transport/kinds.h"
#include "transport/tcp/tcp_transport.h"

namespace ropeteam::test {
namespace {

TransportKind Kind(const std::string& name, const std::string& addresses) {
  TransportKind kind;
  kind.name = name;
  kind.make = [addresses](const std::string& address) {
    TcpConfig config;
    config.listen_address = address.empty() ? addresses : address;
    return CreateTcpTransport(config);
  };
  kind.fences = true;
  kind.names_refusals = true;
  kind.describes = "tcp on lo 127.0.0.";
  return kind;
}

}  // namespace

std::vector<TransportKind> TcpKinds() {
  return {Kind("tcp", "127.0.0.1"), Kind("tcp_two_lanes", "127.0.0.2,127.0.0.3")};
}

}  // namespace ropeteam::test
