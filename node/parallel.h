// SPDX-License-Identifier: Apache-2.0
//
// Work over the whole arena at start-up, on as many threads as are useful.

#ifndef ROPETEAM_NODE_PARALLEL_H_
#define ROPETEAM_NODE_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace ropeteam {

// Memory bandwidth is exhausted long before this many threads.
inline constexpr uint32_t kStartThreadsMax = 32;
uint32_t StartThreads();

// Calls work(i) once for each i in [0, count), on up to StartThreads() threads. Returns when all calls have returned.
void ParallelFor(uint64_t count, const std::function<void(uint64_t)>& work);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_PARALLEL_H_
