// SPDX-License-Identifier: Apache-2.0
//
// `ropeteam clean`: frees the memory of jobs that have ended.

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "api/cli/arenas.h"
#include "api/cli/commands.h"
#include "api/cli/etcd_member.h"
#include "api/cli/sockets.h"
#include "core/base/sizes.h"

namespace ropeteam::cli {
namespace {

constexpr char kHelp[] =
    "ropeteam clean [--job JOB | --all-ended] [--dry-run]: removes unused arenas, sockets and data of "
    "etcd\n"
    "\n"
    "An arena is in use while its daemon runs, or a `ropeteam run` that would start the daemon again. What "
    "another\n"
    "user has is neither listed nor removed. A job that is to go on from its memory later must be left "
    "alone: it is\n"
    "not in use in between. Without --job and --all-ended nothing is removed, and what would be is listed.\n"
    "\n"
    "  --job JOB         of this job alone; exit code 1 when it is in use\n"
    "  --all-ended       of every job that is not running\n"
    "  --dry-run         only say what would be removed\n"
    "  --arena-path DIR  where the arenas are [ROPETEAM_ARENA_PATH, /dev/shm]\n";

struct CleanOptions {
  std::string job;
  bool all_ended = false;
  bool dry_run = false;
  std::string directory;
  bool help = false;
};

Result<CleanOptions> Parse(const std::vector<std::string>& arguments) {
  CleanOptions options;
  options.directory = ArenaDirectory();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const size_t equals = argument.find('=');
    const std::string name = argument.substr(0, equals);
    if (name == "--job" || name == "--arena-path") {
      if (equals == std::string::npos && i + 1 == arguments.size())
        return Error(Code::kInvalidArgument, "%s has no value", name.c_str());
      std::string& value = name == "--job" ? options.job : options.directory;
      value = equals == std::string::npos ? arguments[++i] : argument.substr(equals + 1);
      if (value.empty()) return Error(Code::kInvalidArgument, "%s has no value", name.c_str());
    } else if (argument == "--all-ended") {
      options.all_ended = true;
    } else if (argument == "--dry-run") {
      options.dry_run = true;
    } else if (argument == "--help" || argument == "-h") {
      options.help = true;
    } else {
      return Error(Code::kInvalidArgument, "%.80s was not expected", argument.c_str());
    }
  }
  if (options.all_ended && !options.job.empty())
    return Error(Code::kInvalidArgument, "--job and --all-ended exclude each other");
  if (options.job.empty() && !options.all_ended) options.dry_run = true;
  return options;
}

// A file without an intact superblock holds no shard. Then its name is enough, although it may match two
// jobs.
bool IsMeant(const CleanOptions& options, const ArenaListing& arena) {
  if (options.job.empty()) return true;
  if (!arena.job.empty()) return arena.job == options.job;
  return arena.path.starts_with(options.directory + "/ropeteam-" + EscapeForFileName(options.job) + "-");
}

std::string Describe(const ArenaListing& arena) {
  const std::string names =
      arena.job.empty() ? "no intact arena" : "job " + arena.job + " node " + arena.node;
  return FormatSize(arena.bytes) + "  " + names + "  " + arena.path;
}

// Returns the exit code.
int CleanArenas(const CleanOptions& options) {
  const char* verb = options.dry_run ? "would remove" : "removed";
  uint64_t freed = 0;
  int code = 0;
  for (const ArenaListing& arena : ListArenas(options.directory)) {
    if (!IsMeant(options, arena)) continue;
    Status status;
    if (arena.in_use)
      status = Error(Code::kAlreadyExists, "in use");
    else if (!options.dry_run)
      status = RemoveArena(arena.path);
    if (status.ok()) {
      freed += arena.bytes;
      std::printf("%s  %s\n", verb, Describe(arena).c_str());
    } else if (status.code() == Code::kAlreadyExists) {
      std::printf("in use, stays  %s\n", Describe(arena).c_str());
      if (!options.job.empty()) code = kExitFailed;
    } else {
      std::fprintf(stderr, "ropeteam clean: %s\n", status.message().c_str());
      code = kExitFailed;
    }
  }
  std::printf("%s of memory %s\n", FormatSize(freed).c_str(), options.dry_run ? "would be freed" : "freed");
  return code;
}

// No job can use a dead socket, so its name is enough to choose it.
int CleanSockets(const CleanOptions& options) {
  int code = 0;
  for (const std::string& path : ListSockets()) {
    const std::string name = path.substr(path.rfind('/') + 1);
    if (!options.job.empty() && !name.starts_with(EscapeForFileName(options.job) + "-")) continue;
    if (!SocketIsDead(path)) continue;
    if (!options.dry_run && unlink(path.c_str()) != 0 && errno != ENOENT) {
      std::fprintf(stderr, "ropeteam clean: %s: %s\n", path.c_str(), std::strerror(errno));
      code = kExitFailed;
      continue;
    }
    std::printf("%s  socket  %s\n", options.dry_run ? "would remove" : "removed", path.c_str());
  }
  return code;
}

// Removes data of --start-etcd whose `ropeteam run` was killed.
int CleanEtcd(const CleanOptions& options) {
  int code = 0;
  for (const std::string& directory : ListEtcdDirectories()) {
    const std::string of = EtcdDirectoryName(options.job, 0);
    const std::string name = std::filesystem::path(directory).filename();
    const bool meant = options.job.empty() || (name.size() == of.size() &&
                                               name.compare(0, of.size() - 1, of, 0, of.size() - 1) == 0);
    if (!meant) continue;
    const client::UniqueFd lock = LockEtcdDirectory(directory);
    if (!lock.valid()) {
      std::printf("in use, stays  etcd  %s\n", directory.c_str());
      if (!options.job.empty()) code = kExitFailed;
      continue;
    }
    std::error_code error;
    if (!options.dry_run) std::filesystem::remove_all(directory, error);
    if (error) {
      std::fprintf(stderr, "ropeteam clean: %s: %s\n", directory.c_str(), error.message().c_str());
      code = kExitFailed;
      continue;
    }
    std::printf("%s  etcd  %s\n", options.dry_run ? "would remove" : "removed", directory.c_str());
  }
  return code;
}

}  // namespace

int CleanCommand(const std::vector<std::string>& arguments) {
  const Result<CleanOptions> options = Parse(arguments);
  if (!options.ok()) {
    std::fprintf(stderr, "ropeteam clean: %s (ropeteam clean --help)\n", options.status().message().c_str());
    return kExitUsage;
  }
  if (options->help) {
    std::fputs(kHelp, stdout);
    return 0;
  }
  const int sockets = CleanSockets(*options);
  const int etcd = CleanEtcd(*options);
  const int arenas = CleanArenas(*options);
  if (options->job.empty() && !options->all_ended)
    std::printf("to remove them: ropeteam clean --all-ended, or --job JOB\n");
  return std::max({sockets, etcd, arenas});
}

}  // namespace ropeteam::cli
