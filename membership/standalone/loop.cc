// SPDX-License-Identifier: Apache-2.0
#include "membership/standalone/loop.h"

#include <chrono>
#include <ctime>
#include <limits>
#include <utility>

#include "core/base/check.h"

namespace ropeteam {

TimeUs Loop::Now() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<TimeUs>(now.tv_sec) * 1'000'000 + static_cast<TimeUs>(now.tv_nsec) / 1000;
}

void Loop::WaitUntil(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, TimeUs when) {
  const TimeUs now = Now();
  if (now >= when) return;
  // A duration of steady_clock, so that a step of the wall clock neither shortens nor delays a deadline.
  condition.wait_until(lock, std::chrono::steady_clock::now() + std::chrono::microseconds(when - now));
}

void Loop::Start(Event tick, std::function<TimeUs()> deadline) {
  ROPETEAM_CHECK(!thread_.joinable());
  thread_ =
      std::thread([this, tick = std::move(tick), deadline = std::move(deadline)] { Run(tick, deadline); });
}

void Loop::Post(Event event) {
  std::unique_lock lock(mutex_);
  if (stopping_) {
    // The event's contents may end a stream, which may call back here. So they are destroyed without the lock.
    lock.unlock();
    return;
  }
  events_.push_back(std::move(event));
  lock.unlock();
  wake_.notify_one();
}

void Loop::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) {
    ROPETEAM_CHECK(!OnLoop());
    thread_.join();
  }
  std::deque<Event> dropped;
  const std::lock_guard lock(mutex_);
  dropped.swap(events_);
}

void Loop::Run(const Event& tick, const std::function<TimeUs()>& deadline) {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    if (!events_.empty()) {
      Event event = std::move(events_.front());
      events_.pop_front();
      lock.unlock();
      event(Now());
      event = nullptr;
      lock.lock();
      continue;
    }
    const TimeUs due = deadline();
    if (Now() >= due) {
      lock.unlock();
      tick(Now());
      lock.lock();
      continue;
    }
    if (due == std::numeric_limits<TimeUs>::max()) {
      wake_.wait(lock);
    } else {
      WaitUntil(wake_, lock, due);
    }
  }
}

}  // namespace ropeteam
