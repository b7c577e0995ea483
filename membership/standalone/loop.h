// SPDX-License-Identifier: Apache-2.0
//
// A thread that owns a state machine. It runs posted events in order, runs a deadline when it has come, and sleeps in
// between.

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

  // On the new thread: calls `tick` when `deadline` has passed, and `deadline` after every event (the end of time:
  // none).
  void Start(Event tick, std::function<TimeUs()> deadline);
  // Any thread. The event is dropped with its contents if the loop has stopped, and kept if it has not started yet. The
  // callers bound the queue: every stream has at most one message in it.
  void Post(Event event);
  // Ends after the running event and drops the rest. Not from the loop's own thread. Idempotent.
  void Stop();
  bool OnLoop() const { return thread_.get_id() == std::this_thread::get_id(); }

  // CLOCK_BOOTTIME, which also counts while the machine is suspended, so that leases expire then.
  static TimeUs Now();
  // Like std::condition_variable::wait_until(), for a time of Now(). After a suspension it may return late by the
  // remaining wait, because condition variables have no clock that counts meanwhile.
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
