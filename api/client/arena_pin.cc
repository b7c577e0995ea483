// SPDX-License-Identifier: Apache-2.0
#include "api/client/arena_pin.h"

#include <algorithm>
#include <system_error>

#include "api/client/signals_blocked.h"
#include "core/base/log.h"

namespace ropeteam::client {

ArenaPin::ArenaPin(const CudaDriver& driver, CuContext context, std::byte* begin, uint64_t chunk_bytes,
                   uint64_t chunks_total)
    : driver_(driver),
      context_(context),
      begin_(begin),
      chunk_bytes_(chunk_bytes),
      chunks_total_(chunks_total),
      slab_chunks_(std::max<uint64_t>(1, kPinSlabBytes / chunk_bytes)),
      pinned_((chunks_total + slab_chunks_ - 1) / slab_chunks_, 0) {
  const SignalsBlocked blocked;
  try {
    thread_ = std::thread(&ArenaPin::Run, this);
  } catch (const std::system_error& error) {
    LOG_WARNING("arena not page-locked, no thread for it %s", error.what());
  }
}

ArenaPin::~ArenaPin() {
  stop_ = true;
  if (thread_.joinable()) thread_.join();
  const CudaScope scope(driver_, context_);
  for (uint64_t slab = 0; slab < pinned_.size(); ++slab) {
    // Ignore errors: the registration ends with its context.
    if (pinned_[slab] != 0) (void)driver_.mem_host_unregister(SlabBegin(slab));
  }
}

uint64_t ArenaPin::SlabBytes(uint64_t slab) const {
  return std::min(slab_chunks_, chunks_total_ - slab * slab_chunks_) * chunk_bytes_;
}

void ArenaPin::Run() {
  const uint64_t count = pinned_.size();
  uint64_t preferred = prefer_.load(std::memory_order_relaxed);
  uint64_t next = preferred;
  for (uint64_t done = 0; done < count && !stop_; ++done) {
    if (const uint64_t now = prefer_.load(std::memory_order_relaxed); now != preferred)
      next = preferred = now;
    while (pinned_[next] != 0) next = (next + 1) % count;
    if (!PinSlab(next)) return;
  }
  if (!stop_) {
    LOG_INFO("arena page-locked slabs %llu of %llu bytes", static_cast<unsigned long long>(count),
             static_cast<unsigned long long>(slab_chunks_ * chunk_bytes_));
  }
}

bool ArenaPin::PinSlab(uint64_t slab) {
  const CudaScope scope(driver_, context_);
  CuResult result = scope.result();
  if (result == kCuSuccess) {
    result = driver_.mem_host_register(SlabBegin(slab), SlabBytes(slab), kCuMemHostRegisterPortable);
  }
  if (result != kCuSuccess) {
    // The next slab would fail too: there is a limit on locked memory, or the context is gone.
    LOG_WARNING("arena page-locked only in part, slabs %llu of %zu: %s; copies go on, slower",
                static_cast<unsigned long long>(slabs_pinned_), pinned_.size(),
                driver_.ErrorOf(result, "cuMemHostRegister").message().c_str());
    return false;
  }
  pinned_[slab] = 1;
  ++slabs_pinned_;
  return true;
}

}  // namespace ropeteam::client
