// SPDX-License-Identifier: Apache-2.0

#include "tests/transport/kinds.h"
#include "transport/verbs/verbs_transport.h"

namespace ropeteam::test {

std::vector<TransportKind> VerbsKinds() {
  TransportKind kind;
  kind.name = "verbs";
  kind.make = [](const std::string&) { return CreateVerbsTransport({}); };
  const auto made = kind.make("");
  if (!made.ok()) kind.absent = made.status().message();
  return {kind};
}

}  // namespace ropeteam::test
