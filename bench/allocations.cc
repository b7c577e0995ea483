// SPDX-License-Identifier: Apache-2.0
//
// Counts calls of operator new. These functions have a file of their own: if the compiler could inline them,
// it would warn that memory of new goes to free(), which is right here.

#include <cstdlib>
#include <new>

#include "bench/cluster.h"

namespace {
thread_local uint64_t allocations_of_thread = 0;
}  // namespace

// libropeteam.so uses these, too: it imports operator new, as every user of libstdc++ does.
void* operator new(size_t bytes) {
  ++allocations_of_thread;
  void* memory = std::malloc(bytes != 0 ? bytes : 1);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace ropeteam::bench {

uint64_t AllocationsOfThisThread() { return allocations_of_thread; }

}  // namespace ropeteam::bench
