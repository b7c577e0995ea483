// SPDX-License-Identifier: Apache-2.0

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_ADDRESS_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_ADDRESS_H_

#include <string>

#include "core/base/status.h"

namespace ropeteam {

// Whether a socket can listen on `address` ("host:port", "[v6]:port") right now. kInvalidArgument: it is
// not an address, or cannot be resolved. kIo: otherwise, with the system's reason. Leaves nothing behind.
Status CheckListen(const std::string& address);
// Whether host:port names an address of this machine, whoever listens there.
bool IsOwnAddress(const std::string& address);

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_ADDRESS_H_
