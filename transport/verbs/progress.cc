// SPDX-License-Identifier: Apache-2.0
//
// Reads completion queues and the devices' events, and sleeps on them.

#include <poll.h>

#include <algorithm>

#include "core/base/log.h"
#include "transport/verbs/internal.h"

namespace ropeteam::verbs {
namespace {

constexpr int kEntriesPerRead = 32;
// Reads of one queue in one Poll(). The limit lets the caller do its other work during a flood of
// completions.
constexpr size_t kReadsPerPoll = 4;
constexpr size_t kDatagramsPerPoll = 32;
// For a caller that never sleeps: the interval of reading the devices' events, and of reading the clock for
// that.
constexpr TimeUs kEventsUs = 10'000;
constexpr uint32_t kPollsPerClock = 64;

}  // namespace

size_t VerbsTransport::ReadCompletions(Rail* rail, size_t reads_max) {
  size_t total = 0;
  for (size_t read = 0; read < reads_max; read++) {
    ibv_wc completions[kEntriesPerRead];
    const int count = ibv_poll_cq(rail->queue.get(), kEntriesPerRead, completions);
    if (count < 0) LOG_ERROR("verbs: %s: ibv_poll_cq failed", rail->port.name.c_str());
    for (int i = 0; i < count; i++) OnCompletion(rail, completions[i]);
    if (count > 0) total += static_cast<size_t>(count);
    if (count < kEntriesPerRead) break;
  }
  return total;
}

void VerbsTransport::OnCompletion(Rail* rail, const ibv_wc& completion) {
  const auto tag = static_cast<uint32_t>(completion.wr_id >> 32);
  if (const auto found = tags_.find(tag); found != tags_.end()) {
    FinishPieces(found->second, static_cast<uint32_t>(completion.wr_id), completion.status);
    return;
  }
  const auto found = inbound_tags_.find(tag);
  if (found == inbound_tags_.end()) return;  // its queue pair has been destroyed
  Inbound* inbound = found->second;
  if (!inbound->probing) return;
  inbound->probing = false;
  rail->pieces--;
  if (completion.status == IBV_WC_SUCCESS) return;
  LOG_INFO("verbs: connection from %s: the initiator is gone: %s", AddressText(inbound->request.port).c_str(),
           ibv_wc_status_str(completion.status));
  DestroyInbound(inbound->connection, inbound->instance);
}

size_t VerbsTransport::Advance() {
  size_t count = 0;
  for (const auto& rail : rails_) {
    count += ReadCompletions(rail.get(), kReadsPerPoll);
    count += rail->mailbox.Receive(kDatagramsPerPoll,
                                   [&](std::string_view bytes) { OnMessage(rail.get(), bytes); });
  }
  if (count > 0 || !timed_.empty() || ++polls_ % kPollsPerClock == 0) {
    const TimeUs now = Now();
    if (count > 0) busy_at_ = now;
    if (now >= events_next_) ReadEvents(now);
    if (now >= stuck_next_) BreakStuckLinks(now);
    StepLinks(now);
  }
  Pump();
  FinishClosed();
  return count;
}

// Whether the next piece of work is likely to come sooner than a sleep and a wake-up take.
bool VerbsTransport::Busy(TimeUs now) const { return outstanding_ > 0 || now - busy_at_ < front::kBusyUs; }

void VerbsTransport::ReadEvents(TimeUs now) {
  events_next_ = now + kEventsUs;
  for (const auto& rail : rails_) {
    ibv_async_event event;
    while (ibv_get_async_event(rail->context.get(), &event) == 0) {
      // The event is acknowledged first, because destroying its object waits for that.
      ibv_ack_async_event(&event);
      OnEvent(rail.get(), event, now);
    }
  }
}

void VerbsTransport::OnEvent(Rail* rail, const ibv_async_event& event, TimeUs now) {
  const char* name = rail->port.name.c_str();
  switch (event.event_type) {
    case IBV_EVENT_PORT_ERR:
    case IBV_EVENT_PORT_ACTIVE:
      if (event.element.port_num == rail->port.number)
        OnPort(rail, event.event_type == IBV_EVENT_PORT_ACTIVE, now);
      return;
    case IBV_EVENT_DEVICE_FATAL:
      LOG_ERROR("verbs: device %s has failed", name);
      rail->dead = true;
      return OnPort(rail, false, now);
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR: {
      // A responder in this state stays until its initiator replaces it: the initiator's device reports an
      // error too. An initiator's own queue pair in this state may never return anything.
      const auto found = std::find_if(tags_.begin(), tags_.end(), [&](const auto& entry) {
        return entry.second->queue_pair.get() == event.element.qp;
      });
      if (found != tags_.end() && found->second->state == LinkState::kUp)
        BreakLink(found->second, kTimeoutAliveUs, now);
      return;
    }
    case IBV_EVENT_GID_CHANGE:
      LOG_WARNING("verbs: %s: an address of the port has changed; connections by the old one will fail",
                  name);
      return;
    default:
      LOG_DEBUG("verbs: %s: %s", name, ibv_event_type_str(event.event_type));
  }
}

// A peer with other links stops using this rail at once. For a peer without, the device's own retries bridge
// a short interruption.
void VerbsTransport::OnPort(Rail* rail, bool up, TimeUs now) {
  LOG_WARNING("verbs: port of %s is %s", rail->port.name.c_str(), up ? "up" : "down");
  rail->up = up && !rail->dead;
  for (const auto& [id, peer] : peers_) {
    for (Link& link : peer->links) {
      if (link.rail != rail) continue;
      if (up && link.state == LinkState::kDown) link.deadline = now;
      if (!up && link.state == LinkState::kUp && (peer->links_up > 1 || rail->dead))
        BreakLink(&link, kTimeoutAliveUs, now);
    }
  }
}

TimeUs VerbsTransport::NextTimer() const {
  TimeUs next = outstanding_ > 0 ? stuck_next_ : UINT64_MAX;
  for (const Link* link : timed_) {
    next = std::min(next, link->state == LinkState::kConnecting ? link->send_next : link->deadline);
    if (link->state == LinkState::kDraining && link->pieces.empty()) next = 0;
  }
  return next;
}

// From now on, the next completion makes the channel readable. Earlier completions do not, so the queues must
// be read after this call.
void VerbsTransport::Arm() {
  for (const auto& rail : rails_) {
    ibv_req_notify_cq(rail->queue.get(), 0);
    ibv_req_notify_cq(rail->mailbox.queue(), 0);
  }
}

void VerbsTransport::DrainChannels() {
  for (const auto& rail : rails_) {
    ibv_cq* queue = nullptr;
    void* context = nullptr;
    while (ibv_get_cq_event(rail->channel.get(), &queue, &context) == 0) ibv_ack_cq_events(queue, 1);
  }
}

void VerbsTransport::Sleep(TimeUs now, uint64_t timeout_us) {
  Arm();
  while (Advance() > 0) {
  }
  if (operations_.finished()) return;
  if (const TimeUs timer = NextTimer(); timer != UINT64_MAX)
    timeout_us = std::min(timeout_us, timer > now ? timer - now : 0);
  const bool connecting = std::any_of(timed_.begin(), timed_.end(), [](const Link* link) {
    return link->state == LinkState::kConnecting;
  });
  if (connecting) timeout_us = std::min(timeout_us, front::kRoundSleepUs);
  sleep_items_.assign(1, wake_.item());
  for (const auto& rail : rails_) {
    sleep_items_.push_back({rail->channel->fd, POLLIN, 0});
    sleep_items_.push_back({rail->dead ? -1 : rail->context->async_fd, POLLIN, 0});
  }
  const int ready = front::SleepOn(&sleep_items_, timeout_us);
  wake_.AfterSleep(sleep_items_[0]);
  if (ready > 0) {
    DrainChannels();
    events_next_ = 0;
  }
  Progress();
}

}  // namespace ropeteam::verbs
