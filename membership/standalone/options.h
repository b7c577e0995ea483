// SPDX-License-Identifier: Apache-2.0
//
// How both ends set up gRPC, and the one place where a membership connection is authenticated.

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_

#include <grpcpp/grpcpp.h>

#include <memory>

namespace ropeteam {

std::shared_ptr<grpc::ServerCredentials> ServerCredentials();
std::shared_ptr<grpc::ChannelCredentials> ChannelCredentials();
void SetServerOptions(grpc::ServerBuilder* builder);
grpc::ChannelArguments ChannelOptions();

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_
