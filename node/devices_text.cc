// SPDX-License-Identifier: Apache-2.0
#include "node/devices_text.h"

#include <nlohmann/json.hpp>

namespace ropeteam {
namespace {

constexpr uint64_t kMegabitsPerGigabit = 1000;

std::string LinkText(uint64_t mbps) {
  if (mbps == 0) return "";
  return mbps < kMegabitsPerGigabit ? std::to_string(mbps) + " Mb/s"
                                    : std::to_string(mbps / kMegabitsPerGigabit) + " Gb/s";
}

std::string Line(const FabricDevice& device) {
  std::string text = "  " + device.name;
  for (const std::string& word :
       {device.provider, device.address, LinkText(device.link_mbps),
        device.numa_node < 0 ? std::string() : "numa " + std::to_string(device.numa_node),
        std::string(device.rdma ? "rdma" : ""),
        device.unusable.empty() ? std::string() : "unusable: " + device.unusable})
    if (!word.empty()) text += "  " + word;
  return text + "\n";
}

nlohmann::json ToJson(const FabricListing& listing) {
  nlohmann::json devices = nlohmann::json::array();
  for (const FabricDevice& d : listing.devices)
    devices.push_back({{"name", d.name},
                       {"provider", d.provider},
                       {"address", d.address},
                       {"link_mbps", d.link_mbps},
                       {"numa_node", d.numa_node},
                       {"rdma", d.rdma},
                       {"unusable", d.unusable}});
  return {{"transport", listing.transport},
          {"library", listing.library},
          {"missing", listing.missing},
          {"devices", std::move(devices)}};
}

}  // namespace

std::string DevicesText(bool json) { return DevicesText(ListFabrics(), json); }

std::string DevicesText(const std::vector<FabricListing>& listings, bool json) {
  if (json) {
    nlohmann::json document = {{"transports", nlohmann::json::array()}};
    for (const FabricListing& listing : listings) document["transports"].push_back(ToJson(listing));
    return document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  }
  std::string text;
  for (const FabricListing& listing : listings) {
    text += listing.transport + "  " +
            (listing.missing.empty() ? listing.library : "missing: " + listing.missing) + "\n";
    for (const FabricDevice& device : listing.devices) text += Line(device);
    if (listing.missing.empty() && listing.devices.empty()) text += "  no device\n";
  }
  return text;
}

}  // namespace ropeteam
