// SPDX-License-Identifier: Apache-2.0
//
// When the supervisor decides that a daemon hangs.

#include "api/cli/hang_watch.h"

#include <gtest/gtest.h>
#include <unistd.h>

namespace ropeteam::cli {
namespace {

constexpr uint32_t kLimit = 5;
constexpr uint32_t kStartLimit = 20;

// Simulates seconds. Pass() returns whether the daemon is found to hang in one of them.
class Seconds {
 public:
  explicit Seconds(uint32_t limit = kLimit) : watch_(limit, kStartLimit) {
    watch_.Tick(now_, sample_);  // so that later ticks are on time
    watch_.Alive();
  }
  HangWatch& watch() { return watch_; }
  bool Pass(uint32_t count, char state, bool computes = false, uint64_t tick_us = kHangTickUs) {
    bool hangs = false;
    for (uint32_t i = 0; i < count; ++i) {
      now_ += tick_us;
      sample_.state = state;
      sample_.cpu_ticks += computes ? 100 : 0;
      hangs = hangs || watch_.Tick(now_, sample_);
    }
    return hangs;
  }

 private:
  HangWatch watch_;
  uint64_t now_ = 1'000'000'000;
  ThreadSample sample_;
};

TEST(HangWatch, ASleeperThatSaysNothingHangsAndOneThatSpeaksDoesNot) {
  Seconds seconds;
  for (int i = 0; i < 3; ++i) {
    EXPECT_FALSE(seconds.Pass(kLimit, 'S'));
    seconds.watch().Alive();
  }
  EXPECT_TRUE(seconds.Pass(kLimit + 1, 'S'));
}

TEST(HangWatch, AnEndlessLoopHangs) { EXPECT_TRUE(Seconds().Pass(kLimit + 1, 'R', true)); }

TEST(HangWatch, AStoppedTracedSwappedOutOrStarvedDaemonDoesNotHang) {
  Seconds seconds;
  for (const char state : {'T', 't', 'D', 'R', '?'}) EXPECT_FALSE(seconds.Pass(100, state)) << state;
  EXPECT_TRUE(seconds.Pass(kLimit + 1, 'S')) << "once it runs again it has to speak";
}

TEST(HangWatch, SecondsThatTheWatcherItselfWasLateForDoNotCount) {
  Seconds seconds;
  EXPECT_FALSE(seconds.Pass(100, 'S', false, 3 * kHangTickUs));
  EXPECT_TRUE(seconds.Pass(kLimit + 1, 'S'));
}

TEST(HangWatch, AStartMayTakeAsLongAsAStartMayTake) {
  Seconds seconds;
  seconds.watch().Starting();
  EXPECT_FALSE(seconds.Pass(kStartLimit, 'S'));
  EXPECT_TRUE(seconds.Pass(1, 'S'));
}

TEST(HangWatch, WithoutALimitNothingHangs) { EXPECT_FALSE(Seconds(0).Pass(100, 'S')); }

TEST(HangWatch, TheSampleIsOfTheMainThread) {
  const ThreadSample own = SampleMainThread(getpid());
  EXPECT_EQ(own.state, 'R');
  EXPECT_EQ(SampleMainThread(0).state, '?');
}

}  // namespace
}  // namespace ropeteam::cli
