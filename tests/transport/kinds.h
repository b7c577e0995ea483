// SPDX-License-Identifier: Apache-2.0
//
// The kinds of transport, besides inproc, that the conformance suite runs over. The test's process and the
// peer's process create their transports by the same name. Each fabric lists its kinds in a file of its own.

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
  std::string name;  // in test names: "ofi_tcp"
  // Why it cannot run on this machine, for a printed skip; empty: it can. The check may take a second.
  std::function<std::string()> absent = [] { return std::string(); };
  // `address` is a former peer's RemotePeer::name. If the fabric has such addresses, the transport takes that
  // address again; empty: a new address.
  std::function<Result<std::unique_ptr<Transport>>(const std::string& address)> make;
  // A peer's RemotePeer::name, from its transport.
  std::function<std::string(const Transport&)> name_of = [](const Transport& t) {
    return t.capabilities().address;
  };
  bool cancels_one_peer = true;  // see Rig
  bool shares_bandwidth = true;
  bool names_refusals = false;
  // A card serves the memory of a stopped process, so its operations still complete.
  bool serves_stopped = false;
  // An operation on a released region fails. If false, its bytes land: the memory is still mapped, and
  // nothing checks the key.
  bool refuses_revoked = true;
  // A connection that broke is made again, to the same instance or to another one at its address.
  bool reconnects = true;
  // Disconnect() fences the peer (TransportCapabilities::fences_peers).
  bool fences = false;
  // Why a peer that dies or refuses is never noticed, for a printed skip; empty: it is noticed.
  std::string deaf;
  // Time from a peer's death to the last of its completions. The default is the promise of transport.h for a
  // fabric that notices at once. A fabric that notices by silence needs its own timeouts in addition.
  uint64_t gone_within_ms = 100;
  std::string describes = "";  // a part of Describe()
};

// Each fabric's kinds, also those that cannot run here. Their names begin with the transport's name.
std::vector<TransportKind> TcpKinds();
std::vector<TransportKind> OfiKinds();
std::vector<TransportKind> VerbsKinds();
std::vector<TransportKind> UcxKinds();
std::vector<TransportKind> AllKinds();
// nullptr: no such kind. Checks only this kind.
const TransportKind* FindKind(const std::string& name);

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_TRANSPORT_KINDS_H_
