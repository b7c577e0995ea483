// SPDX-License-Identifier: Apache-2.0
#include "node/arena_list.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "core/base/checksum.h"
#include "core/store/format.h"

namespace ropeteam {
namespace {

constexpr size_t kEscapedBytesMax = 100;  // two of them, prefix and suffix fit into a file name's 255 bytes

// Applies to the whole file. `command` is one of F_OFD_….
int LockFile(int fd, int command, short type, struct flock* lock) {
  *lock = {};
  lock->l_type = type;
  lock->l_whence = SEEK_SET;
  int result = 0;
  do {
    result = fcntl(fd, command, lock);
  } while (result != 0 && errno == EINTR);
  return result;
}

// kInvalidArgument: not a regular file of this user. Only its owner may list or remove an arena.
Result<UniqueFd> OpenOwn(const std::string& path, int mode, struct stat* info) {
  // O_NOFOLLOW and O_NONBLOCK: any user can create a link or a pipe with an arena's name in /dev/shm.
  UniqueFd fd(open(path.c_str(), mode | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  if (!fd.valid() || fstat(fd.get(), info) != 0) return ErrnoError(errno, "open arena %s", path.c_str());
  if (!S_ISREG(info->st_mode) || info->st_uid != geteuid())
    return Error(Code::kInvalidArgument, "%s is not a file of uid %u", path.c_str(), geteuid());
  return fd;
}

// False: it is not intact.
bool ReadSuperblock(int fd, arena::Superblock* superblock) {
  return pread(fd, superblock, sizeof(*superblock), 0) == static_cast<ssize_t>(sizeof(*superblock)) &&
         superblock->magic == arena::kArenaMagic && superblock->crc == arena::SuperblockCrc(*superblock);
}

void ReadIdentity(int fd, ArenaListing* listing) {
  arena::Superblock superblock;
  if (!ReadSuperblock(fd, &superblock)) return;
  listing->job.assign(superblock.job, std::min<size_t>(superblock.job_length, arena::kJobBytesMax));
  listing->node.assign(superblock.node, std::min<size_t>(superblock.node_length, kNodeNameBytesMax));
}

bool InUse(int fd) {
  struct flock lock;
  // A failure counts as in use: only an arena that is known to be unused may be removed.
  return LockFile(fd, F_OFD_GETLK, F_WRLCK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace

std::string EscapeForFileName(std::string_view text) {
  static constexpr char kHex[] = "0123456789ABCDEF";
  std::string escaped;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (std::isalnum(byte) || c == '.' || c == '_' || c == '-') {
      escaped += c;
    } else {
      escaped += {'%', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  if (escaped.size() <= kEscapedBytesMax) return escaped;
  char checksum[16];
  std::snprintf(checksum, sizeof(checksum), "%%%08x", Crc32c(text.data(), text.size()));
  escaped.resize(kEscapedBytesMax - 9);
  return escaped + checksum;
}

std::string ArenaFileName(const std::string& job, const std::string& node) {
  return "ropeteam-" + EscapeForFileName(job) + "-" + EscapeForFileName(node) + ".arena";
}

std::vector<ArenaListing> ListArenas(const std::string& directory) {
  std::vector<ArenaListing> arenas;
  DIR* entries = opendir(directory.c_str());
  if (entries == nullptr) return arenas;
  while (const dirent* entry = readdir(entries)) {
    const std::string name = entry->d_name;
    if (!name.starts_with("ropeteam-") || !name.ends_with(".arena")) continue;
    ArenaListing listing;
    listing.path = directory + "/" + name;
    struct stat info {};
    const Result<UniqueFd> fd = OpenOwn(listing.path, O_RDONLY, &info);
    if (!fd.ok()) continue;
    listing.bytes = static_cast<uint64_t>(info.st_blocks) * 512;
    listing.in_use = InUse(fd->get());
    ReadIdentity(fd->get(), &listing);
    arenas.push_back(std::move(listing));
  }
  closedir(entries);
  std::sort(arenas.begin(), arenas.end(), [](const auto& a, const auto& b) { return a.path < b.path; });
  return arenas;
}

uint64_t RecordedArenaBytes(int fd) {
  arena::Superblock superblock;
  return ReadSuperblock(fd, &superblock) ? superblock.memory_bytes : 0;
}

Status ShareArenaLock(int fd) {
  struct flock lock;
  if (LockFile(fd, F_OFD_SETLKW, F_RDLCK, &lock) != 0) return ErrnoError(errno, "share the lock of an arena");
  return OkStatus();
}

UniqueFd HoldArena(const std::string& path) {
  struct stat info {};
  Result<UniqueFd> fd = OpenOwn(path, O_RDONLY, &info);
  if (!fd.ok() || !ShareArenaLock(fd->get()).ok()) return UniqueFd();
  return std::move(*fd);
}

Status RemoveArena(const std::string& path) {
  struct stat info {};
  const Result<UniqueFd> fd = OpenOwn(path, O_RDWR, &info);
  if (!fd.ok()) return fd.status();
  struct flock lock;
  // While both locks are held, no daemon can take the file between the check and the removal. A new daemon
  // waits in ShareArenaLock(), and then sees that its file has no name any more.
  if (LockFile(fd->get(), F_OFD_SETLK, F_WRLCK, &lock) != 0 || flock(fd->get(), LOCK_EX | LOCK_NB) != 0)
    return Error(Code::kAlreadyExists, "arena %s is in use", path.c_str());
  struct stat named {};
  if (lstat(path.c_str(), &named) != 0 || named.st_ino != info.st_ino || named.st_dev != info.st_dev)
    return Error(Code::kAlreadyExists, "arena %s is in use: it was replaced just now", path.c_str());
  if (unlink(path.c_str()) != 0) return ErrnoError(errno, "remove arena %s", path.c_str());
  return OkStatus();
}

}  // namespace ropeteam
