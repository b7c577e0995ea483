// SPDX-License-Identifier: Apache-2.0
//
// The only way in which the Store's source files write a word that a later process relies on.

#ifndef ROPETEAM_CORE_STORE_PUBLISH_H_
#define ROPETEAM_CORE_STORE_PUBLISH_H_

#include <atomic>
#include <cstdint>

namespace ropeteam::arena {

// Calls the crash point of Store::SetCrashPointForTest().
void CrashPoint(const char* place);

// Orders the word after all earlier stores and before all later ones.
inline void Publish(uint64_t* word, uint64_t value) {
  std::atomic_thread_fence(std::memory_order_release);
  std::atomic_ref<uint64_t>(*word).store(value, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
}

}  // namespace ropeteam::arena

#endif  // ROPETEAM_CORE_STORE_PUBLISH_H_
