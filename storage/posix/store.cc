// SPDX-License-Identifier: Apache-2.0
#include "storage/posix/store.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <utility>

#include "storage/posix/names.h"

namespace ropeteam::storage::posix {
namespace {

constexpr int kFolderFlags = O_RDONLY | O_DIRECTORY;

// File systems that are known to rename atomically: no file is written in place there, so Read() and Stat()
// need not look for markers. On other file systems each of these calls looks up one more name.
constexpr long kRenaming[] = {EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC,  BTRFS_SUPER_MAGIC,
                              TMPFS_MAGIC,      NFS_SUPER_MAGIC,  OVERLAYFS_SUPER_MAGIC,
                              F2FS_SUPER_MAGIC, CEPH_SUPER_MAGIC, 0x0bd00bd0 /* Lustre */,
                              0x2fc12fc1 /* ZFS */};

// The interval at which a call that waits for other calls checks Stop() and the deadline.
constexpr std::chrono::milliseconds kWait{50};

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
  if (this != &other) {
    Reset();
    fd_ = other.Release();
  }
  return *this;
}

void Fd::Reset() {
  if (fd_ >= 0) ::close(fd_);
  fd_ = -1;
}

bool IsUnsupported(int error) {
  return error == ENOSYS || error == EOPNOTSUPP || error == EINVAL || error == ENOTTY;
}

Store::Store(std::string root, Syscalls calls, size_t list_page_entries, mode_t file_mode)
    : root_(std::move(root)),
      calls_(std::move(calls)),
      list_page_entries_(list_page_entries),
      file_mode_(file_mode) {}

Store::~Store() {
  for (std::byte* data : bounces_) ::operator delete[](data, std::align_val_t{kPartAlignment});
}

Status Store::Open() {
  Fd fd(::open(root_.c_str(), kFolderFlags | O_CLOEXEC));
  if (!fd.ok()) {
    const int error = errno;
    if (error == ENOENT)
      return Error(Code::kNotFound, "storage directory %s is not there; make it first", root_.c_str());
    if (error == ENOTDIR)
      return Error(Code::kInvalidArgument, "storage directory %s is not a directory", root_.c_str());
    return Refused(error, "open", root_);
  }
  type_ = calls_.file_system_type(fd.get());
  fuse_ = type_ == FUSE_SUPER_MAGIC;
  may_write_in_place_ = std::find(std::begin(kRenaming), std::end(kRenaming), type_) == std::end(kRenaming);
  return OkStatus();
}

Status Store::Check(Deadline deadline, const char* what, std::string_view name) const {
  if (stopped_) return Error(Code::kAborted, "%s %s: this process stops", what, PathOf(name).c_str());
  if (std::chrono::steady_clock::now() > deadline)
    return Error(Code::kDeadlineExceeded, "%s %s: the deadline has passed", what, PathOf(name).c_str());
  return OkStatus();
}

void Store::Stop() {
  stopped_ = true;
  bounce_returned_.notify_all();
}

// Opens it by path every time. So a directory that vanished and came back is found again, and no descriptor
// prevents unmounting while nothing is written.
Result<Fd> Store::OpenRoot() const {
  Fd fd(::open(root_.c_str(), kFolderFlags | O_CLOEXEC));
  if (!fd.ok()) {
    const int error = errno;
    if (error == ENOENT || error == ENOTDIR)
      return Error(Code::kUnavailable, "the directory %s has vanished", root_.c_str());
    return Refused(error, "open", root_);
  }
  // If it is no longer mounted, the path is an empty directory of another file system, usually the system's
  // own disk.
  if (calls_.file_system_type(fd.get()) != type_)
    return Error(Code::kUnavailable,
                 "the directory %s is on another kind of file system than at start; is its mount lost?",
                 root_.c_str());
  return fd;
}

// Returns a descriptor, or -1 and errno. Never follows a symbolic link.
int Store::OpenBelow(int root, const std::string& folder) const {
  if (has_openat2_) {
    for (int tries = 0;; ++tries) {
      const int fd = calls_.open_beneath(root, folder.c_str(), kFolderFlags, 0);
      if (fd >= 0) return fd;
      // The kernel saw a rename on the path and could not tell whether the path stayed below `root`.
      if ((errno == EAGAIN || errno == EINTR) && tries < 100) continue;
      // Old container runtimes return EPERM for unknown calls. A real EPERM is returned again below.
      if (errno != ENOSYS && errno != EPERM) return -1;
      has_openat2_ = false;
      break;
    }
  }
  Fd at(::fcntl(root, F_DUPFD_CLOEXEC, 0));
  for (size_t begin = 0; at.ok() && begin < folder.size();) {
    const std::string part = folder.substr(begin, folder.find('/', begin) - begin);
    const int fd = calls_.openat(at.get(), part.c_str(), kFolderFlags, 0);
    if (fd < 0) {
      const int error = errno;
      struct stat info {};
      const bool link =
          error == ENOTDIR && calls_.lstatat(at.get(), part.c_str(), &info) == 0 && S_ISLNK(info.st_mode);
      at.Reset();
      errno = link ? ELOOP : error;
      return -1;
    }
    at = Fd(fd);
    begin += part.size() + 1;
  }
  return at.Release();
}

Result<Fd> Store::MakeFolders(int root, const std::string& folder) const {
  for (size_t end = 0; end != std::string::npos;) {
    end = folder.find('/', end + 1);
    const std::string so_far = folder.substr(0, end);
    Fd fd(OpenBelow(root, so_far));
    if (!fd.ok() && errno != ENOENT) return Refused(errno, "open", PathOf(so_far));
    if (!fd.ok()) {
      const std::string above(FolderOf(so_far));
      Fd parent(above.empty() ? ::fcntl(root, F_DUPFD_CLOEXEC, 0) : OpenBelow(root, above));
      if (!parent.ok()) return Refused(errno, "open", PathOf(above));
      // Another process may be making it at the same time.
      if (calls_.mkdirat(parent.get(), std::string(BaseOf(so_far)).c_str(), folder_mode()) != 0 &&
          errno != EEXIST) {
        const int error = errno;
        if (error == ENOENT)
          return Error(Code::kUnavailable, "mkdir %s: the directory above has vanished",
                       PathOf(so_far).c_str());
        return Refused(error, "mkdir", PathOf(so_far));
      }
      fd = Fd(OpenBelow(root, so_far));
      if (!fd.ok()) {
        const int error = errno;
        if (error == ENOENT) return Error(Code::kUnavailable, "%s vanished again", PathOf(so_far).c_str());
        return Refused(error, "open", PathOf(so_far));
      }
    }
    if (end == std::string::npos) return fd;
  }
  return Error(Code::kInternal, "no folder in %s", folder.c_str());
}

Result<Fd> Store::OpenFolder(std::string_view folder, bool make) const {
  Result<Fd> root = OpenRoot();
  if (!root.ok() || folder.empty()) return root;
  const std::string name(folder);
  const int fd = OpenBelow(root->get(), name);
  if (fd >= 0) return Fd(fd);
  const int error = errno;
  if (error == ENOENT && make) return MakeFolders(root->get(), name);
  if (error == ENOENT || (error == ENOTDIR && !make))
    return Error(Code::kNotFound, "%s is not there", PathOf(folder).c_str());
  return Refused(error, "open", PathOf(folder));
}

Status Store::SyncFolders(std::string_view folder) const {
  for (;;) {
    Result<Fd> fd = OpenFolder(folder, false);
    if (!fd.ok()) return fd.status();
    // FUSE and some network file systems have no fsync for folders. Nothing more can be done there.
    if (calls_.fsync(fd->get()) != 0 && !IsUnsupported(errno) && errno != EBADF)
      return Refused(errno, "fsync folder", PathOf(folder));
    if (folder.empty()) return OkStatus();
    folder = FolderOf(folder);
  }
}

DirectAlignment Store::DirectAlignmentOf(int fd) const {
  // A FUSE daemon has its own cache, and O_DIRECT makes its writes small.
  if (fuse_ || direct_refused_) return {};
  DirectAlignment alignment;
  // Before Linux 6.1 no call returns the alignment. 4,096 suits every disk and NFS. A write that is refused
  // is repeated without O_DIRECT.
  if (!calls_.direct_alignment(fd, &alignment)) return {4096, 4096};
  if (alignment.memory == 0 || alignment.offset == 0 || alignment.memory > kPartAlignment ||
      alignment.offset > kPartAlignment)
    return {};
  return alignment;
}

Status Store::Refused(int error, const char* what, const std::string& path) const {
  Code code = Code::kIo;
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      code = Code::kNoSpace;
      break;
    case ENAMETOOLONG:
    case ELOOP:
    case ENOTDIR:
    case EISDIR:
    case EFBIG:
    case EILSEQ:
      code = Code::kInvalidArgument;
      break;
    case ENOENT:
      code = Code::kNotFound;
      break;
    case ESTALE:
    case ENOTCONN:  // the FUSE daemon has died
    case ENODEV:
    case EHOSTDOWN:
    case EHOSTUNREACH:
    case ENETUNREACH:
    case ETIMEDOUT:
    case ECONNABORTED:
    case ECONNRESET:
    case EAGAIN:
    case EINTR:
    case EBUSY:
    case EMFILE:
    case ENFILE:
    case ENOLCK:
    case ENOMEM:
      code = Code::kUnavailable;
      break;
    case ENOSYS:
    case EOPNOTSUPP:
      code = Code::kUnsupported;
      break;
    default:
      break;
  }
  if (error == ELOOP)
    return Error(code, "%s %s: symbolic links below the storage directory are not followed", what,
                 path.c_str());
  return Error(code, "%s", ErrnoError(error, "%s %s", what, path.c_str()).message().c_str());
}

Status Store::NoSpace(int fd, uint64_t bytes, int error, const std::string& path) const {
  struct statvfs info {};
  uint64_t available = 0, all = 0;
  if (::fstatvfs(fd, &info) == 0) {
    available = uint64_t{info.f_bavail} * info.f_frsize;
    all = uint64_t{info.f_blocks} * info.f_frsize;
  }
  return Error(Code::kNoSpace, "%s: needed %llu bytes, available %llu, the file system has %llu%s",
               path.c_str(), static_cast<unsigned long long>(bytes),
               static_cast<unsigned long long>(available), static_cast<unsigned long long>(all),
               error == EDQUOT ? "; a quota is used up" : "");
}

// One thread probes, and the others wait until their deadlines, because the file system may hang.
Result<Abilities> Store::FindAbilities(Deadline deadline, std::string_view name) {
  std::unique_lock<std::mutex> lock(probe_mutex_);
  while (!abilities_) {
    if (probing_) {
      ROPETEAM_RETURN_IF_ERROR(Check(deadline, "write", name));
      probed_.wait_until(lock, std::min(deadline, std::chrono::steady_clock::now() + kWait));
      continue;
    }
    probing_ = true;
    lock.unlock();
    Result<Abilities> found = Probe();
    lock.lock();
    probing_ = false;
    probed_.notify_all();
    if (!found.ok()) return found;
    if (!found->rename || !found->random_writes) may_write_in_place_ = true;
    abilities_ = *found;
  }
  return *abilities_;
}

Result<Abilities> Store::Probe() const {
  Result<Fd> root = OpenRoot();
  if (!root.ok()) return root.status();
  const int folder = root->get();
  const std::string one = UploadName("", RandomId()), two = UploadName("", RandomId());
  const auto clean = [&] {
    calls_.unlinkat(folder, one.c_str(), 0);
    calls_.unlinkat(folder, two.c_str(), 0);
  };
  const auto write = [&](int fd, off_t at) {
    char text[] = "ropeteam\n";
    const iovec piece = {text, sizeof text - 1};
    ssize_t written = 0;
    do written = calls_.pwritev(fd, &piece, 1, at);
    while (written < 0 && errno == EINTR);
    return written > 0 ? 0 : errno;
  };
  Abilities abilities;
  for (const bool random : {true, false}) {
    Fd fd(calls_.openat(folder, one.c_str(), O_RDWR | O_CREAT | O_EXCL, file_mode_));
    if (!fd.ok()) return Refused(errno, "create a file in", root_);
    // A mounted object store without a cache accepts bytes only in order, from first to last.
    int error = random ? write(fd.get(), kPartAlignment) : 0;
    if (error == 0) error = write(fd.get(), 0);
    if (error == 0) abilities.random_writes = random;
    if (error == ENOSPC || error == EDQUOT || (error != 0 && !random)) {
      const Status status = Refused(error, "write to", root_);
      clean();
      return status;
    }
    abilities.locks = !fuse_ && calls_.lock(fd.get()) == 0;
    const int closed = calls_.close(fd.Release());
    if (error == 0 && (closed == 0 || !random)) break;
    abilities.random_writes = false;
    calls_.unlinkat(folder, one.c_str(), 0);
  }
  abilities.rename = calls_.rename(folder, one.c_str(), two.c_str(), 0) == 0;
  const std::string& here = abilities.rename ? two : one;
  const std::string& there = abilities.rename ? one : two;
  abilities.link = calls_.link(folder, here.c_str(), there.c_str()) == 0;
  if (abilities.link) calls_.unlinkat(folder, there.c_str(), 0);
  // Most FUSE daemons ignore rename's flags.
  abilities.rename_noreplace =
      !fuse_ && abilities.rename && calls_.rename(folder, here.c_str(), there.c_str(), RENAME_NOREPLACE) == 0;
  clean();
  return abilities;
}

std::string Store::Describe() const {
  std::string text = root_ + (fuse_ ? " on FUSE" : "");
  std::lock_guard<std::mutex> lock(probe_mutex_);
  if (!abilities_) return text + ", not written to yet";
  if (!abilities_->rename) text += ", no rename";
  if (!abilities_->random_writes) text += ", written in sequence only";
  if (!abilities_->link && !abilities_->rename_noreplace) text += ", no put if absent";
  return text + (fuse_ || direct_refused_ ? ", through the page cache" : ", O_DIRECT where it fits");
}

Result<Store::Bounce> Store::TakeBounce(Deadline deadline, const std::string& path) {
  std::unique_lock<std::mutex> lock(bounce_mutex_);
  for (;;) {
    if (!bounces_.empty()) {
      std::byte* data = bounces_.back();
      bounces_.pop_back();
      return Bounce(this, data);
    }
    if (bounces_made_ < kBouncesMax) {
      void* data = ::operator new[](kBounceBytes, std::align_val_t{kBounceBytes}, std::nothrow);
      if (data == nullptr)
        return Error(Code::kUnavailable, "%s: no memory for a buffer of %zu bytes", path.c_str(),
                     kBounceBytes);
      // An error is ignored: without huge pages it is only slower.
      (void)::madvise(data, kBounceBytes, MADV_HUGEPAGE);
      ++bounces_made_;
      return Bounce(this, static_cast<std::byte*>(data));
    }
    if (stopped_) return Error(Code::kAborted, "%s: this process stops", path.c_str());
    const Deadline now = std::chrono::steady_clock::now();
    if (now > deadline)
      return Error(Code::kDeadlineExceeded, "%s: the deadline passed while %zu other calls had all buffers",
                   path.c_str(), kBouncesMax);
    bounce_returned_.wait_until(lock, std::min(deadline, now + kWait));
  }
}

void Store::Return(std::byte* data) {
  {
    std::lock_guard<std::mutex> lock(bounce_mutex_);
    bounces_.push_back(data);
  }
  bounce_returned_.notify_one();
}

}  // namespace ropeteam::storage::posix
