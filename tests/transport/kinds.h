// SPDX-License-Identifier: Apache-2.0
//
// The kinds of transport that the conformance suite runs over, besides inproc. The test's process and the
// peer's process make their transports by the same name. Each fabric lists its kinds in a file of its own.

#ifndef ROPETEAM_TESTS_TRANSPORT_KINDS_H_
#define ROPETEAM_TESTS_TRANSPORT_KINDS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "transport/transport.h"

namespace ropeteam::test {

struct TransportKind {
  std::string name;  // of the tests: "ofi_tcp"
  // Why it cannot run on this machine, for a printed skip; empty: it can. Looking may take a second.
  std::function<std::string()> absent = [] { return std::string(); };
  // `address` is what a former peer said of itself (RemotePeer::name), to come back under it where a fabric
  // has such addresses; empty: a fresh one.
  std::function<Result<std::unique_ptr<Transport>>(const std::string& address)> make;
  // What a peer says of itself, from its transport.
  std::function<std::string(const Transport&)> name_of = [](const Transport& t) {
    return t.capabilities().address;
  };
  bool cancels_one_peer = true;  // see Rig
  bool shares_bandwidth = true;
  bool names_refusals = false;
  // A card serves the memory of a process that is stopped, so that nothing there holds an operation up.
  bool serves_stopped = false;
  // An operation on a region that its owner has released fails. Where false its bytes land there: the memory
  // is still mapped, and nothing checks the key.
  bool refuses_revoked = true;
  // Disconnect() shuts a peer out (TransportCapabilities::fences_peers).
  bool fences = false;
  // Why a peer that dies or refuses never shows, for a printed skip; empty: it does.
  std::string deaf;
  // From a peer's death to the last of its completions. The default is what transport.h promises of a fabric
  // that notices at once; one that notices by silence takes its own timeouts longer.
  uint64_t gone_within_ms = 100;
  std::string describes = "";  // a part of Describe()
};

// Each lists its own, also those that cannot run here; their names begin with the transport's.
std::vector<TransportKind> OfiKinds();
std::vector<TransportKind> VerbsKinds();
std::vector<TransportKind> UcxKinds();
std::vector<TransportKind> AllKinds();
// nullptr: no such kind. Looks at nothing but this one.
const TransportKind* FindKind(const std::string& name);

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_TRANSPORT_KINDS_H_
