// SPDX-License-Identifier: Apache-2.0

#include "transport/fabrics.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"
#include "transport/ofi/ofi_transport.h"
#include "transport/ucx/ucx_transport.h"
#include "transport/verbs/verbs_transport.h"

namespace ropeteam {
namespace {

constexpr const char* kTcp = "tcp;ofi_rxm";
constexpr const char* kEfa = "efa";

bool IsLoopback(const std::string& address) {
  return address.starts_with("127.") || address.starts_with("::1") || address.starts_with("[::1]");
}

std::string Join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ",") + word;
  return text;
}

Result<std::unique_ptr<Transport>> CreateOfi(const FabricConfig& config, const std::string& provider) {
  OfiConfig ofi;
  ofi.provider = provider;
  ofi.listen_address = config.listen_address;
  ofi.device = Join(config.devices);
  return CreateOfiTransport(ofi);
}

// "verbs: mlx5_0 port 1 is down; ofi: …": everything that could have moved bytes by RDMA and cannot, and why.
std::string WhyNoRdma(const std::vector<FabricListing>& listings) {
  std::string text;
  const auto add = [&text](const std::string& words) { text += (text.empty() ? "" : "; ") + words; };
  for (const FabricListing& listing : listings) {
    if (!listing.missing.empty()) add(listing.transport + ": " + listing.missing);
    for (const FabricDevice& device : listing.devices)
      if (device.rdma && !device.unusable.empty())
        add(listing.transport + ": " + device.name + ": " + device.unusable);
  }
  return text.empty() ? "this machine shows no RDMA device" : text;
}

// What auto prefers of what is there: verbs, then EFA; empty when there is neither. Only devices that were
// asked for count, when any were.
std::string PreferredRdma(const FabricConfig& config, const std::vector<FabricListing>& listings) {
  for (const FabricListing& listing : listings)
    for (const FabricDevice& device : listing.devices) {
      const bool asked = config.devices.empty() || std::find(config.devices.begin(), config.devices.end(),
                                                             device.name) != config.devices.end();
      if (!asked || !device.rdma || !device.unusable.empty()) continue;
      if (listing.transport == "verbs") return "verbs";
      if (listing.transport == "ofi" && device.provider == kEfa) return kEfa;
    }
  return "";
}

Result<FabricChoice> Done(Result<std::unique_ptr<Transport>> made, const FabricConfig& config,
                          std::string fallback) {
  if (!made.ok()) return made.status();
  FabricChoice choice{std::move(*made), std::move(fallback)};
  if (config.require_rdma && !choice.transport->capabilities().rdma)
    return Error(Code::kUnsupported, "RDMA is required, and %s is not RDMA%s%s",
                 choice.transport->Describe().c_str(), choice.fallback.empty() ? "" : ": ",
                 choice.fallback.c_str());
  return choice;
}

Result<FabricChoice> CreateAuto(const FabricConfig& config) {
  // A provider that was asked for by name is libfabric's.
  if (!config.provider.empty()) return Done(CreateOfi(config, config.provider), config, "");
  if (IsLoopback(config.listen_address) && !config.require_rdma)
    return Done(CreateOfi(config, kTcp), config, "");
  const std::vector<FabricListing> listings = ListFabrics();
  const std::string preferred = PreferredRdma(config, listings);
  std::string fallback;
  if (preferred == "verbs") {
    Result<std::unique_ptr<Transport>> made = CreateVerbsTransport({config.devices, config.gid_index});
    if (made.ok()) return Done(std::move(made), config, "");
    fallback = made.status().message();
  } else if (preferred == kEfa) {
    Result<std::unique_ptr<Transport>> made = CreateOfi(config, kEfa);
    if (made.ok()) return Done(std::move(made), config, "");
    fallback = made.status().message();
  } else {
    fallback = WhyNoRdma(listings);
  }
  if (config.require_rdma)
    return Error(Code::kUnsupported, "RDMA is required and cannot be had: %s", fallback.c_str());
  return Done(CreateOfi(config, kTcp), config, std::move(fallback));
}

}  // namespace

std::vector<FabricListing> ListFabrics() { return {ListVerbsDevices(), ListOfiDevices(), ListUcxDevices()}; }

Result<FabricChoice> CreateFabric(const FabricConfig& config) {
  if (config.transport == "auto") return CreateAuto(config);
  if (!config.provider.empty() && config.transport != "ofi")
    return Error(Code::kInvalidArgument, "provider \"%s\" goes with transport ofi, not with \"%.80s\"",
                 config.provider.c_str(), config.transport.c_str());
  if (config.transport == "verbs")
    return Done(CreateVerbsTransport({config.devices, config.gid_index}), config, "");
  if (config.transport == "ucx") return Done(CreateUcxTransport({config.devices, ""}), config, "");
  if (config.transport == "ofi") {
    const std::string efa = PreferredRdma(config, {ListOfiDevices()});
    const bool loopback = IsLoopback(config.listen_address);
    const std::string provider = !config.provider.empty()   ? config.provider
                                 : efa == kEfa && !loopback ? kEfa
                                                            : kTcp;
    return Done(CreateOfi(config, provider), config, "");
  }
  return Error(Code::kInvalidArgument, "no transport \"%.80s\": there are auto, verbs, ucx and ofi",
               config.transport.c_str());
}

}  // namespace ropeteam
