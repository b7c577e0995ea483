// SPDX-License-Identifier: Apache-2.0
//
// The daemon's main thread, which makes all decisions. It sleeps in epoll_wait. It calls back for descriptors, for its
// one timer, and for closures posted by other threads. A callback must not block.
//
// Post(), Stop() and Now() are safe from any thread; everything else only from the thread that runs Run(), or
// before it.

#ifndef ROPETEAM_NODE_EVENT_LOOP_H_
#define ROPETEAM_NODE_EVENT_LOOP_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "node/unique_fd.h"

namespace ropeteam {

class EventLoop {
 public:
  using FdCallback = std::function<void(uint32_t epoll_events)>;
  static constexpr TimeUs kNever = UINT64_MAX;

  EventLoop() = default;
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  Status Init();  // kIo: out of descriptors

  // Level-triggered. The caller keeps the descriptor and must remove it before closing it. A callback may add and
  // remove any descriptor, its own included.
  Status Add(int fd, uint32_t epoll_events, FdCallback callback);
  void Modify(int fd, uint32_t epoll_events);
  void Remove(int fd);

  // `callback` is called once, when Now() has reached `when`. A later call replaces an earlier one. kNever: never.
  void SetTimer(TimeUs when, std::function<void()> callback);

  // Runs `closure` on the loop's thread, in the order of posting. Closures left when Run() returns are run by the next
  // Run(), or dropped with the loop.
  void Post(std::function<void()> closure);

  void Run();   // until Stop()
  void Stop();  // Run() returns after the current callback

  // Microseconds of CLOCK_BOOTTIME, the clock of membership's leases: it also counts while the machine is suspended.
  static TimeUs Now();

 private:
  struct Watch {
    uint64_t generation = 0;
    FdCallback callback;
  };
  void Dispatch(uint64_t key, uint32_t epoll_events);
  void RunPosted();
  void RunTimer();
  void Wake();

  UniqueFd epoll_;
  UniqueFd timer_;
  UniqueFd wake_;
  // Keyed by descriptor. The generation distinguishes an event for a closed descriptor from one for the next owner of
  // its number.
  std::map<int, std::shared_ptr<Watch>> watches_;
  uint64_t generation_ = 0;
  TimeUs timer_when_ = kNever;
  std::function<void()> timer_callback_;

  std::mutex mutex_;
  std::vector<std::function<void()>> posted_;  // guarded by mutex_
  bool stop_ = false;                          // guarded by mutex_
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_EVENT_LOOP_H_
