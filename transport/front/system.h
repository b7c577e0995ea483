// SPDX-License-Identifier: Apache-2.0
//
// Services of the operating system for every fabric: the clock, sleeping and waking, random numbers, and the reason for
// a failed registration. Any thread may call the stateless functions.

#ifndef ROPETEAM_TRANSPORT_FRONT_SYSTEM_H_
#define ROPETEAM_TRANSPORT_FRONT_SYSTEM_H_

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"

namespace ropeteam::front {

// If work is expected soon, Wait() spins this long before it sleeps. A sleep and its wake-up cost 20 to 50 µs on a
// virtual machine, and the next piece of a transfer usually comes sooner.
inline constexpr TimeUs kSpinUs = 100;
// Work seen at most this long ago, by this node or by a peer on its memory, counts as ongoing.
inline constexpr TimeUs kBusyUs = 1'000;
static_assert(kSpinUs < kBusyUs);

TimeUs Now();             // of the monotonic clock
uint64_t RandomNumber();  // never 0

// A clock for the timeouts after which a connecting peer is declared gone. While a peer is connecting, a transport calls
// Advance() once in each round and sleeps at most kRoundSleepUs between two rounds. If a round comes later than
// kRoundMaxUs after the one before, the thread did not run, or it was ending other connections. No one has read a
// peer's answer in that time, so it counts as kRoundMaxUs. One thread.
inline constexpr TimeUs kRoundSleepUs = 10'000;
inline constexpr TimeUs kRoundMaxUs = 25'000;
static_assert(kRoundSleepUs < kRoundMaxUs / 2);
class RoundClock {
 public:
  // The time of the last round. A timeout that starts between two rounds may lose up to kRoundMaxUs.
  TimeUs time() const { return time_; }
  // `now`: by Now(). Returns this clock's time, which has nothing to do with Now()'s.
  TimeUs Advance(TimeUs now) {
    if (now > last_) time_ += std::min(now - last_, kRoundMaxUs);
    last_ = std::max(now, last_);
    return time_;
  }

 private:
  TimeUs last_ = 0;
  TimeUs time_ = 0;
};

// Sleeps until an item is ready or the time is over; UINT64_MAX: no limit. Returns the number of ready items; if it is
// 0, no `revents` is set.
int SleepOn(std::vector<pollfd>* items, uint64_t timeout_us);

// Implements Transport::Wake(). However many calls there are between two sleeps, they cause at most one write and one
// read of the descriptor.
class WakeFd {
 public:
  WakeFd() = default;
  ~WakeFd();
  WakeFd(const WakeFd&) = delete;
  WakeFd& operator=(const WakeFd&) = delete;

  Status Open();  // call it first; kIo
  // The item for the sleeper's poll set.
  pollfd item() const { return {fd_, POLLIN, 0}; }
  // Any thread. Makes `item` readable until Consume().
  void Wake();
  // [loop] Whether Wake() was called since the last time. A Wake() between the two steps of Consume() leaves the
  // descriptor readable, so the next sleep returns early.
  bool Consume();
  // [loop] After a sleep: `slept_on` is `item` as poll() returned it.
  void AfterSleep(const pollfd& slept_on);

 private:
  int fd_ = -1;
  std::atomic<bool> wake_{false};
};

// The error for a failed registration of `length` bytes with `device`, from an errno and the library's own text. A lack
// of lockable memory (ENOMEM, EAGAIN) is kNoSpace; the message has the bytes needed, the limit and what to set.
// Everything else is kIo.
Status RegistrationError(int errno_value, const char* reason, const std::string& device, uint64_t length);

// Whether registering `length` more bytes exceeds RLIMIT_MEMLOCK, for libraries that return another error in that case.
// Never with CAP_IPC_LOCK, because the limit does not apply then.
bool BeyondLockedMemoryLimit(uint64_t length);

}  // namespace ropeteam::front

#endif  // ROPETEAM_TRANSPORT_FRONT_SYSTEM_H_
