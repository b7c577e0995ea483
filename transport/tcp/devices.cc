// SPDX-License-Identifier: Apache-2.0
//
// The network interfaces of this machine.

#include "transport/tcp/devices.h"

#include <net/if.h>

#include <fstream>

#include "transport/fabrics.h"
#include "transport/ip_address.h"

namespace ropeteam {
namespace {

// The number in a file of the interface's folder in /sys; -1: unknown.
int64_t NumberOf(const std::string& interface, const char* file) {
  std::ifstream stream("/sys/class/net/" + interface + "/" + file);
  int64_t number = -1;
  return !interface.empty() && stream >> number ? number : -1;
}

}  // namespace

uint64_t tcp::LinkMbpsOf(const std::string& interface) {
  const int64_t speed = NumberOf(interface, "speed");
  return speed > 0 ? static_cast<uint64_t>(speed) : 0;
}

FabricListing ListTcpDevices() {
  FabricListing listing;
  listing.transport = "tcp";
  listing.library = "the kernel's TCP";
  struct if_nameindex* const all = if_nameindex();
  for (const struct if_nameindex* i = all; i != nullptr && i->if_name != nullptr; i++) {
    FabricDevice device;
    device.name = i->if_name;
    device.link_mbps = tcp::LinkMbpsOf(device.name);
    device.numa_node = static_cast<int>(NumberOf(device.name, "device/numa_node"));
    if (const Result<IpAddress> address = AddressOfInterface(device.name); address.ok()) {
      device.address = ToText(*address);
      device.address.resize(device.address.rfind(':'));
    } else {
      device.unusable = address.status().message();
    }
    listing.devices.push_back(std::move(device));
  }
  if (all != nullptr) if_freenameindex(all);
  return listing;
}

}  // namespace ropeteam
