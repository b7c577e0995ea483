// SPDX-License-Identifier: Apache-2.0
//
// What the commands know of the files that daemons leave in memory, and of this user's directories: the daemon's own
// code, so that both mean the same by a name and a lock.

#ifndef ROPETEAM_API_CLI_ARENAS_H_
#define ROPETEAM_API_CLI_ARENAS_H_

#include "node/arena_list.h"
#include "node/user_directory.h"

#endif  // ROPETEAM_API_CLI_ARENAS_H_
