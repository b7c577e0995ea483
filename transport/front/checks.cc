// SPDX-License-Identifier: Apache-2.0

#include "transport/front/checks.h"

namespace ropeteam::front {
namespace {

unsigned long long Ull(uint64_t value) { return value; }

}  // namespace

Status NotConnected(PeerId peer) { return Error(Code::kInvalidArgument, "peer %u is not connected", peer); }

Status NotOfPeer(RemoteRegionId remote, PeerId peer) {
  return Error(Code::kInvalidArgument, "remote region %u is not of peer %u", remote, peer);
}

Status NotRegistered(RegionId region) {
  return Error(Code::kInvalidArgument, "region %u is not registered", region);
}

Status TooManyOperations(size_t accepted) {
  return Error(Code::kNoSpace, "%zu operations outstanding, limit %zu", accepted, kOperationsOutstandingMax);
}

Status ForeignKey(const std::string& peer) {
  return Error(Code::kInvalidArgument, "the region key is not from this instance of peer %s", peer.c_str());
}

Status CheckRange(uint64_t offset, uint64_t length, uint64_t size, const char* what, uint32_t region) {
  if (InRange(offset, length, size)) return OkStatus();
  return Error(Code::kInvalidArgument, "offset %llu + %llu bytes is outside %s %u of %llu bytes", Ull(offset),
               Ull(length), what, region, Ull(size));
}

Status CheckMemory(const void* base, uint64_t length) {
  if (base != nullptr || length == 0) return OkStatus();
  return Error(Code::kInvalidArgument, "register %llu bytes at a null pointer", Ull(length));
}

Status CheckRegionCount(size_t count) {
  if (count < kRegionsMax) return OkStatus();
  return Error(Code::kNoSpace, "%zu regions are registered, limit %zu", count, kRegionsMax);
}

Status CheckUnused(RegionId region, uint64_t operations) {
  if (operations == 0) return OkStatus();
  return Error(Code::kInvalidArgument, "region %u has %llu operations outstanding", region, Ull(operations));
}

}  // namespace ropeteam::front
