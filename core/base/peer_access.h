// SPDX-License-Identifier: Apache-2.0
//
// What peers may do with each chunk of a region now. One thread owns the table and grants and revokes access. The
// thread that carries out the peers' requests asks it before each system call on a chunk's memory.
//
// The owner grants access before it tells the place to a peer, and revokes it before it gives the chunk to anybody else.
// Revoke() returns when no system call uses the chunk any more. So a peer never sees or changes bytes of the chunk's next
// owner, also with a request that was accepted before. The proof is that of a hazard pointer: the server publishes the
// range that it uses, then reads the table; the owner writes the table, then reads the published range. All four are
// sequentially consistent, so at least one of the two sees the other.

#ifndef ROPETEAM_CORE_BASE_PEER_ACCESS_H_
#define ROPETEAM_CORE_BASE_PEER_ACCESS_H_

#include <atomic>
#include <cstdint>
#include <vector>

#include "core/base/check.h"

namespace ropeteam {

class PeerAccess {
 public:
  enum class Kind : uint8_t { kNone, kRead, kWrite };

  // No access to any chunk.
  PeerAccess(uint64_t chunks, uint64_t chunk_bytes) : chunk_bytes_(chunk_bytes), kinds_(chunks) {}

  // Owner. Replaces what peers may do with these chunks.
  void Set(uint32_t first, uint32_t count, Kind kind) {
    bool revoked = false;
    for (uint32_t i = 0; i < count; ++i) {
      const Kind before = kinds_[first + i].exchange(kind);
      revoked = revoked || (before != Kind::kNone && before != kind);
    }
    if (!revoked) return;
    for (uint64_t used = used_.load(); Overlaps(used, first, count); used = used_.load()) used_.wait(used);
  }
  // Owner.
  Kind Of(uint32_t chunk) const { return kinds_[chunk].load(std::memory_order_relaxed); }

  // A server's use of a range, in the region's bytes, for one system call that does not block. One at a time.
  class Use {
   public:
    Use() = default;
    ~Use() { End(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    // False: peers may not do this with each of these chunks. No table: they may do everything.
    bool Begin(PeerAccess* access, uint64_t offset, uint64_t length, Kind kind) {
      ROPETEAM_CHECK(access_ == nullptr);
      if (access == nullptr) return true;
      access_ = access;
      if (access->Enter(offset, length, kind)) return true;
      End();
      return false;
    }
    void End() {
      if (access_ != nullptr) access_->Leave();
      access_ = nullptr;
    }

   private:
    PeerAccess* access_ = nullptr;
  };

 private:
  // `used` is the first chunk, and in the upper half the number of chunks; 0: none is used.
  static bool Overlaps(uint64_t used, uint64_t first, uint64_t count) {
    const uint64_t used_first = static_cast<uint32_t>(used), used_count = used >> 32;
    return used_first < first + count && first < used_first + used_count;
  }
  bool Enter(uint64_t offset, uint64_t length, Kind kind) {
    if (length == 0) return true;
    const uint64_t first = offset / chunk_bytes_, last = (offset + length - 1) / chunk_bytes_;
    ROPETEAM_CHECK(used_.load(std::memory_order_relaxed) == 0);
    if (last >= kinds_.size()) return false;
    used_.store(first | (last - first + 1) << 32);
    for (uint64_t chunk = first; chunk <= last; ++chunk)
      if (kinds_[chunk].load() != kind) return false;
    return true;
  }
  void Leave() {
    used_.store(0);
    used_.notify_all();
  }

  const uint64_t chunk_bytes_;
  std::vector<std::atomic<Kind>> kinds_;
  std::atomic<uint64_t> used_{0};
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_BASE_PEER_ACCESS_H_
