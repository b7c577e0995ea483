// SPDX-License-Identifier: Apache-2.0

#include "transport/verbs/device.h"

#include <arpa/inet.h>
#include <errno.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <set>

#include "core/base/log.h"
#include "transport/fabrics.h"
#include "transport/front/system.h"

namespace ropeteam::verbs {
namespace {

constexpr uint8_t kHopLimit = 64;  // RoCE v2 is routed like other UDP packets
constexpr uint8_t kGidPrefixBytes = 8;

struct DeviceList {
  DeviceList() : list(ibv_get_device_list(&count)) {}
  ~DeviceList() {
    if (list != nullptr) ibv_free_device_list(list);
  }
  int count = 0;
  ibv_device** list;
};

// Only unused objects are closed. If closing fails, the object leaks until the process ends.
void Closed(int result, const char* what) {
  if (result != 0) LOG_ERROR("verbs: %s: %s (%d)", what, std::strerror(result), result);
}

bool IsZero(const ibv_gid& gid) { return gid.global.interface_id == 0 && gid.global.subnet_prefix == 0; }

bool IsIpv4(const ibv_gid& gid) {
  static constexpr uint8_t kPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kPrefix, sizeof kPrefix) == 0;
}

bool IsLinkLocal(const ibv_gid& gid) { return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80; }

std::string GidText(const ibv_gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  if (IsIpv4(gid))
    inet_ntop(AF_INET, gid.raw + 12, text, sizeof text);
  else
    inet_ntop(AF_INET6, gid.raw, text, sizeof text);
  return text;
}

// The preference for an entry of the GID table; 0: not usable.
int Rank(const ibv_gid_entry& entry) {
  if (IsZero(entry.gid)) return 0;
  if (entry.gid_type == IBV_GID_TYPE_IB) return 5;
  if (entry.gid_type != IBV_GID_TYPE_ROCE_V2) return 1;
  if (IsIpv4(entry.gid)) return 4;
  return IsLinkLocal(entry.gid) ? 2 : 3;
}

void ChooseGid(ibv_context* context, int wanted, Port* port) {
  int best_rank = 0;
  std::string there;
  for (uint32_t index = 0; index < static_cast<uint32_t>(port->attributes.gid_tbl_len); index++) {
    ibv_gid_entry entry{};
    if (ibv_query_gid_ex(context, port->number, index, &entry, 0) != 0) continue;
    const int rank = Rank(entry);
    if (rank == 0) continue;
    there += (there.empty() ? "" : ", ") + std::to_string(index);
    const bool better = wanted < 0 ? rank > best_rank : static_cast<int>(index) == wanted;
    if (!better) continue;
    best_rank = rank;
    port->gid_index = static_cast<int>(index);
    port->gid = entry.gid;
    port->fabric = entry.gid_type == IBV_GID_TYPE_IB        ? "InfiniBand"
                   : entry.gid_type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2"
                                                            : "RoCE v1";
  }
  if (port->gid_index >= 0) return;
  if (wanted >= 0)
    port->unusable =
        "it has no GID " + std::to_string(wanted) + ", there are " + (there.empty() ? "none" : there);
  else if (port->ethernet())
    port->unusable = "it has no GID: does its network interface have an address?";
}

int NumaNode(const std::string& device) {
  std::ifstream file("/sys/class/infiniband/" + device + "/device/numa_node");
  int node = -1;
  file >> node;
  return file ? node : -1;
}

// Why no port of this device can be used; empty: it depends on the port.
std::string WhyNotDevice(const ibv_device* device) {
  if (device->transport_type == IBV_TRANSPORT_IB) return "";
  if (device->transport_type == IBV_TRANSPORT_IWARP)
    return "it speaks iWARP, which has no datagrams to connect by";
  return "it has no reliable connections (on EFA use transport ofi)";
}

void Examine(ibv_context* context, int gid_index, Port* port) {
  if (const int error = ibv_query_port(context, port->number, &port->attributes); error != 0) {
    port->unusable = std::string("it cannot be asked: ") + std::strerror(error);
    return;
  }
  port->needs_grh = (port->attributes.flags & IBV_QPF_GRH_REQUIRED) != 0 || gid_index >= 0;
  port->link_mbps = LinkMbps(port->attributes.active_width, port->attributes.active_speed);
  port->fabric = port->ethernet() ? "RoCE" : "InfiniBand";
  if (port->unusable.empty()) ChooseGid(context, gid_index, port);
  if (!port->ethernet() || port->gid_index >= 0) port->address = AddressText(port->Address());
  if (port->attributes.state != IBV_PORT_ACTIVE)
    port->unusable = "port " + std::to_string(port->number) + " is " +
                     (port->attributes.state == IBV_PORT_DOWN ? "down" : "not active yet");
}

std::string Reasons(const std::vector<Port>& ports) {
  std::string text;
  for (const Port& port : ports)
    text +=
        (text.empty() ? "" : "; ") + port.name + ": " + (port.unusable.empty() ? "usable" : port.unusable);
  return text.empty() ? "this machine shows no RDMA device" : text;
}

}  // namespace

void HandleCloser::operator()(ibv_context* context) const {
  Closed(ibv_close_device(context), "ibv_close_device");
}
void HandleCloser::operator()(ibv_pd* domain) const { Closed(ibv_dealloc_pd(domain), "ibv_dealloc_pd"); }
void HandleCloser::operator()(ibv_comp_channel* channel) const {
  Closed(ibv_destroy_comp_channel(channel), "ibv_destroy_comp_channel");
}
void HandleCloser::operator()(ibv_cq* queue) const { Closed(ibv_destroy_cq(queue), "ibv_destroy_cq"); }
void HandleCloser::operator()(ibv_qp* queue_pair) const {
  Closed(ibv_destroy_qp(queue_pair), "ibv_destroy_qp");
}
void HandleCloser::operator()(ibv_mr* memory) const { Closed(ibv_dereg_mr(memory), "ibv_dereg_mr"); }
void HandleCloser::operator()(ibv_ah* address) const { Closed(ibv_destroy_ah(address), "ibv_destroy_ah"); }

PortAddress Port::Address() const {
  PortAddress address;
  std::memcpy(&address.gid_high, gid.raw, sizeof address.gid_high);
  std::memcpy(&address.gid_low, gid.raw + kGidPrefixBytes, sizeof address.gid_low);
  address.lid = attributes.lid;
  address.ethernet = ethernet() ? 1 : 0;
  address.mtu = static_cast<uint8_t>(attributes.active_mtu);
  return address;
}

std::string AddressText(const PortAddress& address) {
  if (address.ethernet == 0) return "lid " + std::to_string(address.lid);
  ibv_gid gid{};
  std::memcpy(gid.raw, &address.gid_high, sizeof address.gid_high);
  std::memcpy(gid.raw + kGidPrefixBytes, &address.gid_low, sizeof address.gid_low);
  return GidText(gid);
}

// Codes and rates are those of PortInfo in the InfiniBand specification. A lane's rate is the advertised one.
uint64_t LinkMbps(uint8_t active_width, uint8_t active_speed) {
  uint64_t lanes = 0, lane_mbps = 0;
  switch (active_width) {
    case 1:
      lanes = 1;
      break;
    case 2:
      lanes = 4;
      break;
    case 4:
      lanes = 8;
      break;
    case 8:
      lanes = 12;
      break;
    case 16:
      lanes = 2;
      break;
    default:
      break;
  }
  switch (active_speed) {
    case 1:
      lane_mbps = 2'500;
      break;
    case 2:
      lane_mbps = 5'000;
      break;
    case 4:
    case 8:
      lane_mbps = 10'000;
      break;
    case 16:
      lane_mbps = 14'000;
      break;
    case 32:
      lane_mbps = 25'000;
      break;
    case 64:
      lane_mbps = 50'000;
      break;
    case 128:
      lane_mbps = 100'000;
      break;
    default:
      break;
  }
  return lanes * lane_mbps;
}

std::vector<Port> ListPorts(int gid_index) {
  std::vector<Port> ports;
  const DeviceList devices;
  for (int i = 0; i < devices.count; i++) {
    Port first;
    first.device = first.name = ibv_get_device_name(devices.list[i]);
    first.numa_node = NumaNode(first.device);
    first.unusable = WhyNotDevice(devices.list[i]);
    const Handle<ibv_context> context(ibv_open_device(devices.list[i]));
    if (!context || ibv_query_device(context.get(), &first.limits) != 0) {
      first.unusable = std::string("it cannot be opened: ") + std::strerror(errno);
      ports.push_back(std::move(first));
      continue;
    }
    for (uint8_t number = 1; number <= std::max<uint8_t>(first.limits.phys_port_cnt, 1); number++) {
      Port port = first;
      port.number = number;
      if (number > 1) port.name += ":" + std::to_string(number);
      Examine(context.get(), gid_index, &port);
      ports.push_back(std::move(port));
    }
  }
  return ports;
}

Result<std::vector<Port>> ChoosePorts(const VerbsConfig& config) {
  return ChoosePorts(config, ListPorts(config.gid_index));
}

Result<std::vector<Port>> ChoosePorts(const VerbsConfig& config, std::vector<Port> all) {
  std::vector<Port> chosen;
  if (config.devices.empty()) {
    for (const Port& port : all)
      if (port.unusable.empty()) chosen.push_back(port);
    if (chosen.size() > kRailsMax) {
      LOG_WARNING("transport verbs: %zu devices can be used, the first %zu are", chosen.size(), kRailsMax);
      chosen.resize(kRailsMax);
    }
    if (chosen.empty())
      return Error(Code::kUnsupported, "transport verbs: no usable device: %s", Reasons(all).c_str());
  }
  std::set<std::string> seen;
  for (std::string name : config.devices) {
    if (name.ends_with(":1")) name.resize(name.size() - 2);
    const auto found =
        std::find_if(all.begin(), all.end(), [&](const Port& port) { return port.name == name; });
    if (found == all.end())
      return Error(Code::kInvalidArgument, "transport verbs: no device \"%.80s\": %s", name.c_str(),
                   Reasons(all).c_str());
    if (!seen.insert(name).second)
      return Error(Code::kInvalidArgument, "transport verbs: device \"%.80s\" is named twice", name.c_str());
    if (!found->unusable.empty())
      return Error(config.gid_index >= 0 ? Code::kInvalidArgument : Code::kUnsupported,
                   "transport verbs: device %s cannot be used: %s", name.c_str(), found->unusable.c_str());
    chosen.push_back(*found);
  }
  if (chosen.size() > kRailsMax)
    return Error(Code::kInvalidArgument, "transport verbs: %zu devices, limit %zu", chosen.size(), kRailsMax);
  return chosen;
}

Result<Handle<ibv_context>> OpenDevice(const std::string& device) {
  const DeviceList devices;
  for (int i = 0; i < devices.count; i++) {
    if (device != ibv_get_device_name(devices.list[i])) continue;
    Handle<ibv_context> context(ibv_open_device(devices.list[i]));
    if (!context) return ErrnoError(errno, "open device %s", device.c_str());
    return context;
  }
  return Error(Code::kInvalidArgument, "device %s has gone", device.c_str());
}

ibv_ah_attr PathTo(const Port& port, const PortAddress& to) {
  ibv_ah_attr path{};
  path.port_num = port.number;
  path.dlid = to.lid;
  const PortAddress own = port.Address();
  if (port.ethernet() || port.needs_grh || own.gid_high != to.gid_high) {
    path.is_global = 1;
    std::memcpy(path.grh.dgid.raw, &to.gid_high, sizeof to.gid_high);
    std::memcpy(path.grh.dgid.raw + kGidPrefixBytes, &to.gid_low, sizeof to.gid_low);
    path.grh.sgid_index = static_cast<uint8_t>(std::max(port.gid_index, 0));
    path.grh.hop_limit = kHopLimit;
  }
  return path;
}

Status RegistrationError(int errno_value, const std::string& device, uint64_t length) {
  return front::RegistrationError(errno_value, std::strerror(errno_value), "device " + device, length);
}

}  // namespace ropeteam::verbs

namespace ropeteam {

FabricListing ListVerbsDevices() {
  FabricListing listing;
  listing.transport = "verbs";
  listing.library = "libibverbs";
  for (const verbs::Port& port : verbs::ListPorts(-1))
    listing.devices.push_back(
        {port.name, port.fabric, port.address, port.link_mbps, port.numa_node, true, port.unusable});
  return listing;
}

}  // namespace ropeteam
