// SPDX-License-Identifier: Apache-2.0
//
// What ropeteam_open() takes from the environment where its caller gives nothing: names set by `ropeteam run`
// and by launchers. Reads the environment only here, once per open.

#ifndef ROPETEAM_API_CLIENT_ENVIRONMENT_H_
#define ROPETEAM_API_CLIENT_ENVIRONMENT_H_

#include <cstdint>
#include <string>

#include "core/base/status.h"

namespace ropeteam::client {

struct OpenOptions {
  std::string socket;
  uint32_t rank = 0;
  uint32_t world_size = 0;
  std::string incarnation_token;
  int64_t timeout_ms = 0;
  uint32_t copy_threads = 1;  // of a put, the caller's among them (copy_team.h)
};

// ROPETEAM_SOCKET. kInvalidArgument: not set.
Result<std::string> SocketFromEnvironment();
// RANK or WORLD_SIZE, by `name`. kInvalidArgument: not set, or no number below 2^32; the value is named.
Result<uint32_t> NumberFromEnvironment(const char* name);
// The incarnation's token: ROPETEAM_INCARNATION_TOKEN; else Slurm's job, step and restart numbers as
// "slurm.JOB.STEP.RESTART"; else empty. Slurm's numbers are not used under torchrun: it restarts its
// workers within one step of Slurm's, so the numbers do not distinguish the incarnations.
std::string IncarnationTokenFromEnvironment();
// With how many threads a put is copied. ROPETEAM_COPY_THREADS, 1 to kCopyThreadsMax; without it 4, but not more
// than this rank's part of the processors: those that the process may run on, divided by LOCAL_WORLD_SIZE, which
// torchrun sets to the number of ranks on this node. Never more than the processors that the process may run on,
// and at least 1. kInvalidArgument: not a number from 1 to kCopyThreadsMax; the value and the limit are named.
Result<uint32_t> CopyThreadsFromEnvironment();

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_ENVIRONMENT_H_
