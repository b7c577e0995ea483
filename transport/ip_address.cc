// SPDX-License-Identifier: Apache-2.0

#include "transport/ip_address.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <unistd.h>

#include <charconv>
#include <cstring>
#include <memory>
#include <set>

namespace ropeteam {
namespace {

const sockaddr_in& V4(const IpAddress& address) {
  return reinterpret_cast<const sockaddr_in&>(address.storage);
}
const sockaddr_in6& V6(const IpAddress& address) {
  return reinterpret_cast<const sockaddr_in6&>(address.storage);
}
bool IsV4(const IpAddress& address) { return address.storage.ss_family == AF_INET; }

// Splits "host:port" and "[host]:port"; a bare IPv6 address has more than one colon and no port.
bool SplitPort(const std::string& text, std::string* host, uint16_t* port) {
  *host = text;
  *port = 0;
  std::string digits;
  if (!text.empty() && text.front() == '[') {
    const size_t close = text.find(']');
    if (close == std::string::npos) return false;
    *host = text.substr(1, close - 1);
    if (close + 1 == text.size()) return true;
    if (text[close + 1] != ':') return false;
    digits = text.substr(close + 2);
  } else {
    const size_t colon = text.find(':');
    if (colon == std::string::npos || text.find(':', colon + 1) != std::string::npos) return true;
    *host = text.substr(0, colon);
    digits = text.substr(colon + 1);
  }
  const char* const end = digits.data() + digits.size();
  const auto parsed = std::from_chars(digits.data(), end, *port);
  return parsed.ec == std::errc() && parsed.ptr == end;
}

std::unique_ptr<ifaddrs, void (*)(ifaddrs*)> Interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) list = nullptr;
  return {list, [](ifaddrs* l) {
            if (l != nullptr) freeifaddrs(l);
          }};
}

bool SameHost(const IpAddress& address, const sockaddr* other) {
  if (other == nullptr || other->sa_family != address.storage.ss_family) return false;
  if (IsV4(address))
    return V4(address).sin_addr.s_addr == reinterpret_cast<const sockaddr_in*>(other)->sin_addr.s_addr;
  return std::memcmp(&V6(address).sin6_addr, &reinterpret_cast<const sockaddr_in6*>(other)->sin6_addr,
                     sizeof(in6_addr)) == 0;
}

}  // namespace

Result<IpAddress> ParseIpAddress(const std::string& text) {
  std::string host;
  uint16_t port = 0;
  if (!SplitPort(text, &host, &port))
    return Error(Code::kInvalidArgument, "listen address \"%s\": want HOST or HOST:PORT, port 0 to 65535",
                 text.c_str());
  IpAddress address;
  auto* v4 = reinterpret_cast<sockaddr_in*>(&address.storage);
  auto* v6 = reinterpret_cast<sockaddr_in6*>(&address.storage);
  if (inet_pton(AF_INET, host.c_str(), &v4->sin_addr) == 1) {
    const uint32_t bits = ntohl(v4->sin_addr.s_addr);
    if (bits == INADDR_ANY || bits == INADDR_BROADCAST || IN_MULTICAST(bits))
      return Error(Code::kInvalidArgument,
                   "listen address \"%s\" is no address of one interface; name the one to use", text.c_str());
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    address.length = sizeof *v4;
    return address;
  }
  if (inet_pton(AF_INET6, host.c_str(), &v6->sin6_addr) == 1) {
    if (IN6_IS_ADDR_UNSPECIFIED(&v6->sin6_addr) || IN6_IS_ADDR_MULTICAST(&v6->sin6_addr))
      return Error(Code::kInvalidArgument,
                   "listen address \"%s\" is no address of one interface; name the one to use", text.c_str());
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    address.length = sizeof *v6;
    return address;
  }
  return Error(Code::kInvalidArgument, "listen address \"%s\" is not numeric; names are never resolved",
               text.c_str());
}

std::string ToText(const IpAddress& address) {
  char host[INET6_ADDRSTRLEN] = "?";
  if (address.length == 0) return host;
  if (IsV4(address)) {
    inet_ntop(AF_INET, &V4(address).sin_addr, host, sizeof host);
    return std::string(host).append(":").append(std::to_string(PortOf(address)));
  }
  inet_ntop(AF_INET6, &V6(address).sin6_addr, host, sizeof host);
  return std::string("[").append(host).append("]:").append(std::to_string(PortOf(address)));
}

uint16_t PortOf(const IpAddress& address) {
  if (address.length == 0) return 0;
  return ntohs(IsV4(address) ? V4(address).sin_port : V6(address).sin6_port);
}

IpAddress WithPort(const IpAddress& address, uint16_t port) {
  IpAddress with = address;
  if (IsV4(with))
    reinterpret_cast<sockaddr_in*>(&with.storage)->sin_port = htons(port);
  else
    reinterpret_cast<sockaddr_in6*>(&with.storage)->sin6_port = htons(port);
  return with;
}

std::string InterfaceOf(const IpAddress& address) {
  const auto list = Interfaces();
  std::string loopback;
  for (const ifaddrs* i = list.get(); i != nullptr; i = i->ifa_next) {
    if (SameHost(address, i->ifa_addr)) return i->ifa_name;
    // All of 127.0.0.0/8 is this machine, although only 127.0.0.1 is listed.
    if ((i->ifa_flags & IFF_LOOPBACK) != 0 && IsV4(address) && i->ifa_addr != nullptr &&
        i->ifa_addr->sa_family == AF_INET && (ntohl(V4(address).sin_addr.s_addr) >> 24) == IN_LOOPBACKNET)
      loopback = i->ifa_name;
  }
  return loopback;
}

Result<IpAddress> AddressOfInterface(const std::string& interface) {
  const auto list = Interfaces();
  std::set<std::string> names;
  for (const ifaddrs* i = list.get(); i != nullptr; i = i->ifa_next) {
    names.insert(i->ifa_name);
    if (interface != i->ifa_name || i->ifa_addr == nullptr || i->ifa_addr->sa_family != AF_INET) continue;
    IpAddress address;
    address.length = sizeof(sockaddr_in);
    std::memcpy(&address.storage, i->ifa_addr, address.length);
    return WithPort(address, 0);
  }
  std::string known;
  for (const std::string& name : names) known += (known.empty() ? "" : ", ") + name;
  if (names.contains(interface))
    return Error(Code::kInvalidArgument, "device \"%s\" has no IPv4 address; give the address to listen on",
                 interface.c_str());
  return Error(Code::kInvalidArgument, "device \"%s\" does not exist; this machine has %s", interface.c_str(),
               known.empty() ? "none" : known.c_str());
}

Status CheckListenable(const IpAddress& address) {
  const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return ErrnoError(errno, "socket for %s", ToText(address).c_str());
  // The provider sets this too. With it, a port in TIME_WAIT counts as free, and a listening port still gives
  // EADDRINUSE.
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  int error = bind(fd, address.get(), address.length) == 0 ? 0 : errno;
  if (error == 0 && PortOf(address) != 0) error = listen(fd, 1) == 0 ? 0 : errno;
  close(fd);
  const std::string text = ToText(address);
  if (error == EADDRNOTAVAIL)
    return Error(Code::kInvalidArgument, "listen address %s is not an address of this machine", text.c_str());
  if (error == EADDRINUSE) return Error(Code::kAlreadyExists, "listen address %s is in use", text.c_str());
  if (error != 0) return ErrnoError(error, "listen on %s", text.c_str());
  return OkStatus();
}

}  // namespace ropeteam
