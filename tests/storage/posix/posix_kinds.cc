// SPDX-License-Identifier: Apache-2.0
//
// The posix sink over the file systems of this machine, and over simulated limits of others.

#include <linux/magic.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "tests/storage/posix/place.h"

namespace ropeteam::storage::test {
namespace {

using posix::RealSyscalls;
using posix::Syscalls;

template <typename... Arguments>
auto Refusing(int error) {
  return [error](Arguments...) {
    errno = error;
    return -1;
  };
}

SinkKind Kind(const std::string& name, Syscalls (*calls)(), const std::string& parent = "") {
  SinkKind kind;
  kind.name = name;
  kind.absent = [parent] {
    return parent.empty() || access(parent.c_str(), W_OK) == 0 ? std::string() : "no " + parent;
  };
  kind.make = [=] { return std::make_unique<PosixPlace>(calls(), parent); };
  kind.page_files = kTestPage;
  return kind;
}

// O_DIRECT is refused at open, as by tmpfs before Linux 6.6.
Syscalls WithoutDirect() {
  Syscalls calls = RealSyscalls();
  calls.direct_alignment = [](int, posix::DirectAlignment* alignment) {
    *alignment = {};
    return true;
  };
  return calls;
}

// Linux 5.4 and a file system without fallocate().
Syscalls OfOldKernel() {
  Syscalls calls = RealSyscalls();
  calls.open_beneath = Refusing<int, const char*, int, mode_t>(ENOSYS);
  calls.direct_alignment = [](int, posix::DirectAlignment*) { return false; };
  calls.fallocate = Refusing<int, off_t>(EOPNOTSUPP);
  return calls;
}

Syscalls WithoutLinks() {
  Syscalls calls = RealSyscalls();
  calls.link = Refusing<int, const char*, const char*>(EPERM);
  return calls;
}

Syscalls WithoutLocks() {
  Syscalls calls = RealSyscalls();
  calls.lock = Refusing<int>(ENOLCK);
  return calls;
}

Syscalls WithoutRename() {
  Syscalls calls = WithoutLinks();
  calls.file_system_type = [](int) { return long{V9FS_MAGIC}; };
  calls.rename = Refusing<int, const char*, const char*, unsigned>(ENOSYS);
  return calls;
}

// A mounted bucket with a disk cache: rename copies, and there are no hard links.
Syscalls OfCachedBucket() {
  Syscalls calls = WithoutLinks();
  calls.file_system_type = [](int) { return long{FUSE_SUPER_MAGIC}; };
  calls.fallocate = Refusing<int, off_t>(EOPNOTSUPP);
  calls.sync_file_range = Refusing<int, off_t, off_t, unsigned>(ENOSYS);
  return calls;
}

// A mounted bucket without a cache: files are written sequentially and cannot be renamed.
Syscalls OfBareBucket() {
  Syscalls calls = OfCachedBucket();
  calls.rename = Refusing<int, const char*, const char*, unsigned>(ENOSYS);
  calls.pwritev = [](int fd, const iovec* pieces, int count, off_t at) -> ssize_t {
    struct stat info {};
    if (fstat(fd, &info) == 0 && info.st_size == at) return ::pwritev(fd, pieces, count, at);
    errno = EINVAL;
    return -1;
  };
  calls.fsync = [](int fd) {
    struct stat info {};
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) return ::fsync(fd);
    errno = EINVAL;
    return -1;
  };
  return calls;
}

const bool kRegistered = [] {
  RegisterSinkKind(Kind("posix", RealSyscalls));
  RegisterSinkKind(Kind("posix_shm", RealSyscalls, "/dev/shm"));
  RegisterSinkKind(Kind("posix_page_cache", WithoutDirect));
  RegisterSinkKind(Kind("posix_old_kernel", OfOldKernel));
  RegisterSinkKind(Kind("posix_no_links", WithoutLinks));
  SinkKind kind = Kind("posix_no_locks", WithoutLocks);
  kind.resumes = false;
  RegisterSinkKind(kind);
  kind = Kind("posix_no_rename", WithoutRename);
  kind.put_if_absent = false;
  RegisterSinkKind(kind);
  kind = Kind("posix_cached_bucket", OfCachedBucket);
  kind.put_if_absent = false;
  kind.resumes = false;
  RegisterSinkKind(kind);
  kind = Kind("posix_bare_bucket", OfBareBucket);
  kind.put_if_absent = false;
  kind.resumes = false;
  RegisterSinkKind(kind);
  return true;
}();

}  // namespace
}  // namespace ropeteam::storage::test
