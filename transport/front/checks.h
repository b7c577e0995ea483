// SPDX-License-Identifier: Apache-2.0
//
// The refusals of Transport's calls, the same in every fabric. Each has the value and the limit. Pure functions.

#ifndef ROPETEAM_TRANSPORT_FRONT_CHECKS_H_
#define ROPETEAM_TRANSPORT_FRONT_CHECKS_H_

#include <cstdint>

#include "core/base/status.h"
#include "transport/transport.h"

namespace ropeteam::front {

inline bool InRange(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

Status NotConnected(PeerId peer);
Status NotOfPeer(RemoteRegionId remote, PeerId peer);
Status NotRegistered(RegionId region);
Status TooManyOperations(size_t accepted);
Status ForeignKey(const std::string& peer);  // the region key is of another instance than the peer's

// kInvalidArgument unless [offset, +length) is inside the region of `size` bytes. `what`: "region" or "remote region".
Status CheckRange(uint64_t offset, uint64_t length, uint64_t size, const char* what, uint32_t region);
// kInvalidArgument for a null pointer with a length other than 0.
Status CheckMemory(const void* base, uint64_t length);
// kNoSpace if there are already `count` regions and no more are allowed.
Status CheckRegionCount(size_t count);
// kInvalidArgument while operations use the region.
Status CheckUnused(RegionId region, uint64_t operations);

}  // namespace ropeteam::front

#endif  // ROPETEAM_TRANSPORT_FRONT_CHECKS_H_
