// SPDX-License-Identifier: Apache-2.0
//
// Virtual time: one queue of events, in the order of their time and, at the same time, of their creation.
// Nothing else moves the clock, so the seed determines the run.

#ifndef ROPETEAM_TESTS_SIMULATION_SCHEDULER_H_
#define ROPETEAM_TESTS_SIMULATION_SCHEDULER_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/base/ids.h"

namespace ropeteam::simulation {

inline constexpr TimeUs kMs = 1000;
inline constexpr TimeUs kSecond = 1'000'000;
inline constexpr TimeUs kForever = UINT64_MAX;

class Scheduler {
 public:
  using Action = std::function<void()>;

  TimeUs now() const { return now_; }
  uint64_t events() const { return executed_; }
  void At(TimeUs when, Action action) {
    queue_.push_back({std::max(when, now_), next_++, std::move(action)});
    std::push_heap(queue_.begin(), queue_.end(), Later);
  }
  void After(TimeUs delay, Action action) { At(now_ + delay, std::move(action)); }

  // Runs the next event if it is due by `limit`. Otherwise moves the clock to `limit` and returns false.
  bool RunOne(TimeUs limit) {
    if (queue_.empty() || queue_.front().when > limit) {
      now_ = std::max(now_, limit);
      return false;
    }
    std::pop_heap(queue_.begin(), queue_.end(), Later);
    const Entry entry = std::move(queue_.back());
    queue_.pop_back();
    now_ = entry.when;
    ++executed_;
    entry.action();
    return true;
  }

 private:
  struct Entry {
    TimeUs when;
    uint64_t order;
    Action action;
  };
  static bool Later(const Entry& a, const Entry& b) {
    return a.when != b.when ? a.when > b.when : a.order > b.order;
  }

  // Not zero: a clock's zero is arbitrary, and code that confuses the time 0 with "not set" must not work by
  // chance.
  TimeUs now_ = 10 * kSecond;
  uint64_t next_ = 0;
  uint64_t executed_ = 0;
  std::vector<Entry> queue_;
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_SCHEDULER_H_
