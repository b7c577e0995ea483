// SPDX-License-Identifier: Apache-2.0
#include "storage/posix/posix_sink.h"

#include <fcntl.h>
#include <linux/fs.h>

#include <cerrno>
#include <utility>

#include "storage/posix/file_io.h"
#include "storage/posix/folders.h"
#include "storage/posix/in_place.h"
#include "storage/posix/names.h"
#include "storage/posix/posix_upload.h"
#include "storage/posix/store.h"

namespace ropeteam::storage {
namespace posix {
namespace {

Status CheckName(std::string_view name) {
  ROPETEAM_RETURN_IF_ERROR(CheckFileName(name));
  for (size_t begin = 0; begin < name.size();) {
    const std::string_view part = name.substr(begin, name.find('/', begin) - begin);
    if (KindOf(part) != NameKind::kFile)
      return Error(Code::kInvalidArgument, "file name \"%s\": %s is kept for unfinished files",
                   std::string(name).c_str(), std::string(part).c_str());
    begin += part.size() + 1;
  }
  return OkStatus();
}

class PosixSink final : public Sink {
 public:
  explicit PosixSink(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  std::string Describe() const override { return store_->Describe(); }

  Result<std::unique_ptr<Upload>> Begin(const std::string& name, uint64_t bytes, uint64_t part_bytes_wanted,
                                        Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckName(name));
    return BeginUpload(store_, name, bytes, part_bytes_wanted, deadline);
  }

  Status Put(const std::string& name, std::string_view bytes, PutMode mode, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckName(name));
    ROPETEAM_RETURN_IF_ERROR(store_->Check(deadline, "write", name));
    if (bytes.size() > kPutBytesMax)
      return Error(Code::kInvalidArgument, "%s: %zu bytes in one piece, the limit is %llu",
                   store_->PathOf(name).c_str(), bytes.size(), static_cast<unsigned long long>(kPutBytesMax));
    const Result<Abilities> abilities = store_->FindAbilities(deadline, name);
    if (!abilities.ok()) return abilities.status();
    if (mode == PutMode::kIfAbsent && !abilities->link && !abilities->rename_noreplace)
      return Error(
          Code::kUnsupported,
          "%s: this file system has neither hard links nor a rename that never replaces, so that only one "
          "of many writers would win",
          store_->PathOf(name).c_str());
    const Piece piece{reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
    if (mode == PutMode::kReplace && !abilities->rename)
      return WriteInPlace(store_.get(), name, deadline, [&](OpenFile* file) -> Status {
        Result<uint32_t> crc =
            WritePieces(store_.get(), file, {&piece, 1}, 0, /*write_back=*/false, deadline);
        return crc.ok() ? OkStatus() : crc.status();
      });
    return PutBeside(name, piece, mode, *abilities, deadline);
  }

  Status Read(const std::string& name, uint64_t offset, std::span<const Target> targets,
              Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckName(name));
    ROPETEAM_RETURN_IF_ERROR(store_->Check(deadline, "read", name));
    Result<Fd> folder = store_->OpenFolder(FolderOf(name), false);
    if (!folder.ok()) return folder.status();
    const std::string base(BaseOf(name));
    // The file is opened before the check, so that the check is about the open file.
    OpenFile file;
    file.path = store_->PathOf(name);
    file.plain = Fd(store_->calls().openat(folder->get(), base.c_str(), O_RDONLY | O_NONBLOCK, 0));
    if (!file.plain.ok()) return store_->Refused(errno, "open", file.path);
    Result<struct stat> counted = StatCounted(*store_, folder->get(), name);
    if (!counted.ok()) return counted.status();
    struct stat info {};
    if (::fstat(file.plain.get(), &info) != 0) return store_->Refused(errno, "stat", file.path);
    if (store_->may_write_in_place() && info.st_size != counted->st_size)
      return Error(Code::kUnavailable, "%s is being replaced", file.path.c_str());
    uint64_t bytes = 0;
    for (const Target& target : targets) bytes += target.bytes;
    const uint64_t size = static_cast<uint64_t>(info.st_size);
    if (offset > size || bytes > size - offset)
      return Error(Code::kCorrupt, "read %s: %llu bytes at %llu, it has %llu", file.path.c_str(),
                   static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(offset),
                   static_cast<unsigned long long>(size));
    if (bytes >= kDirectRunMin) AddDirect(*store_, folder->get(), base.c_str(), O_RDONLY, &file);
    return ReadTargets(store_.get(), &file, targets, offset, deadline);
  }

  Result<FileInfo> Stat(const std::string& name, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckName(name));
    ROPETEAM_RETURN_IF_ERROR(store_->Check(deadline, "stat", name));
    Result<Fd> folder = store_->OpenFolder(FolderOf(name), false);
    if (!folder.ok()) return folder.status();
    const Result<struct stat> info = StatCounted(*store_, folder->get(), name);
    if (!info.ok()) return info.status();
    return FileInfo{name, static_cast<uint64_t>(info->st_size), std::nullopt};
  }

  Result<ListPage> List(const std::string& folder, const std::string& page, Deadline deadline) override {
    if (!folder.empty()) ROPETEAM_RETURN_IF_ERROR(CheckName(folder));
    return ListFolder(*store_, folder, page, deadline);
  }

  // Not synced: every file system keeps the order of deletions, and a file that reappears after a power loss
  // can be deleted again.
  Status Delete(const std::string& name, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckName(name));
    ROPETEAM_RETURN_IF_ERROR(store_->Check(deadline, "delete", name));
    Result<Fd> folder = store_->OpenFolder(FolderOf(name), false);
    if (!folder.ok()) return folder.status().code() == Code::kNotFound ? OkStatus() : folder.status();
    const std::string base(BaseOf(name));
    if (store_->calls().unlinkat(folder->get(), base.c_str(), 0) == 0) return OkStatus();
    const int error = errno;
    // A folder is not a file of this name. For a folder, POSIX has EPERM, and Linux has EISDIR.
    if (error == ENOENT || error == EISDIR || error == ENOTDIR) return OkStatus();
    return store_->Refused(error, "delete", store_->PathOf(name));
  }

  Status DeleteFolder(const std::string& folder, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckName(folder));
    return RemoveFolder(*store_, folder, deadline);
  }

  Result<uint64_t> AbortUploads(const std::string& folder, std::chrono::seconds age,
                                Deadline deadline) override {
    if (!folder.empty()) ROPETEAM_RETURN_IF_ERROR(CheckName(folder));
    return AbortOldUploads(*store_, folder, age, deadline);
  }

  void SetYield(Yield yield) override { store_->SetYield(std::move(yield)); }

  void Stop() override { store_->Stop(); }

 private:
  // Writes and syncs a hidden file beside the name. Then one call gives it the name.
  Status PutBeside(const std::string& name, const Piece& piece, PutMode mode, const Abilities& abilities,
                   Deadline deadline) {
    Result<Fd> folder = store_->OpenFolder(FolderOf(name), true);
    if (!folder.ok()) return folder.status();
    Result<Unfinished> unfinished = OpenUnfinished(*store_, abilities, folder->get(), name, "");
    if (!unfinished.ok()) return unfinished.status();
    OpenFile file;
    file.path = store_->PathOf(name);
    file.plain = std::move(unfinished->fd);
    Result<uint32_t> crc = WritePieces(store_.get(), &file, {&piece, 1}, 0, /*write_back=*/false, deadline);
    Status status = crc.ok() ? OkStatus() : crc.status();
    if (status.ok() && store_->calls().fsync(file.plain.get()) != 0 && !IsUnsupported(errno)) {
      const int error = errno;
      status = error == ENOSPC || error == EDQUOT
                   ? store_->NoSpace(folder->get(), piece.bytes, error, file.path + ": fsync")
                   : store_->Refused(error, "fsync", file.path);
    }
    if (store_->calls().close(file.plain.Release()) != 0 && status.ok())
      status = store_->Refused(errno, "close", file.path);
    if (status.ok()) status = store_->Check(deadline, "write", name);
    if (status.ok()) status = Publish(folder->get(), unfinished->base, name, mode, abilities);
    if (!status.ok() || (mode == PutMode::kIfAbsent && abilities.link))
      store_->calls().unlinkat(folder->get(), unfinished->base.c_str(), 0);
    if (!status.ok()) return status;
    status = store_->SyncFolders(FolderOf(name));
    if (!status.ok())
      return Error(Code::kUnavailable, "%s is written, but not known to be durable: %s", file.path.c_str(),
                   status.message().c_str());
    return OkStatus();
  }

  Status Publish(int folder, const std::string& beside, const std::string& name, PutMode mode,
                 const Abilities& abilities) {
    const Syscalls& calls = store_->calls();
    const std::string base(BaseOf(name));
    int result = 0;
    if (mode == PutMode::kReplace)
      result = calls.rename(folder, beside.c_str(), base.c_str(), 0);
    else if (abilities.link)
      result = calls.link(folder, beside.c_str(), base.c_str());
    else
      result = calls.rename(folder, beside.c_str(), base.c_str(), RENAME_NOREPLACE);
    if (result == 0) return OkStatus();
    const int error = errno;
    struct stat one {};
    struct stat two {};
    // NFS repeats a call whose reply was lost. Two links mean that the first call succeeded.
    if (mode == PutMode::kIfAbsent && abilities.link && calls.lstatat(folder, beside.c_str(), &one) == 0 &&
        calls.lstatat(folder, base.c_str(), &two) == 0 && one.st_ino == two.st_ino &&
        one.st_dev == two.st_dev && one.st_nlink == 2)
      return OkStatus();
    if (error == EEXIST)
      return Error(Code::kAlreadyExists, "%s is there already", store_->PathOf(name).c_str());
    if (error == ENOENT)
      return Error(Code::kUnavailable,
                   "%s: its folder has vanished, or another process has aborted this write",
                   store_->PathOf(name).c_str());
    return store_->Refused(error, mode == PutMode::kReplace ? "rename" : "link", store_->PathOf(name));
  }

  const std::shared_ptr<Store> store_;
};

}  // namespace

Result<std::unique_ptr<Sink>> OpenSinkWith(const Url& url, Syscalls calls, size_t list_page_entries,
                                           mode_t file_mode) {
  if (!url.authority.empty())
    return Error(Code::kInvalidArgument, "storage URL file://%s%s: a host where file:///path was expected",
                 url.authority.c_str(), url.path.c_str());
  if (!url.parameters.empty())
    return Error(Code::kInvalidArgument, "storage URL of %s: unknown parameter %s, a directory has none",
                 url.path.c_str(), url.parameters.begin()->first.c_str());
  std::string root = url.path;
  while (root.size() > 1 && root.ends_with('/')) root.pop_back();
  if (!root.starts_with('/') || root.find('\0') != std::string::npos)
    return Error(Code::kInvalidArgument, "storage directory \"%s\" is not an absolute path", root.c_str());
  auto store = std::make_shared<Store>(std::move(root), std::move(calls), list_page_entries, file_mode);
  ROPETEAM_RETURN_IF_ERROR(store->Open());
  return std::unique_ptr<Sink>(std::make_unique<PosixSink>(std::move(store)));
}

}  // namespace posix

Result<std::unique_ptr<Sink>> OpenPosixSink(const Url& url, mode_t file_mode) {
  return posix::OpenSinkWith(url, posix::RealSyscalls(), posix::kListPageEntries, file_mode);
}

}  // namespace ropeteam::storage
