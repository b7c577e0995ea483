// SPDX-License-Identifier: Apache-2.0
//
// What a process shows on its gRPC connections and whom it believes: mutual TLS in both directions, for the coordinator's
// connections and the control plane's. Where a pointer to Credentials is null, connections are in clear and open to
// everybody (--insecure).
//
// Who may enter is decided by the chain: a peer's certificate must come from a root of ours. Names of hosts are not
// compared, because nodes have addresses that move. No root of the system is ever believed.
//
// Thread-safe. gRPC's objects hold on to what they need, but a Credentials must outlive them: its last reference must not
// go on one of gRPC's threads.

#ifndef ROPETEAM_MEMBERSHIP_CREDENTIALS_CREDENTIALS_H_
#define ROPETEAM_MEMBERSHIP_CREDENTIALS_CREDENTIALS_H_

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "membership/credentials/job_key.h"
#include "membership/credentials/tls_files.h"
#include "membership/credentials/watched_files.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace ropeteam {

// Renewed certificates need not be in use at once, and a look is three calls of stat().
inline constexpr std::chrono::milliseconds kTlsFilesLookedAtEvery{5000};

class Credentials {
 public:
  // `from` says where the key is from, for people: "--job-key-file FILE". kInternal.
  static Result<std::shared_ptr<const Credentials>> FromJobKey(const std::vector<JobKey>& keys,
                                                               const std::string& job,
                                                               const std::string& node,
                                                               const std::string& from);
  // Of certificates that an operator made. The files are looked at every `interval`: good ones replace those in use for new
  // connections, others are told in the log. With `peer_name` every peer's certificate must have it as a DNS name or as its
  // CN. Errors as ReadTlsFiles().
  static Result<std::shared_ptr<const Credentials>> FromFiles(
      const TlsFiles& files, const std::string& peer_name,
      std::chrono::milliseconds interval = kTlsFilesLookedAtEvery);
  ~Credentials();

  const std::shared_ptr<grpc::ServerCredentials>& server() const { return server_; }
  const std::shared_ptr<grpc::ChannelCredentials>& channel() const { return channel_; }
  // "job key 3f2a9c01 (--job-key-file FILE)", "certificate of node-3 expires 2027-01-31": what may be shown. It changes with
  // the files.
  std::string description() const { return files_ != nullptr ? files_->Describe() : description_; }
  bool is_of_files() const { return files_ != nullptr; }

  Credentials(const Credentials&) = delete;
  Credentials& operator=(const Credentials&) = delete;

 private:
  Credentials() = default;

  std::unique_ptr<WatchedFiles> files_;  // null with a job key; what gRPC reads is there as long as gRPC
  std::shared_ptr<grpc::ServerCredentials> server_;
  std::shared_ptr<grpc::ChannelCredentials> channel_;
  std::string description_;
};

// Those of `credentials`, or of connections in clear where it is null.
std::shared_ptr<grpc::ServerCredentials> ServerCredentialsOf(const Credentials* credentials);
std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(const Credentials* credentials);

// A sentence for a node whose connection to the coordinator at `address` ended because the two have different keys; empty when
// the end has nothing to do with keys. `message` is gRPC's. Where this node has no key it is a guess: the other end just
// closes.
std::string ExplainEnd(const std::string& message, const std::string& address,
                       const Credentials* credentials);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_CREDENTIALS_CREDENTIALS_H_
