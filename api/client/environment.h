// SPDX-License-Identifier: Apache-2.0
//
// The values that ropeteam_open() takes from the environment if its caller gives none: names set by `ropeteam run` and
// by launchers. The environment is read only here, once per open.

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
  uint32_t copy_threads = 1;  // for a put, the caller's thread included (copy_team.h)
};

// ROPETEAM_SOCKET. kInvalidArgument: not set.
Result<std::string> SocketFromEnvironment();
// RANK or WORLD_SIZE, by `name`. kInvalidArgument: not set, or not a number below 2^32; the message has the value.
Result<uint32_t> NumberFromEnvironment(const char* name);
// The incarnation's token: ROPETEAM_INCARNATION_TOKEN; else Slurm's job, step and restart numbers as
// "slurm.JOB.STEP.RESTART"; else empty. Slurm's numbers are not used under torchrun: it restarts its
// workers within one step of Slurm's, so the numbers do not distinguish the incarnations.
std::string IncarnationTokenFromEnvironment();
// The number of threads that copy a put: ROPETEAM_COPY_THREADS, 1 to kCopyThreadsMax. Without it 4, but at most this
// rank's share of the processors. The share is the number of processors that the process may use, divided by
// LOCAL_WORLD_SIZE, which torchrun sets to the number of ranks on this node. Never more than the processors that the
// process may use, and at least 1. kInvalidArgument: not a number from 1 to kCopyThreadsMax; the message has the value
// and the limit.
Result<uint32_t> CopyThreadsFromEnvironment();

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_ENVIRONMENT_H_
