// SPDX-License-Identifier: Apache-2.0
//
// The system calls of the posix sink, as a table: tests inject failures, and simulate file systems that this machine does
// not have. Each returns as the call of its name does: -1 and errno.

#ifndef ROPETEAM_STORAGE_POSIX_SYSCALLS_H_
#define ROPETEAM_STORAGE_POSIX_SYSCALLS_H_

#include <dirent.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <functional>
#include <memory>

#include "storage/sink.h"
#include "storage/url.h"

namespace ropeteam::storage::posix {

// The alignment of memory and of offsets (and lengths) that O_DIRECT needs, from STATX_DIOALIGN.
struct DirectAlignment {
  size_t memory = 0;  // both 0: no O_DIRECT
  size_t offset = 0;
};

struct Syscalls {
  // openat2() with RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS. Kernels before 5.6: ENOSYS.
  std::function<int(int folder, const char* path, int flags, mode_t mode)> open_beneath;
  std::function<int(int folder, const char* name, int flags, mode_t mode)> openat;
  std::function<int(int folder, const char* name, mode_t mode)> mkdirat;
  std::function<int(int folder, const char* name, int flags)> unlinkat;
  std::function<int(int folder, const char* from, const char* to, unsigned flags)> rename;  // in one folder
  std::function<int(int folder, const char* from, const char* to)> link;                    // in one folder
  std::function<int(int folder, const char* name, struct stat* info)> lstatat;
  std::function<dirent*(DIR* folder)> readdir;
  std::function<int(int fd)> fsync;  // of files and of folders
  std::function<int(int fd)> close;  // NFS and FUSE report here what a write has met
  std::function<int(int fd, off_t bytes)> fallocate;
  std::function<int(int fd, off_t bytes)> ftruncate;
  std::function<ssize_t(int fd, const iovec* pieces, int count, off_t at)> pwritev;
  std::function<ssize_t(int fd, const iovec* pieces, int count, off_t at)> preadv;
  std::function<int(int fd, off_t at, off_t bytes, unsigned flags)> sync_file_range;
  std::function<int(int fd)> lock;  // flock(LOCK_EX | LOCK_NB)
  // False: this kernel or file system does not say.
  std::function<bool(int fd, DirectAlignment* alignment)> direct_alignment;
  std::function<long(int fd)> file_system_type;  // fstatfs's f_type; 0 where it fails
};

Syscalls RealSyscalls();

// OpenPosixSink(), for tests: over other system calls, with pages of List() of another size.
Result<std::unique_ptr<Sink>> OpenSinkWith(const Url& url, Syscalls calls, size_t list_page_entries,
                                           mode_t file_mode = kFileModeDefault);

}  // namespace ropeteam::storage::posix

#endif  // ROPETEAM_STORAGE_POSIX_SYSCALLS_H_
