// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "core/store/free_runs.h"
#include "tests/core/store_arena_for_test.h"

namespace ropeteam {
namespace {

// A slow and simple model of FreeRuns.
struct Naive {
  explicit Naive(uint32_t chunks) : free(chunks, true) {}
  // The start of the lowest run of `count`, or the number of chunks if there is no such run.
  uint32_t FirstFit(uint32_t count) const {
    uint32_t run = 0;
    for (uint32_t i = 0; i < free.size(); ++i) {
      run = free[i] ? run + 1 : 0;
      if (run == count) return i + 1 - count;
    }
    return static_cast<uint32_t>(free.size());
  }
  uint32_t Longest() const {
    uint32_t longest = 0;
    uint32_t run = 0;
    for (const bool f : free) {
      run = f ? run + 1 : 0;
      longest = std::max(longest, run);
    }
    return longest;
  }
  std::vector<bool> free;
};

TEST(FreeRuns, AgreesWithANaiveListForEverySize) {
  for (const uint32_t chunks : {1u, 2u, 3u, 5u, 8u, 13u, 31u, 64u, 100u}) {
    std::mt19937_64 random(chunks);
    std::printf("seed %u\n", chunks);
    FreeRuns runs(chunks);
    Naive naive(chunks);
    for (int step = 0; step < 3000; ++step) {
      const auto first = static_cast<uint32_t>(random() % chunks);
      // Changes the state of a run of equal chunks that begins at `first`, or of a part of it.
      uint32_t count = 1;
      while (first + count < chunks && naive.free[first + count] == naive.free[first] && random() % 8 != 0)
        ++count;
      if (naive.free[first]) {
        runs.Take(first, count);
      } else {
        runs.Give(first, count);
      }
      const bool now = !naive.free[first];
      for (uint32_t i = first; i < first + count; ++i) naive.free[i] = now;
      ASSERT_EQ(runs.longest(), naive.Longest());
      ASSERT_EQ(runs.free(), static_cast<uint32_t>(std::count(naive.free.begin(), naive.free.end(), true)));
      for (uint32_t want = 1; want <= runs.longest(); want += 1 + want / 4) {
        ASSERT_EQ(runs.FirstFit(want), naive.FirstFit(want)) << "step " << step << " want " << want;
      }
      const auto probe = static_cast<uint32_t>(random() % chunks);
      ASSERT_EQ(runs.IsFree(probe), naive.free[probe]);
    }
  }
}

TEST(FreeRunsDeathTest, TakingOrGivingTwiceIsOurBug) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  FreeRuns runs(10);
  runs.Take(3, 4);
  EXPECT_DEATH(runs.Take(2, 2), "check failed");
  EXPECT_DEATH(runs.Give(6, 2), "check failed");
  EXPECT_DEATH(runs.Take(9, 2), "check failed");
  EXPECT_DEATH((void)runs.FirstFit(4), "check failed");
}

// 100,000 chunks, every second one taken, is the worst fragmentation. A linear list would take 50,000 steps
// per call, 5e9 in all. The test's time limit is the assertion.
TEST(FreeRuns, StaysQuickWhenFragmented) {
  constexpr uint32_t kChunks = 100000;
  FreeRuns runs(kChunks);
  for (uint32_t i = 0; i < kChunks; i += 2) runs.Take(i, 1);
  runs.Give(kChunks - 2, 1);
  ASSERT_EQ(runs.longest(), 3u);
  for (int i = 0; i < 100000; ++i) {
    const uint32_t first = runs.FirstFit(2);
    ASSERT_EQ(first, kChunks - 3);
    runs.Take(first, 2);
    runs.Give(first, 2);
  }
}

}  // namespace
}  // namespace ropeteam
