// SPDX-License-Identifier: Apache-2.0
//
// Lists the arenas in a directory and finds the unused ones, for `ropeteam clean`, and for `--memory auto`, which
// counts their memory.
//
// An arena is in use while a process shares its lock: the daemon, from its start to its end, and the `ropeteam run`
// that restarts the daemon. The kernel releases the lock with the process, so no pid is checked. It is an open file
// description lock (fcntl(2)), which can be tested without taking it. Taking it would disturb a daemon that starts at
// the same moment.
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

// `text` with every byte outside A-Z a-z 0-9 . _ - as %XX. Over 100 bytes, the rest is replaced by a checksum.
std::string EscapeForFileName(std::string_view text);
std::string ArenaFileName(const std::string& job, const std::string& node);

struct ArenaListing {
  std::string path;
  uint64_t bytes = 0;  // memory that the file occupies
  bool in_use = false;
  // From the superblock. Both are empty if it is not intact: such a file has no readable shard.
  std::string job;
  std::string node;
};

// This user's arenas in `directory`, by path. A directory that cannot be read has none.
std::vector<ArenaListing> ListArenas(const std::string& directory);

// The size of the file, as its superblock says it. 0: it has no intact superblock.
uint64_t RecordedArenaBytes(int fd);

// Shares the lock as long as `fd`, of an arena's file, is open. Waits while another process removes the file, which
// takes microseconds. Check afterwards whether the file still has its name. kIo.
Status ShareArenaLock(int fd);
// The same with a new descriptor. It is invalid if the file cannot be opened or locked.
UniqueFd HoldArena(const std::string& path);

// Removes an unused arena. Its memory is free once no process maps it. kAlreadyExists: it is in use. kInvalidArgument:
// it is not a file of this user. kIo.
Status RemoveArena(const std::string& path);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_ARENA_LIST_H_
