// SPDX-License-Identifier: Apache-2.0
//
// IP addresses as text, and their interfaces on this machine. Nothing here uses a resolver: other systems lost
// bandwidth because a host name resolved to the slow card, or to 127.0.1.1.

#ifndef ROPETEAM_TRANSPORT_IP_ADDRESS_H_
#define ROPETEAM_TRANSPORT_IP_ADDRESS_H_

#include <sys/socket.h>

#include <string>

#include "core/base/status.h"

namespace ropeteam {

struct IpAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;  // 0: none
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
};

// "127.0.0.1", "127.0.0.1:7000", "::1", "[::1]:7000"; numeric only. kInvalidArgument for anything else, and for
// wildcard, broadcast and multicast addresses.
Result<IpAddress> ParseIpAddress(const std::string& text);

std::string ToText(const IpAddress& address);  // "127.0.0.1:7000", "[::1]:7000"
uint16_t PortOf(const IpAddress& address);
IpAddress WithPort(const IpAddress& address, uint16_t port);

// The interface that has the address, or whose loopback network contains it; empty if there is none.
std::string InterfaceOf(const IpAddress& address);
// The first IPv4 address of the interface. kInvalidArgument: there is no such interface (the message lists the existing
// ones), or it has no address.
Result<IpAddress> AddressOfInterface(const std::string& interface);

// Whether a socket of this machine may listen there. kInvalidArgument: the address is not of this machine.
// kAlreadyExists: the port is in use. It is only a snapshot: another process may bind the port next.
Status CheckListenable(const IpAddress& address);

}  // namespace ropeteam

#endif  // ROPETEAM_TRANSPORT_IP_ADDRESS_H_
