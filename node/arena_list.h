// SPDX-License-Identifier: Apache-2.0
//
// The arenas in a directory, and which of them are unused: for `ropeteam clean`, and for `--memory auto`, which counts
// their memory.
//
// An arena is in use while a process shares its lock: the daemon, from its start to its end, and the `ropeteam run`
// that starts the daemon again. The kernel drops the lock with the process, so no pid is ever asked. It is an open file
// description lock (fcntl(2)), which can be tested without taking it. Taking it would disturb a daemon that starts at the
// same moment.
//
// Safe from any thread.

#ifndef ROPETEAM_NODE_ARENA_LIST_H_
#define ROPETEAM_NODE_ARENA_LIST_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "core/base/status.h"
#include "node/unique_fd.h"

namespace ropeteam {

// `text` with every byte outside A-Z a-z 0-9 . _ - as %XX; over 100 bytes cut, with a checksum in place of
// the rest.
std::string EscapeForFileName(std::string_view text);
std::string ArenaFileName(const std::string& job, const std::string& node);

struct ArenaListing {
  std::string path;
  uint64_t bytes = 0;  // of memory that the file holds
  bool in_use = false;
  // From the superblock. Both empty where there is no intact one: such a file holds no shard that could be read.
  std::string job;
  std::string node;
};

// This user's arenas in `directory`, by path. A directory that cannot be read has none.
std::vector<ArenaListing> ListArenas(const std::string& directory);

// Shares the lock for as long as `fd`, of an arena's file, is open. Waits while another process removes the file,
// which takes microseconds; the caller then looks whether the file still has its name. kIo.
Status ShareArenaLock(int fd);
// The same with a descriptor of its own. An invalid one where the file cannot be opened or locked.
UniqueFd HoldArena(const std::string& path);

// Removes an unused arena; its memory is free once no process maps it. kAlreadyExists: it is in use.
// kInvalidArgument: it is not a file of this user. kIo.
Status RemoveArena(const std::string& path);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_ARENA_LIST_H_
