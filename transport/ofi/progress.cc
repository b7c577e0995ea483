// SPDX-License-Identifier: Apache-2.0
//
// The completion queue, and sleeping on it.

#include <errno.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>

#include "core/base/log.h"
#include "transport/ofi/internal.h"

namespace ropeteam::ofi {
namespace {

constexpr size_t kEntriesPerRead = 64;
// Reads of the queue in one Poll(), so that a flood of completions cannot keep the caller from its other
// work.
constexpr size_t kReadsPerPoll = 4;
// Work seen at most this long ago, ours or a peer's on our memory, is taken to be still going on.
constexpr TimeUs kBusyUs = 1'000;
static_assert(kSpinUs < kBusyUs);
// While a connection is being made its progress comes from our calls, not from events.
constexpr TimeUs kConnectingSleepUs = 500;
// How often a completion queue without a descriptor is looked at: with work in sight, and without.
constexpr TimeUs kBlindBusySleepUs = 50;
constexpr TimeUs kBlindIdleSleepUs = 2'000;

// What the provider's error says about whose fault it was. The verdict on the peer comes first; see
// internal.h.
Code CodeOf(int error) {
  switch (error) {
    case FI_EACCES:
    case FI_EPERM:
    case FI_ENOKEY:
    case FI_EKEYREJECTED:
      return Code::kInvalidArgument;
    default:
      return Code::kLinkFailed;
  }
}

}  // namespace

TimeUs Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<TimeUs>(now.tv_sec) * 1'000'000 + static_cast<TimeUs>(now.tv_nsec) / 1'000;
}

size_t OfiTransport::ReadCompletions(const Queue& queue, size_t reads_max) {
  size_t total = 0;
  for (size_t read = 0; read < reads_max; read++) {
    fi_cq_entry entries[kEntriesPerRead];
    const ssize_t count = fi_cq_read(queue.completions.get(), entries, kEntriesPerRead);
    if (count == -FI_EAGAIN) break;
    if (count == -FI_EAVAIL) {
      ReadError(queue);
      total++;
      continue;
    }
    if (count < 0) {
      LOG_ERROR("ofi: fi_cq_read: %s", fi_strerror(static_cast<int>(-count)));
      break;
    }
    for (ssize_t i = 0; i < count; i++)
      FinishFragment(static_cast<Fragment*>(entries[i].op_context), Code::kOk);
    total += static_cast<size_t>(count);
    // A short read is the end of the queue, except where everything must come out.
    if (static_cast<size_t>(count) < kEntriesPerRead && reads_max != SIZE_MAX) break;
  }
  return total;
}

void OfiTransport::ReadError(const Queue& queue) {
  fi_cq_err_entry error{};
  if (fi_cq_readerr(queue.completions.get(), &error, 0) <= 0) return;
  auto* fragment = static_cast<Fragment*>(error.op_context);
  // Errors of the provider's own receive buffers carry no context of ours; they concern a peer's connection
  // to us.
  if (fragment == nullptr || fragment->peer == nullptr) return;
  LOG_DEBUG("ofi peer %s: operation of %llu bytes failed: %s (provider %d)", fragment->peer->text.c_str(),
            static_cast<unsigned long long>(fragment->length), fi_strerror(error.err), error.prov_errno);
  FinishFragment(fragment, CodeOf(error.err));
}

bool OfiTransport::Progress() {
  size_t completions = ReadCompletions(listener_.queue, kReadsPerPoll);
  // Nothing comes in on a link of one peer's but the answers to our own operations.
  for (Peer* peer : linked_)
    if (peer->outstanding > 0 || peer->state == PeerState::kConnecting)
      completions += ReadCompletions(peer->link.queue, kReadsPerPoll);
  if (completions > 0) busy_at_ = Now();
  if (connecting_ > 0 || !failed_.empty()) {
    const TimeUs now = Now();
    LookAtFailed(now);
    StepPeers(now);
  }
  Pump();
  return !completed_.empty();
}

size_t OfiTransport::Poll(Completion* out, size_t capacity) {
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

void OfiTransport::Wake() {
  if (wake_.exchange(true)) return;
  const uint64_t one = 1;
  // A full counter is as good as a written one.
  (void)!write(wake_fd_, &one, sizeof one);
}

// A Wake() between its two steps leaves the descriptor readable after this; the next Wait() then returns
// early.
bool OfiTransport::ConsumeWake() {
  if (!wake_.exchange(false)) return false;
  uint64_t count;
  (void)!read(wake_fd_, &count, sizeof count);
  return true;
}

// Whether the next piece of work is likely to be nearer than a sleep and its wake-up are long.
bool OfiTransport::Busy(TimeUs now) const {
  return outstanding_ > 0 || connecting_ > 0 || now - busy_at_ < kBusyUs;
}

void OfiTransport::Wait(uint64_t timeout_us) {
  if (!completed_.empty() || ConsumeWake()) return;
  TimeUs now = Now();
  const TimeUs deadline = timeout_us > UINT64_MAX - now ? UINT64_MAX : now + timeout_us;
  if (Busy(now)) {
    const TimeUs spin_end = std::min(deadline, now + kSpinUs);
    while (now < spin_end) {
      if (Progress() || ConsumeWake()) return;
      now = Now();
    }
  }
  if (now >= deadline) return;
  timeout_us = deadline - now;
  sleep_items_.clear();
  if (!PrepareSleep(now, &timeout_us, &sleep_items_)) return;
  SleepOn(&sleep_items_, timeout_us);
  FinishSleep(sleep_items_.data(), sleep_items_.size());
}

// Adds what to sleep on, the wake-up first, and shortens the time. False: there is something to do now.
bool OfiTransport::PrepareSleep(TimeUs now, uint64_t* timeout_us, std::vector<pollfd>* items) {
  if (!failed_.empty()) return false;
  // No event says when a peer that was told "again" with nothing outstanding may post.
  const bool blocked =
      std::any_of(active_.begin(), active_.end(), [](const Peer* peer) { return peer->blocked_since != 0; });
  if (connecting_ > 0 || blocked) *timeout_us = std::min(*timeout_us, kConnectingSleepUs);
  sleep_objects_.clear();
  items->push_back({wake_fd_, POLLIN, 0});
  auto add = [this, items](const Queue& queue) {
    if (queue.fd < 0) return;
    sleep_objects_.push_back(&queue.completions->fid);
    items->push_back({queue.fd, POLLIN, 0});
  };
  add(listener_.queue);
  for (Peer* peer : linked_)
    if (peer->outstanding > 0) add(peer->link.queue);
  if (listener_.queue.fd < 0) {
    const bool busy = outstanding_ > 0 || now - busy_at_ < kBusyUs;
    *timeout_us = std::min(*timeout_us, busy ? kBlindBusySleepUs : kBlindIdleSleepUs);
    return true;
  }
  const int tried = fi_trywait(fabric_.get(), sleep_objects_.data(), static_cast<int>(sleep_objects_.size()));
  if (tried == -FI_EAGAIN) {
    busy_at_ = now;
    Progress();
    return false;
  }
  // The provider cannot say whether its descriptors can be trusted: look at intervals, rather than spin for
  // ever.
  if (tried != 0) *timeout_us = std::min(*timeout_us, kBlindIdleSleepUs);
  return true;
}

// `items` are those that PrepareSleep() has added.
void OfiTransport::FinishSleep(const pollfd* items, size_t count) {
  for (size_t i = 1; i < count; i++)
    if (items[i].revents != 0) busy_at_ = Now();
  if (items[0].revents != 0) {
    wake_.store(true);  // so that the descriptor is read also when Wake() is between its two steps
    ConsumeWake();
  }
  Progress();
}

void SleepOn(std::vector<pollfd>* items, uint64_t timeout_us) {
  const timespec timeout{static_cast<time_t>(timeout_us / 1'000'000),
                         static_cast<long>(timeout_us % 1'000'000 * 1'000)};
  if (ppoll(items->data(), items->size(), timeout_us >= UINT64_MAX / 2 ? nullptr : &timeout, nullptr) >= 0)
    return;
  for (pollfd& item : *items) item.revents = 0;
}

}  // namespace ropeteam::ofi
