// SPDX-License-Identifier: Apache-2.0

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_ADDRESS_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_ADDRESS_H_

#include <string>

#include "core/base/status.h"

namespace ropeteam {

// Whether a socket can listen on `address` ("host:port", "[v6]:port") now. kInvalidArgument: it is not an address, or
// cannot be resolved. kIo: any other failure, with the system's reason. It leaves nothing open.
Status CheckListen(const std::string& address);
// Whether host:port is an address of this machine, whatever process listens there.
bool IsOwnAddress(const std::string& address);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_ADDRESS_H_
