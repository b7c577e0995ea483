// SPDX-License-Identifier: Apache-2.0
//
// Memory: registered once with every device. Pinning hundreds of gigabytes takes seconds, so no lock is held
// meanwhile.

#include <errno.h>

#include "core/base/log.h"
#include "transport/verbs/internal.h"

namespace ropeteam::verbs {
namespace {

// Relaxed ordering lets the bytes of one operation reach memory in any order, which doubles the bandwidth of
// some hosts; nothing here looks at bytes before their operation is complete. Where the device or the kernel
// does not know it, libibverbs leaves it out.
constexpr int kRegionAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;
constexpr int kDmabufAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING;

}  // namespace

Status VerbsTransport::ReserveRegion() {
  std::lock_guard lock(regions_mutex_);
  const size_t count = regions_.size() + regions_pending_;
  if (count >= kRegionsMax)
    return Error(Code::kNoSpace, "%zu regions are registered, limit %zu", count, kRegionsMax);
  regions_pending_++;
  return OkStatus();
}

Result<RegionId> VerbsTransport::AddRegion(Status status, std::unique_ptr<Region> region) {
  std::lock_guard lock(regions_mutex_);
  regions_pending_--;
  if (!status.ok()) {
    LOG_ERROR("transport verbs: %s", status.ToString().c_str());
    return status;
  }
  registrations_.fetch_add(1, std::memory_order_relaxed);
  const RegionId id = region_next_++;
  regions_.emplace(id, std::move(region));
  return id;
}

Result<RegionId> VerbsTransport::RegisterRegion(void* base, uint64_t length) {
  if (base == nullptr && length != 0)
    return Error(Code::kInvalidArgument, "register %llu bytes at a null pointer",
                 static_cast<unsigned long long>(length));
  ROPETEAM_RETURN_IF_ERROR(ReserveRegion());
  auto region = std::make_unique<Region>();
  region->base = reinterpret_cast<uintptr_t>(base);
  region->length = length;
  Status status;
  for (const auto& rail : rails_) {
    if (length == 0) break;  // devices differ on empty registrations, and no byte of it is ever touched
    Handle<ibv_mr> memory(ibv_reg_mr(rail->domain.get(), base, length, kRegionAccess));
    if (!memory) {
      status = RegistrationError(errno, rail->port.name, length);
      break;
    }
    region->memory.push_back(std::move(memory));
  }
  return AddRegion(std::move(status), std::move(region));
}

Result<RegionId> VerbsTransport::RegisterDmabuf(int fd, uint64_t offset, uint64_t length) {
  if (!capabilities_.dmabuf)
    return Error(Code::kUnsupported, "transport verbs: %s cannot register a dmabuf",
                 capabilities_.devices.c_str());
  if (length == 0) return Error(Code::kInvalidArgument, "register 0 bytes of a dmabuf");
  ROPETEAM_RETURN_IF_ERROR(ReserveRegion());
  auto region = std::make_unique<Region>();
  region->base = offset;  // devices want the same place in a page as in the dmabuf
  region->length = length;
  region->exported = false;
  Status status;
  for (const auto& rail : rails_) {
    Handle<ibv_mr> memory(ibv_reg_dmabuf_mr(rail->domain.get(), offset, length, offset, fd, kDmabufAccess));
    if (!memory) {
      status = ErrnoError(errno, "device %s refuses the dmabuf, %llu bytes at %llu", rail->port.name.c_str(),
                          static_cast<unsigned long long>(length), static_cast<unsigned long long>(offset));
      break;
    }
    region->memory.push_back(std::move(memory));
  }
  return AddRegion(std::move(status), std::move(region));
}

Status VerbsTransport::DeregisterRegion(RegionId id) {
  std::unique_ptr<Region> region;
  {
    std::lock_guard lock(regions_mutex_);
    const auto found = regions_.find(id);
    if (found == regions_.end()) return Error(Code::kInvalidArgument, "region %u is not registered", id);
    if (const uint64_t operations = found->second->operations.load(); operations != 0)
      return Error(Code::kInvalidArgument, "region %u has %llu operations outstanding", id,
                   static_cast<unsigned long long>(operations));
    region = std::move(found->second);
    regions_.erase(found);
  }
  return OkStatus();  // the devices let go here, without the lock
}

std::string VerbsTransport::ExportRegion(RegionId id) const {
  std::lock_guard lock(regions_mutex_);
  const auto found = regions_.find(id);
  if (found == regions_.end() || !found->second->exported) return {};
  RegionKey key;
  key.instance = instance_;
  key.base = found->second->base;
  key.length = found->second->length;
  for (const auto& memory : found->second->memory) key.keys.push_back(memory->rkey);
  return Encode(key);
}

Transport::Counters VerbsTransport::counters() const {
  Counters c;
  c.registrations = registrations_.load(std::memory_order_relaxed);
  c.put_bytes = put_bytes_.load(std::memory_order_relaxed);
  c.get_bytes = get_bytes_.load(std::memory_order_relaxed);
  c.puts = puts_.load(std::memory_order_relaxed);
  c.gets = gets_.load(std::memory_order_relaxed);
  c.failures = failures_.load(std::memory_order_relaxed);
  return c;
}

}  // namespace ropeteam::verbs
