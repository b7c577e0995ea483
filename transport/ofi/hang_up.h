// SPDX-License-Identifier: Apache-2.0
//
// Ends a peer's TCP connection from below libfabric.
//
// tcp of libfabric 1.17 must not be closed while the answer to a read is arriving: it gives that read back
// twice, the second time without a context, which ofi_rxm follows to address 0. A connection that ends by
// itself is cleaned up well. libfabric has no call for that, so the socket is looked up among what the
// completion queue waits for, and shut down.

#ifndef ROPETEAM_TRANSPORT_OFI_HANG_UP_H_
#define ROPETEAM_TRANSPORT_OFI_HANG_UP_H_

#include <cstddef>

#include "transport/ip_address.h"

namespace ropeteam::ofi {

// Shuts down the connections to `peer` among the descriptors that `epoll` waits for, by itself or by further
// epoll descriptors, so that they end with a reset when they are closed; returns how many there were. 0 also
// where /proc is not mounted.
size_t HangUp(int epoll, const IpAddress& peer);

}  // namespace ropeteam::ofi

#endif  // ROPETEAM_TRANSPORT_OFI_HANG_UP_H_
