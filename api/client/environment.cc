// SPDX-License-Identifier: Apache-2.0
#include "api/client/environment.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

namespace ropeteam::client {
namespace {

// Null for a variable that is empty too: `VAR= command` is how a shell user unsets one.
const char* Variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
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
  const char* end = value + std::strlen(value);
  const auto [stop, error] = std::from_chars(value, end, number);
  if (error != std::errc() || stop != end) {
    return Error(Code::kInvalidArgument, "%s is '%s', not a number below 2^32", name, value);
  }
  return number;
}

std::string LifeFromEnvironment() {
  if (const char* value = Variable("ROPETEAM_LIFE")) return value;
  const char* job = Variable("SLURM_JOB_ID");
  const char* step = Variable("SLURM_STEP_ID");
  if (job == nullptr || step == nullptr || Variable("TORCHELASTIC_RUN_ID") != nullptr) return {};
  const char* restart = Variable("SLURM_RESTART_COUNT");
  return std::string("slurm.") + job + "." + step + "." + (restart != nullptr ? restart : "0");
}

}  // namespace ropeteam::client
