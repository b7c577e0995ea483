// SPDX-License-Identifier: Apache-2.0
#include "api/client/environment.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "api/client/copy_team.h"

namespace ropeteam::client {
namespace {

// Null also for an empty variable: `VAR= command` is how a shell user unsets one.
const char* Variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

// False: it is not a number below 2^32.
bool ParseNumber(const char* value, uint32_t* number) {
  const char* end = value + std::strlen(value);
  const auto [stop, error] = std::from_chars(value, end, *number);
  return error == std::errc() && stop == end;
}

// Processors that this thread may run on.
uint32_t AllowedProcessors() {
  constexpr int kProcessorsMax = 16384;
  cpu_set_t* set = CPU_ALLOC(kProcessorsMax);
  const size_t bytes = CPU_ALLOC_SIZE(kProcessorsMax);
  const bool known = set != nullptr && ::sched_getaffinity(0, bytes, set) == 0;
  const long count = known ? CPU_COUNT_S(bytes, set) : ::sysconf(_SC_NPROCESSORS_ONLN);
  if (set != nullptr) CPU_FREE(set);
  return static_cast<uint32_t>(std::max(count, 1L));
}

}  // namespace

Result<std::string> SocketFromEnvironment() {
  if (const char* value = Variable("ROPETEAM_SOCKET")) return std::string(value);
  return Error(Code::kInvalidArgument,
               "no socket given and ROPETEAM_SOCKET is not set; `ropeteam run` sets it");
}

Result<uint32_t> NumberFromEnvironment(const char* name) {
  const char* value = Variable(name);
  if (value == nullptr) return Error(Code::kInvalidArgument, "%s is not given and not set", name);
  uint32_t number = 0;
  if (!ParseNumber(value, &number)) {
    return Error(Code::kInvalidArgument, "%s is '%s', not a number below 2^32", name, value);
  }
  return number;
}

std::string IncarnationTokenFromEnvironment() {
  if (const char* value = Variable("ROPETEAM_INCARNATION_TOKEN")) return value;
  const char* job = Variable("SLURM_JOB_ID");
  const char* step = Variable("SLURM_STEP_ID");
  if (job == nullptr || step == nullptr || Variable("TORCHELASTIC_RUN_ID") != nullptr) return {};
  const char* restart = Variable("SLURM_RESTART_COUNT");
  return std::string("slurm.") + job + "." + step + "." + (restart != nullptr ? restart : "0");
}

Result<uint32_t> CopyThreadsFromEnvironment() {
  // A few cores can use all of a socket's memory bandwidth, and the node's other ranks copy at the same time.
  constexpr uint32_t kThreadsDefault = 4;
  const uint32_t processors = AllowedProcessors();
  if (const char* value = Variable("ROPETEAM_COPY_THREADS")) {
    uint32_t threads = 0;
    if (!ParseNumber(value, &threads) || threads < 1 || threads > kCopyThreadsMax) {
      return Error(Code::kInvalidArgument, "ROPETEAM_COPY_THREADS is '%s', not a number from 1 to %u", value,
                   kCopyThreadsMax);
    }
    return std::min(threads, processors);
  }
  // All ranks of a node save at the same time, because their training loops run in lockstep.
  uint32_t ranks = 1;
  const char* local = Variable("LOCAL_WORLD_SIZE");
  if (local != nullptr && !ParseNumber(local, &ranks)) ranks = 1;  // not ours to check
  return std::clamp(processors / std::max(ranks, 1u), 1u, kThreadsDefault);
}

}  // namespace ropeteam::client
