// SPDX-License-Identifier: Apache-2.0
//
// A test program that links count_allocations.cc has its operator new counted, also in the shared libraries
// that import it.

#ifndef ROPETEAM_TESTS_API_COUNT_ALLOCATIONS_H_
#define ROPETEAM_TESTS_API_COUNT_ALLOCATIONS_H_

#include <cstdint>

namespace ropeteam::test {

uint64_t AllocationsOfThisThread();

}  // namespace ropeteam::test

#endif  // ROPETEAM_TESTS_API_COUNT_ALLOCATIONS_H_
