// SPDX-License-Identifier: Apache-2.0
//
// Finds and ends TCP connections from below libfabric. libfabric has no call for it, so the sockets are
// looked up, in /proc, among what a completion queue waits for.
//
// Two callers need it:
// - tcp of libfabric 1.17 must not be closed while the answer to a read is arriving: it completes that read
//   twice, the second time without a context, which ofi_rxm dereferences as a null pointer. A connection that ends by
//   itself is cleaned up correctly. So HangUp() shuts it down first, and the queue is read until libfabric has seen
//   the end. Upstream it is github.com/ofiwg/libfabric/pull/8656, merged after 1.17.0.
// - A fragment that is arriving when its peer is disconnected would go on arriving. Cut() discards what has
//   not been read: the next read of the socket finds its end.

#ifndef ROPETEAM_TRANSPORT_OFI_HANG_UP_H_
#define ROPETEAM_TRANSPORT_OFI_HANG_UP_H_

#include <cstddef>
#include <functional>
#include <string>

#include "transport/ip_address.h"

namespace ropeteam::ofi {

// All four look among the descriptors that `epoll` waits for, by itself or by further epoll descriptors, and
// find nothing where /proc is not mounted. CanFindConnections() says whether it is.
//
// After a reset from the other end the kernel does not say whose the connection was, but libfabric still reads
// what had arrived. HangUp() and Cut() treat such a connection as one of those they look for: nothing that it
// carries can succeed any more.

// Shuts down the connections to `peer`, so that they end with a reset when they are closed; returns how many
// there were.
size_t HangUp(int epoll, const IpAddress& peer);

// Ends the TCP connections whose other end `chosen` answers true for ("127.0.0.1:40000"); returns how many
// there were, also of those that were ended before, until libfabric lets go of them. No byte of theirs can be read
// from the kernel any more; what libfabric has read already, it may still copy until it closes the socket.
size_t Cut(int epoll, const std::function<bool(const std::string& peer)>& chosen);

// This end of the connection to `peer`, "127.0.0.1:40000"; empty if there is no such connection.
std::string SourceTo(int epoll, const IpAddress& peer);

// Whether /proc says what an epoll descriptor waits for.
bool CanFindConnections();

}  // namespace ropeteam::ofi

#endif  // ROPETEAM_TRANSPORT_OFI_HANG_UP_H_
