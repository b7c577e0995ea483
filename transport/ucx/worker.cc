// SPDX-License-Identifier: Apache-2.0
//
// Opens the context, the worker and the hello, and registers memory.

#include <errno.h>
#include <sys/mman.h>

#include <ucm/api/ucm.h>

#include <cstring>
#include <set>

#include "core/base/log.h"
#include "transport/blob.h"
#include "transport/ucx/internal.h"

namespace ropeteam {

Result<std::unique_ptr<Transport>> CreateUcxTransport(const UcxConfig& config) {
  return ucx::UcxTransport::Create(config);
}

namespace ucx {
namespace {

constexpr size_t kPageBytes = 4096;
// UCX itself cuts operations to the sizes of its transports. This transport cuts them before that, so that
// peers share the link and a lost peer has few bytes outstanding. Larger operations are not faster over
// shared memory, tcp or rc.
constexpr uint64_t kOperationBytes = 1 << 20;

}  // namespace

Status Registration::Map(ucp_context_h context, void* base, uint64_t length) {
  ucp_mem_map_params_t params{};
  params.field_mask =
      UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE;
  params.address = base;
  params.length = length;
  params.memory_type = UCS_MEMORY_TYPE_HOST;
  const ucs_status_t status = ucp_mem_map(context, &params, &memory_);
  if (status == UCS_OK) {
    context_ = context;
    base_ = base;
    length_ = length;
    return OkStatus();
  }
  memory_ = nullptr;
  // If a device may not lock the memory, UCX returns an input/output error.
  const bool locked = status == UCS_ERR_NO_MEMORY || front::BeyondLockedMemoryLimit(length);
  return front::RegistrationError(locked ? ENOMEM : EIO, ucs_status_string(status), "ucx", length);
}

// UCX keeps deregistered memory in a cache, and peers that have its key can still reach it. ucm_vm_munmap()
// tells the cache that the memory is gone. The cache then drops it at the next registration, so a page is
// registered.
void Registration::Reset() {
  if (memory_ == nullptr) return;
  const ucs_status_t status = ucp_mem_unmap(context_, memory_);
  if (status != UCS_OK) LOG_WARNING("ucx: ucp_mem_unmap: %s", ucs_status_string(status));
  memory_ = nullptr;
  ucm_vm_munmap(base_, length_);
  void* page = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return;
  ucp_mem_map_params_t params{};
  params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
  params.address = page;
  params.length = kPageBytes;
  ucp_mem_h flushed = nullptr;
  if (ucp_mem_map(context_, &params, &flushed) == UCS_OK) ucp_mem_unmap(context_, flushed);
  munmap(page, kPageBytes);
}

Result<std::string> Registration::PackKey() const {
  void* packed = nullptr;
  size_t length = 0;
  const ucs_status_t status = ucp_rkey_pack(context_, memory_, &packed, &length);
  if (status != UCS_OK) return Error(Code::kIo, "ucp_rkey_pack: %s", ucs_status_string(status));
  std::string key(static_cast<const char*>(packed), length);
  ucp_rkey_buffer_release(packed);
  return key;
}

Result<std::unique_ptr<Transport>> UcxTransport::Create(const UcxConfig& config) {
  std::unique_ptr<UcxTransport> transport(new UcxTransport(config));
  const Status status = transport->Open();
  if (!status.ok()) {
    LOG_ERROR("transport ucx: %s", status.ToString().c_str());
    return status;
  }
  LOG_INFO("transport %s", transport->Describe().c_str());
  return std::unique_ptr<Transport>(std::move(transport));
}

Status UcxTransport::Open() {
  instance_ = front::RandomNumber();
  ROPETEAM_RETURN_IF_ERROR(wake_.Open());
  Result<Context> context = OpenContext(config_);
  if (!context.ok()) return context.status();
  context_ = std::move(context).value();
  ROPETEAM_RETURN_IF_ERROR(OpenWorker());
  for (const Resource& resource : ResourcesOf(context_.get()))
    if (resource.transport == "cma" && cma_ == nullptr) cma_ = Cma::Open();
  DescribeSelf();
  ROPETEAM_RETURN_IF_ERROR(NameSelf());
  AddInstance(instance_);
  return OkStatus();
}

Status UcxTransport::OpenWorker() {
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;  // created by one thread, used by the loop's
  ucp_worker_h worker = nullptr;
  ucs_status_t status = ucp_worker_create(context_.get(), &params, &worker);
  if (status != UCS_OK) return Error(Code::kIo, "ucp_worker_create: %s", ucs_status_string(status));
  worker_.reset(worker);
  status = ucp_worker_get_efd(worker, &event_fd_);
  if (status != UCS_OK)
    return Error(Code::kUnsupported, "ucx's transports on this machine cannot wake a waiting thread: %s",
                 ucs_status_string(status));
  return OkStatus();
}

Status UcxTransport::NameSelf() {
  void* page = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return ErrnoError(errno, "mmap of a page");
  hello_ = new (page) Hello{kHelloMagic, instance_};
  ROPETEAM_RETURN_IF_ERROR(hello_memory_.Map(context_.get(), hello_, kPageBytes));
  Result<std::string> key = hello_memory_.PackKey();
  if (!key.ok()) return key.status();

  WorkerAddress self;
  self.instance = instance_;
  self.process = ThisProcess();
  self.hello_address = reinterpret_cast<uintptr_t>(hello_);
  self.hello_key = *key;
  if (cma_ != nullptr) self.cma = cma_->Address();
  ucp_address_t* address = nullptr;
  size_t length = 0;
  const ucs_status_t status = ucp_worker_get_address(worker_.get(), &address, &length);
  if (status != UCS_OK) return Error(Code::kIo, "ucp_worker_get_address: %s", ucs_status_string(status));
  self.name.assign(reinterpret_cast<const char*>(address), length);
  ucp_worker_release_address(worker_.get(), address);
  Result<std::string> encoded = Encode(self);
  if (!encoded.ok()) return encoded.status();
  local_address_ = std::move(encoded).value();
  return OkStatus();
}

void UcxTransport::DescribeSelf() {
  std::set<std::string> networks;
  std::string resources;
  for (const Resource& resource : ResourcesOf(context_.get())) {
    if (resource.transport == "self") continue;
    resources += (resources.empty() ? "" : ", ") + resource.transport + "/" + resource.device;
    capabilities_.rdma |= resource.rdma();
    if (resource.network()) networks.insert(resource.device);
  }
  for (const std::string& device : networks) {
    capabilities_.devices += (capabilities_.devices.empty() ? "" : ",") + device;
    // Loopback reports no speed. A node's transfers do not use it together with the cards.
    capabilities_.link_mbps += LinkMbps(device);
  }
  if (networks.empty()) capabilities_.devices = "memory";
  capabilities_.name = "ucx";
  capabilities_.address = capabilities_.devices;
  capabilities_.fences_peers = false;  // a disconnected peer that has the key may connect again
  capabilities_.operation_bytes = kOperationBytes;
  description_ = "ucx " + Version() + " over " + resources;
}

UcxTransport::~UcxTransport() {
  RemoveInstance(instance_);
  // Endpoints and requests end with the worker. Operations that are not complete yet are lost, as transport.h
  // says. Keys must be destroyed before the worker.
  for (auto& [id, peer] : peers_) {
    CloseEndpoint(peer.get());
    peer->watch.Stop();
  }
  if (worker_ != nullptr) {
    // The worker's progress returns the cancelled requests, which point to our tables.
    constexpr int kRoundsMax = 10'000;
    for (int round = 0; round < kRoundsMax && outstanding_ > 0; round++) {
      ucp_worker_progress(worker_.get());
      if (cma_ != nullptr) cma_->Progress();
    }
  }
  for (auto& [id, peer] : peers_) {
    if (!peer->parked) (void)Drained(peer.get());
    peer->cma.reset();
  }
  cma_.reset();
  for (auto& [id, peer] : peers_)
    if (peer->parked) parked_.push_back(std::move(peer));
  const bool parked = !parked_.empty();
  for (auto& peer : parked_) (void)peer.release();  // UCX's threads may still write to them
  if (parked) (void)worker_.release();              // destroying it would close their endpoints
  worker_.reset();
  regions_.Clear();
  hello_memory_.Reset();
  if (hello_ != nullptr) munmap(hello_, kPageBytes);
  if (parked) (void)context_.release();
  context_.reset();
}

Status UcxTransport::MapRegion(Region* region, void* base) {
  region->base = static_cast<char*>(base);
  if (region->length == 0) return OkStatus();  // no byte of an empty region is ever accessed
  Status status = region->memory.Map(context_.get(), base, region->length);
  if (status.ok()) {
    Result<std::string> key = region->memory.PackKey();
    if (key.ok())
      region->key = std::move(key).value();
    else
      status = key.status();
  }
  const size_t bytes = status.ok() ? EncodeKey(*region).size() : 0;
  if (bytes > kBlobBytesMax)
    status = Error(Code::kUnsupported,
                   "ucx's key of a region has %zu bytes with all its devices, limit %zu: name fewer "
                   "(--device mlx5_0:1)",
                   bytes, kBlobBytesMax);
  if (!status.ok()) LOG_ERROR("transport ucx: %s", status.ToString().c_str());
  return status;
}

std::string UcxTransport::EncodeKey(const Region& region) const {
  return Encode(RegionKey{instance_, reinterpret_cast<uintptr_t>(region.base), region.length, region.key});
}

}  // namespace ucx
}  // namespace ropeteam
