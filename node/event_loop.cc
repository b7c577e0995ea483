// SPDX-License-Identifier: Apache-2.0
#include "node/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <cerrno>
#include <ctime>

#include "core/base/check.h"

namespace ropeteam {
namespace {

constexpr int kEventsPerWait = 64;  // events handled before posted closures and the timer

// An epoll key: the descriptor and the low 32 bits of its generation.
uint64_t KeyOf(int fd, uint64_t generation) { return (generation << 32) | static_cast<uint32_t>(fd); }

}  // namespace

TimeUs EventLoop::Now() {
  timespec now{};
  clock_gettime(CLOCK_BOOTTIME, &now);
  return static_cast<TimeUs>(now.tv_sec) * 1'000'000 + static_cast<TimeUs>(now.tv_nsec) / 1000;
}

Status EventLoop::Init() {
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  if (!epoll_.valid()) return ErrnoError(errno, "epoll_create1");
  timer_.reset(timerfd_create(CLOCK_BOOTTIME, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!timer_.valid()) return ErrnoError(errno, "timerfd_create");
  wake_.reset(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake_.valid()) return ErrnoError(errno, "eventfd");
  ROPETEAM_RETURN_IF_ERROR(Add(timer_.get(), EPOLLIN, [this](uint32_t) {
    uint64_t expirations = 0;
    // If nothing can be read, the timer was set again meanwhile. RunTimer() checks the clock itself.
    (void)!read(timer_.get(), &expirations, sizeof(expirations));
  }));
  return Add(wake_.get(), EPOLLIN, [this](uint32_t) {
    uint64_t count = 0;
    (void)!read(wake_.get(), &count, sizeof(count));  // RunPosted() follows every wait
  });
}

Status EventLoop::Add(int fd, uint32_t epoll_events, FdCallback callback) {
  auto watch = std::make_shared<Watch>();
  watch->generation = ++generation_;
  watch->callback = std::move(callback);
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = KeyOf(fd, watch->generation);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
    return ErrnoError(errno, "epoll_ctl add %d", fd);
  watches_[fd] = std::move(watch);
  return OkStatus();
}

void EventLoop::Modify(int fd, uint32_t epoll_events) {
  const auto found = watches_.find(fd);
  ROPETEAM_CHECK(found != watches_.end());
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = KeyOf(fd, found->second->generation);
  ROPETEAM_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event) == 0);
}

void EventLoop::Remove(int fd) {
  if (watches_.erase(fd) == 0) return;
  ROPETEAM_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr) == 0);
}

void EventLoop::SetTimer(TimeUs when, std::function<void()> callback) {
  timer_callback_ = std::move(callback);
  if (when == timer_when_) return;
  timer_when_ = when;
  itimerspec spec{};  // zero disarms
  if (when != kNever) {
    const TimeUs armed = when == 0 ? 1 : when;
    spec.it_value.tv_sec = static_cast<time_t>(armed / 1'000'000);
    spec.it_value.tv_nsec = static_cast<long>(armed % 1'000'000 * 1000);
  }
  ROPETEAM_CHECK(timerfd_settime(timer_.get(), TFD_TIMER_ABSTIME, &spec, nullptr) == 0);
}

void EventLoop::RunTimer() {
  if (timer_when_ == kNever || Now() < timer_when_) return;
  timer_when_ = kNever;
  const auto callback = std::exchange(timer_callback_, nullptr);
  if (callback) callback();
}

void EventLoop::Post(std::function<void()> closure) {
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    first = posted_.empty();
    posted_.push_back(std::move(closure));
  }
  if (first) Wake();
}

void EventLoop::Wake() {
  const uint64_t one = 1;
  // EAGAIN: the counter is at its maximum, so a wake-up is pending.
  (void)!write(wake_.get(), &one, sizeof(one));
}

void EventLoop::RunPosted() {
  std::vector<std::function<void()>> posted;
  {
    const std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (auto& closure : posted) closure();
}

void EventLoop::Dispatch(uint64_t key, uint32_t epoll_events) {
  const auto found = watches_.find(static_cast<int>(key & UINT32_MAX));
  if (found == watches_.end() || KeyOf(found->first, found->second->generation) != key) return;
  const std::shared_ptr<Watch> watch = found->second;  // the callback may remove itself
  watch->callback(epoll_events);
}

void EventLoop::Run() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = false;
  }
  epoll_event events[kEventsPerWait];
  for (;;) {
    RunPosted();
    RunTimer();
    {
      const std::lock_guard lock(mutex_);
      if (stop_) return;
    }
    const int count = epoll_wait(epoll_.get(), events, kEventsPerWait, -1);
    ROPETEAM_CHECK(count >= 0 || errno == EINTR);
    for (int i = 0; i < count; ++i) Dispatch(events[i].data.u64, events[i].events);
  }
}

void EventLoop::Stop() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  Wake();
}

}  // namespace ropeteam
