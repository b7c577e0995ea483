// SPDX-License-Identifier: Apache-2.0

#include "transport/fabrics.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"
#include "transport/inproc/inproc_transport.h"
#include "transport/ip_address.h"
#include "transport/ofi/ofi_transport.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/ucx/ucx_transport.h"
#include "transport/verbs/verbs_transport.h"

namespace ropeteam {
namespace {

constexpr const char* kEfa = "efa";
constexpr const char* kOfiTcp = "tcp;ofi_rxm";  // only with `insecure`

bool IsLoopback(const std::string& address) {
  return address.starts_with("127.") || address.starts_with("::1") || address.starts_with("[::1]");
}

std::string Join(const std::vector<std::string>& words) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : ",") + word;
  return text;
}

// "verbs: mlx5_0: port 1 is down; ofi: …": the RDMA devices that cannot be used, each with the reason.
std::string WhyNoRdma(const std::vector<FabricListing>& listings) {
  std::string text;
  const auto add = [&text](const std::string& words) { text += (text.empty() ? "" : "; ") + words; };
  for (const FabricListing& listing : listings) {
    bool any = false;
    if (!listing.missing.empty()) add(listing.transport + ": " + listing.missing);
    for (const FabricDevice& device : listing.devices) {
      if (!device.rdma) continue;
      any = true;
      if (!device.unusable.empty()) add(listing.transport + ": " + device.name + ": " + device.unusable);
    }
    if (listing.missing.empty() && !any && listing.transport == "verbs")
      add("verbs: this machine shows no device");
  }
  return text.empty() ? "no RDMA device that was asked for" : text;
}

// Whether a usable RDMA device speaks verbs, or libfabric's efa. If the configuration names devices, only those count.
struct Rdma {
  bool verbs = false, efa = false;
};
Rdma RdmaOf(const FabricConfig& config, const std::vector<FabricListing>& listings) {
  Rdma found;
  // "mlx5_0:2" names a port of the device mlx5_0.
  const auto names = [](const std::string& asked, const std::string& device) {
    return asked == device || asked.substr(0, asked.find(':')) == device;
  };
  for (const FabricListing& listing : listings)
    for (const FabricDevice& device : listing.devices) {
      const bool asked = config.devices.empty() ||
                         std::any_of(config.devices.begin(), config.devices.end(),
                                     [&](const std::string& each) { return names(each, device.name); });
      if (!asked || !device.rdma || !device.unusable.empty()) continue;
      found.verbs |= listing.transport == "verbs";
      found.efa |= listing.transport == "ofi" && device.provider == kEfa;
    }
  return found;
}

// EFA's security group keeps strangers away, and shm is reachable on this machine only. libfabric's other providers
// parse whatever reaches them, and a packet of a stranger can end the process.
bool TrustsPeers(const std::string& provider) { return provider != kEfa && provider != "shm"; }

Result<FabricPlan> PlanOfi(const FabricConfig& config, const std::vector<FabricListing>& listings) {
  std::string provider = config.provider;
  if (provider.empty() && RdmaOf(config, listings).efa) provider = kEfa;
  if (provider.empty() && config.require_rdma)
    return Error(Code::kUnsupported, "RDMA is required and not available: %s", WhyNoRdma(listings).c_str());
  if (provider.empty()) provider = kOfiTcp;
  if (!TrustsPeers(provider) || config.insecure) return FabricPlan{"ofi", provider, ""};
  const char* none = config.provider.empty() ? "this machine has no EFA device, and " : "";
  return Error(
      Code::kInvalidArgument,
      "transport ofi: %slibfabric's provider \"%.80s\" trusts its peers: anyone who reaches it can end this "
      "process. Take --transport tcp, or verbs for a card with InfiniBand or RoCE, or say --insecure",
      none, provider.c_str());
}

Result<std::unique_ptr<Transport>> Create(const FabricConfig& config, const FabricPlan& plan) {
  if (plan.transport == "verbs") return CreateVerbsTransport({config.devices, config.gid_index});
  if (plan.transport == "ucx") {
    UcxConfig ucx;
    const FabricListing listing = ListUcxDevices();
    Result<std::vector<std::string>> devices = UcxDevices(config, listing);
    if (!devices.ok()) return devices.status();
    ROPETEAM_RETURN_IF_ERROR(CheckUcxListens(config, *devices, listing));
    ucx.devices = std::move(devices).value();
    ucx.gid_index = config.gid_index;
    return CreateUcxTransport(ucx);
  }
  if (plan.transport == "tcp" && config.alone) {
    for (const std::string& device : config.devices)
      if (const Result<IpAddress> address = AddressOfInterface(device); !address.ok())
        return address.status();
    return InprocFabric::Create()->CreateTransport("alone");
  }
  if (plan.transport == "tcp") {
    TcpConfig tcp;
    tcp.listen_address = config.listen_address;
    tcp.device = Join(config.devices);
    return CreateTcpTransport(tcp);
  }
  if (TrustsPeers(plan.provider))
    LOG_WARNING("libfabric's provider \"%s\" trusts its peers: anyone who reaches it can end this process",
                plan.provider.c_str());
  OfiConfig ofi;
  ofi.provider = plan.provider;
  ofi.listen_address = config.listen_address;
  ofi.device = Join(config.devices);
  return CreateOfiTransport(ofi);
}

}  // namespace

Result<std::vector<std::string>> UcxDevices(const FabricConfig& config, const FabricListing& ucx) {
  if (!config.devices.empty()) return config.devices;
  const Result<IpAddress> listen = ParseIpAddress(config.listen_address);
  if (!listen.ok()) return listen.status();
  std::vector<std::string> devices = {InterfaceOf(*listen)};
  if (devices[0].empty())
    return Error(Code::kInvalidArgument, "no network interface of this machine has the address %.80s",
                 config.listen_address.c_str());
  if (IsLoopback(config.listen_address) && !config.require_rdma) return devices;
  for (const FabricDevice& device : ucx.devices)
    if (device.rdma && device.unusable.empty()) devices.push_back(device.name);
  return devices;
}

Status CheckUcxListens(const FabricConfig& config, const std::vector<std::string>& devices,
                       const FabricListing& ucx) {
  for (const FabricDevice& device : ucx.devices) {
    const bool used = std::find(devices.begin(), devices.end(), device.name) != devices.end();
    // device.provider: the device's transports, separated by commas.
    if (!used || ("," + device.provider + ",").find(",tcp,") == std::string::npos) continue;
    if (device.name == "lo" || config.insecure) {
      LOG_WARNING(
          "transport ucx listens by tcp on %s, and UCX checks no key there: anyone who reaches it can write "
          "to "
          "this process's memory",
          device.name.c_str());
      continue;
    }
    return Error(
        Code::kInvalidArgument,
        "transport ucx listens by tcp on %s, and UCX checks no key there: anyone who reaches it can write to "
        "this process's memory. Name the RDMA devices alone (--device mlx5_0:1), take --transport tcp or "
        "verbs, or say --insecure",
        device.name.c_str());
  }
  return OkStatus();
}

Result<FabricPlan> PlanFabric(const FabricConfig& config, const std::vector<FabricListing>& listings) {
  const bool any = config.transport == "auto";
  if (!any && config.transport != "verbs" && config.transport != "ucx" && config.transport != "ofi" &&
      config.transport != "tcp")
    return Error(Code::kInvalidArgument, "no transport \"%.80s\": there are auto, tcp, verbs, ucx and ofi",
                 config.transport.c_str());
  if (!config.provider.empty() && !any && config.transport != "ofi")
    return Error(Code::kInvalidArgument, "provider \"%.80s\" goes with transport ofi, not with %s",
                 config.provider.c_str(), config.transport.c_str());
  if (config.transport == "verbs" || config.transport == "ucx" || config.transport == "tcp")
    return FabricPlan{config.transport, "", ""};
  // A named provider is one of libfabric.
  if (!any || !config.provider.empty()) return PlanOfi(config, listings);
  if (IsLoopback(config.listen_address) && !config.require_rdma) return FabricPlan{"tcp", "", ""};
  const Rdma rdma = RdmaOf(config, listings);
  if (rdma.verbs) return FabricPlan{"verbs", "", ""};
  if (rdma.efa) return FabricPlan{"ofi", kEfa, ""};
  std::string reason = WhyNoRdma(listings);
  if (config.require_rdma)
    return Error(Code::kUnsupported, "RDMA is required and not available: %s", reason.c_str());
  return FabricPlan{"tcp", "", std::move(reason)};
}

std::vector<FabricListing> ListFabrics() {
  return {ListVerbsDevices(), ListOfiDevices(), ListTcpDevices(), ListUcxDevices()};
}

Result<FabricChoice> CreateFabric(const FabricConfig& config) {
  const bool loopback = IsLoopback(config.listen_address) && !config.require_rdma;
  const bool asks =
      config.provider.empty() && (config.transport == "ofi" || (config.transport == "auto" && !loopback));
  Result<FabricPlan> plan = PlanFabric(config, asks ? ListFabrics() : std::vector<FabricListing>());
  if (!plan.ok()) return plan.status();
  Result<std::unique_ptr<Transport>> made = Create(config, *plan);
  const bool rdma_planned = plan->transport == "verbs" || plan->provider == kEfa;
  const bool free_choice = config.transport == "auto" && config.provider.empty() && !config.require_rdma;
  if (!made.ok() && free_choice && rdma_planned) {
    plan = FabricPlan{"tcp", "", made.status().message()};
    made = Create(config, *plan);
  }
  if (!made.ok()) return made.status();
  if (config.require_rdma && !(*made)->capabilities().rdma)
    return Error(Code::kUnsupported, "RDMA is required, and %s is not RDMA", (*made)->Describe().c_str());
  return FabricChoice{std::move(*made), std::move(plan->fallback)};
}

}  // namespace ropeteam
