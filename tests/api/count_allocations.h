// SPDX-License-Identifier: Apache-2.0
//
// In a test program that links count_allocations.cc, calls of operator new are counted, also those from
// shared libraries that import it.

#ifndef ROPETEAM_TESTS_API_COUNT_ALLOCATIONS_H_
#define ROPETEAM_TESTS_API_COUNT_ALLOCATIONS_H_

#include <cstdint>

namespace ropeteam::test {

uint64_t AllocationsOfThisThread();

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_API_COUNT_ALLOCATIONS_H_
