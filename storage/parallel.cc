// SPDX-License-Identifier: Apache-2.0
#include "storage/parallel.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

namespace ropeteam::storage {

Status RunParallel(size_t count, size_t threads, const std::function<Status(size_t, size_t)>& task) {
  std::atomic<size_t> next{0};
  std::mutex mutex;
  Status first;
  const auto work = [&](size_t thread) {
    for (size_t index = next++; index < count; index = next++) {
      Status status = task(index, thread);
      if (status.ok()) continue;
      next = count;
      const std::lock_guard lock(mutex);
      if (first.ok()) first = std::move(status);
    }
  };
  std::vector<std::thread> started;
  for (size_t i = 1; i < std::min(count, threads); ++i) started.emplace_back(work, i);
  work(0);
  for (std::thread& thread : started) thread.join();
  return first;
}

}  // namespace ropeteam::storage
