// SPDX-License-Identifier: Apache-2.0
//
// The S3 sink's access to its process: variables and the time of day. Passed in, so that a test can replace them.

#ifndef ROPETEAM_STORAGE_S3_ENVIRONMENT_H_
#define ROPETEAM_STORAGE_S3_ENVIRONMENT_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace ropeteam::storage::s3 {

struct Environment {
  // A variable's value; nullopt if it is not set. Thread-safe as long as no thread changes the environment.
  std::function<std::optional<std::string>(const std::string& name)> variable;
  // Seconds since 1970, as signatures and expiry times count them. Thread-safe.
  std::function<int64_t()> now;

  // Set and not empty: an empty AWS_PROFILE means none, as for AWS's own tools.
  std::optional<std::string> NonEmpty(const std::string& name) const {
    std::optional<std::string> value = variable(name);
    if (value && value->empty()) value.reset();
    return value;
  }
};

// getenv() and the system's clock.
Environment ProcessEnvironment();

}  // namespace ropeteam::storage::s3

#endif  // ROPETEAM_STORAGE_S3_ENVIRONMENT_H_
