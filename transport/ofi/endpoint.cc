// SPDX-License-Identifier: Apache-2.0
//
// Chooses the address and the provider, opens the fabric and the endpoints, and registers memory.

#include <cstdlib>
#include <cstring>
#include <set>

#include "core/base/log.h"
#include "transport/ofi/internal.h"
#include "transport/ofi/rails.h"

namespace ropeteam {

Result<std::unique_ptr<Transport>> CreateOfiTransport(const OfiConfig& config) {
  SetOfiEnvironment();
  const std::vector<OfiConfig> rails = ofi::RailsOf(config);
  if (!rails.empty()) return ofi::OfiRails::Create(rails);
  Result<std::unique_ptr<ofi::OfiTransport>> made = ofi::OfiTransport::Create(config);
  if (!made.ok()) return made.status();
  LOG_INFO("transport %s", (*made)->Describe().c_str());
  return std::unique_ptr<Transport>(std::move(made).value());
}

void SetOfiEnvironment() {
  // Registrations last until they are closed. With a cache, peers that have the key could still reach a
  // region that was deregistered.
  setenv("FI_MR_CACHE_MAX_COUNT", "0", 0);
  // Otherwise EFA uses shm for a peer on the same host, and shm does not notice the peer's death.
  setenv("FI_EFA_ENABLE_SHM_TRANSFER", "0", 0);
  // If device memory is requested, libfabric initialises every kind that it finds, with a context on each
  // GPU. Device memory is registered here as a dmabuf, which needs none of that.
  setenv("FI_HMEM", "system", 0);
  // The number of peers for whose completions ofi_rxm makes room in a queue. The default of 256 needs more entries
  // than some devices have in a queue (32767 with rxe), and only tests use ofi_rxm, with few peers.
  setenv("FI_UNIVERSE_SIZE", "64", 0);
}

namespace ofi {
namespace {

constexpr uint64_t kMemoryModes = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
// Entries of the completion queue when it is opened. A provider that needs more enlarges it.
constexpr size_t kCompletionEntries = 4096;
// FI_NAME_MAX for an endpoint's name; EFA's is 32 bytes, shm's a path.
constexpr size_t kEndpointNameBytesMax = 256;

Status FabricError(Code code, int64_t result, const char* what) {
  return Error(code, "%s: %s (%lld)", what, fi_strerror(static_cast<int>(-result)),
               static_cast<long long>(result));
}

// "shm, tcp;ofi_rxm, …": the providers of this machine.
std::string ProvidersThere() {
  fi_info* list = nullptr;
  std::set<std::string> names;
  if (fi_getinfo(kFabricVersion, nullptr, nullptr, 0, Hints("").get(), &list) == 0)
    for (const fi_info* info = list; info != nullptr; info = info->next)
      names.insert(info->fabric_attr->prov_name);
  if (list != nullptr) fi_freeinfo(list);
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

}  // namespace

bool IsRdma(const std::string& provider) {
  return provider == "efa" || provider.starts_with("verbs") || provider == "psm2" || provider == "opx" ||
         provider == "cxi";
}

bool HasIpAddresses(const fi_info* info) {
  return info->addr_format == FI_SOCKADDR || info->addr_format == FI_SOCKADDR_IN ||
         info->addr_format == FI_SOCKADDR_IN6;
}

Info Hints(const std::string& provider) {
  Info hints(fi_allocinfo());
  hints->caps = FI_MSG | FI_RMA;
  hints->mode = FI_CONTEXT | FI_CONTEXT2;
  hints->ep_attr->type = FI_EP_RDM;
  hints->domain_attr->mr_mode = static_cast<int>(kMemoryModes);
  hints->domain_attr->threading = FI_THREAD_SAFE;  // regions are registered from any thread
  hints->domain_attr->data_progress = FI_PROGRESS_MANUAL;
  hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
  hints->fabric_attr->prov_name = provider.empty() ? nullptr : strdup(provider.c_str());
  return hints;
}

Result<std::unique_ptr<OfiTransport>> OfiTransport::Create(const OfiConfig& config, uint64_t instance) {
  if (config.operation_bytes == 0 || config.depth == 0 || config.depth > kOfiDepthMax)
    return Error(Code::kInvalidArgument,
                 "ofi: operation of %llu bytes, depth %u: want at least 1, depth at most %u",
                 static_cast<unsigned long long>(config.operation_bytes), config.depth, kOfiDepthMax);
  std::unique_ptr<OfiTransport> transport(new OfiTransport(config));
  transport->instance_ = instance != 0 ? instance : RandomNumber();
  const Status status = transport->Open();
  if (!status.ok()) {
    LOG_ERROR("transport ofi provider %s listen %s device %s: %s", config.provider.c_str(),
              config.listen_address.c_str(), config.device.c_str(), status.ToString().c_str());
    return status;
  }
  return transport;
}

Status OfiTransport::Open() {
  ROPETEAM_RETURN_IF_ERROR(wake_.Open());
  ROPETEAM_RETURN_IF_ERROR(ChooseInfo());
  ROPETEAM_RETURN_IF_ERROR(OpenFabric());
  ROPETEAM_RETURN_IF_ERROR(RegisterHello());
  ROPETEAM_RETURN_IF_ERROR(OpenQueue());
  ROPETEAM_RETURN_IF_ERROR(OpenEndpoint());
  ProbeDmabuf();
  NameSelf();
  return OkStatus();
}

Status OfiTransport::ChooseListen() {
  if (config_.listen_address.empty()) {
    if (config_.device.empty())
      return Error(Code::kInvalidArgument, "ofi: neither a listen address nor a device given");
    Result<IpAddress> first = AddressOfInterface(config_.device);
    if (!first.ok()) return first.status();
    listen_ = *first;
  } else {
    Result<IpAddress> parsed = ParseIpAddress(config_.listen_address);
    if (!parsed.ok()) return parsed.status();
    listen_ = *parsed;
    if (!config_.device.empty()) {
      Result<IpAddress> exists = AddressOfInterface(config_.device);
      const std::string has = InterfaceOf(listen_);
      if (has != config_.device) {
        if (!exists.ok()) return exists.status();
        return Error(Code::kInvalidArgument, "listen address %s is on %s, not on device \"%s\"",
                     config_.listen_address.c_str(), has.empty() ? "no device here" : has.c_str(),
                     config_.device.c_str());
      }
    }
  }
  return CheckListenable(listen_);
}

Status OfiTransport::ChooseInfo() {
  const uint32_t version = WantsDmabuf() ? kDmabufVersion : kFabricVersion;
  fi_info* list = nullptr;
  int result = fi_getinfo(version, nullptr, nullptr, 0, Hints(config_.provider).get(), &list);
  Info any(list);
  if (result != 0)
    return Error(Code::kUnsupported,
                 "provider \"%s\" offers no one-sided operations with delivery-complete semantics here (%s); "
                 "there are: %s",
                 config_.provider.c_str(), fi_strerror(-result), ProvidersThere().c_str());
  Info hints = Hints(config_.provider);
  if (HasIpAddresses(any.get())) {
    ROPETEAM_RETURN_IF_ERROR(ChooseListen());
    hints->addr_format = listen_.storage.ss_family == AF_INET ? FI_SOCKADDR_IN : FI_SOCKADDR_IN6;
    hints->src_addr = std::malloc(listen_.length);  // freed with the hints
    hints->src_addrlen = listen_.length;
    std::memcpy(hints->src_addr, listen_.get(), listen_.length);
  } else if (!config_.device.empty()) {
    hints->domain_attr->name = strdup(config_.device.c_str());
  }
  list = nullptr;
  result = -FI_ENODATA;
  if (WantsDmabuf()) {
    hints->caps |= FI_HMEM;
    hints->domain_attr->mr_mode |= FI_MR_HMEM;
    result = fi_getinfo(version, nullptr, nullptr, 0, hints.get(), &list);
    hints->caps &= ~FI_HMEM;
    hints->domain_attr->mr_mode &= ~FI_MR_HMEM;
  }
  if (result != 0) result = fi_getinfo(version, nullptr, nullptr, 0, hints.get(), &list);
  info_.reset(list);
  if (result != 0)
    return Error(Code::kInvalidArgument, "provider \"%s\" has no device \"%s\" for listen address \"%s\": %s",
                 config_.provider.c_str(), config_.device.c_str(), config_.listen_address.c_str(),
                 fi_strerror(-result));
  if (info_->domain_attr->mr_key_size > sizeof(uint64_t))
    return Error(Code::kUnsupported, "provider \"%s\" has keys of %zu bytes, at most 8 are supported",
                 config_.provider.c_str(), info_->domain_attr->mr_key_size);
  return OkStatus();
}

Status OfiTransport::OpenFabric() {
  fid_fabric* fabric = nullptr;
  int result = fi_fabric(info_->fabric_attr, &fabric, nullptr);
  if (result != 0) return FabricError(Code::kIo, result, "fi_fabric");
  fabric_.reset(fabric);
  fid_domain* domain = nullptr;
  result = fi_domain(fabric_.get(), info_.get(), &domain, nullptr);
  if (result != 0) return FabricError(Code::kIo, result, "fi_domain");
  domain_.reset(domain);
  fi_av_attr av_attributes{};
  av_attributes.type = FI_AV_TABLE;
  fid_av* addresses = nullptr;
  result = fi_av_open(domain_.get(), &av_attributes, &addresses, nullptr);
  if (result != 0) return FabricError(Code::kIo, result, "fi_av_open");
  addresses_.reset(addresses);
  return OkStatus();
}

Status OfiTransport::OpenQueue() {
  fi_cq_attr attributes{};
  attributes.size = kCompletionEntries;
  attributes.format = FI_CQ_FORMAT_CONTEXT;
  attributes.wait_obj = FI_WAIT_FD;
  fid_cq* completions = nullptr;
  int result = fi_cq_open(domain_.get(), &attributes, &completions, nullptr);
  const bool sleepable = result == 0;
  if (!sleepable) {
    // EFA in libfabric 1.x has no descriptor to sleep on. Wait() then polls at intervals.
    attributes.wait_obj = FI_WAIT_NONE;
    result = fi_cq_open(domain_.get(), &attributes, &completions, nullptr);
  }
  if (result != 0) return FabricError(Code::kIo, result, "fi_cq_open");
  queue_.reset(completions);
  if (sleepable && fi_control(&completions->fid, FI_GETWAIT, &queue_fd_) != 0) queue_fd_ = -1;
  return OkStatus();
}

Status OfiTransport::OpenEndpoint() {
  fid_ep* opened = nullptr;
  int result = fi_endpoint(domain_.get(), info_.get(), &opened, nullptr);
  if (result != 0) {
    if (result == -FI_EADDRINUSE)
      return Error(Code::kAlreadyExists, "listen address %s is in use", ToText(listen_).c_str());
    return FabricError(Code::kIo, result, "fi_endpoint");
  }
  endpoint_.reset(opened);
  result = fi_ep_bind(opened, &addresses_->fid, 0);
  if (result == 0) result = fi_ep_bind(opened, &queue_->fid, FI_TRANSMIT | FI_RECV);
  if (result != 0) return FabricError(Code::kIo, result, "fi_ep_bind");
  result = fi_enable(opened);
  if (result == -FI_EADDRINUSE)
    return Error(Code::kAlreadyExists, "listen address %s is in use", ToText(listen_).c_str());
  if (result != 0) return FabricError(Code::kIo, result, "fi_enable");
  return OkStatus();
}

Status OfiTransport::RegisterHello() {
  hello_ = {kHelloMagic, instance_};
  hellos_read_ = std::make_unique<Hello[]>(kOfiPeersMax);
  for (uint32_t slot = kOfiPeersMax; slot > 0; slot--) slots_free_.push_back(slot - 1);
  ROPETEAM_RETURN_IF_ERROR(RegisterMemory(&hello_, sizeof hello_, FI_REMOTE_READ, kHelloKey, &hello_memory_));
  return RegisterMemory(hellos_read_.get(), kOfiPeersMax * sizeof(Hello), FI_READ, RandomNumber(),
                        &hellos_read_memory_);
}

uint64_t OfiTransport::RemoteBase(const void* base) const {
  return (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) != 0 ? reinterpret_cast<uintptr_t>(base) : 0;
}

void OfiTransport::NameSelf() {
  EndpointAddress self;
  self.name.resize(kEndpointNameBytesMax);
  size_t length = self.name.size();
  const int result = fi_getname(&endpoint_->fid, self.name.data(), &length);
  ROPETEAM_CHECK(result == 0 && length <= self.name.size());
  self.name.resize(length);
  name_bytes_ = length;
  self.instance = instance_;
  self.hello_address = RemoteBase(&hello_);
  self.hello_key = fi_mr_key(hello_memory_.get());
  self.address_format = info_->addr_format;
  self.provider = info_->fabric_attr->prov_name;
  local_address_ = Encode(self);

  std::string where = info_->domain_attr->name;
  capabilities_.devices = where;
  if (listen_.length != 0) {
    std::memcpy(&listen_.storage, self.name.data(), std::min<size_t>(length, sizeof listen_.storage));
    const std::string interface = InterfaceOf(listen_);
    where = (interface.empty() ? where : interface) + " " + ToText(listen_);
    capabilities_.devices = interface.empty() ? capabilities_.devices : interface;
    capabilities_.address = ToText(listen_);
  }
  description_ = self.provider + " on " + where;
  capabilities_.name = "ofi";
  capabilities_.provider = self.provider;
  capabilities_.rdma = IsRdma(self.provider);
  if (info_->nic != nullptr && info_->nic->link_attr != nullptr)
    capabilities_.link_mbps = info_->nic->link_attr->speed / kBitsPerMegabit;
  capabilities_.operation_bytes = std::min<uint64_t>(config_.operation_bytes, info_->ep_attr->max_msg_size);
}

OfiTransport::~OfiTransport() {
  // Operations that are not complete yet are lost, as transport.h says.
  endpoint_.reset();
  regions_.Clear();  // before domain_
}

Status OfiTransport::RegisterMemory(void* base, uint64_t length, uint64_t access, uint64_t key,
                                    Fid<fid_mr>* memory) {
  if (info_->domain_attr->mr_key_size < sizeof(uint64_t))
    key &= (uint64_t{1} << (8 * info_->domain_attr->mr_key_size)) - 1;
  fid_mr* registered = nullptr;
  const int result = fi_mr_reg(domain_.get(), base, length, access, 0, key, 0, &registered, nullptr);
  // libfabric's error numbers are errno values.
  if (result != 0)
    return front::RegistrationError(-result, fi_strerror(-result), info_->domain_attr->name, length);
  memory->reset(registered);
  return OkStatus();
}

Status OfiTransport::MapRegion(Region* region, void* base) {
  region->base = static_cast<char*>(base);
  // Providers differ on empty registrations, so none is made: no byte of it is ever accessed.
  if (region->length == 0) return OkStatus();
  const Status status =
      RegisterMemory(base, region->length, FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE,
                     RandomNumber(), &region->memory);
  if (!status.ok()) {
    LOG_ERROR("transport ofi: %s", status.ToString().c_str());
    return status;
  }
  region->descriptor = fi_mr_desc(region->memory.get());
  region->key = fi_mr_key(region->memory.get());
  return OkStatus();
}

std::string OfiTransport::EncodeKey(const Region& region) const {
  return Encode(RegionKey{instance_, RemoteBase(region.base), region.key, region.length});
}

}  // namespace ofi
}  // namespace ropeteam
