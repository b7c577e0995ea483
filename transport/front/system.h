// SPDX-License-Identifier: Apache-2.0
//
// Services of the operating system for every fabric: the clock, sleeping and waking, random numbers, and the reason why
// memory could not be registered. Stateless functions may be called from any thread.

#ifndef ROPETEAM_TRANSPORT_FRONT_SYSTEM_H_
#define ROPETEAM_TRANSPORT_FRONT_SYSTEM_H_

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"

namespace ropeteam::front {

// While work is in sight Wait() spins this long before it sleeps: a sleep and its wake-up cost 20 to 50 µs on
// a virtual machine, and the next piece of a transfer in progress is usually nearer than that.
inline constexpr TimeUs kSpinUs = 100;
// Work seen at most this long ago, of this node or of a peer on its memory, counts as still going on.
inline constexpr TimeUs kBusyUs = 1'000;
static_assert(kSpinUs < kBusyUs);

TimeUs Now();             // of the monotonic clock
uint64_t RandomNumber();  // never 0

// Until one of them is ready or the time is over; UINT64_MAX: no limit. Returns how many are ready; where
// that is 0 no `revents` is set.
int SleepOn(std::vector<pollfd>* items, uint64_t timeout_us);

// The other end of Transport::Wake(). At most one write and one read of the descriptor for any number of
// calls between two sleeps.
class WakeFd {
 public:
  WakeFd() = default;
  ~WakeFd();
  WakeFd(const WakeFd&) = delete;
  WakeFd& operator=(const WakeFd&) = delete;

  Status Open();  // before anything else; kIo
  // The item that the sleeper adds to its poll set.
  pollfd item() const { return {fd_, POLLIN, 0}; }
  // Any thread. Makes `item` readable until it is consumed.
  void Wake();
  // [loop] Whether Wake() was called since the last time. A Wake() between its two steps leaves the
  // descriptor readable: the next sleep then returns early.
  bool Consume();
  // [loop] After a sleep: `slept_on` is `item` as it came back.
  void AfterSleep(const pollfd& slept_on);

 private:
  int fd_ = -1;
  std::atomic<bool> wake_{false};
};

// Why `length` bytes could not be registered with `device`, from an errno and the library's own words for it.
// A lack of lockable memory (ENOMEM, EAGAIN) is kNoSpace and says what is needed, the limit and what to set;
// everything else is kIo.
Status RegistrationError(int errno_value, const char* reason, const std::string& device, uint64_t length);

// Whether registering `length` more bytes goes beyond RLIMIT_MEMLOCK, for libraries that answer something
// else then. Never with CAP_IPC_LOCK, which the limit does not bind.
bool BeyondLockedMemoryLimit(uint64_t length);

}  // namespace ropeteam::front

#endif  // ROPETEAM_TRANSPORT_FRONT_SYSTEM_H_
