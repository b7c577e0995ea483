// SPDX-License-Identifier: Apache-2.0
//
// The highest number of an incarnation that a message may name.

#ifndef ROPETEAM_CORE_ENGINE_INCARNATION_LIMIT_H_
#define ROPETEAM_CORE_ENGINE_INCARNATION_LIMIT_H_

#include "core/base/ids.h"

namespace ropeteam::engine {

// Epochs that count milliseconds reach it after 278 years. What names a higher one is damaged, and counting on from
// there would overflow.
inline constexpr Incarnation kIncarnationMax = Incarnation{1} << 63;

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_INCARNATION_LIMIT_H_
