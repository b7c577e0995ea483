// SPDX-License-Identifier: Apache-2.0
//
// UCX's progress, and sleeping until there is some to make.

#include <errno.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "core/base/log.h"
#include "transport/ucx/internal.h"

namespace ropeteam::ucx {
namespace {

// Rounds of UCX's progress in one Poll(), so that a flood of work cannot keep the caller from its other work.
constexpr int kRoundsPerPoll = 16;
// Work seen at most this long ago, ours or a peer's on our memory, is taken to be still going on …
constexpr TimeUs kBusyUs = 1'000;
// … and then Wait() spins this long before it sleeps: a sleep and its wake-up cost 20 to 50 µs on a virtual
// machine.
constexpr TimeUs kSpinUs = 100;
static_assert(kSpinUs < kBusyUs);
// How often the peers that have work are asked whether they live.
constexpr TimeUs kLookUs = 1'000;
// While a peer connects or drains, time passes by our calls.
constexpr TimeUs kUnsettledSleepUs = 500;
// A peer in this process has no descriptor that would tell of its end.
constexpr TimeUs kInsideSleepUs = 10'000;
// Arming is refused while there is something to do; progress between two tries gets it done.
constexpr int kArmTriesMax = 64;

}  // namespace

TimeUs Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<TimeUs>(now.tv_sec) * 1'000'000 + static_cast<TimeUs>(now.tv_nsec) / 1'000;
}

bool UcxTransport::Progress() {
  unsigned work = 0;
  for (int round = 0; round < kRoundsPerPoll; round++) {
    unsigned count = ucp_worker_progress(worker_.get());
    if (cma_ != nullptr && outstanding_ > 0) count += cma_->Progress();
    work += count;
    if (count == 0) break;
  }
  const bool waiting = outstanding_ > 0 || !active_.empty();
  if (work > 0 || waiting || Unsettled()) {
    const TimeUs now = Now();
    if (work > 0) busy_at_ = now;
    if (Unsettled() || now >= look_next_) {
      StepPeers(now);
      look_next_ = now + kLookUs;
    }
  }
  Pump();
  return !completed_.empty();
}

size_t UcxTransport::Poll(Completion* out, size_t capacity) {
  Progress();
  size_t count = 0;
  for (; count < capacity && !completed_.empty(); count++) {
    Operation* operation = completed_.Pop();
    out[count] = {operation->kind, operation->peer, operation->context, operation->code};
    if (operation->region != nullptr) {
      operation->region->operations.fetch_sub(1);
      accepted_--;
    }
    FreeOperation(operation);
  }
  return count;
}

void UcxTransport::Wake() {
  if (wake_.exchange(true)) return;
  const uint64_t one = 1;
  // A full counter is as good as a written one.
  (void)!write(wake_fd_, &one, sizeof one);
}

// A Wake() between its two steps leaves the descriptor readable after this; the next Wait() then returns
// early.
bool UcxTransport::ConsumeWake() {
  if (!wake_.exchange(false)) return false;
  uint64_t count;
  (void)!read(wake_fd_, &count, sizeof count);
  return true;
}

void UcxTransport::Wait(uint64_t timeout_us) {
  if (!completed_.empty() || ConsumeWake()) return;
  TimeUs now = Now();
  const TimeUs deadline = timeout_us > UINT64_MAX - now ? UINT64_MAX : now + timeout_us;
  if (outstanding_ > 0 || Unsettled() || now - busy_at_ < kBusyUs) {
    const TimeUs spin_end = std::min(deadline, now + kSpinUs);
    while (now < spin_end) {
      if (Progress() || ConsumeWake()) return;
      now = Now();
    }
  }
  if (now >= deadline) return;
  Sleep(now, deadline - now);
}

void UcxTransport::Sleep(TimeUs now, uint64_t timeout_us) {
  // cma has no event to wait for, because it never has to wait.
  const bool copying = cma_ != nullptr && std::any_of(peers_.begin(), peers_.end(), [](const auto& entry) {
                         return entry.second->cma != nullptr && entry.second->requests > 0;
                       });
  if (copying) {
    Progress();
    return;
  }
  ucs_status_t armed = UCS_ERR_BUSY;
  for (int i = 0; i < kArmTriesMax && armed == UCS_ERR_BUSY; i++) {
    armed = ucp_worker_arm(worker_.get());
    if (armed != UCS_ERR_BUSY) break;
    busy_at_ = now;
    if (Progress()) return;
  }
  if (armed == UCS_ERR_BUSY) return;
  if (armed != UCS_OK) {
    // Asleep it would hear nothing: look at intervals, rather than spin for ever.
    LOG_DEBUG("ucx: ucp_worker_arm: %s", ucs_status_string(armed));
    timeout_us = std::min(timeout_us, kUnsettledSleepUs);
  }
  if (Unsettled()) timeout_us = std::min(timeout_us, kUnsettledSleepUs);
  sleep_items_.assign(1, {wake_fd_, POLLIN, 0});
  sleep_items_.push_back({event_fd_, POLLIN, 0});
  if (outstanding_ > 0) {
    for (auto& [id, peer] : peers_) {
      if (peer->requests == 0 || !peer->watch.watching()) continue;
      if (peer->watch.fd() >= 0)
        sleep_items_.push_back({peer->watch.fd(), POLLIN, 0});
      else
        timeout_us = std::min(timeout_us, kInsideSleepUs);
    }
  }
  const timespec timeout{static_cast<time_t>(timeout_us / 1'000'000),
                         static_cast<long>(timeout_us % 1'000'000 * 1'000)};
  const int ready = ppoll(sleep_items_.data(), sleep_items_.size(),
                          timeout_us >= UINT64_MAX / 2 ? nullptr : &timeout, nullptr);
  const bool woken = ready > 0 && sleep_items_[0].revents != 0;
  if (ready > (woken ? 1 : 0)) {
    busy_at_ = Now();
    look_next_ = 0;
  }
  if (woken) {
    wake_.store(true);  // so that the descriptor is read also when Wake() is between its two steps
    ConsumeWake();
  }
  Progress();
}

}  // namespace ropeteam::ucx
