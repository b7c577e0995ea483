// SPDX-License-Identifier: Apache-2.0
//
// Reads the completion queues, and sleeps on them.

#include <poll.h>

#include <algorithm>
#include <functional>

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
    for (ssize_t i = 0; i < count; i++) {
      if (KnockBuffer* const knock = KnockBufferOf(entries[i].op_context); knock != nullptr)
        TakeKnock(knock);
      else
        FinishFragment(static_cast<Fragment*>(entries[i].op_context), Code::kOk);
    }
    total += static_cast<size_t>(count);
    // A short read counts as an empty queue, except if the caller must read everything.
    if (static_cast<size_t>(count) < kEntriesPerRead && reads_max != SIZE_MAX) break;
  }
  return total;
}

// The receive buffer that a completion belongs to; null: it does not belong to one.
KnockBuffer* OfiTransport::KnockBufferOf(void* context) {
  auto* buffer = static_cast<KnockBuffer*>(context);
  KnockBuffer* const begin = knocks_.get();
  const bool within =
      begin != nullptr && !std::less<>()(buffer, begin) && std::less<>()(buffer, begin + kKnockBuffers);
  return within ? buffer : nullptr;
}

// Handles the message in the buffer and posts the buffer again.
void OfiTransport::TakeKnock(KnockBuffer* buffer) {
  const bool granted = grants_->OnKnock(buffer->knock);
  LOG_DEBUG("ofi: instance %016llx asks for keys: %s",
            static_cast<unsigned long long>(buffer->knock.instance), granted ? "granted" : "refused");
  PostKnockBuffer(buffer);
}

void OfiTransport::ReadError(const Queue& queue) {
  fi_cq_err_entry error{};
  if (fi_cq_readerr(queue.completions.get(), &error, 0) <= 0) return;
  if (KnockBuffer* const knock = KnockBufferOf(error.op_context); knock != nullptr) {
    PostKnockBuffer(knock);  // a message that is too long or cut short is not a knock
    return;
  }
  auto* fragment = static_cast<Fragment*>(error.op_context);
  // Errors of the provider's own receive buffers have no context of ours. They concern a peer's connection to
  // us.
  if (fragment == nullptr || fragment->peer == nullptr) return;
  LOG_DEBUG("ofi peer %s: operation of %llu bytes failed: %s (provider %d)", fragment->peer->text.c_str(),
            static_cast<unsigned long long>(fragment->length), fi_strerror(error.err), error.prov_errno);
  FinishFragment(fragment, CodeOf(error.err));
}

void OfiTransport::Progress() {
  size_t completions = ReadCompletions(listener_.queue, kReadsPerPoll);
  // On a peer's own link, only completions of our own operations arrive.
  for (Peer* peer : linked_)
    if (peer->outstanding > 0 || peer->state == PeerState::kConnecting)
      completions += ReadCompletions(peer->link.queue, kReadsPerPoll);
  if (completions > 0) busy_at_ = Now();
  if (watches_silence() && outstanding_ > 0) CheckSilent(Now());
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
  if (watches_silence() && outstanding_ > 0) *timeout_us = std::min(*timeout_us, kSilenceStepUs);
  if (connecting_ > 0 || blocked) *timeout_us = std::min(*timeout_us, kConnectingSleepUs);
  sleep_objects_.clear();
  auto add = [this, items](const Queue& queue) {
    if (queue.fd < 0) return;
    sleep_objects_.push_back(&queue.completions->fid);
    items->push_back({queue.fd, POLLIN, 0});
  };
  add(listener_.queue);
  for (Peer* peer : linked_)
    if (peer->outstanding > 0) add(peer->link.queue);
  if (listener_.queue.fd < 0) {
    const bool busy = outstanding_ > 0 || now - busy_at_ < front::kBusyUs;
    *timeout_us = std::min(*timeout_us, busy ? kBlindBusySleepUs : kBlindIdleSleepUs);
    return true;
  }
  const int tried = fi_trywait(fabric_.get(), sleep_objects_.data(), static_cast<int>(sleep_objects_.size()));
  if (tried == -FI_EAGAIN) {
    busy_at_ = now;
    Progress();
    return false;
  }
  // The provider does not report whether a sleep on its descriptors is safe. Poll at intervals instead of
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
