// SPDX-License-Identifier: Apache-2.0
//
// Durations counted in fixed buckets, for people: from a copy inside a node to a step that drifts to storage. A value; not
// safe from several threads.

#ifndef ROPETEAM_CORE_BASE_HISTOGRAM_H_
#define ROPETEAM_CORE_BASE_HISTOGRAM_H_

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "core/base/ids.h"

namespace ropeteam {

class Histogram {
 public:
  // Upper bounds, inclusive, ascending; microseconds. About two and a half apart: a quantile that is read from them is as
  // exact as that.
  static constexpr std::array<TimeUs, 16> kBoundsUs = {
      1'000,   2'500,     5'000,     10'000,    25'000,     50'000,     100'000,     250'000,
      500'000, 1'000'000, 2'500'000, 5'000'000, 10'000'000, 30'000'000, 120'000'000, 600'000'000};

  void Add(TimeUs duration) {
    const auto bucket = std::lower_bound(kBoundsUs.begin(), kBoundsUs.end(), duration);
    ++counts_[static_cast<size_t>(bucket - kBoundsUs.begin())];
    ++count_;
    sum_us_ += duration;
  }
  // Of the bucket that ends with kBoundsUs[i]; the last one has what is longer than all bounds.
  uint64_t count(size_t bucket) const { return counts_[bucket]; }
  uint64_t count() const { return count_; }
  TimeUs sum_us() const { return sum_us_; }

 private:
  std::array<uint64_t, kBoundsUs.size() + 1> counts_{};
  uint64_t count_ = 0;
  TimeUs sum_us_ = 0;
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_BASE_HISTOGRAM_H_
