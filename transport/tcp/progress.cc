// SPDX-License-Identifier: Apache-2.0
//
// Waits for sockets with epoll, level-triggered.

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>

#include <algorithm>

#include "core/base/log.h"
#include "transport/tcp/internal.h"

namespace ropeteam::tcp {
namespace {

constexpr int kEventsPerRound = 64;
// While a lane is connecting or probed, our calls drive it, not only events.
constexpr TimeUs kConnectingSleepUs = 1'000;
static_assert(kConnectingSleepUs <= front::kRoundSleepUs);
constexpr TimeUs kFlightSleepUs = 50'000;  // as often as silent lanes are looked for

}  // namespace

// Waits for these events from now on.
void TcpTransport::Watch(Watched* watched, uint32_t events) {
  if (watched->events == events) return;
  epoll_event event{};
  event.events = events;
  event.data.ptr = watched;
  const bool known = watched->watched;
  const int result =
      epoll_ctl(epoll_.get(), known ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, watched->fd.get(), &event);
  // Without it nothing is heard of this descriptor, but the timeouts end what waits for it.
  if (result != 0) LOG_ERROR("transport tcp: epoll_ctl: errno %d", errno);
  watched->watched = true;
  watched->events = events;
}

// Closing alone leaves the descriptor in the epoll set while a child process, between fork() and exec(), has a copy.
void TcpTransport::Unwatch(Watched* watched) {
  if (watched->watched) (void)epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, watched->fd.get(), nullptr);
  watched->fd.Reset();
  watched->watched = false;
  watched->events = 0;
}

void TcpTransport::Progress() {
  closed_.clear();
  epoll_event events[kEventsPerRound];
  const int count = epoll_wait(epoll_.get(), events, kEventsPerRound, 0);
  for (int i = 0; i < count; i++) {
    auto* watched = static_cast<Watched*>(events[i].data.ptr);
    if (!watched->fd.open()) continue;  // closed by an event before
    if (watched->kind == Watched::Kind::kListener) {
      Accept(static_cast<Listener*>(watched));
    } else if (watched->kind == Watched::Kind::kLane) {
      OnLane(static_cast<Lane*>(watched), events[i].events);
    } else if (auto* inbound = static_cast<Inbound*>(watched); inbound->instance == 0) {
      ReadHello(inbound);
    } else {
      Serve(inbound, events[i].events);
    }
  }
  const bool timed =
      flight_ > 0 || connecting_ > 0 || doubted_ > 0 || deaf_until_ != 0 || !strangers_.empty();
  if (timed) {
    const TimeUs now = Now();
    if (flight_ > 0) CheckSilent(now);
    if (connecting_ > 0) StepConnecting(now);
    if (doubted_ > 0) CheckDoubted(now);
    if (!strangers_.empty()) ExpireStrangers(now);
    if (deaf_until_ != 0 && now >= deaf_until_) Listen(true);
  }
  Pump();
}

// Never spins: the kernel and the peer's process need the processor to move the bytes. With two busy cores an operation
// of 8 bytes takes 56 µs without spinning, 330 µs with it.
bool TcpTransport::Busy(TimeUs) const { return false; }

void TcpTransport::Sleep(TimeUs now, uint64_t timeout_us) {
  const auto until = [now, &timeout_us](TimeUs time) {
    timeout_us = std::min<uint64_t>(timeout_us, time > now ? time - now : 0);
  };
  if (connecting_ > 0 || doubted_ > 0) until(now + kConnectingSleepUs);
  if (flight_ > 0) until(now + kFlightSleepUs);
  if (!strangers_.empty()) until(strangers_.front()->deadline);
  if (deaf_until_ != 0) until(deaf_until_);
  sleep_items_.assign(1, wake_.item());
  sleep_items_.push_back({epoll_.get(), POLLIN, 0});
  front::SleepOn(&sleep_items_, timeout_us);
  wake_.AfterSleep(sleep_items_[0]);
  Progress();
}

}  // namespace ropeteam::tcp
