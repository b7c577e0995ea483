// SPDX-License-Identifier: Apache-2.0
//
// The gRPC settings of both ends.

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_

#include <grpcpp/grpcpp.h>

#include <memory>

#include "membership/credentials/credentials.h"
#include "membership/standalone/acceptor.h"

namespace ropeteam {

void SetServerOptions(grpc::ServerBuilder* builder);
// A server whose connections come from `acceptor` alone, which must be stopped before it. Null acceptor: it has only an
// in-process channel. `credentials` may be null: unencrypted. kInternal: gRPC does not start it.
Result<std::unique_ptr<grpc::Server>> StartServer(grpc::ServerBuilder* builder, Acceptor* acceptor,
                                                  const Credentials* credentials);
grpc::ChannelArguments ChannelOptions();

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_
