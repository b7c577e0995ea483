// SPDX-License-Identifier: Apache-2.0
#include "storage/posix/posix_upload.h"

#include <fcntl.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "core/base/checksum.h"
#include "storage/posix/file_io.h"
#include "storage/posix/in_place.h"
#include "storage/posix/names.h"

namespace ropeteam::storage::posix {
namespace {

constexpr int kTriesMax = 100;  // tries, as other processes may interfere

// Locks work between the processes of one machine, on NFS too. So only those processes share names.
const std::string& BootId() {
  static const std::string id = [] {
    std::string text;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
    return text;
  }();
  return id;
}

bool SameFile(const struct stat& a, const struct stat& b) {
  return a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

uint64_t PartBytes(uint64_t bytes, uint64_t wanted) {
  const uint64_t least = (bytes + kPartsMax - 1) / kPartsMax;
  const uint64_t part = std::max<uint64_t>({wanted, least, 1});
  const uint64_t limit = std::numeric_limits<uint64_t>::max() / 2;
  return (std::min(part, limit) + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

// Reserves space for the whole file now, so that a full disk is found before any byte is written.
Status Reserve(const Store& store, int fd, uint64_t bytes, const std::string& path) {
  if (bytes == 0) return OkStatus();
  const off_t length = static_cast<off_t>(bytes);
  int error = 0;
  do error = store.calls().fallocate(fd, length) == 0 ? 0 : errno;
  while (error == EINTR);
  if (error == 0) return OkStatus();
  if (error == ENOSPC || error == EDQUOT) return store.NoSpace(fd, bytes, error, path);
  if (!IsUnsupported(error)) return store.Refused(error, "reserve room for", path);
  // glibc's emulation is not used: it would write a byte into every block. A mounted bucket may report no
  // blocks.
  struct statvfs info {};
  if (::fstatvfs(fd, &info) == 0 && info.f_blocks > 0 && uint64_t{info.f_bavail} * info.f_frsize < bytes)
    return store.NoSpace(fd, bytes, ENOSPC, path);
  // A failure does not matter: writing the parts sets the file's length.
  (void)store.calls().ftruncate(fd, length);
  return OkStatus();
}

// The common base of both kinds of upload: which parts have been put.
class PosixUpload : public Upload {
 public:
  PosixUpload(std::shared_ptr<Store> store, const std::string& name, uint64_t bytes, uint64_t part_bytes,
              Fd folder)
      : Upload(bytes, part_bytes),
        store_(std::move(store)),
        name_(name),
        path_(store_->PathOf(name)),
        folder_(std::move(folder)),
        parts_(part_count()) {}

  bool Has(uint32_t index, uint32_t crc32c) const final {
    if (index >= part_count() || Lost()) return false;
    if (const std::optional<uint32_t> part = PartCrc(index)) return *part == crc32c;
    if (!found_) return false;
    const Result<uint32_t> crc = ReadFound(index);
    if (!crc.ok() || *crc != crc32c) return false;
    SetPart(index, crc32c);
    return true;
  }

 protected:
  // The unfinished file was removed or replaced, or its bytes can no longer be trusted.
  virtual bool Lost() const = 0;
  // The checksum of a part that an earlier attempt may have left.
  virtual Result<uint32_t> ReadFound(uint32_t index) const = 0;
  Status CheckPart(uint32_t index, std::span<const Piece> pieces) const {
    if (index >= part_count())
      return Error(Code::kInvalidArgument, "%s: part %u, it has %u", path_.c_str(), index, part_count());
    uint64_t bytes = 0;
    for (const Piece& piece : pieces) bytes += piece.bytes;
    if (bytes != PartLength(index))
      return Error(Code::kInvalidArgument, "%s: part %u with %llu bytes, it has %llu", path_.c_str(), index,
                   static_cast<unsigned long long>(bytes),
                   static_cast<unsigned long long>(PartLength(index)));
    return OkStatus();
  }
  Status OtherBytes(uint32_t index, uint32_t found, uint32_t crc32c) const {
    return Error(Code::kCorrupt, "%s: part %u has crc32c %08x in memory, %08x was expected", path_.c_str(),
                 index, found, crc32c);
  }
  void SetPart(uint32_t index, std::optional<uint32_t> crc32c) const {
    std::lock_guard<std::mutex> lock(mutex_);
    parts_[index] = crc32c;
  }
  std::optional<uint32_t> PartCrc(uint32_t index) const {
    std::lock_guard<std::mutex> lock(mutex_);
    return parts_[index];
  }
  // For Finish(): every part has been put, and together they have the whole file's checksum.
  Status CheckWhole(uint32_t crc32c, Deadline deadline) const {
    ROPETEAM_RETURN_IF_ERROR(store_->Check(deadline, "finish", name_));
    if (Lost()) return Gone();
    uint32_t whole = 0;
    for (uint32_t i = 0; i < part_count(); ++i) {
      const std::optional<uint32_t> part = PartCrc(i);
      if (!part)
        return Error(Code::kInvalidArgument, "%s: part %u of %u has not been put", path_.c_str(), i,
                     part_count());
      whole = Crc32cCombine(whole, *part, PartLength(i));
    }
    if (whole != crc32c)
      return Error(Code::kCorrupt, "%s: its parts together have crc32c %08x, %08x was expected",
                   path_.c_str(), whole, crc32c);
    return OkStatus();
  }
  Status Gone() const {
    return Error(Code::kNotFound, "%s: this upload was aborted, or failed for good; begin again",
                 path_.c_str());
  }
  Status Unlink(const std::string& base) const {
    if (store_->calls().unlinkat(folder_.get(), base.c_str(), 0) == 0 || errno == ENOENT || errno == ESTALE)
      return OkStatus();
    return store_->Refused(errno, "abort the upload of", path_);
  }
  // Whether the hidden file of this name is the one that `fd` has open. A shared name may belong to another
  // upload by now.
  bool Holds(int fd, const std::string& base) const {
    struct stat here {};
    struct stat held {};
    return store_->calls().lstatat(folder_.get(), base.c_str(), &here) == 0 && ::fstat(fd, &held) == 0 &&
           SameFile(here, held);
  }

  const std::shared_ptr<Store> store_;
  const std::string name_, path_;
  const Fd folder_;
  bool found_ = false;  // an earlier attempt has begun it

 private:
  mutable std::mutex mutex_;
  mutable std::vector<std::optional<uint32_t>> parts_;
};

class WholeUpload final : public PosixUpload {
 public:
  WholeUpload(std::shared_ptr<Store> store, const std::string& name, uint64_t bytes, uint64_t part_bytes,
              Fd folder, Unfinished unfinished)
      : PosixUpload(std::move(store), name, bytes, part_bytes, std::move(folder)),
        base_(std::move(unfinished.base)),
        shared_(unfinished.shared) {
    file_.path = path_;
    file_.plain = std::move(unfinished.fd);
  }

  Status Prepare(bool found) {
    struct stat info {};
    found_ = found && ::fstat(file_.plain.get(), &info) == 0 && info.st_size == static_cast<off_t>(bytes_);
    const Status status = Reserve(*store_, file_.plain.get(), bytes_, path_);
    if (!status.ok()) {
      (void)Drop();
      return status;
    }
    AddDirect(*store_, folder_.get(), base_.c_str(), O_RDWR, &file_);
    return OkStatus();
  }

  Status PutPart(uint32_t index, std::span<const Piece> pieces, uint32_t crc32c, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(store_->Check(deadline, "write", name_));
    ROPETEAM_RETURN_IF_ERROR(CheckPart(index, pieces));
    if (Lost()) return Gone();
    // Finish() closed the file and failed after that. Nothing can be written now, but Finish() can be
    // repeated.
    if (synced_) return PartCrc(index) == crc32c ? OkStatus() : Gone();
    SetPart(index, std::nullopt);
    Result<uint32_t> crc =
        WritePieces(store_.get(), &file_, pieces, index * part_bytes_, /*write_back=*/true, deadline);
    const bool failed = file_.lost;
    if (Lost() && !failed) return Gone();
    if (!crc.ok()) return crc.status();
    if (failed) return Gone();  // the write-back of another part has failed
    if (*crc != crc32c) return OtherBytes(index, *crc, crc32c);
    SetPart(index, crc32c);
    return OkStatus();
  }

  Status Finish(uint32_t crc32c, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckWhole(crc32c, deadline));
    if (!synced_) {
      ROPETEAM_RETURN_IF_ERROR(Sync());
      ROPETEAM_RETURN_IF_ERROR(store_->Check(deadline, "finish", name_));
      ROPETEAM_RETURN_IF_ERROR(Close());
    }
    ROPETEAM_RETURN_IF_ERROR(Rename());
    finished_ = true;
    const Status status = store_->SyncFolders(FolderOf(name_));
    if (!status.ok())
      return Error(Code::kUnavailable, "%s is written, but not known to be durable: %s", path_.c_str(),
                   status.message().c_str());
    return OkStatus();
  }

  Status Abort(Deadline) override { return finished_ ? OkStatus() : Drop(); }

 private:
  Result<uint32_t> ReadFound(uint32_t index) const override {
    return ReadThrough(store_.get(), &file_, index * part_bytes_, PartLength(index), Deadline::max(),
                       nullptr);
  }
  bool Lost() const override {
    if (dropped_ || finished_) return true;
    if (file_.lost) {
      Spoil();
      return true;
    }
    if (shared_) return !Holds(file_.plain.get(), base_);
    struct stat here {};
    return store_->calls().lstatat(folder_.get(), base_.c_str(), &here) != 0 &&
           (errno == ENOENT || errno == ESTALE);
  }

  Status Drop() const {
    dropped_ = true;
    return shared_ && !Holds(file_.plain.get(), base_) ? OkStatus() : Unlink(base_);
  }

  // The kernel reports a failed write once, and may have dropped the bytes. A second fsync would succeed, and
  // the page cache may show bytes that are not on the disk. So no process may find this file again.
  void Spoil() const {
    (void)store_->calls().ftruncate(file_.plain.get(), 0);
    (void)Drop();
  }

  Status Sync() {
    if (store_->calls().fsync(file_.plain.get()) != 0 && !IsUnsupported(errno)) {
      const int error = errno;
      Spoil();
      if (error == ENOSPC || error == EDQUOT)
        return store_->NoSpace(folder_.get(), bytes_, error, path_ + ": fsync");
      return store_->Refused(error, "fsync", path_ + " (it is not finished, its parts are dropped)");
    }
    posix_fadvise(file_.plain.get(), 0, 0, POSIX_FADV_DONTNEED);
    return OkStatus();
  }

  // Renames the file to a name that no other process uses, then closes it. Closing releases the lock, and the
  // next process may write to a file that it finds under the shared name.
  Status Close() {
    if (shared_) {
      const std::string own = UploadName(BaseOf(name_), RandomId());
      if (store_->calls().rename(folder_.get(), base_.c_str(), own.c_str(), 0) != 0) {
        if (errno == ENOENT) return Gone();
        return store_->Refused(errno, "rename", path_);
      }
      if (!Holds(file_.plain.get(), own)) {
        // Our upload was aborted, and this file belongs to a process that began later. Ours must begin again.
        dropped_ = true;
        (void)Unlink(own);
        return Gone();
      }
      base_ = own;
      shared_ = false;
    }
    file_.direct.Reset();
    struct stat info {};
    ::fstat(file_.plain.get(), &info);
    inode_ = info.st_ino;
    if (store_->calls().close(file_.plain.Release()) != 0 && errno != EINTR) {
      const int error = errno;
      (void)Drop();
      return store_->Refused(error, "close", path_ + " (it is not finished, its parts are dropped)");
    }
    synced_ = true;
    return OkStatus();
  }

  Status Rename() {
    const std::string base(BaseOf(name_));
    if (store_->calls().rename(folder_.get(), base_.c_str(), base.c_str(), 0) == 0) return OkStatus();
    const int error = errno;
    // NFS repeats a call whose reply was lost, and returns the result of the second one.
    struct stat here {};
    if (error == ENOENT && store_->calls().lstatat(folder_.get(), base.c_str(), &here) == 0 &&
        here.st_ino == inode_)
      return OkStatus();
    if (error == ENOENT) return Gone();
    return store_->Refused(error, "rename", path_);
  }

  std::string base_;
  bool shared_;
  mutable OpenFile file_;
  bool synced_ = false;
  bool finished_ = false;
  ino_t inode_ = 0;
  mutable std::atomic<bool> dropped_{false};
};

class LooseUpload final : public PosixUpload {
 public:
  LooseUpload(std::shared_ptr<Store> store, const std::string& name, uint64_t bytes, uint64_t part_bytes,
              Fd folder, Unfinished unfinished)
      : PosixUpload(std::move(store), name, bytes, part_bytes, std::move(folder)),
        base_(std::move(unfinished.base)),
        held_(std::move(unfinished.fd)),
        shared_(unfinished.shared) {
    found_ = unfinished.found;
  }

  Status PutPart(uint32_t index, std::span<const Piece> pieces, uint32_t crc32c, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(store_->Check(deadline, "write", name_));
    ROPETEAM_RETURN_IF_ERROR(CheckPart(index, pieces));
    if (Lost()) return Gone();
    SetPart(index, std::nullopt);
    const Syscalls& calls = store_->calls();
    const std::string part = PartName(base_, index);
    OpenFile file;
    file.path = path_;
    (void)Unlink(part);
    file.plain =
        Fd(calls.openat(folder_.get(), part.c_str(), O_WRONLY | O_CREAT | O_EXCL, store_->file_mode()));
    if (!file.plain.ok()) return store_->Refused(errno, "create a part of", path_);
    Result<uint32_t> crc = WritePieces(store_.get(), &file, pieces, 0, /*write_back=*/true, deadline);
    Status status = crc.ok() ? OkStatus() : crc.status();
    if (status.ok() && *crc != crc32c) status = OtherBytes(index, *crc, crc32c);
    if (status.ok() && calls.fsync(file.plain.get()) != 0 && !IsUnsupported(errno))
      status = store_->Refused(errno, "fsync a part of", path_);
    if (calls.close(file.plain.Release()) != 0 && status.ok())
      status = store_->Refused(errno, "close a part of", path_);
    if (!status.ok() || Lost()) {
      (void)Unlink(part);
      return status.ok() ? Gone() : status;
    }
    SetPart(index, crc32c);
    return OkStatus();
  }

  Status Finish(uint32_t crc32c, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckWhole(crc32c, deadline));
    const Status status =
        WriteInPlace(store_.get(), name_, deadline, [&](OpenFile* file) { return Join(file, deadline); });
    if (!status.ok()) return status;
    (void)Drop();
    return OkStatus();
  }

  Status Abort(Deadline) override { return Drop(); }

 private:
  Result<uint32_t> ReadFound(uint32_t index) const override {
    return ReadPart(index, Deadline::max(), nullptr);
  }
  bool Lost() const override {
    if (dropped_) return true;
    if (shared_) return !Holds(held_.get(), base_);
    struct stat info {};
    return store_->calls().lstatat(folder_.get(), base_.c_str(), &info) != 0 && errno == ENOENT;
  }

  Status Drop() {
    dropped_ = true;
    if (shared_ && !Holds(held_.get(), base_)) return OkStatus();
    for (uint32_t i = 0; i < part_count(); ++i) ROPETEAM_RETURN_IF_ERROR(Unlink(PartName(base_, i)));
    return Unlink(base_);
  }

  Result<uint32_t> ReadPart(uint32_t index, Deadline deadline,
                            const std::function<Status(const Piece&)>& sink) const {
    OpenFile part;
    part.path = path_;
    part.plain = Fd(store_->calls().openat(folder_.get(), PartName(base_, index).c_str(), O_RDONLY, 0));
    if (!part.plain.ok()) return store_->Refused(errno, "open a part of", path_);
    struct stat info {};
    if (::fstat(part.plain.get(), &info) == 0 && info.st_size != static_cast<off_t>(PartLength(index)))
      return Error(Code::kCorrupt, "%s: its part %u has %lld bytes on storage, %llu were put", path_.c_str(),
                   index, static_cast<long long>(info.st_size),
                   static_cast<unsigned long long>(PartLength(index)));
    return ReadThrough(store_.get(), &part, 0, PartLength(index), deadline, sink);
  }

  Status Join(OpenFile* file, Deadline deadline) {
    for (uint32_t i = 0; i < part_count(); ++i) {
      uint64_t at = i * part_bytes_;
      Result<uint32_t> crc = ReadPart(i, deadline, [&](const Piece& piece) -> Status {
        Result<uint32_t> written =
            WritePieces(store_.get(), file, {&piece, 1}, at, /*write_back=*/true, deadline);
        at += piece.bytes;
        return written.ok() ? OkStatus() : written.status();
      });
      if (!crc.ok()) return crc.status().code() == Code::kNotFound ? Gone() : crc.status();
      if (*crc != PartCrc(i)) {
        SetPart(i, std::nullopt);
        return Error(Code::kCorrupt, "%s: part %u comes back with crc32c %08x", path_.c_str(), i, *crc);
      }
    }
    return OkStatus();
  }

  const std::string base_;
  const Fd held_;
  const bool shared_;
  bool dropped_ = false;
};

}  // namespace

Result<Unfinished> OpenUnfinished(const Store& store, const Abilities& abilities, int folder,
                                  const std::string& name, const std::string& key) {
  const std::string base(BaseOf(name));
  const Syscalls& calls = store.calls();
  if (abilities.locks && !key.empty() && !BootId().empty()) {
    const std::string shared = UploadName(base, HashOf(BootId() + "\n" + base + "\n" + key));
    for (int i = 0; i < kTriesMax; ++i) {
      Fd fd(calls.openat(folder, shared.c_str(), O_RDWR | O_CREAT | O_EXCL, store.file_mode()));
      const bool made = fd.ok();
      if (!made && errno == EEXIST) fd = Fd(calls.openat(folder, shared.c_str(), O_RDWR, 0));
      if (!fd.ok() && errno == ENOENT) continue;  // it was removed between the two calls
      if (!fd.ok()) return store.Refused(errno, "create", store.PathOf(name));
      if (calls.lock(fd.get()) != 0) break;  // another process is uploading this name now
      // The owner renames the file before unlocking it, so the file that we have locked may be a finished one
      // by now.
      struct stat held {};
      struct stat here {};
      if (::fstat(fd.get(), &held) == 0 && calls.lstatat(folder, shared.c_str(), &here) == 0 &&
          SameFile(held, here))
        return Unfinished{shared, std::move(fd), true, !made};
    }
  }
  for (int i = 0; i < kTriesMax; ++i) {
    std::string own = UploadName(base, RandomId());
    Fd fd(calls.openat(folder, own.c_str(), O_RDWR | O_CREAT | O_EXCL, store.file_mode()));
    if (fd.ok()) return Unfinished{std::move(own), std::move(fd), false, false};
    if (errno == ENOENT)
      return Error(Code::kUnavailable, "create %s: its folder has vanished", store.PathOf(name).c_str());
    if (errno == ENOSPC || errno == EDQUOT) return store.NoSpace(folder, 0, errno, store.PathOf(name));
    if (errno != EEXIST) return store.Refused(errno, "create", store.PathOf(name));
  }
  return Error(Code::kInternal, "%s: no name for an unfinished file is free", store.PathOf(name).c_str());
}

Result<std::unique_ptr<Upload>> BeginUpload(std::shared_ptr<Store> store, const std::string& name,
                                            uint64_t bytes, uint64_t part_bytes_wanted, Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(store->Check(deadline, "begin", name));
  if (bytes > static_cast<uint64_t>(std::numeric_limits<off_t>::max()))
    return Error(Code::kInvalidArgument, "%s: %llu bytes, a file has at most %lld",
                 store->PathOf(name).c_str(), static_cast<unsigned long long>(bytes),
                 static_cast<long long>(std::numeric_limits<off_t>::max()));
  const Result<Abilities> abilities = store->FindAbilities(deadline, name);
  if (!abilities.ok()) return abilities.status();
  Result<Fd> folder = store->OpenFolder(FolderOf(name), true);
  if (!folder.ok()) return folder.status();
  const uint64_t part_bytes = PartBytes(bytes, part_bytes_wanted);
  const bool whole = abilities->rename && abilities->random_writes;
  std::string key = std::to_string(bytes);
  if (!whole) key += "/" + std::to_string(part_bytes);
  Result<Unfinished> unfinished = OpenUnfinished(*store, *abilities, folder->get(), name, key);
  if (!unfinished.ok()) return unfinished.status();
  if (!whole) {
    return std::unique_ptr<Upload>(std::make_unique<LooseUpload>(std::move(store), name, bytes, part_bytes,
                                                                 std::move(*folder), std::move(*unfinished)));
  }
  const bool found = unfinished->found;
  auto upload = std::make_unique<WholeUpload>(std::move(store), name, bytes, part_bytes, std::move(*folder),
                                              std::move(*unfinished));
  ROPETEAM_RETURN_IF_ERROR(upload->Prepare(found));
  return std::unique_ptr<Upload>(std::move(upload));
}

}  // namespace ropeteam::storage::posix
