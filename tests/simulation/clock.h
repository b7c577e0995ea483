// SPDX-License-Identifier: Apache-2.0
//
// A machine's clock as its processes see it (CLOCK_BOOTTIME). It starts at any value and drifts. It runs
// while a process is stopped, so the process sees it jump. True time is the scheduler's.

#ifndef ROPETEAM_TESTS_SIMULATION_CLOCK_H_
#define ROPETEAM_TESTS_SIMULATION_CLOCK_H_

#include "tests/simulation/scheduler.h"

namespace ropeteam::simulation {

class HostClock {
 public:
  // The clock shows `local` at `now`, and is faster than true time by `drift_ppm`.
  void Set(TimeUs now, TimeUs local, int drift_ppm) {
    begin_ = now;
    local_ = local;
    drift_ppm_ = drift_ppm;
  }
  int drift_ppm() const { return drift_ppm_; }
  TimeUs Local(TimeUs now) const { return local_ + (now - begin_) * rate() / kRight; }
  // The first true time, not before `now`, at which Local() is `local` or more.
  TimeUs When(TimeUs now, TimeUs local) const {
    if (local <= Local(now)) return now;
    if (local - Local(now) > kFar) return kForever;
    TimeUs when = begin_ + (local - local_) * kRight / rate();
    while (Local(when) < local) ++when;
    return when;
  }

 private:
  static constexpr TimeUs kRight = 1'000'000;
  static constexpr TimeUs kFar = 1'000'000 * kSecond;  // beyond every run
  TimeUs rate() const { return static_cast<TimeUs>(static_cast<int64_t>(kRight) + drift_ppm_); }

  TimeUs begin_ = 0;
  TimeUs local_ = 0;
  int drift_ppm_ = 0;
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_CLOCK_H_
