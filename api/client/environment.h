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
  std::string life;
  int64_t timeout_ms = 0;
};

// ROPETEAM_SOCKET. kInvalidArgument: not set.
Result<std::string> SocketFromEnvironment();
// RANK or WORLD_SIZE, by `name`. kInvalidArgument: not set, or no number below 2^32; the value is named.
Result<uint32_t> NumberFromEnvironment(const char* name);
// ROPETEAM_LIFE; else Slurm's job, step and restart numbers as "slurm.JOB.STEP.RESTART"; else empty. Slurm's
// are left alone under torchrun: it starts the world anew within one step of Slurm's, so they do not tell its
// lives apart.
std::string LifeFromEnvironment();

}  // namespace ropeteam::client

#endif  // ROPETEAM_API_CLIENT_ENVIRONMENT_H_
