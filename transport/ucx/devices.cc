// SPDX-License-Identifier: Apache-2.0
//
// The devices that UCX finds on this machine.

#include <map>

#include "transport/fabrics.h"
#include "transport/ucx/library.h"

namespace ropeteam {

FabricListing ListUcxDevices() {
  FabricListing listing;
  listing.transport = "ucx";
  listing.library = "UCX " + ucx::Version();
  Result<ucx::Context> context = ucx::OpenContext(UcxConfig{});
  if (!context.ok()) return listing;
  // One entry per device, with all transports that UCX offers over it.
  std::map<std::string, FabricDevice> devices;
  for (const ucx::Resource& resource : ucx::ResourcesOf(context->get())) {
    if (resource.transport == "self") continue;
    FabricDevice& device = devices[resource.device];
    device.name = resource.device;
    device.provider += (device.provider.empty() ? "" : ",") + resource.transport;
    device.rdma |= resource.rdma();
    if (!resource.network()) continue;
    device.link_mbps = ucx::LinkMbps(resource.device);
    device.numa_node = ucx::NumaNode(resource.device);
  }
  for (auto& [name, device] : devices) listing.devices.push_back(std::move(device));
  return listing;
}

}  // namespace ropeteam
