// SPDX-License-Identifier: Apache-2.0
#include "api/client/arena.h"

#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <system_error>
#include <utility>

#include "api/client/signals_blocked.h"
#include "core/base/log.h"

namespace ropeteam::client {
namespace {

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; glibc defines it since 2.35
#endif

// A page table entry takes 8 bytes. A rank may spend this much on entries of chunks that it was not granted
// yet. For larger arenas (over 32 GiB in 4 KiB pages), entries are made only for granted chunks, at the
// grant.
constexpr uint64_t kPageTableBytesMax = 64ull << 20;
constexpr uint64_t kPageTableEntryBytes = 8;
// What the background thread populates in one call. It takes some milliseconds, and closing a handle waits
// for it.
constexpr uint64_t kPopulateRunBytes = 16ull << 20;

uint64_t PageBytes() {
  static const uint64_t bytes = static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  return bytes;
}

// The unit in which the file can be mapped.
uint64_t FilePageBytes(const UniqueFd& fd) {
  struct statfs system {};
  if (::fstatfs(fd.get(), &system) != 0 || system.f_type != HUGETLBFS_MAGIC) return PageBytes();
  return static_cast<uint64_t>(system.f_bsize);
}

Status PopulateMemory(std::byte* begin, uint64_t bytes) {
  for (;;) {
    if (::madvise(begin, bytes, MADV_POPULATE_WRITE) == 0) return OkStatus();
    if (errno == EINTR || errno == EAGAIN) continue;
    break;
  }
  if (errno != EINVAL) {
    // A plain store would have raised SIGBUS here.
    const Status status =
        ErrnoError(errno, "fault in %llu bytes of the arena", static_cast<unsigned long long>(bytes));
    return {Code::kNoSpace, status.message()};
  }
  // Before Linux 5.14. An atomic OR with 0, because others may be writing to these chunks.
  for (uint64_t at = 0; at < bytes; at += PageBytes()) {
    reinterpret_cast<std::atomic<uint8_t>*>(begin + at)->fetch_or(0, std::memory_order_relaxed);
  }
  return OkStatus();
}

Status CheckGeometry(const UniqueFd& fd, const local::HelloReply& hello) {
  struct stat info {};
  if (!fd.valid()) return Error(Code::kInvalidArgument, "the daemon sent no descriptor of its arena");
  if (::fstat(fd.get(), &info) != 0) return ErrnoError(errno, "fstat of the arena");
  const auto chunk_bytes = static_cast<unsigned long long>(hello.chunk_bytes);
  if (!std::has_single_bit(hello.chunk_bytes) || hello.chunk_bytes < kChunkBytesMin ||
      hello.chunk_bytes > kChunkBytesMax || hello.chunk_bytes % PageBytes() != 0 ||
      hello.chunks_begin % PageBytes() != 0) {
    return Error(Code::kInvalidArgument,
                 "arena with chunks of %llu bytes from offset %llu; pages are of %llu bytes", chunk_bytes,
                 static_cast<unsigned long long>(hello.chunks_begin),
                 static_cast<unsigned long long>(PageBytes()));
  }
  const auto file_bytes = static_cast<uint64_t>(info.st_size);
  if (hello.chunks_total == 0 || hello.arena_bytes > file_bytes || hello.chunks_begin > hello.arena_bytes ||
      hello.chunks_total > (hello.arena_bytes - hello.chunks_begin) / hello.chunk_bytes) {
    return Error(Code::kInvalidArgument,
                 "arena of %llu bytes with %llu chunks of %llu from offset %llu in a file of %llu",
                 static_cast<unsigned long long>(hello.arena_bytes),
                 static_cast<unsigned long long>(hello.chunks_total), chunk_bytes,
                 static_cast<unsigned long long>(hello.chunks_begin),
                 static_cast<unsigned long long>(file_bytes));
  }
  return OkStatus();
}

}  // namespace

Window::Window(Window&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Window& Window::operator=(Window&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

Window::~Window() {
  if (data_ != nullptr) ::munmap(data_, bytes_);
}

Result<std::shared_ptr<Arena>> Arena::Map(UniqueFd fd, const local::HelloReply& hello) {
  ROPETEAM_RETURN_IF_ERROR(CheckGeometry(fd, hello));
  std::shared_ptr<Arena> arena(new Arena);
  // Maps from chunk 0 on. Its offset is page-aligned, unless chunks are smaller than the file's huge pages.
  const uint64_t begin = hello.chunks_begin / FilePageBytes(fd) * FilePageBytes(fd);
  const uint64_t bytes = hello.arena_bytes - begin;
  void* mapped =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), static_cast<off_t>(begin));
  if (mapped == MAP_FAILED) {
    return ErrnoError(errno, "map %llu bytes of the arena from offset %llu",
                      static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(begin));
  }
  arena->fd_ = std::move(fd);
  arena->mapped_ = {static_cast<std::byte*>(mapped), bytes};
  arena->chunks_ = arena->mapped_.data() + (hello.chunks_begin - begin);
  arena->bytes_ = hello.arena_bytes;
  arena->chunks_begin_ = hello.chunks_begin;
  arena->chunk_bytes_ = hello.chunk_bytes;
  arena->chunks_total_ = hello.chunks_total;
  arena->populated_ = std::vector<std::atomic<uint8_t>>(hello.chunks_total);
  // Ignore errors: without huge pages for shared memory, ordinary pages are used.
  (void)::madvise(mapped, bytes, MADV_HUGEPAGE);
  if (hello.arena_bytes / PageBytes() * kPageTableEntryBytes <= kPageTableBytesMax) {
    const SignalsBlocked blocked;
    try {
      arena->background_ = std::thread(&Arena::PopulateAll, arena.get());
    } catch (const std::system_error& error) {
      // Then granted chunks are populated at the grant.
      LOG_DEBUG("no thread to populate the arena %s", error.what());
    }
  }
  return arena;
}

Arena::~Arena() {
  stop_ = true;
  if (background_.joinable()) background_.join();
  pin_.reset();
  if (!mapped_.empty()) ::munmap(mapped_.data(), mapped_.size());
}

bool Arena::IsOf(const UniqueFd& fd, const local::HelloReply& hello) const {
  struct stat mine {};
  struct stat theirs {};
  if (::fstat(fd_.get(), &mine) != 0 || ::fstat(fd.get(), &theirs) != 0) return false;
  return mine.st_dev == theirs.st_dev && mine.st_ino == theirs.st_ino && bytes_ == hello.arena_bytes &&
         chunks_begin_ == hello.chunks_begin && chunk_bytes_ == hello.chunk_bytes &&
         chunks_total_ == hello.chunks_total;
}

Status Arena::CheckExtents(const std::vector<Extent>& extents) const {
  for (const Extent& extent : extents) {
    if (extent.count == 0 || extent.first >= chunks_total_ || extent.count > chunks_total_ - extent.first) {
      return Error(Code::kInternal, "the daemon granted %u chunks from chunk %u of an arena of %llu chunks",
                   extent.count, extent.first, static_cast<unsigned long long>(chunks_total_));
    }
  }
  return OkStatus();
}

Status Arena::Populate(const std::vector<Extent>& extents) {
  for (const Extent& extent : extents) ROPETEAM_RETURN_IF_ERROR(PopulateRun(extent.first, extent.count));
  return OkStatus();
}

// Two threads may populate the same chunk at once. This is harmless and rare, so there is no lock.
Status Arena::PopulateRun(uint64_t first, uint64_t count) {
  const uint64_t end = first + count;
  while (first < end) {
    if (populated_[first].load(std::memory_order_relaxed) != 0) {
      ++first;
      continue;
    }
    uint64_t stop = first + 1;
    while (stop < end && populated_[stop].load(std::memory_order_relaxed) == 0) ++stop;
    ROPETEAM_RETURN_IF_ERROR(
        PopulateMemory(chunk(static_cast<uint32_t>(first)), (stop - first) * chunk_bytes_));
    for (; first < stop; ++first) populated_[first].store(1, std::memory_order_relaxed);
  }
  return OkStatus();
}

void Arena::PopulateAll() {
  const uint64_t step = std::max<uint64_t>(1, kPopulateRunBytes / chunk_bytes_);
  for (uint64_t first = 0; first < chunks_total_ && !stop_; first += step) {
    const Status status = PopulateRun(first, std::min(step, chunks_total_ - first));
    if (!status.ok()) {
      // A grant of these chunks gets the same error and returns it to its caller.
      LOG_DEBUG("populate the arena %s", status.ToString().c_str());
      return;
    }
  }
}

void Arena::Pin(const CudaDriver& driver, CuContext context) {
  const std::lock_guard lock(pin_mutex_);
  if (pin_ == nullptr) {
    pin_ = std::make_unique<ArenaPin>(driver, context, chunk(0), chunk_bytes_, chunks_total_);
  }
}

void Arena::Unpin(CuContext context) {
  const std::lock_guard lock(pin_mutex_);
  if (pin_ != nullptr && pin_->context() == context) pin_.reset();
}

void Arena::PreferPinned(uint32_t chunk) {
  const std::lock_guard lock(pin_mutex_);
  if (pin_ != nullptr) pin_->Prefer(chunk);
}

Result<Window> Arena::MapWindow(std::span<const uint32_t> chunks, bool writable) const {
  // Address space is reserved first, so that nothing else is mapped there meanwhile. The window begins at a
  // multiple of the chunk size, as chunks do in the file: pieces of huge pages can be mapped only there.
  const uint64_t bytes = chunks.size() * chunk_bytes_;
  const uint64_t reserved_bytes = bytes + chunk_bytes_;
  void* reserved =
      ::mmap(nullptr, reserved_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (reserved == MAP_FAILED) {
    return ErrnoError(errno, "reserve %llu bytes of address space",
                      static_cast<unsigned long long>(reserved_bytes));
  }
  auto* begin = static_cast<std::byte*>(reserved);
  const uint64_t skip = -reinterpret_cast<uintptr_t>(reserved) & (chunk_bytes_ - 1);
  if (skip != 0) ::munmap(begin, skip);
  ::munmap(begin + skip + bytes, chunk_bytes_ - skip);
  Window window(begin + skip, bytes);
  const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  for (size_t first = 0; first < chunks.size();) {
    size_t end = first + 1;
    while (end < chunks.size() && chunks[end] == chunks[end - 1] + 1) ++end;
    const uint64_t offset = chunks_begin_ + chunks[first] * chunk_bytes_;
    void* piece = ::mmap(window.data() + first * chunk_bytes_, (end - first) * chunk_bytes_, protection,
                         MAP_SHARED | MAP_FIXED, fd_.get(), static_cast<off_t>(offset));
    if (piece == MAP_FAILED) {
      return ErrnoError(errno, "map %zu chunks of %llu bytes from offset %llu of the arena", end - first,
                        static_cast<unsigned long long>(chunk_bytes_),
                        static_cast<unsigned long long>(offset));
    }
    first = end;
  }
  if (writable) ROPETEAM_RETURN_IF_ERROR(PopulateMemory(window.data(), bytes));
  return window;
}

}  // namespace ropeteam::client
