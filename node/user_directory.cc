// SPDX-License-Identifier: Apache-2.0
#include "node/user_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>

namespace ropeteam {
namespace {

const char* KindOf(mode_t mode) {
  return S_ISDIR(mode)    ? "a directory"
         : S_ISREG(mode)  ? "a file"
         : S_ISLNK(mode)  ? "a symbolic link"
         : S_ISSOCK(mode) ? "a socket"
                          : "a special file";
}

std::string TemporaryDirectory() { return "/tmp/ropeteam-" + std::to_string(geteuid()); }

Result<std::string> Make(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST)
    return ErrnoError(errno, "make directory %s", path.c_str());
  const Status own = CheckOwnDirectory(path);
  if (own.ok()) return path;
  struct stat info {};
  if (lstat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode) && info.st_uid == geteuid())
    return Error(own.code(), "%s: chmod 700 %s", own.message().c_str(), path.c_str());
  return Error(own.code(),
               "%s: have its owner or root remove it, or set XDG_RUNTIME_DIR to a directory of your own",
               own.message().c_str());
}

}  // namespace

std::string DescribePath(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return "nothing that can be examined";
  char text[80];
  std::snprintf(text, sizeof(text), "%s of uid %u (mode %04o)", KindOf(info.st_mode), info.st_uid,
                info.st_mode & 07777);
  return text;
}

Status CheckOwnDirectory(const std::string& path) {
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) return ErrnoError(errno, "%s", path.c_str());
  if (S_ISDIR(info.st_mode) && info.st_uid == geteuid() && (info.st_mode & 0077) == 0) return OkStatus();
  return Error(Code::kInvalidArgument, "%s is %s, not a directory of uid %u alone (mode 0700)", path.c_str(),
               DescribePath(path).c_str(), geteuid());
}

std::string RuntimeDirectory() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  struct stat info {};
  // A program that was started by su or sudo may have the variable of the former user.
  if (runtime != nullptr && runtime[0] == '/' && stat(runtime, &info) == 0 && S_ISDIR(info.st_mode) &&
      info.st_uid == geteuid())
    return std::string(runtime) + "/ropeteam";
  return TemporaryDirectory();
}

std::vector<std::string> UserDirectories() {
  std::vector<std::string> all = {RuntimeDirectory()};
  if (all.front() != TemporaryDirectory()) all.push_back(TemporaryDirectory());
  return all;
}

Result<std::string> MakeRuntimeDirectory() { return Make(RuntimeDirectory()); }

Result<std::string> MakeDataDirectory() {
  Result<std::string> made = Make(TemporaryDirectory());
  if (made.ok() || RuntimeDirectory() == TemporaryDirectory()) return made;
  return MakeRuntimeDirectory();
}

}  // namespace ropeteam
