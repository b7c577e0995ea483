// SPDX-License-Identifier: Apache-2.0
//
// A time on the monotonic clock by which a call must return. A value type; safe from any thread.

#ifndef ROPETEAM_API_CLIENT_DEADLINE_H_
#define ROPETEAM_API_CLIENT_DEADLINE_H_

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

namespace ropeteam::client {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  // `ms` from now; at most a day or two, so that adding it cannot overflow.
  static Deadline In(int64_t ms) { return Deadline(Clock::now() + std::chrono::milliseconds(ms)); }
  Deadline Plus(int64_t ms) const { return Deadline(at_ + std::chrono::milliseconds(ms)); }

  Clock::time_point at() const { return at_; }
  bool Passed() const { return Clock::now() >= at_; }
  // Rounded up, so that a poll() with this timeout does not return just before the deadline; 0 once it has passed.
  uint64_t RemainingMs() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    return left > 0 ? static_cast<uint64_t>(left) : 0;
  }
  int PollMs() const {
    return static_cast<int>(std::min<uint64_t>(RemainingMs(), std::numeric_limits<int>::max()));
  }

 private:
  explicit Deadline(Clock::time_point at) : at_(at) {}
  Clock::time_point at_;
};

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_DEADLINE_H_
