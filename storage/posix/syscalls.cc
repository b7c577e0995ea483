// SPDX-License-Identifier: Apache-2.0
#include "storage/posix/syscalls.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <linux/stat.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstdio>

namespace ropeteam::storage::posix {
namespace {

int OpenBeneath(int folder, const char* path, int flags, mode_t mode) {
  open_how how{};
  how.flags = static_cast<uint64_t>(static_cast<unsigned>(flags | O_CLOEXEC));
  how.mode = mode;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS;
  return static_cast<int>(syscall(SYS_openat2, folder, path, &how, sizeof how));
}

// Uses the system call directly, because glibc's header before 2.37 and the kernel's header conflict.
bool ReadDirectAlignment(int fd, DirectAlignment* alignment) {
#ifdef STATX_DIOALIGN
  struct statx info {};
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &info) != 0 ||
      (info.stx_mask & STATX_DIOALIGN) == 0)
    return false;
  *alignment = {info.stx_dio_mem_align, info.stx_dio_offset_align};
  return true;
#else
  (void)fd, (void)alignment;
  return false;
#endif
}

}  // namespace

Syscalls RealSyscalls() {
  Syscalls calls;
  calls.open_beneath = OpenBeneath;
  calls.openat = [](int folder, const char* name, int flags, mode_t mode) {
    return ::openat(folder, name, flags | O_CLOEXEC | O_NOFOLLOW, mode);
  };
  calls.mkdirat = ::mkdirat;
  calls.unlinkat = ::unlinkat;
  calls.rename = [](int folder, const char* from, const char* to, unsigned flags) {
    return flags == 0 ? ::renameat(folder, from, folder, to) : ::renameat2(folder, from, folder, to, flags);
  };
  calls.link = [](int folder, const char* from, const char* to) {
    return ::linkat(folder, from, folder, to, 0);
  };
  calls.lstatat = [](int folder, const char* name, struct stat* info) {
    return ::fstatat(folder, name, info, AT_SYMLINK_NOFOLLOW);
  };
  calls.readdir = ::readdir;
  calls.fsync = ::fsync;
  calls.close = ::close;
  calls.fallocate = [](int fd, off_t bytes) { return ::fallocate(fd, 0, 0, bytes); };
  calls.ftruncate = ::ftruncate;
  calls.pwritev = ::pwritev;
  calls.preadv = ::preadv;
  calls.sync_file_range = ::sync_file_range;
  calls.lock = [](int fd) { return ::flock(fd, LOCK_EX | LOCK_NB); };
  calls.direct_alignment = ReadDirectAlignment;
  calls.file_system_type = [](int fd) {
    struct statfs info {};
    return ::fstatfs(fd, &info) == 0 ? static_cast<long>(info.f_type) : 0L;
  };
  return calls;
}

}  // namespace ropeteam::storage::posix
