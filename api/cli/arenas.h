// SPDX-License-Identifier: Apache-2.0
//
// What the commands know of the files that daemons leave in memory, and of this user's directories: the daemon's own
// code, so that both mean the same by a name and a lock.

#ifndef ROPETEAM_API_CLI_ARENAS_H_
#define ROPETEAM_API_CLI_ARENAS_H_

#include <cstdlib>
#include <string>

#include "node/arena_list.h"
#include "node/user_directory.h"

namespace ropeteam::cli {

// Where arenas are unless an option says otherwise.
inline std::string ArenaDirectory() {
  const char* told = std::getenv("ROPETEAM_ARENA_PATH");
  return told != nullptr && told[0] != '\0' ? told : "/dev/shm";
}

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_ARENAS_H_
