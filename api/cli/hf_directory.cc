// SPDX-License-Identifier: Apache-2.0
#include "api/cli/hf_directory.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>

#include "core/base/sizes.h"

namespace ropeteam::cli {
namespace {

constexpr std::string_view kPartialSuffix = ".ropeteam-partial";

std::string Partial(const std::string& path) { return path + std::string(kPartialSuffix); }

Status FileError(int error, const char* what, const std::string& path) {
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  const std::string text = std::string(what) + " " + path;
  const Status status = ErrnoError(error, "%s", text.c_str());
  return full ? Status(Code::kNoSpace, status.message()) : status;
}

Status SyncFolder(const std::string& path) {
  const client::UniqueFd fd(open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (fd.get() < 0 || fsync(fd.get()) != 0) return FileError(errno, "fsync", path);
  return OkStatus();
}

}  // namespace

Result<HfDirectory> HfDirectory::Open(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) return ErrnoError(error.value(), "mkdir %s", path.c_str());
  std::vector<std::filesystem::path> left;
  for (std::filesystem::recursive_directory_iterator each(path, error), end; !error && each != end;
       each.increment(error)) {
    if (each->is_directory(error)) continue;
    if (!each->path().native().ends_with(kPartialSuffix))
      return Error(Code::kAlreadyExists, "%s is not empty: it has %s; nothing was written", path.c_str(),
                   each->path().lexically_relative(path).c_str());
    left.push_back(each->path());
  }
  if (error) return ErrnoError(error.value(), "read the directory %s", path.c_str());
  for (const std::filesystem::path& each : left)
    if (unlink(each.c_str()) != 0) return ErrnoError(errno, "unlink %s", each.c_str());
  return HfDirectory(path);
}

HfDirectory::~HfDirectory() {
  for (const File& file : files_) (void)unlink(Partial(file.path).c_str());
}

Status HfDirectory::MakeFolders(const std::string& name) {
  for (size_t slash = name.find('/'); slash != std::string::npos; slash = name.find('/', slash + 1)) {
    const std::string folder = path_ + "/" + name.substr(0, slash);
    if (mkdir(folder.c_str(), 0777) != 0 && errno != EEXIST) return FileError(errno, "mkdir", folder);
  }
  return OkStatus();
}

Result<size_t> HfDirectory::Create(const std::string& name, uint64_t bytes) {
  ROPETEAM_RETURN_IF_ERROR(MakeFolders(name));
  const std::string path = path_ + "/" + name;
  client::UniqueFd fd(open(Partial(path).c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (fd.get() < 0) return FileError(errno, "create", path);
  const int descriptor = fd.get();
  files_.push_back({path, std::move(fd)});
  // Some file systems cannot reserve. Then a full disk is noticed only by a write.
  const auto size = static_cast<off_t>(bytes);
  if (bytes != 0 && fallocate(descriptor, 0, 0, size) != 0) {
    const int error = errno;
    if (error == ENOSPC || error == EDQUOT || error == EFBIG)
      return FileError(error, ("reserve " + FormatSize(bytes) + " for").c_str(), path);
    if (ftruncate(descriptor, size) != 0) return FileError(errno, "ftruncate", path);
  }
  return files_.size() - 1;
}

Status HfDirectory::Write(size_t file, uint64_t offset, const void* data, uint64_t length) {
  const File& to = files_[file];
  const char* from = static_cast<const char*>(data);
  while (length > 0) {
    const ssize_t done = pwrite(to.fd.get(), from, length, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return FileError(errno, "write", to.path);
    from += done;
    offset += static_cast<uint64_t>(done);
    length -= static_cast<uint64_t>(done);
  }
  return OkStatus();
}

Status HfDirectory::Put(const std::string& name, std::string_view bytes) {
  const Result<size_t> file = Create(name, bytes.size());
  if (!file.ok()) return file.status();
  return Write(*file, 0, bytes.data(), bytes.size());
}

Status HfDirectory::Finish() {
  for (const File& file : files_)
    if (fsync(file.fd.get()) != 0) return FileError(errno, "fsync", file.path);
  for (const File& file : files_)
    if (rename(Partial(file.path).c_str(), file.path.c_str()) != 0)
      return FileError(errno, "rename to", file.path);
  files_.clear();
  return SyncFolder(path_);
}

}  // namespace ropeteam::cli
