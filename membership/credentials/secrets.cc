// SPDX-License-Identifier: Apache-2.0
#include "membership/credentials/secrets.h"

#include <string.h>
#include <unistd.h>

#include <cstdlib>
#include <string_view>

namespace ropeteam {
namespace {

constexpr char kJobKey[] = "ROPETEAM_JOB_KEY";
constexpr char kEtcdPassword[] = "ROPETEAM_ETCD_PASSWORD";

std::string Take(const char* name) {
  const std::string prefix = std::string(name) + "=";
  std::string taken;
  // A variable may be there twice: getenv() would find the first one only.
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    if (!std::string_view(*entry).starts_with(prefix)) continue;
    char* value = *entry + prefix.size();
    if (taken.empty()) taken = value;
    explicit_bzero(value, std::string_view(value).size());
  }
  unsetenv(name);
  return taken;
}

}  // namespace

Secrets TakeSecrets() { return {Take(kJobKey), Take(kEtcdPassword)}; }

void GiveSecrets(const Secrets& secrets) {
  if (!secrets.job_key.empty()) setenv(kJobKey, secrets.job_key.c_str(), 1);
  if (!secrets.etcd_password.empty()) setenv(kEtcdPassword, secrets.etcd_password.c_str(), 1);
}

}  // namespace ropeteam
