// SPDX-License-Identifier: Apache-2.0
#include "storage/posix/in_place.h"

#include <fcntl.h>

#include <cerrno>
#include <utility>

#include "storage/posix/names.h"

namespace ropeteam::storage::posix {
namespace {

constexpr int kTriesMax = 100;  // tries, as other writers or deleters may interfere

// Whether `fd` has this name open. Not for FUSE, where inode numbers are arbitrary.
bool IsOpenAs(const Store& store, int folder, const std::string& base, int fd) {
  struct stat held {};
  struct stat here {};
  return ::fstat(fd, &held) == 0 && store.calls().lstatat(folder, base.c_str(), &here) == 0 &&
         held.st_ino == here.st_ino && held.st_dev == here.st_dev;
}

// Creates or opens the marker, and locks it.
Result<Fd> TakeMarker(const Store& store, int folder, const std::string& name) {
  const std::string marker = MarkerName(BaseOf(name));
  for (int i = 0; i < kTriesMax; ++i) {
    Fd fd(store.calls().openat(folder, marker.c_str(), O_RDWR | O_CREAT | O_EXCL, store.file_mode()));
    const bool made = fd.ok();
    if (!made && errno != EEXIST) return store.Refused(errno, "create", store.PathOf(name));
    if (!made) {
      fd = Fd(store.calls().openat(folder, marker.c_str(), O_RDWR, 0));
      if (!fd.ok() && errno == ENOENT) continue;
      if (!fd.ok()) return store.Refused(errno, "open", store.PathOf(name));
    }
    if (store.calls().lock(fd.get()) != 0) {
      const bool unsupported = errno != EWOULDBLOCK;
      if (made && unsupported) return fd;
      return Error(Code::kUnavailable, "%s is being written by another process%s", store.PathOf(name).c_str(),
                   unsupported ? ", or was by one that is dead: then its upload must be aborted first" : "");
    }
    if (store.fuse() || IsOpenAs(store, folder, marker, fd.get())) return fd;
    // The marker's writer has removed it between our open and our lock.
  }
  return Error(Code::kUnavailable, "%s is being written by many others", store.PathOf(name).c_str());
}

}  // namespace

bool Counts(const Store& store, int folder, const std::string& base) {
  struct stat info {};
  return store.calls().lstatat(folder, MarkerName(base).c_str(), &info) != 0;
}

Result<struct stat> StatCounted(const Store& store, int folder, const std::string& name) {
  const std::string base(BaseOf(name));
  const auto look = [&](struct stat* info) -> Status {
    if (store.calls().lstatat(folder, base.c_str(), info) != 0)
      return store.Refused(errno == ENOTDIR ? ENOENT : errno, "stat", store.PathOf(name));
    if (!S_ISREG(info->st_mode))
      return Error(Code::kNotFound, "%s is not a file", store.PathOf(name).c_str());
    return OkStatus();
  };
  for (int i = 0; i < kTriesMax; ++i) {
    struct stat info {};
    ROPETEAM_RETURN_IF_ERROR(look(&info));
    if (!store.may_write_in_place()) return info;
    if (!Counts(store, folder, base)) break;
    // At the first look the file may have been incomplete, and its marker may have been removed after that.
    struct stat again {};
    ROPETEAM_RETURN_IF_ERROR(look(&again));
    if (info.st_size == again.st_size && info.st_mtim.tv_sec == again.st_mtim.tv_sec &&
        info.st_mtim.tv_nsec == again.st_mtim.tv_nsec)
      return info;
  }
  return Error(Code::kNotFound, "%s is not finished", store.PathOf(name).c_str());
}

Status WriteInPlace(Store* store, const std::string& name, Deadline deadline,
                    const std::function<Status(OpenFile*)>& write) {
  const Syscalls& calls = store->calls();
  Result<Fd> folder = store->OpenFolder(FolderOf(name), true);
  if (!folder.ok()) return folder.status();
  const int at = folder->get();
  const std::string base(BaseOf(name)), path = store->PathOf(name), marker = MarkerName(base);
  Result<Fd> held = TakeMarker(*store, at, name);
  if (!held.ok()) return held.status();
  // False: AbortUploads() has removed our marker, and perhaps another writer has made one.
  const auto ours = [&] { return store->fuse() || IsOpenAs(*store, at, marker, held->get()); };
  // The old file is unlinked, not truncated: a process that reads it continues to see the old bytes.
  const auto clear = [&] { return calls.unlinkat(at, base.c_str(), 0) == 0 || errno == ENOENT; };
  const auto give_up = [&](Status status) {
    // If the file stays, its marker stays too.
    if (ours() && clear()) calls.unlinkat(at, marker.c_str(), 0);
    return status;
  };
  // The marker must be durable before the file that it hides.
  if (calls.fsync(at) != 0 && !IsUnsupported(errno) && errno != EBADF)
    return give_up(store->Refused(errno, "fsync folder of", path));
  if (!clear()) {
    const int error = errno;
    calls.unlinkat(at, marker.c_str(), 0);
    return store->Refused(error, "replace", path);
  }
  OpenFile file;
  file.path = path;
  file.plain = Fd(calls.openat(at, base.c_str(), O_WRONLY | O_CREAT | O_EXCL, store->file_mode()));
  if (!file.plain.ok()) return give_up(store->Refused(errno, "create", path));
  Status status = write(&file);
  if (status.ok() && calls.fsync(file.plain.get()) != 0 && !IsUnsupported(errno))
    status = store->Refused(errno, "fsync", path);
  if (calls.close(file.plain.Release()) != 0 && status.ok()) status = store->Refused(errno, "close", path);
  if (status.ok()) status = store->SyncFolders(FolderOf(name));
  if (status.ok()) status = store->Check(deadline, "write", name);
  if (!status.ok()) return give_up(std::move(status));
  if (!ours()) return Error(Code::kUnavailable, "%s: another process has aborted this write", path.c_str());
  if (calls.unlinkat(at, marker.c_str(), 0) != 0) {
    const int error = errno;
    return give_up(store->Refused(error, "commit", path));
  }
  // A marker that reappears after a power loss would hide the file again. So its removal must be durable too.
  status = store->SyncFolders(FolderOf(name));
  if (!status.ok())
    return Error(Code::kUnavailable, "%s is written, but not known to be durable: %s", path.c_str(),
                 status.message().c_str());
  return OkStatus();
}

}  // namespace ropeteam::storage::posix
