// SPDX-License-Identifier: Apache-2.0

#ifndef ROPETEAM_TRANSPORT_TCP_DEVICES_H_
#define ROPETEAM_TRANSPORT_TCP_DEVICES_H_

#include <cstdint>
#include <string>

namespace ropeteam::tcp {

// Of a network interface, by the kernel; 0: unknown.
uint64_t LinkMbpsOf(const std::string& interface);

}  // namespace ropeteam::tcp

#endif  // ROPETEAM_TRANSPORT_TCP_DEVICES_H_
