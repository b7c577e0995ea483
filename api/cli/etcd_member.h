// SPDX-License-Identifier: Apache-2.0
//
// `ropeteam run --start-etcd`: a member of etcd beside the daemons of the first nodes, for jobs whose cluster has none.
//
// A keeper process, forked by `ropeteam run`, starts etcd, starts it again when it ends, and ends with its parent. It asks
// the other members before it starts without data:
//
//   the others say                                   then
//   ----------------------------------------------   ----------------------------------------------------------------
//   nothing: none of them answers                    all begin together, as a new cluster of the hosts that were named
//   this member has not started yet                  the same
//   this member has run, here or at another address  its data is lost: it is removed from the cluster and added again
//   there is none of this name                       it is added
//
// Removing and adding take a majority of the members; the keeper tries again every second. The data lies in a directory of
// this user and job, which goes when `ropeteam run` ends in good order; `ropeteam clean` removes what others have left.

#ifndef ROPETEAM_API_CLI_ETCD_MEMBER_H_
#define ROPETEAM_API_CLI_ETCD_MEMBER_H_

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <vector>

#include "api/client/unique_fd.h"
#include "core/base/status.h"

namespace ropeteam::cli {

// Beside the coordinator's 29600. The port for the other members is the next one.
inline constexpr uint16_t kEtcdPortDefault = 29610;
inline constexpr size_t kEtcdMembers = 3;  // of a job that has so many nodes: one of them may be lost

struct EtcdHost {
  std::string host;  // without brackets
  uint16_t port = kEtcdPortDefault;
};

// "HOST[:PORT][,HOST[:PORT],HOST[:PORT]]", one host or three. kInvalidArgument.
Result<std::vector<EtcdHost>> ParseEtcdHosts(const std::string& text);
// For ropeteamd's --membership.
std::string EtcdUrlOf(const std::vector<EtcdHost>& hosts);

struct EtcdMemberConfig {
  std::vector<EtcdHost> hosts;
  size_t own = 0;             // of hosts: this node's ordinal
  std::string listen;         // numeric
  std::string job;            // in the name of the directory
  std::string ca, cert, key;  // PEM files; empty: no TLS
};

// What a member without data does, by the answer of another one.
struct EtcdEntry {
  bool begin = false;   // with all hosts, as a new cluster
  std::string remove;   // the id of its former self, hexadecimal; empty: none
  std::string members;  // of the others: NAME=URL,…
};
// `list` is etcdctl's JSON of `member list`. kInvalidArgument: it is something else.
Result<EtcdEntry> DecideEntry(const std::string& list, const std::string& name, const std::string& peer_url);

// "ropeteam-2"
std::string EtcdMemberName(size_t own);
// The directories of this user's members: paths. Those that a keeper uses are locked.
std::vector<std::string> ListEtcdDirectories();
// Such a directory's name in a UserDirectories().
std::string EtcdDirectoryName(const std::string& job, size_t own);
// Takes the directory's lock, made if missing; invalid while another keeper has it.
client::UniqueFd LockEtcdDirectory(const std::string& directory);

class EtcdMember {
 public:
  // kNotFound: no etcd or etcdctl; kAlreadyExists: another `ropeteam run` keeps this member; kIo.
  static Result<EtcdMember> Start(const EtcdMemberConfig& config);
  EtcdMember(EtcdMember&& other) noexcept;
  EtcdMember& operator=(EtcdMember&&) = delete;
  ~EtcdMember();  // ends keeper and etcd, and removes the data

 private:
  EtcdMember(pid_t keeper, std::string directory, client::UniqueFd lock)
      : keeper_(keeper), directory_(std::move(directory)), lock_(std::move(lock)) {}

  pid_t keeper_ = 0;
  std::string directory_;
  client::UniqueFd lock_;
};

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_ETCD_MEMBER_H_
