// SPDX-License-Identifier: Apache-2.0
//
// The tables of regions: this node's, which any thread registers and the loop uses, and those imported from peers,
// which only the loop uses.

#ifndef ROPETEAM_TRANSPORT_FRONT_REGIONS_H_
#define ROPETEAM_TRANSPORT_FRONT_REGIONS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/base/status.h"
#include "transport/front/checks.h"
#include "transport/transport.h"

namespace ropeteam::front {

// The base of a fabric's region. The derived class owns the device's handles and releases them.
struct LocalRegion {
  uint64_t length = 0;
  bool exported = true;                 // false: a dmabuf, which peers cannot reach
  std::atomic<uint64_t> operations{0};  // accepted operations that Poll() has not returned yet
};

// Owns the registered regions. A region in use by an operation stays until the operation releases it: Remove() refuses
// it. A registration with a device may take seconds, so it happens without the lock, between Reserve() and Add() or
// Unreserve(). The release after Remove() is without the lock, too. Any thread.
template <typename Region>
class RegionTable {
 public:
  // Reserves a place for a region that is about to be registered. kNoSpace: kRegionsMax.
  Status Reserve() {
    std::lock_guard lock(mutex_);
    ROPETEAM_RETURN_IF_ERROR(CheckRegionCount(regions_.size() + pending_));
    pending_++;
    return OkStatus();
  }
  // Fills the reserved place.
  RegionId Add(std::unique_ptr<Region> region) {
    std::lock_guard lock(mutex_);
    pending_--;
    registrations_++;
    regions_.emplace(next_, std::move(region));
    return next_++;
  }
  // Frees the reserved place: the device has refused.
  void Unreserve() {
    std::lock_guard lock(mutex_);
    pending_--;
  }
  // For an operation on [offset, +length). kInvalidArgument: no such region, outside of it.
  Status Acquire(RegionId id, uint64_t offset, uint64_t length, Region** region) {
    std::lock_guard lock(mutex_);
    const auto found = regions_.find(id);
    if (found == regions_.end()) return NotRegistered(id);
    if (!InRange(offset, length, found->second->length))
      return CheckRange(offset, length, found->second->length, "region", id);
    found->second->operations.fetch_add(1);  // under the lock: from here on it cannot be removed
    *region = found->second.get();
    return OkStatus();
  }
  static void Release(Region* region) { region->operations.fetch_sub(1); }
  // The caller releases its handles and destroys it. kInvalidArgument: no such region, or outstanding operations.
  Result<std::unique_ptr<Region>> Remove(RegionId id) {
    std::lock_guard lock(mutex_);
    const auto found = regions_.find(id);
    if (found == regions_.end()) return NotRegistered(id);
    ROPETEAM_RETURN_IF_ERROR(CheckUnused(id, found->second->operations.load()));
    std::unique_ptr<Region> region = std::move(found->second);
    regions_.erase(found);
    return region;
  }
  // Returns the result of `encode` for the region, under the lock; empty if there is no such region or it is not
  // exported.
  template <typename Encode>
  std::string Export(RegionId id, Encode encode) const {
    std::lock_guard lock(mutex_);
    const auto found = regions_.find(id);
    if (found == regions_.end() || !found->second->exported) return {};
    return encode(*found->second);
  }
  // Calls `visit` for the region, under the lock.
  template <typename Visit>
  void With(RegionId id, Visit visit) {
    std::lock_guard lock(mutex_);
    if (const auto found = regions_.find(id); found != regions_.end()) visit(found->second.get());
  }
  uint64_t registrations() const {
    std::lock_guard lock(mutex_);
    return registrations_;
  }
  // At the transport's end, when no operation is at a device.
  void Clear() { regions_.clear(); }

 private:
  mutable std::mutex mutex_;
  std::unordered_map<RegionId, std::unique_ptr<Region>> regions_;
  size_t pending_ = 0;
  RegionId next_ = 1;
  uint64_t registrations_ = 0;
};

// The base of a fabric's remote region.
struct PeerRegion {
  PeerId peer = 0;
  uint64_t length = 0;
};

// A remote region stays in place until its peer is dropped, because operations point to it. [loop]
template <typename Remote>
class RemoteTable {
 public:
  RemoteRegionId Add(Remote remote) {
    remotes_.emplace(next_, std::move(remote));
    return next_++;
  }
  // nullptr: no such region of this peer.
  Remote* Find(RemoteRegionId id, PeerId peer) {
    const auto found = remotes_.find(id);
    return found == remotes_.end() || found->second.peer != peer ? nullptr : &found->second;
  }
  template <typename Visit>
  void ForEach(PeerId peer, Visit visit) {
    for (auto& [id, remote] : remotes_)
      if (remote.peer == peer) visit(&remote);
  }
  void Drop(PeerId peer) {
    std::erase_if(remotes_, [peer](const auto& entry) { return entry.second.peer == peer; });
  }

 private:
  std::unordered_map<RemoteRegionId, Remote> remotes_;  // nodes do not move
  RemoteRegionId next_ = 1;
};

}  // namespace ropeteam::front

#endif  // ROPETEAM_TRANSPORT_FRONT_REGIONS_H_
