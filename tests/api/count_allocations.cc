// SPDX-License-Identifier: Apache-2.0
#include "tests/api/count_allocations.h"

#include <cstdlib>
#include <new>

namespace {
thread_local uint64_t allocations = 0;
}  // namespace

void* operator new(size_t bytes) {
  ++allocations;
  void* memory = std::malloc(bytes != 0 ? bytes : 1);
  if (memory == nullptr) std::abort();
  return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace ropeteam::test {

uint64_t AllocationsOfThisThread() { return allocations; }

}  // namespace ropeteam::test
