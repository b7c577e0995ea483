// SPDX-License-Identifier: Apache-2.0
//
// A thread that owns a state machine: it runs what is posted to it, in order, and a deadline when that has
// come, and sleeps in between.

#ifndef ROPETEAM_MEMBERSHIP_STANDALONE_LOOP_H_
#define ROPETEAM_MEMBERSHIP_STANDALONE_LOOP_H_

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

#include "core/base/ids.h"

namespace ropeteam {

class Loop {
 public:
  using Event = std::function<void(TimeUs now)>;

  Loop() = default;
  ~Loop() { Stop(); }
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  // On the new thread: `tick` when `deadline` has passed, `deadline` after every event (the end of time:
  // none).
  void Start(Event tick, std::function<TimeUs()> deadline);
  // Any thread. Dropped, together with what it holds, when the loop has stopped; kept when it has not started
  // yet. What bounds the queue is the poster: every stream has one message in it at most.
  void Post(Event event);
  // Ends after the event that is running; the rest is dropped. Not from the loop's own thread. Idempotent.
  void Stop();
  bool OnLoop() const { return thread_.get_id() == std::this_thread::get_id(); }

  // CLOCK_BOOTTIME, which also counts while the machine is suspended: leases run out then.
  static TimeUs Now();
  // As std::condition_variable::wait_until(), for an instant of Now(). After a suspension it may return late by the
  // time that was left to wait: condition variables know no clock that goes on meanwhile.
  static void WaitUntil(std::condition_variable& condition, std::unique_lock<std::mutex>& lock, TimeUs when);

 private:
  void Run(const Event& tick, const std::function<TimeUs()>& deadline);

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Event> events_;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_STANDALONE_LOOP_H_
