// SPDX-License-Identifier: Apache-2.0
//
// The gRPC settings of both ends.

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_

#include <grpcpp/grpcpp.h>

namespace ropeteam {

void SetServerOptions(grpc::ServerBuilder* builder);
grpc::ChannelArguments ChannelOptions();

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_OPTIONS_H_
