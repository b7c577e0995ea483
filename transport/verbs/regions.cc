// SPDX-License-Identifier: Apache-2.0
//
// Registers memory once with every device. Pinning hundreds of gigabytes takes seconds, so no lock is held
// meanwhile.

#include <errno.h>

#include "core/base/log.h"
#include "transport/verbs/internal.h"

namespace ropeteam::verbs {
namespace {

// Relaxed ordering lets the bytes of one operation reach memory in any order. It doubles the bandwidth of
// some hosts. No code here reads bytes before their operation is complete. If the device or the kernel does
// not support it, libibverbs ignores the flag.
constexpr int kRegionAccess =
    IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;
constexpr int kDmabufAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_RELAXED_ORDERING;

unsigned long long Ull(uint64_t value) { return value; }

}  // namespace

Status VerbsTransport::MapRegion(Region* region, void* base) {
  region->base = reinterpret_cast<uintptr_t>(base);
  for (const auto& rail : rails_) {
    if (region->length == 0)
      break;  // devices differ on empty registrations, and no byte of it is ever accessed
    Handle<ibv_mr> memory(ibv_reg_mr(rail->domain.get(), base, region->length, kRegionAccess));
    if (!memory) {
      const Status status = RegistrationError(errno, rail->port.name, region->length);
      LOG_ERROR("transport verbs: %s", status.ToString().c_str());
      return status;
    }
    region->memory.push_back(std::move(memory));
  }
  return OkStatus();
}

Result<RegionId> VerbsTransport::RegisterDmabuf(int fd, uint64_t offset, uint64_t length) {
  if (!capabilities_.dmabuf)
    return Error(Code::kUnsupported, "transport verbs: %s cannot register a dmabuf",
                 capabilities_.devices.c_str());
  if (length == 0) return Error(Code::kInvalidArgument, "register 0 bytes of a dmabuf");
  return AddRegion(length, [&](Region* region) {
    region->base = offset;  // devices require the same offset within a page as in the dmabuf
    region->exported = false;
    return MapDmabuf(region, fd);
  });
}

Status VerbsTransport::MapDmabuf(Region* region, int fd) {
  for (const auto& rail : rails_) {
    Handle<ibv_mr> memory(
        ibv_reg_dmabuf_mr(rail->domain.get(), region->base, region->length, region->base, fd, kDmabufAccess));
    if (!memory) {
      const Status status = ErrnoError(errno, "device %s refuses the dmabuf, %llu bytes at %llu",
                                       rail->port.name.c_str(), Ull(region->length), Ull(region->base));
      LOG_ERROR("transport verbs: %s", status.ToString().c_str());
      return status;
    }
    region->memory.push_back(std::move(memory));
  }
  return OkStatus();
}

std::string VerbsTransport::EncodeKey(const Region& region) const {
  RegionKey key;
  key.instance = instance_;
  key.base = region.base;
  key.length = region.length;
  for (const auto& memory : region.memory) key.keys.push_back(memory->rkey);
  return Encode(key);
}

}  // namespace ropeteam::verbs
