// SPDX-License-Identifier: Apache-2.0
#include "storage/posix/folders.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "storage/posix/in_place.h"
#include "storage/posix/names.h"

namespace ropeteam::storage::posix {
namespace {

// The deadline is checked once per this many entries.
constexpr size_t kEntriesPerCheck = 256;

// Calls `each` for every entry except "." and "..". `type` is a DT_ value, never DT_UNKNOWN.
Status ForEachEntry(const Store& store, int folder, const std::string& name, Deadline deadline,
                    const std::function<Status(const std::string& base, unsigned char type)>& each) {
  // The new descriptor has its own offset; `folder` is used again.
  const int fd = ::openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return store.Refused(errno, "open", store.PathOf(name));
  DIR* opened = ::fdopendir(fd);
  if (opened == nullptr) {
    const int error = errno;
    ::close(fd);
    return store.Refused(error, "list", store.PathOf(name));
  }
  const std::unique_ptr<DIR, int (*)(DIR*)> list(opened, ::closedir);
  for (size_t count = 0;; ++count) {
    if (count % kEntriesPerCheck == 0) ROPETEAM_RETURN_IF_ERROR(store.Check(deadline, "list", name));
    errno = 0;
    const dirent* entry = store.calls().readdir(list.get());
    if (entry == nullptr) return errno == 0 ? OkStatus() : store.Refused(errno, "list", store.PathOf(name));
    const std::string base = entry->d_name;
    if (base == "." || base == "..") continue;
    unsigned char type = entry->d_type;
    if (type == DT_UNKNOWN) {
      struct stat info {};
      if (store.calls().lstatat(folder, base.c_str(), &info) != 0) {
        if (errno == ENOENT) continue;  // it was deleted meanwhile
        return store.Refused(errno, "stat", store.PathOf(Joined(name, base)));
      }
      type = static_cast<unsigned char>(IFTODT(info.st_mode));
    }
    ROPETEAM_RETURN_IF_ERROR(each(base, type));
  }
}

// The folder and all folders below it; each comes before its contents. Symbolic links are not followed.
Result<std::vector<std::string>> AllFolders(const Store& store, const std::string& folder,
                                            Deadline deadline) {
  std::vector<std::string> all = {folder};
  for (size_t i = 0; i < all.size(); ++i) {
    const std::string here = all[i];
    Result<Fd> fd = store.OpenFolder(here, false);
    if (!fd.ok()) {
      if (fd.status().code() != Code::kNotFound) return fd.status();
      if (i == 0) return std::vector<std::string>();
      continue;  // it was deleted meanwhile
    }
    ROPETEAM_RETURN_IF_ERROR(
        ForEachEntry(store, fd->get(), here, deadline, [&](const std::string& base, unsigned char type) {
          const std::string below = Joined(here, base);
          if (type == DT_DIR && CheckFileName(below).ok()) all.push_back(below);
          return OkStatus();
        }));
  }
  return all;
}

std::chrono::nanoseconds Since(std::chrono::system_clock::time_point now, int64_t seconds,
                               uint32_t nanoseconds) {
  return now.time_since_epoch() - std::chrono::seconds(seconds) - std::chrono::nanoseconds(nanoseconds);
}

// Whether the file was begun more than `age` ago. An age of 0 means all files, also if the clocks of this
// machine and of the server differ.
bool OlderThan(int folder, const std::string& base, std::chrono::seconds age) {
  if (age.count() <= 0) return true;
  struct statx info {};
  if (::statx(folder, base.c_str(), AT_SYMLINK_NOFOLLOW, STATX_BTIME | STATX_MTIME, &info) != 0) return false;
  const statx_timestamp& begun = (info.stx_mask & STATX_BTIME) != 0 ? info.stx_btime : info.stx_mtime;
  return Since(std::chrono::system_clock::now(), begun.tv_sec, begun.tv_nsec) > age;
}

// Returns how many uploads it has aborted.
Result<uint64_t> AbortIn(const Store& store, int folder, const std::string& name, std::chrono::seconds age,
                         Deadline deadline) {
  std::set<uint64_t> uploads;  // their files are deleted
  std::vector<std::string> doomed;
  std::map<uint64_t, std::string> markers;  // by the hash of the name that they hide
  ROPETEAM_RETURN_IF_ERROR(
      ForEachEntry(store, folder, name, deadline, [&](const std::string& base, unsigned char type) {
        const NameKind kind = KindOf(base);
        if (type != DT_REG || kind == NameKind::kFile || !OlderThan(folder, base, age)) return OkStatus();
        if (kind == NameKind::kMarker) markers[IdOf(base)] = base;
        // Loose parts are deleted with their upload. Parts without an upload are left over from an
        // interrupted Abort().
        struct stat info {};
        if (kind == NameKind::kUpload) uploads.insert(IdOf(base));
        if (kind == NameKind::kUpload ||
            (kind == NameKind::kPart &&
             (age.count() <= 0 ||
              store.calls().lstatat(folder, base.substr(0, base.rfind('-')).c_str(), &info) != 0)))
          doomed.push_back(base);
        return OkStatus();
      }));
  // A file that is half written in place is deleted before the marker that hides it. The parts of the uploads
  // are deleted too.
  if (!markers.empty() || !uploads.empty())
    ROPETEAM_RETURN_IF_ERROR(
        ForEachEntry(store, folder, name, deadline, [&](const std::string& base, unsigned char type) {
          const NameKind kind = KindOf(base);
          if (type == DT_REG && ((kind == NameKind::kFile && markers.count(HashOf(base)) > 0) ||
                                 (kind == NameKind::kPart && uploads.count(IdOf(base)) > 0)))
            doomed.push_back(base);
          return OkStatus();
        }));
  for (const auto& [hash, marker] : markers) doomed.push_back(marker);
  uint64_t aborted = 0;
  for (const std::string& base : doomed) {
    ROPETEAM_RETURN_IF_ERROR(store.Check(deadline, "abort uploads in", name));
    if (store.calls().unlinkat(folder, base.c_str(), 0) == 0)
      // Files left by the probe of FindAbilities() are not named after a file.
      aborted += KindOf(base) == NameKind::kUpload && !base.starts_with("..") ? 1 : 0;
    else if (errno != ENOENT)
      return store.Refused(errno, "abort the upload", store.PathOf(Joined(name, base)));
  }
  return aborted;
}

}  // namespace

Result<ListPage> ListFolder(const Store& store, const std::string& folder, const std::string& page,
                            Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(store.Check(deadline, "list", folder));
  Result<Fd> fd = store.OpenFolder(folder, false);
  if (!fd.ok()) return fd.status().code() == Code::kNotFound ? Result<ListPage>(ListPage()) : fd.status();
  // The first names after `page`, one more than the page can hold: it shows that there is another page.
  std::map<std::string, bool> entries;  // base: is a folder
  ListPage list;
  ROPETEAM_RETURN_IF_ERROR(
      ForEachEntry(store, fd->get(), folder, deadline, [&](const std::string& base, unsigned char type) {
        if (page.empty() && type == DT_REG && store.may_write_in_place() &&
            KindOf(base) == NameKind::kMarker && list.unfinished.size() < store.list_page_entries() &&
            !HiddenBy(base).empty())
          list.unfinished.push_back(Joined(folder, HiddenBy(base)));
        if (base <= page || (type != DT_REG && type != DT_DIR) || KindOf(base) != NameKind::kFile ||
            !CheckFileName(Joined(folder, base)).ok())
          return OkStatus();
        if (entries.size() > store.list_page_entries() && base >= entries.rbegin()->first) return OkStatus();
        entries.emplace(base, type == DT_DIR);
        if (entries.size() > store.list_page_entries() + 1) entries.erase(std::prev(entries.end()));
        return OkStatus();
      }));
  size_t count = 0;
  for (const auto& [base, is_folder] : entries) {
    if (count++ == store.list_page_entries()) break;
    if (entries.size() > store.list_page_entries()) list.next = base;
    const std::string name = Joined(folder, base);
    if (is_folder) {
      list.folders.push_back(name);
      continue;
    }
    if (count % kEntriesPerCheck == 0) ROPETEAM_RETURN_IF_ERROR(store.Check(deadline, "list", folder));
    const Result<struct stat> info = StatCounted(store, fd->get(), name);
    if (info.ok())
      list.files.push_back({name, static_cast<uint64_t>(info->st_size), std::nullopt});
    else if (info.status().code() != Code::kNotFound)  // kNotFound: it was deleted, or is not finished
      return info.status();
  }
  return list;
}

Status RemoveFolder(const Store& store, const std::string& folder, Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(store.Check(deadline, "delete folder", folder));
  const Result<std::vector<std::string>> all = AllFolders(store, folder, deadline);
  if (!all.ok()) return all.status();
  for (const std::string& here : *all) {
    bool empty = true;
    Result<Fd> fd = store.OpenFolder(here, false);
    if (!fd.ok() && fd.status().code() == Code::kNotFound) continue;
    if (!fd.ok()) return fd.status();
    ROPETEAM_RETURN_IF_ERROR(
        ForEachEntry(store, fd->get(), here, deadline, [&](const std::string&, unsigned char type) {
          empty = empty && type == DT_DIR;
          return OkStatus();
        }));
    if (!empty) return OkStatus();
  }
  for (auto here = all->rbegin(); here != all->rend(); ++here) {
    Result<Fd> above = store.OpenFolder(FolderOf(*here), false);
    if (!above.ok() && above.status().code() == Code::kNotFound) continue;
    if (!above.ok()) return above.status();
    // A folder that has got a file meanwhile stays.
    if (store.calls().unlinkat(above->get(), std::string(BaseOf(*here)).c_str(), AT_REMOVEDIR) != 0 &&
        errno != ENOENT && errno != ENOTEMPTY && errno != EEXIST && errno != ENOTDIR)
      return store.Refused(errno, "delete folder", store.PathOf(*here));
  }
  return OkStatus();
}

Result<uint64_t> AbortOldUploads(const Store& store, const std::string& folder, std::chrono::seconds age,
                                 Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(store.Check(deadline, "abort uploads in", folder));
  const Result<std::vector<std::string>> all = AllFolders(store, folder, deadline);
  if (!all.ok()) return all.status();
  uint64_t aborted = 0;
  for (const std::string& here : *all) {
    Result<Fd> fd = store.OpenFolder(here, false);
    if (!fd.ok() && fd.status().code() == Code::kNotFound) continue;
    if (!fd.ok()) return fd.status();
    Result<uint64_t> count = AbortIn(store, fd->get(), here, age, deadline);
    if (!count.ok()) return count;
    aborted += *count;
  }
  return aborted;
}

}  // namespace ropeteam::storage::posix
