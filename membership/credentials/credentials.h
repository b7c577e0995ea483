// SPDX-License-Identifier: Apache-2.0
//
// The credentials of a process for its gRPC connections, and the roots that it trusts: mutual TLS, for the connections
// of the coordinator and the control plane. If a pointer to Credentials is null, connections are not encrypted and open
// to everyone (--insecure).
//
// The certificate chain decides about access: a peer's certificate must come from one of the job's roots. Host names
// are not compared, because addresses of nodes change. The system's roots are never trusted.
//
// Thread-safe. A Credentials must outlive the channels and servers that use it. Its last reference must not be dropped on
// one of gRPC's threads.

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

// Renewed certificates need not be in use at once. A check is three calls of stat().
inline constexpr std::chrono::milliseconds kTlsFilesLookedAtEvery{5000};

class Credentials {
 public:
  // `from` describes the key's source for messages: "--job-key-file FILE". kInternal.
  static Result<std::shared_ptr<const Credentials>> FromJobKey(const std::vector<JobKey>& keys,
                                                               const std::string& job,
                                                               const std::string& node,
                                                               const std::string& from);
  // Uses certificates made by an operator. The files are checked every `interval`: valid new ones are used for new
  // connections, invalid ones are reported in the log. With `peer_name`, every peer's certificate must have it as a DNS
  // name or as its CN. Errors as ReadTlsFiles().
  static Result<std::shared_ptr<const Credentials>> FromFiles(
      const TlsFiles& files, const std::string& peer_name,
      std::chrono::milliseconds interval = kTlsFilesLookedAtEvery);
  ~Credentials();

  const std::shared_ptr<grpc::ServerCredentials>& server() const { return server_; }
  const std::shared_ptr<grpc::ChannelCredentials>& channel() const { return channel_; }
  // Text for people: "job key 3f2a9c01 (--job-key-file FILE)", "certificate of node-3 expires 2027-01-31". It changes
  // with the files.
  std::string description() const { return files_ != nullptr ? files_->Describe() : description_; }
  bool is_of_files() const { return files_ != nullptr; }

  Credentials(const Credentials&) = delete;
  Credentials& operator=(const Credentials&) = delete;

 private:
  Credentials() = default;

  std::unique_ptr<WatchedFiles> files_;  // null with a job key
  std::shared_ptr<grpc::ServerCredentials> server_;
  std::shared_ptr<grpc::ChannelCredentials> channel_;
  std::string description_;
};

// The gRPC credentials of `credentials`; those of unencrypted connections if it is null.
std::shared_ptr<grpc::ServerCredentials> ServerCredentialsOf(const Credentials* credentials);
std::shared_ptr<grpc::ChannelCredentials> ChannelCredentialsOf(const Credentials* credentials);

// A sentence for a node of `job` whose connection to the coordinator at `address` ended because the two have different
// keys; empty if it ended for another reason. Keys are derived from the job key and the job's name, so the ends cannot
// tell which of the two differs. `message` is gRPC's. If this node has no key, the sentence is a guess, because
// the other end only closes the connection.
std::string ExplainEnd(const std::string& message, const std::string& address, const std::string& job,
                       const Credentials* credentials);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_CREDENTIALS_CREDENTIALS_H_
