// SPDX-License-Identifier: Apache-2.0
#include "core/base/ids.h"

namespace ropeteam {

std::string ShardId::ToString() const {
  return "step " + std::to_string(step) + " rank " + std::to_string(rank) + " incarnation " +
         std::to_string(IncarnationNumber(incarnation));
}

std::string StepId::ToString() const {
  return "step " + std::to_string(step) + " incarnation " + std::to_string(IncarnationNumber(incarnation));
}

}  // namespace ropeteam
