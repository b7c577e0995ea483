// SPDX-License-Identifier: Apache-2.0

#include "transport/front/system.h"

#include <errno.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <fstream>

namespace ropeteam::front {
namespace {

constexpr uint64_t kUsPerSecond = 1'000'000;
constexpr uint64_t kNsPerUs = 1'000;
constexpr uint64_t kBytesPerKiB = 1024;
constexpr unsigned kCapIpcLock = 14;  // linux/capability.h

unsigned long long Ull(uint64_t value) { return value; }

struct LockedMemory {
  uint64_t limit = UINT64_MAX;  // RLIMIT_MEMLOCK; UINT64_MAX: no limit
  uint64_t pinned = 0;          // bytes pinned by devices, which the kernel compares to the limit; 0: unknown
  bool bound = true;            // false: CAP_IPC_LOCK in the initial user namespace lifts the limit
};

// Capabilities in another user namespace, such as a rootless container's, do not lift the limit.
bool InFirstUserNamespace() {
  std::ifstream map("/proc/self/uid_map");
  uint64_t inside = 0, outside = 0, count = 0;
  return map >> inside >> outside >> count && inside == 0 && outside == 0 && count == UINT32_MAX;
}

LockedMemory LockedMemoryNow() {
  LockedMemory memory;
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
    memory.limit = limit.rlim_cur;
  std::ifstream file("/proc/self/status");
  for (std::string word; file >> word;) {
    if (word == "VmPin:" && file >> memory.pinned) memory.pinned *= kBytesPerKiB;
    uint64_t capabilities = 0;
    if (word == "CapEff:" && file >> std::hex >> capabilities >> std::dec)
      memory.bound = (capabilities >> kCapIpcLock & 1) == 0 || !InFirstUserNamespace();
  }
  return memory;
}

}  // namespace

TimeUs Now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<TimeUs>(now.tv_sec) * kUsPerSecond + static_cast<TimeUs>(now.tv_nsec) / kNsPerUs;
}

uint64_t RandomNumber() {
  uint64_t number = 0;
  while (number == 0)
    if (getrandom(&number, sizeof number, 0) != sizeof number) number = 0;
  return number;
}

int SleepOn(std::vector<pollfd>* items, uint64_t timeout_us) {
  const timespec timeout{static_cast<time_t>(timeout_us / kUsPerSecond),
                         static_cast<long>(timeout_us % kUsPerSecond * kNsPerUs)};
  const int ready =
      ppoll(items->data(), items->size(), timeout_us >= UINT64_MAX / 2 ? nullptr : &timeout, nullptr);
  if (ready >= 0) return ready;
  for (pollfd& item : *items) item.revents = 0;  // a signal wakes the caller
  return 0;
}

WakeFd::~WakeFd() {
  if (fd_ >= 0) close(fd_);
}

Status WakeFd::Open() {
  fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  return fd_ < 0 ? ErrnoError(errno, "eventfd") : OkStatus();
}

void WakeFd::Wake() {
  if (wake_.exchange(true)) return;
  const uint64_t one = 1;
  // If the counter is full, the descriptor is readable anyway.
  (void)!write(fd_, &one, sizeof one);
}

bool WakeFd::Consume() {
  if (!wake_.exchange(false)) return false;
  uint64_t count;
  (void)!read(fd_, &count, sizeof count);
  return true;
}

void WakeFd::AfterSleep(const pollfd& slept_on) {
  if (slept_on.revents == 0) return;
  wake_.store(true);  // makes Consume() read the descriptor, even if Wake() is between its two steps
  Consume();
}

Status RegistrationError(int errno_value, const char* reason, const std::string& device, uint64_t length) {
  const char* with = device.c_str();
  if (errno_value != ENOMEM && errno_value != EAGAIN)
    return Error(Code::kIo, "register %llu bytes with %s: %s (%d)", Ull(length), with, reason, errno_value);
  const LockedMemory memory = LockedMemoryNow();
  if (memory.limit == UINT64_MAX)
    return Error(Code::kNoSpace, "register %llu bytes with %s: %s, and the locked-memory limit is unlimited",
                 Ull(length), with, reason);
  return Error(
      Code::kNoSpace,
      "register %llu bytes with %s: %s; the locked-memory limit (RLIMIT_MEMLOCK) is %llu bytes, needed "
      "are %llu with what is pinned already: raise it with ulimit -l unlimited or LimitMEMLOCK=infinity",
      Ull(length), with, reason, Ull(memory.limit), Ull(memory.pinned + length));
}

bool BeyondLockedMemoryLimit(uint64_t length) {
  const LockedMemory memory = LockedMemoryNow();
  return memory.bound && memory.limit != UINT64_MAX &&
         (memory.pinned > memory.limit || length > memory.limit - memory.pinned);
}

}  // namespace ropeteam::front
