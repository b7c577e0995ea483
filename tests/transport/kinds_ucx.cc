// SPDX-License-Identifier: Apache-2.0

#include "tests/transport/kinds.h"
#include "transport/ucx/ucx_transport.h"

namespace ropeteam::test {

std::vector<TransportKind> UcxKinds() {
  TransportKind kind;
  kind.name = "ucx";
  kind.make = [](const std::string&) { return CreateUcxTransport({}); };
  const auto made = kind.make("");
  if (!made.ok()) kind.absent = made.status().message();
  return {kind};
}

}  // namespace ropeteam::test
