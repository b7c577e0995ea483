// SPDX-License-Identifier: Apache-2.0
//
// The end of a daemon whose arena was truncated. A rank has a descriptor of the arena's file that is open for writing, and
// runs as the daemon's user, so nothing keeps it from ftruncate(). (Seals are for memory files without a name, and an
// arena has a name, because it outlives every process.) Each access behind the new end raises SIGBUS.

#ifndef ROPETEAM_NODE_ARENA_GUARD_H_
#define ROPETEAM_NODE_ARENA_GUARD_H_

#include <cstddef>
#include <span>
#include <string>

namespace ropeteam {

// The exit code of a daemon whose arena was truncated. `ropeteam run` starts another one, which takes over the rest
// (ArenaFile::Open).
inline constexpr int kExitTruncated = 7;

// From now on a SIGBUS in `memory`, a mapping of the file `path`, ends the process with kExitTruncated and a line on
// stderr, in place of a crash. Any other SIGBUS has the effect that it had before. Replaces the memory of an earlier call.
// Call it from one thread.
void GuardArena(std::span<const std::byte> memory, const std::string& path);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_ARENA_GUARD_H_
