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

#include <memory>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "membership/credentials/job_key.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

namespace ropeteam {

class Credentials {
 public:
  // `from` says where the key is from, for people: "--job-key-file FILE". kInternal.
  static Result<std::shared_ptr<const Credentials>> FromJobKey(const std::vector<JobKey>& keys,
                                                               const std::string& job,
                                                               const std::string& node,
                                                               const std::string& from);
  ~Credentials();

  const std::shared_ptr<grpc::ServerCredentials>& server() const { return server_; }
  const std::shared_ptr<grpc::ChannelCredentials>& channel() const { return channel_; }
  // "job key 3f2a9c01 of --job-key-file FILE": what may be shown.
  const std::string& description() const { return description_; }

  Credentials(const Credentials&) = delete;
  Credentials& operator=(const Credentials&) = delete;

 private:
  Credentials() = default;

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
