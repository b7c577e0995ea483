// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/posix/faults.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <utility>

namespace ropeteam::storage::test {

const char* NameOf(Call call) {
  constexpr const char* kNames[] = {"create",       "mkdir", "unlink",    "rename", "link", "fsync",
                                    "fsync folder", "close", "fallocate", "write",  "read", "write back"};
  static_assert(std::size(kNames) == static_cast<size_t>(Call::kCount));
  return kNames[static_cast<size_t>(call)];
}

void Faults::Fail(Call call, int error, int skip, int times) {
  std::lock_guard<std::mutex> lock(mutex_);
  rules_[static_cast<size_t>(call)] = {error, skip, times};
}

void Faults::DieAfter(int skip) {
  std::lock_guard<std::mutex> lock(mutex_);
  dies_after_ = skip;
}

void Faults::Heal() {
  std::lock_guard<std::mutex> lock(mutex_);
  rules_ = {};
  dies_after_ = -1;
  struck_ = false;
  write_ = read_ = nullptr;
}

bool Faults::struck() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return struck_;
}

void Faults::ReplaceWrites(Move write) {
  std::lock_guard<std::mutex> lock(mutex_);
  write_ = std::move(write);
}

void Faults::ReplaceReads(Move read) {
  std::lock_guard<std::mutex> lock(mutex_);
  read_ = std::move(read);
}

int Faults::ErrorOf(Call call) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (dies_after_ == 0) {
    struck_ = true;
    return EIO;
  }
  if (dies_after_ > 0) --dies_after_;
  Rule& rule = rules_[static_cast<size_t>(call)];
  if (rule.error == 0 || rule.times == 0) return 0;
  if (rule.skip > 0) {
    --rule.skip;
    return 0;
  }
  --rule.times;
  struck_ = true;
  return rule.error;
}

posix::Syscalls Faults::calls() {
  posix::Syscalls calls = below_;
  const auto guard = [this](Call call, auto below) {
    return [this, call, below](auto... arguments) -> int {
      if (const int error = ErrorOf(call); error != 0) {
        errno = error;
        return -1;
      }
      return below(arguments...);
    };
  };
  calls.openat = [this](int folder, const char* name, int flags, mode_t mode) {
    const int error = (flags & O_CREAT) != 0 ? ErrorOf(Call::kCreate) : 0;
    errno = error;
    return error != 0 ? -1 : below_.openat(folder, name, flags, mode);
  };
  calls.mkdirat = guard(Call::kMakeFolder, below_.mkdirat);
  calls.unlinkat = guard(Call::kUnlink, below_.unlinkat);
  calls.rename = guard(Call::kRename, below_.rename);
  calls.link = guard(Call::kLink, below_.link);
  calls.fsync = [this](int fd) {
    struct stat info {};
    const bool folder = fstat(fd, &info) == 0 && S_ISDIR(info.st_mode);
    const int error = ErrorOf(folder ? Call::kSyncFolder : Call::kSyncFile);
    errno = error;
    return error != 0 ? -1 : below_.fsync(fd);
  };
  // The descriptor is closed in any case, as by close() on Linux.
  calls.close = [this](int fd) {
    const int error = ErrorOf(Call::kClose), closed = below_.close(fd);
    if (error != 0) errno = error;
    return error != 0 ? -1 : closed;
  };
  calls.fallocate = guard(Call::kReserve, below_.fallocate);
  calls.sync_file_range = guard(Call::kWriteBack, below_.sync_file_range);
  calls.pwritev = [this](int fd, const iovec* pieces, int count, off_t at) -> ssize_t {
    errno = ErrorOf(Call::kWrite);
    if (errno != 0) return -1;
    Move write;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      write = write_;
    }
    return write ? write(fd, pieces, count, at) : below_.pwritev(fd, pieces, count, at);
  };
  calls.preadv = [this](int fd, const iovec* pieces, int count, off_t at) -> ssize_t {
    errno = ErrorOf(Call::kRead);
    if (errno != 0) return -1;
    Move read;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      read = read_;
    }
    return read ? read(fd, pieces, count, at) : below_.preadv(fd, pieces, count, at);
  };
  return calls;
}

}  // namespace ropeteam::storage::test
