// SPDX-License-Identifier: Apache-2.0
//
// A machine's clock as its processes see it (CLOCK_BOOTTIME): it runs a little too fast or too slow, and jumps forward
// when the machine was suspended; it never goes back. True time is the scheduler's.

#ifndef ROPETEAM_TESTS_SIMULATION_CLOCK_H_
#define ROPETEAM_TESTS_SIMULATION_CLOCK_H_

#include "tests/simulation/scheduler.h"

namespace ropeteam::simulation {

class HostClock {
 public:
  // `rate_ppm`: parts of a million that it shows per true one; a million is right.
  void Set(TimeUs now, uint64_t rate_ppm) {
    before_ = after_;
    after_ = {now, Local(now), rate_ppm};
  }
  void Jump(TimeUs now, TimeUs by) {
    before_ = after_;
    after_ = {now, Local(now) + by, after_.rate_ppm};
  }
  // Also of a time before the last jump.
  TimeUs Local(TimeUs now) const {
    const Segment& segment = now < after_.begin ? before_ : after_;
    const TimeUs elapsed = now < segment.begin ? 0 : now - segment.begin;
    return segment.local + elapsed * segment.rate_ppm / kRight;
  }
  // The first true time, not before `now`, at which Local() is `local` or more.
  TimeUs When(TimeUs now, TimeUs local) const {
    if (local == kForever) return kForever;
    if (local <= Local(now)) return now;
    if (local - Local(now) > kFar) return kForever;
    TimeUs when = after_.begin + (local - after_.local) * kRight / after_.rate_ppm;
    while (Local(when) < local) ++when;
    return when;
  }

 private:
  static constexpr uint64_t kRight = 1'000'000;
  static constexpr TimeUs kFar = 1'000'000 * kSecond;  // beyond every run
  struct Segment {
    TimeUs begin = 0;
    TimeUs local = 0;
    uint64_t rate_ppm = kRight;
  };
  Segment before_;
  Segment after_;
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_CLOCK_H_
