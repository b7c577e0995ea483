// SPDX-License-Identifier: Apache-2.0
//
// The gRPC settings of both ends.

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "membership/credentials/credentials.h"
#include "membership/standalone/acceptor.h"

namespace ropeteam {

// Makes gRPC resolve names as the C library does, unless GRPC_DNS_RESOLVER is set. Its own resolver, c-ares, waits for a
// name server even if the name is in /etc/hosts. To be called once, before gRPC is used and before there is any thread.
void SetGrpcEnvironment();

// `message`, or, if it says that gRPC has not resolved the name of `address` (host:port), a sentence with that name.
std::string ExplainName(const std::string& message, const std::string& address);

void SetServerOptions(grpc::ServerBuilder* builder);
// A server whose connections come from `acceptor` alone, which must be stopped before it. Null acceptor: it has only an
// in-process channel. `credentials` may be null: unencrypted. kInternal: gRPC does not start it.
Result<std::unique_ptr<grpc::Server>> StartServer(grpc::ServerBuilder* builder, Acceptor* acceptor,
                                                  const Credentials* credentials);
grpc::ChannelArguments ChannelOptions();

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_
