// SPDX-License-Identifier: Apache-2.0
//
// An ArenaPin page-locks the arena for CUDA, once, slab by slab, in its own thread. Copies between a device and
// page-locked memory run at the link's speed and need no CPU. The driver copies a slab that is not locked yet (or
// cannot be) as ordinary memory, so nothing ever waits for this.
//
// A slab is a whole number of chunks. The driver refuses a copy that is partly in a locked range, and our copies never
// cross a chunk.
//
// Safe from any thread. The destructor unlocks everything; the arena must still be mapped then.

#ifndef ROPETEAM_API_CLIENT_ARENA_PIN_H_
#define ROPETEAM_API_CLIENT_ARENA_PIN_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "api/client/cuda_driver.h"

namespace ropeteam::client {

// Registering this much takes some 10 ms, during which the driver may delay other calls of the process. It is the
// longest delay for training, and the longest that closing a handle waits.
inline constexpr uint64_t kPinSlabBytes = 64ull << 20;

class ArenaPin {
 public:
  // `begin` is chunk 0's address. The context may be destroyed when no copies are made any more: memory that is
  // page-locked for one context is page-locked for all.
  ArenaPin(const CudaDriver& driver, CuContext context, std::byte* begin, uint64_t chunk_bytes,
           uint64_t chunks_total);
  ~ArenaPin();
  ArenaPin(const ArenaPin&) = delete;
  ArenaPin& operator=(const ArenaPin&) = delete;

  CuContext context() const { return context_; }
  // Locks the slab of this chunk next, and continues from there: this rank's saves are there.
  void Prefer(uint32_t chunk) { prefer_.store(chunk / slab_chunks_, std::memory_order_relaxed); }
  // Slabs that are locked, of how many.
  uint64_t slabs_pinned() const { return slabs_pinned_; }
  uint64_t slabs() const { return pinned_.size(); }

 private:
  void Run();
  bool PinSlab(uint64_t slab);
  std::byte* SlabBegin(uint64_t slab) const { return begin_ + slab * slab_chunks_ * chunk_bytes_; }
  uint64_t SlabBytes(uint64_t slab) const;

  const CudaDriver& driver_;
  const CuContext context_;
  std::byte* const begin_;
  const uint64_t chunk_bytes_;
  const uint64_t chunks_total_;
  const uint64_t slab_chunks_;
  std::atomic<uint64_t> prefer_ = 0;
  std::atomic<uint64_t> slabs_pinned_ = 0;
  std::atomic<bool> stop_ = false;
  std::vector<uint8_t> pinned_;  // by slab; only the thread uses it until it was joined
  std::thread thread_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_ARENA_PIN_H_
