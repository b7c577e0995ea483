// SPDX-License-Identifier: Apache-2.0
#include "core/base/check.h"

#include <cstdio>
#include <cstdlib>

#include "core/base/log.h"

namespace ropeteam {

void CheckFailed(const char* expression, const char* file, int line) {
  LOG_ERROR("check failed %s at %s:%d", expression, file, line);
  std::fprintf(stderr, "ropeteam: check failed: %s at %s:%d\n", expression, file, line);
  std::abort();
}

}  // namespace ropeteam
