// SPDX-License-Identifier: Apache-2.0
//
// Makes calls of a sink in parallel, for callers without threads of their own.

#ifndef ROPETEAM_STORAGE_PARALLEL_H_
#define ROPETEAM_STORAGE_PARALLEL_H_

#include <cstddef>
#include <functional>

#include "core/base/status.h"

namespace ropeteam::storage {

// Parallel requests, to hide a store's latency.
inline constexpr size_t kStorageThreads = 8;

// Runs task(index, thread) for every index below `count` on at most `threads` threads, numbered from 0. The first
// status that is not OK ends it; running tasks are waited for.
Status RunParallel(size_t count, size_t threads, const std::function<Status(size_t, size_t)>& task);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_PARALLEL_H_
