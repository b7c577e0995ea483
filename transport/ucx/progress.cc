// SPDX-License-Identifier: Apache-2.0
//
// Calls UCX's progress, and sleeps until there is work.

#include <poll.h>

#include <algorithm>

#include "core/base/log.h"
#include "transport/ucx/internal.h"

namespace ropeteam::ucx {
namespace {

// Rounds of UCX's progress in one Poll(). The limit lets the caller do its other work during a flood of
// requests.
constexpr int kRoundsPerPoll = 16;
// The interval at which peers with work are checked for being alive.
constexpr TimeUs kLookUs = 1'000;
// While a peer connects or drains, only our calls check its timeouts.
constexpr TimeUs kUnsettledSleepUs = 500;
static_assert(kUnsettledSleepUs <= front::kRoundSleepUs);
// A peer in this process has no descriptor that shows its end.
constexpr TimeUs kInsideSleepUs = 10'000;
// Arming fails while there is work. Progress between two tries does that work.
constexpr int kArmTriesMax = 64;

}  // namespace

void UcxTransport::Progress() {
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
}

// Whether the next piece of work is likely to come sooner than a sleep and a wake-up take.
bool UcxTransport::Busy(TimeUs now) const {
  return outstanding_ > 0 || Unsettled() || now - busy_at_ < front::kBusyUs;
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
    Progress();
    if (operations_.finished()) return;
  }
  if (armed == UCS_ERR_BUSY) return;
  if (armed != UCS_OK) {
    // A sleep would miss events. Poll at intervals instead of spinning for ever.
    LOG_DEBUG("ucx: ucp_worker_arm: %s", ucs_status_string(armed));
    timeout_us = std::min(timeout_us, kUnsettledSleepUs);
  }
  if (Unsettled()) timeout_us = std::min(timeout_us, kUnsettledSleepUs);
  sleep_items_.assign(1, wake_.item());
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
  const int ready = front::SleepOn(&sleep_items_, timeout_us);
  const bool woken = sleep_items_[0].revents != 0;
  if (ready > (woken ? 1 : 0)) {
    busy_at_ = Now();
    look_next_ = 0;
  }
  wake_.AfterSleep(sleep_items_[0]);
  Progress();
}

}  // namespace ropeteam::ucx
