// SPDX-License-Identifier: Apache-2.0
#include "node/parallel.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace ropeteam {

uint32_t StartThreads() { return std::clamp(std::thread::hardware_concurrency(), 1u, kStartThreadsMax); }

void ParallelFor(uint64_t count, const std::function<void(uint64_t)>& work) {
  std::atomic<uint64_t> next{0};
  const auto run = [&] {
    for (uint64_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
  };
  std::vector<std::thread> threads;
  const uint64_t helpers = std::min<uint64_t>(StartThreads(), count);
  for (uint64_t i = 1; i < helpers; ++i) threads.emplace_back(run);
  run();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace ropeteam
