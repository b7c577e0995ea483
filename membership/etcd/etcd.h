// SPDX-License-Identifier: Apache-2.0
//
// Membership over etcd (version 3.4 or newer). One daemon holds the coordinator role, a key in etcd, and runs the
// Coordinator. All nodes register with it as in standalone, and it detects dead nodes in the same way. etcd stores
// which node has the role, confirms to the holder regularly that it still has it, and keeps the last view (seat.h). So
// detection takes no longer than standalone, the coordinator may be on any node, and the loss of any node does not stop
// the job.
//
// While etcd does not answer, no node is declared dead and no view changes. The leases expire within TermMs(): saves
// stay LOCAL, reads go on. Everything resumes when etcd answers again. A loss of etcd's data has the same effect as a
// restart of a standalone coordinator: epochs continue above any that a node has seen.

#ifndef ROPETEAM_MEMBERSHIP_ETCD_ETCD_H_
#define ROPETEAM_MEMBERSHIP_ETCD_ETCD_H_

#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "membership/membership.h"

namespace ropeteam {

inline constexpr size_t kEtcdEndpointsMax = 16;     // etcd's documentation advises seven members at most
inline constexpr size_t kEtcdPrefixBytesMax = 255;  // it is part of every key

struct EtcdConfig {
  std::vector<std::string> endpoints;  // host:port of etcd's members, at least one
  std::string prefix;                  // of all keys, without slashes at its ends
  std::string user;                    // empty: none
  std::string password;
  bool tls = false;
  // Paths of PEM files: the roots of etcd's certificates (empty: the system's), and this client's own certificate and key.
  std::string ca;
  std::string cert;
  std::string key;
};

// etcd://[USER@]HOST:PORT[,HOST:PORT…]/PREFIX; etcds:// requires TLS. kInvalidArgument with the reason. A URL with a
// password is refused, because the password would be shown with the URL.
Result<EtcdConfig> ParseEtcdUrl(const std::string& url);
// "etcd at h1:2379,h2:2379", for messages.
std::string EtcdName(const EtcdConfig& config);

// `config.coordinator_listen` is where this node listens if it gets the role; port 0: the system chooses. `config`'s
// coordinator addresses and embed_coordinator are not used.
std::unique_ptr<Membership> CreateEtcdMembership(const MembershipConfig& config, const EtcdConfig& etcd);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_ETCD_ETCD_H_
