// SPDX-License-Identifier: Apache-2.0
#include "node/arena_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "core/base/log.h"
#include "core/base/sizes.h"
#include "node/event_loop.h"
#include "node/parallel.h"

#ifdef ROPETEAM_HAVE_NUMA
#include <numa.h>
#endif

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; glibc 2.36 does not define it for every feature macro
#endif

namespace ropeteam {
namespace {

constexpr uint64_t kSlabBytes = 64ull << 20;       // a thread's portion; large enough to amortise the call
constexpr TimeUs kProgressIntervalUs = 5'000'000;  // between progress lines
constexpr uint64_t kTouchStrideBytes = 4096;

uint64_t MemAvailable() {
  std::ifstream file("/proc/meminfo");
  std::string word;
  while (file >> word) {
    uint64_t kib = 0;
    if (word == "MemAvailable:" && file >> kib) return kib << 10;
  }
  return UINT64_MAX;
}

// 0: the file does not exist, or contains "max".
uint64_t NumberIn(const std::filesystem::path& path) {
  std::ifstream file(path);
  uint64_t number = 0;
  return file >> number ? number : 0;
}

// The file pages in a group's memory that the kernel reclaims when the group needs room. Pages of a tmpfs,
// such as an arena's, are not counted in these two.
uint64_t ReclaimableIn(const std::filesystem::path& stat, const std::string& prefix) {
  std::ifstream file(stat);
  std::string name;
  uint64_t value = 0;
  uint64_t bytes = 0;
  while (file >> name >> value)
    if (name == prefix + "active_file" || name == prefix + "inactive_file") bytes += value;
  return bytes;
}

// File names in one version of control groups.
struct GroupFiles {
  const char* limit;
  const char* usage;
  const char* prefix;  // in memory.stat, of the counters that include child groups
};
constexpr GroupFiles kVersion1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_"};
constexpr GroupFiles kVersion2 = {"memory.max", "memory.current", ""};

// The memory that the limits of a group and of its parents up to `mount` leave. A container often sees its
// own group at the mount. Then the path does not exist below the mount, or leads above it.
uint64_t LeftByGroups(const std::filesystem::path& mount, const std::string& path, const GroupFiles& files) {
  uint64_t left = UINT64_MAX;
  std::filesystem::path group = mount;
  const auto look = [&] {
    const uint64_t limit = NumberIn(group / files.limit);
    if (limit == 0) return;
    const uint64_t usage = NumberIn(group / files.usage);
    const uint64_t kept = usage - std::min(usage, ReclaimableIn(group / "memory.stat", files.prefix));
    left = std::min(left, limit - std::min(limit, kept));
  };
  look();
  for (const std::filesystem::path& name : std::filesystem::path(path).relative_path()) {
    if (name == "..") break;
    group /= name;
    look();
  }
  return left;
}

std::string ReadLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

// For kernels before 5.14. The blocks are allocated first, because touching a page that a full tmpfs cannot
// provide raises SIGBUS. The touch is an atomic OR with 0: a rank that outlived the last daemon may be
// writing here.
int TouchSlab(int fd, std::byte* begin, uint64_t offset, uint64_t length) {
  const int error = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(length));
  if (error != 0) return error;
  for (uint64_t i = 0; i < length; i += kTouchStrideBytes)
    __atomic_fetch_or(reinterpret_cast<unsigned char*>(begin + i), 0, __ATOMIC_RELAXED);
  return 0;
}

// 0 or an errno; ENOSPC if no pages are left.
int PopulateSlab(int fd, std::span<std::byte> memory, uint64_t offset, uint64_t length) {
  std::byte* begin = memory.data() + offset;
  while (madvise(begin, length, MADV_POPULATE_WRITE) != 0) {
    if (errno == EINTR || errno == EAGAIN) continue;
    if (errno == EINVAL) return TouchSlab(fd, begin, offset, length);
    return errno == EFAULT ? ENOSPC : errno;  // EFAULT: a touch would have raised SIGBUS
  }
  return 0;
}

}  // namespace

uint64_t MemoryLeftByControlGroups(std::istream& membership, const std::string& mount) {
  uint64_t left = UINT64_MAX;
  for (std::string line; std::getline(membership, line);) {
    const size_t controllers = line.find(':');
    const size_t path = controllers == std::string::npos ? controllers : line.find(':', controllers + 1);
    if (path == std::string::npos) continue;
    const std::string names = "," + line.substr(controllers + 1, path - controllers - 1) + ",";
    if (names == ",,") left = std::min(left, LeftByGroups(mount, line.substr(path + 1), kVersion2));
    if (names.find(",memory,") != std::string::npos)
      left = std::min(left, LeftByGroups(mount + "/memory", line.substr(path + 1), kVersion1));
  }
  return left;
}

uint64_t AvailableMemory(std::string* limited_by) {
  std::ifstream membership("/proc/self/cgroup");
  const uint64_t host = MemAvailable();
  const uint64_t group = MemoryLeftByControlGroups(membership, "/sys/fs/cgroup");
  *limited_by = group < host ? "what the control group's memory limit leaves" : "the host's available memory";
  return std::min(host, group);
}

void AdviseMemory(std::span<std::byte> memory) {
  const bool huge = madvise(memory.data(), memory.size(), MADV_HUGEPAGE) == 0;
  const std::string shmem = ReadLine("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  LOG_INFO("arena huge_pages %s shmem_enabled %s", huge ? "asked" : "refused",
           shmem.empty() ? "unknown" : shmem.c_str());
#ifdef ROPETEAM_HAVE_NUMA
  if (numa_available() < 0) return;
  const int nodes = numa_num_task_nodes();
  if (nodes > 1) numa_interleave_memory(memory.data(), memory.size(), numa_all_nodes_ptr);
  LOG_INFO("arena numa_nodes %d placement %s", nodes, nodes > 1 ? "interleaved" : "local");
#endif
}

Status PopulateMemory(int fd, std::span<std::byte> memory,
                      const std::function<void(uint64_t done, uint64_t total)>& progress) {
  const TimeUs begin = EventLoop::Now();
  std::atomic<uint64_t> done{0};
  std::atomic<int> error{0};
  std::atomic<TimeUs> next_progress{begin + kProgressIntervalUs};
  if (progress) progress(0, memory.size());
  const uint64_t slabs = (memory.size() + kSlabBytes - 1) / kSlabBytes;
  ParallelFor(slabs, [&](uint64_t slab) {
    if (error.load() != 0) return;
    const uint64_t offset = slab * kSlabBytes;
    const uint64_t length = std::min<uint64_t>(kSlabBytes, memory.size() - offset);
    const int result = PopulateSlab(fd, memory, offset, length);
    if (result != 0) {
      error = result;
      return;
    }
    const uint64_t so_far = done.fetch_add(length) + length;
    if (progress) progress(so_far, memory.size());
    TimeUs due = next_progress.load();
    const TimeUs now = EventLoop::Now();
    if (now >= due && next_progress.compare_exchange_strong(due, now + kProgressIntervalUs))
      LOG_INFO("arena prefaulting %s of %s", FormatSize(so_far).c_str(), FormatSize(memory.size()).c_str());
  });
  if (const int code = error.load(); code != 0) {
    const std::string so_far = FormatSize(done.load());
    const std::string wanted = FormatSize(memory.size());
    if (code == ENOSPC || code == ENOMEM)
      return Error(Code::kNoSpace, "arena needs %s, only %s of it could be had: %s", wanted.c_str(),
                   so_far.c_str(), std::strerror(code));
    return ErrnoError(code, "arena of %s, faulted in %s", wanted.c_str(), so_far.c_str());
  }
  const double seconds = std::max(1e-6, static_cast<double>(EventLoop::Now() - begin) / 1e6);
  LOG_INFO("arena prefaulted %s seconds %.2f rate %.1f GB/s threads %u", FormatSize(memory.size()).c_str(),
           seconds, static_cast<double>(memory.size()) / 1e9 / seconds, StartThreads());
  return OkStatus();
}

}  // namespace ropeteam
