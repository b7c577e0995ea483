// SPDX-License-Identifier: Apache-2.0
//
// Reads the completion queue, and sleeps on it.

#include <poll.h>

#include <algorithm>

#include "core/base/log.h"
#include "transport/ofi/internal.h"

namespace ropeteam::ofi {
namespace {

constexpr size_t kEntriesPerRead = 64;
// While a connection is being made, our calls drive it, not events.
constexpr TimeUs kConnectingSleepUs = 500;
static_assert(kConnectingSleepUs <= front::kRoundSleepUs);
// The intervals of polling a completion queue without a descriptor: with work outstanding, and without.
constexpr TimeUs kBlindBusySleepUs = 50;
constexpr TimeUs kBlindIdleSleepUs = 2'000;

// The code for a provider's error. It is reported only after the peer was checked; see internal.h.
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

size_t OfiTransport::ReadCompletions() {
  size_t total = 0;
  for (size_t read = 0; read < kReadsPerPoll; read++) {
    fi_cq_entry entries[kEntriesPerRead];
    const ssize_t count = fi_cq_read(queue_.get(), entries, kEntriesPerRead);
    if (count == -FI_EAGAIN) break;
    if (count == -FI_EAVAIL) {
      ReadError();
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
    if (static_cast<size_t>(count) < kEntriesPerRead) break;
  }
  return total;
}

void OfiTransport::ReadError() {
  fi_cq_err_entry error{};
  if (fi_cq_readerr(queue_.get(), &error, 0) <= 0) return;
  auto* fragment = static_cast<Fragment*>(error.op_context);
  // Errors of the provider's own receive buffers have no context of ours. They concern a peer's connection to
  // us.
  if (fragment == nullptr || fragment->peer == nullptr) return;
  LOG_DEBUG("ofi peer %s: operation of %llu bytes failed: %s (provider %d)", fragment->peer->text.c_str(),
            static_cast<unsigned long long>(fragment->length), fi_strerror(error.err), error.prov_errno);
  FinishFragment(fragment, CodeOf(error.err));
}

void OfiTransport::Progress() {
  if (ReadCompletions() > 0) busy_at_ = Now();
  if (connecting_ > 0 || !failed_.empty()) {
    const TimeUs now = Now();
    CheckFailed(now);
    StepPeers(now);
  }
  Pump();
}

// Whether the next piece of work is likely to come sooner than a sleep and a wake-up take.
bool OfiTransport::Busy(TimeUs now) const {
  return outstanding_ > 0 || connecting_ > 0 || now - busy_at_ < front::kBusyUs;
}

void OfiTransport::Sleep(TimeUs now, uint64_t timeout_us) {
  sleep_items_.assign(1, wake_.item());
  if (!PrepareSleep(now, &timeout_us, &sleep_items_)) return;
  front::SleepOn(&sleep_items_, timeout_us);
  wake_.AfterSleep(sleep_items_[0]);
  FinishSleep(sleep_items_.data() + 1, sleep_items_.size() - 1);
}

// Adds the descriptors to sleep on and shortens the timeout. False: there is work now.
bool OfiTransport::PrepareSleep(TimeUs now, uint64_t* timeout_us, std::vector<pollfd>* items) {
  if (!failed_.empty()) return false;
  // If a peer got FI_EAGAIN with nothing outstanding, no event shows when it may post again.
  const bool blocked =
      std::any_of(active_.begin(), active_.end(), [](const Peer* peer) { return peer->blocked_since != 0; });
  if (connecting_ > 0 || blocked) *timeout_us = std::min(*timeout_us, kConnectingSleepUs);
  if (queue_fd_ < 0) {
    const bool busy = outstanding_ > 0 || now - busy_at_ < front::kBusyUs;
    *timeout_us = std::min(*timeout_us, busy ? kBlindBusySleepUs : kBlindIdleSleepUs);
    return true;
  }
  items->push_back({queue_fd_, POLLIN, 0});
  fid* object = &queue_->fid;
  const int tried = fi_trywait(fabric_.get(), &object, 1);
  if (tried == -FI_EAGAIN) {
    busy_at_ = now;
    Progress();
    return false;
  }
  // The provider does not report whether a sleep on its descriptor is safe. Poll at intervals instead of
  // spinning for ever.
  if (tried != 0) *timeout_us = std::min(*timeout_us, kBlindIdleSleepUs);
  return true;
}

// `items` are those that PrepareSleep() added.
void OfiTransport::FinishSleep(const pollfd* items, size_t count) {
  for (size_t i = 0; i < count; i++)
    if (items[i].revents != 0) busy_at_ = Now();
  Progress();
}

}  // namespace ropeteam::ofi
