// SPDX-License-Identifier: Apache-2.0
#include "node/arena_file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <fstream>
#include <sstream>
#include <vector>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "core/base/sizes.h"
#include "core/store/format.h"
#include "node/arena_memory.h"
#include "node/event_loop.h"
#include "node/parallel.h"
#include "node/user_directory.h"

namespace ropeteam {
namespace {

constexpr uint64_t kDefaultShare = 4;  // the default arena is the available memory divided by this

// A disk's file system would write the arena back all the time, and limit saves to the disk's speed.
Status CheckFileSystem(const std::string& directory) {
  struct statfs system {};
  if (statfs(directory.c_str(), &system) != 0) return ErrnoError(errno, "--arena-path %s", directory.c_str());
  if (system.f_type == TMPFS_MAGIC || system.f_type == HUGETLBFS_MAGIC) return OkStatus();
  return Error(Code::kInvalidArgument,
               "--arena-path %s is on neither tmpfs nor hugetlbfs (file system type 0x%lx): an arena is "
               "memory; give /dev/shm or another such mount",
               directory.c_str(), static_cast<unsigned long>(system.f_type));
}

// Returns the bytes of the unused arenas in `directory`. If there are any, sets `sentence` to a text about
// them.
uint64_t LeftBehind(const std::string& directory, std::string* sentence) {
  uint64_t bytes = 0;
  size_t count = 0;
  for (const ArenaListing& arena : ListArenas(directory)) {
    if (arena.in_use) continue;
    bytes += arena.bytes;
    ++count;
  }
  if (count != 0)
    *sentence = "unused arenas hold " + FormatSize(bytes) + " in " + directory + " (" +
                std::to_string(count) + "): ropeteam clean --all-ended --arena-path " + directory +
                " frees it";
  return bytes;
}

// The process that holds a flock() on this inode, from /proc/locks. 0: not listed (another pid namespace).
long LockHolder(const struct stat& info) {
  char wanted[64];
  std::snprintf(wanted, sizeof(wanted), "%02x:%02x:%" PRIu64, major(info.st_dev), minor(info.st_dev),
                static_cast<uint64_t>(info.st_ino));
  std::ifstream locks("/proc/locks");
  for (std::string line; std::getline(locks, line);) {
    std::istringstream fields(line);
    std::string number, kind, advisory, access, inode;
    long pid = 0;
    if (fields >> number >> kind >> advisory >> access >> pid >> inode && kind == "FLOCK" && inode == wanted)
      return pid;
  }
  return 0;
}

struct ChunkCheck {
  ShardId shard;
  uint32_t index = 0;
  uint32_t chunk = 0;
  uint64_t length = 0;
  uint32_t crc = 0;
};

std::vector<ChunkCheck> ListChunks(const Store& store) {
  std::vector<ChunkCheck> checks;
  for (const auto& [id, shard] : store.shards())
    for (uint32_t i = 0; i < shard->crcs.size(); ++i)
      checks.push_back({id, i, ChunkAt(shard->extents, i),
                        ChunkLength(shard->meta.stream_bytes, shard->meta.chunk_bytes, i), shard->crcs[i]});
  return checks;
}

// Promise 4: every chunk that was kept over a restart is read and checked.
void VerifyStore(Store* store) {
  const TimeUs begin = EventLoop::Now();
  const std::vector<ChunkCheck> checks = ListChunks(*store);
  std::vector<char> good(checks.size());
  ParallelFor(checks.size(), [&](uint64_t i) {
    const ChunkCheck& check = checks[i];
    good[i] = Crc32c(store->chunk(check.chunk), check.length) == check.crc;
  });
  size_t bad = 0;
  for (size_t i = 0; i < checks.size(); ++i) {
    if (good[i]) continue;
    ++bad;
    LOG_WARNING("arena chunk %u of %s does not match its checksum", checks[i].index,
                checks[i].shard.ToString().c_str());
    store->MarkBad(checks[i].shard, checks[i].index);
  }
  LOG_INFO("arena verified shards %zu chunks %zu bad %zu ms %" PRIu64, store->shards().size(), checks.size(),
           bad, (EventLoop::Now() - begin) / 1000);
}

}  // namespace

Result<std::unique_ptr<ArenaFile>> ArenaFile::Open(const ArenaFileConfig& config) {
  std::unique_ptr<ArenaFile> file(new ArenaFile(config));
  file->path_ = config.directory + "/" + ArenaFileName(config.job, config.node);
  ROPETEAM_RETURN_IF_ERROR(CheckFileSystem(config.directory));
  ROPETEAM_RETURN_IF_ERROR(file->Lock());
  Status status = file->Size();
  if (status.ok()) status = file->Map();
  if (status.ok()) status = file->Populate();
  // A file that never became an arena is removed, and its memory freed.
  if (!status.ok() && file->fresh_) (void)unlink(file->path_.c_str());
  if (!status.ok()) return status;
  return file;
}

ArenaFile::~ArenaFile() {
  if (!memory_.empty()) munmap(memory_.data(), memory_.size());
  if (!former_.empty()) munmap(former_.data(), former_.size());
}

std::string ArenaFile::Taken() const {
  return "it is " + DescribePath(path_) + ", this daemon is uid " + std::to_string(geteuid()) +
         ": have its owner or root remove it, or give another --arena-path";
}

Status ArenaFile::Lock() {
  for (;;) {
    // O_NOFOLLOW: every user can write to /dev/shm, and a symbolic link there must not redirect the arena.
    fd_.reset(open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd_.valid() && (errno == EACCES || errno == ELOOP || errno == EISDIR))
      return Error(Code::kInvalidArgument, "arena %s cannot be opened: %s", path_.c_str(), Taken().c_str());
    if (!fd_.valid()) return ErrnoError(errno, "open arena %s", path_.c_str());
    struct stat info {};
    if (fstat(fd_.get(), &info) != 0) return ErrnoError(errno, "stat arena %s", path_.c_str());
    if (!S_ISREG(info.st_mode))
      return Error(Code::kInvalidArgument, "arena %s is not a regular file: %s", path_.c_str(),
                   Taken().c_str());
    if (info.st_uid != geteuid())
      return Error(Code::kInvalidArgument, "arena %s belongs to another user: %s", path_.c_str(),
                   Taken().c_str());
    ROPETEAM_RETURN_IF_ERROR(ShareArenaLock(fd_.get()));
    if (flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return ErrnoError(errno, "lock arena %s", path_.c_str());
      const long holder = LockHolder(info);
      const std::string who =
          holder > 0 ? "pid " + std::to_string(holder) : "a process that cannot be seen from here";
      return Error(Code::kAlreadyExists,
                   "arena %s is in use by another daemon, %s: end it, or give another --job or --node",
                   path_.c_str(), who.c_str());
    }
    // The former holder of the lock may have removed the file meanwhile. Then the locked file has no name:
    // try again.
    struct stat named {};
    if (stat(path_.c_str(), &named) == 0 && named.st_ino == info.st_ino && named.st_dev == info.st_dev) break;
  }
  if (fchmod(fd_.get(), 0600) != 0) return ErrnoError(errno, "chmod arena %s", path_.c_str());
  shared_fd_.reset(open(path_.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  if (!shared_fd_.valid()) return ErrnoError(errno, "open arena %s again", path_.c_str());
  return OkStatus();
}

Status ArenaFile::CheckRoom(uint64_t bytes, uint64_t allocated) const {
  const uint64_t needed = bytes > allocated ? bytes - allocated : 0;
  std::string left;
  (void)LeftBehind(config_.directory, &left);
  if (!left.empty()) left = "; " + left;
  struct statfs system {};
  if (fstatfs(fd_.get(), &system) != 0) return ErrnoError(errno, "statfs %s", path_.c_str());
  if (system.f_blocks != 0) {  // 0: a tmpfs without a limit
    const uint64_t available = static_cast<uint64_t>(system.f_bavail) * static_cast<uint64_t>(system.f_bsize);
    if (needed > available)
      return Error(
          Code::kNoSpace,
          "arena %s needs %s, available in %s are %s: give a smaller --memory or another --arena-path%s",
          path_.c_str(), FormatSize(needed).c_str(), config_.directory.c_str(), FormatSize(available).c_str(),
          left.c_str());
  }
  if (system.f_type == HUGETLBFS_MAGIC) return OkStatus();  // reserved, and not part of that memory
  std::string limited_by;
  const uint64_t available = AvailableMemory(&limited_by);
  if (needed <= available) return OkStatus();
  return Error(Code::kNoSpace, "arena %s needs %s, %s is %s: give a smaller --memory%s", path_.c_str(),
               FormatSize(needed).c_str(), limited_by.c_str(), FormatSize(available).c_str(), left.c_str());
}

Result<uint64_t> ArenaFile::DefaultBytes() const {
  struct statfs system {};
  if (fstatfs(fd_.get(), &system) != 0) return ErrnoError(errno, "statfs %s", path_.c_str());
  std::string limited_by;
  uint64_t available = AvailableMemory(&limited_by);
  const uint64_t in_directory =
      static_cast<uint64_t>(system.f_bavail) * static_cast<uint64_t>(system.f_bsize);
  if (system.f_type == HUGETLBFS_MAGIC) return in_directory;  // huge pages are reserved for this
  if (system.f_blocks != 0) available = std::min(available, in_directory);
  if (available == UINT64_MAX)
    return Error(Code::kInvalidArgument, "--memory auto: the free memory of this machine cannot be read");
  std::string left;
  const uint64_t held = LeftBehind(config_.directory, &left);
  if (held != 0) {
    LOG_WARNING("%s", left.c_str());
    if (config_.note) config_.note(left);
  }
  // Unused arenas count as free: otherwise each of them would make the next arena smaller. At most half of
  // the memory that is really free is used, so that the job can use the rest.
  return std::min((available + held) / kDefaultShare, available / 2);
}

Status ArenaFile::RestoreSize(uint64_t* there) {
  uint64_t bytes = RecordedArenaBytes(fd_.get());
  // Less than a superblock holds no shard.
  if (*there >= arena::kPageBytes && (bytes == 0 || bytes % page_bytes_ != 0)) return OkStatus();
  if (*there == bytes) return OkStatus();
  LOG_WARNING(
      "arena %s has %" PRIu64 " bytes, not %" PRIu64
      ": another process has truncated or extended it; it gets its size back, and what is missing counts "
      "as damaged",
      path_.c_str(), *there, bytes);
  if (ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0)
    return ErrnoError(errno, "size arena %s to %" PRIu64 " bytes", path_.c_str(), bytes);
  *there = bytes;
  return OkStatus();
}

void ArenaFile::WarnIfContainersDefault(uint64_t directory_bytes) const {
  constexpr uint64_t kDockersDefault = 64ull << 20;
  if (directory_bytes == 0 || directory_bytes > kDockersDefault) return;  // 0: a tmpfs without a limit
  const std::string text =
      config_.directory + " has " + FormatSize(directory_bytes) +
      " in all, as in a container that was started without --shm-size: start it with --shm-size 16g, or as "
      "much as "
      "its steps need (in Kubernetes an emptyDir of medium Memory), or give another --arena-path";
  LOG_WARNING("%s", text.c_str());
  if (config_.note) config_.note("warning: " + text);
}

Status ArenaFile::Size() {
  struct stat info {};
  if (fstat(fd_.get(), &info) != 0) return ErrnoError(errno, "stat arena %s", path_.c_str());
  struct statfs system {};
  if (fstatfs(fd_.get(), &system) != 0) return ErrnoError(errno, "statfs %s", path_.c_str());
  if (system.f_type != HUGETLBFS_MAGIC)
    WarnIfContainersDefault(static_cast<uint64_t>(system.f_blocks) * static_cast<uint64_t>(system.f_bsize));
  page_bytes_ = system.f_type == HUGETLBFS_MAGIC ? static_cast<uint64_t>(system.f_bsize) : 4096;
  auto there = static_cast<uint64_t>(info.st_size);
  if (!config_.reset) ROPETEAM_RETURN_IF_ERROR(RestoreSize(&there));
  fresh_ = there == 0;
  uint64_t bytes = config_.memory_bytes;
  const uint64_t least = Store::MemoryFor(1, config_.chunk_bytes, config_.encrypted);
  // auto keeps the size of an existing file. With a reset, a file too small for one chunk gets a new size.
  if (bytes == 0 && there >= (config_.reset ? least : 1)) bytes = there;
  if (bytes == 0) {
    Result<uint64_t> chosen = DefaultBytes();
    if (!chosen.ok()) return chosen.status();
    bytes = *chosen;
  }
  bytes = bytes / page_bytes_ * page_bytes_;
  if (bytes < least)
    return Error(Code::kInvalidArgument, "--memory %s is %" PRIu64 " bytes, one chunk of %s needs %" PRIu64,
                 config_.memory_bytes == 0 ? "auto" : std::to_string(config_.memory_bytes).c_str(), bytes,
                 FormatSize(config_.chunk_bytes).c_str(), least);
  if (there != 0 && there != bytes) {
    if (!config_.reset)
      return Error(Code::kInvalidArgument,
                   "arena %s has %" PRIu64 " bytes, --memory asks for %" PRIu64 ": give --memory %" PRIu64
                   " to keep what is in it, or --arena-reset to drop that",
                   path_.c_str(), there, bytes, there);
    LOG_WARNING("arena %s dropped bytes %" PRIu64 ", as --arena-reset asked", path_.c_str(), there);
    if (ftruncate(fd_.get(), 0) != 0) return ErrnoError(errno, "truncate arena %s", path_.c_str());
    fresh_ = true;
  }
  ROPETEAM_RETURN_IF_ERROR(CheckRoom(bytes, fresh_ ? 0 : static_cast<uint64_t>(info.st_blocks) * 512));
  if (fresh_ && ftruncate(fd_.get(), static_cast<off_t>(bytes)) != 0)
    return ErrnoError(errno, "size arena %s to %" PRIu64 " bytes", path_.c_str(), bytes);
  config_.memory_bytes = bytes;
  return OkStatus();
}

void ArenaFile::Remove() {
  if (unlink(path_.c_str()) == 0)
    LOG_INFO("arena %s removed, nothing was in it", path_.c_str());
  else
    LOG_WARNING("%s", ErrnoError(errno, "remove arena %s", path_.c_str()).message().c_str());
}

Status ArenaFile::Renew() {
  const std::span<std::byte> before = memory_;
  ROPETEAM_RETURN_IF_ERROR(Map());
  if (!former_.empty()) munmap(former_.data(), former_.size());
  former_ = before;
  // MAP_FIXED replaces the former mapping, so that nothing else can be mapped there in between. This is done
  // before the new mapping is populated: both together would need twice the page tables, gigabytes for a
  // large arena.
  if (mmap(before.data(), before.size(), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED,
           -1, 0) == MAP_FAILED)
    return ErrnoError(errno, "withdraw arena %s from its former address", path_.c_str());
  return Populate();
}

Status ArenaFile::Map() {
  const uint64_t bytes = config_.memory_bytes;
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_.get(), 0);
  if (base == MAP_FAILED) {
    if (errno == ENOMEM)
      return Error(Code::kNoSpace, "map arena %s of %s: not that much (huge-page) memory is free",
                   path_.c_str(), FormatSize(bytes).c_str());
    return ErrnoError(errno, "map arena %s of %s", path_.c_str(), FormatSize(bytes).c_str());
  }
  memory_ = {static_cast<std::byte*>(base), bytes};
  // A core dump of the daemon must not contain the whole arena. A child process does not need it, and ranks
  // map the file themselves.
  (void)madvise(base, bytes, MADV_DONTDUMP);
  (void)madvise(base, bytes, MADV_DONTFORK);
  LOG_INFO("arena %s bytes %" PRIu64 " page_bytes %" PRIu64, path_.c_str(), bytes, page_bytes_);
  AdviseMemory(memory_);
  return OkStatus();
}

Status ArenaFile::Populate() {
  Status populated = PopulateMemory(fd_.get(), memory_, config_.progress);
  if (populated.ok()) return populated;
  return Error(populated.code(), "%s: %s", path_.c_str(), populated.message().c_str());
}

Result<std::unique_ptr<Store>> ArenaFile::OpenStore() {
  const ArenaIdentity identity{config_.job, config_.node, config_.encrypted};
  Store::AdoptReport report;
  Result<std::unique_ptr<Store>> store = Store::Adopt(memory_, config_.chunk_bytes, identity, &report);
  if (store.ok()) {
    VerifyStore(store->get());
    return store;
  }
  if (store.status().code() != Code::kNotFound) {
    if (!config_.reset)
      return Error(store.status().code(), "arena %s: %s; --arena-reset drops what is in it", path_.c_str(),
                   store.status().message().c_str());
    LOG_WARNING("arena %s dropped, as --arena-reset asked: %s", path_.c_str(),
                store.status().ToString().c_str());
  }
  store = Store::Format(memory_, config_.chunk_bytes, identity);
  if (store.ok())
    LOG_INFO("arena formatted chunks %" PRIu64 " chunk_bytes %" PRIu64, (*store)->chunks_total(),
             config_.chunk_bytes);
  return store;
}

}  // namespace ropeteam
