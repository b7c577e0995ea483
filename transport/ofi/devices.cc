// SPDX-License-Identifier: Apache-2.0
//
// The devices that libfabric finds on this machine.

#include <cstring>
#include <set>
#include <utility>

#include "transport/fabrics.h"
#include "transport/ofi/internal.h"

namespace ropeteam {

FabricListing ListOfiDevices() {
  SetOfiEnvironment();
  FabricListing listing;
  listing.transport = "ofi";
  const uint32_t version = fi_version();
  listing.library =
      "libfabric " + std::to_string(FI_MAJOR(version)) + "." + std::to_string(FI_MINOR(version));
  const ofi::Info hints = ofi::Hints("");
  fi_info* list = nullptr;
  if (fi_getinfo(ofi::kFabricVersion, nullptr, nullptr, 0, hints.get(), &list) != 0) return listing;
  const ofi::Info all(list);
  std::set<std::pair<std::string, std::string>> seen;
  for (const fi_info* info = list; info != nullptr; info = info->next) {
    FabricDevice device;
    device.provider = info->fabric_attr->prov_name;
    device.name = info->domain_attr->name;
    if (!seen.emplace(device.provider, device.name).second) continue;
    device.numa_node = ofi::NumaNodeOf(info);
    device.rdma = ofi::IsRdma(device.provider);
    if (ofi::HasIpAddresses(info) && info->src_addr != nullptr &&
        info->src_addrlen <= sizeof(sockaddr_storage)) {
      IpAddress address;
      std::memcpy(&address.storage, info->src_addr, info->src_addrlen);
      address.length = static_cast<socklen_t>(info->src_addrlen);
      device.address = ToText(WithPort(address, 0));
      device.address.resize(device.address.rfind(':'));
    }
    if (info->nic != nullptr && info->nic->link_attr != nullptr)
      device.link_mbps = info->nic->link_attr->speed / ofi::kBitsPerMegabit;
    listing.devices.push_back(std::move(device));
  }
  return listing;
}

}  // namespace ropeteam
