// SPDX-License-Identifier: Apache-2.0
//
// Decides when a daemon hangs: it has said nothing for so many seconds in which it could have. The seconds are counted one
// by one, and these do not count:
//
//   * those that this process was late for: then the machine, or both processes, stood still or swapped;
//   * those in which the daemon's main thread is stopped or traced (SIGSTOP, a debugger), or waits for a disk, which is
//     where a process that is swapped out stands. To kill it would not make it run;
//   * those in which it was ready to run and did not get the processor.
//
// What is left is a thread that sleeps on a lock or in a call that does not return, or one that computes without end.
// After its start, and when it begins again, a daemon may be silent for as long as its start may take.
//
// Pure. One thread.

#ifndef ROPETEAM_API_CLI_HANG_WATCH_H_
#define ROPETEAM_API_CLI_HANG_WATCH_H_

#include <cstdint>
#include <string>

namespace ropeteam::cli {

inline constexpr uint64_t kHangTickUs = 1'000'000;  // as often as the daemon says "alive"

// Of the daemon's main thread, from /proc.
struct ThreadSample {
  char state = '?';  // as in proc(5): R, S, D, T, t, Z, …; '?' where it cannot be read
  uint64_t cpu_ticks = 0;
};
ThreadSample SampleMainThread(int pid);

class HangWatch {
 public:
  // `limit_s` 0: never.
  HangWatch(uint32_t limit_s, uint32_t start_limit_s) : limit_(limit_s), start_limit_(start_limit_s) {}

  void Starting();  // it was started, or says that it begins again
  void Alive();     // it has said something
  // Once every kHangTickUs. True: it hangs, for limit_s(); Starting() comes next.
  bool Tick(uint64_t now_us, const ThreadSample& sample);
  uint32_t limit_s() const { return starting_ ? start_limit_ : limit_; }

 private:
  const uint32_t limit_;
  const uint32_t start_limit_;
  bool starting_ = true;
  uint32_t silent_ = 0;  // ticks that count
  uint64_t ticked_at_us_ = 0;
  uint64_t cpu_ticks_ = 0;
};

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_HANG_WATCH_H_
