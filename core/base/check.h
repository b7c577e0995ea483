// SPDX-License-Identifier: Apache-2.0
//
// ROPETEAM_CHECK is for our own bugs and stays on in release: a store that goes on after a broken invariant
// would hand out wrong bytes. What the world does (a dead peer, a full disk, garbage on a socket) is a
// Status, never a CHECK.

#ifndef ROPETEAM_CORE_BASE_CHECK_H_
#define ROPETEAM_CORE_BASE_CHECK_H_

namespace ropeteam {
[[noreturn]] void CheckFailed(const char* expression, const char* file, int line);
}  // namespace ropeteam

#define ROPETEAM_CHECK(condition)                    \
  (__builtin_expect(static_cast<bool>(condition), 1) \
       ? static_cast<void>(0)                        \
       : ::ropeteam::CheckFailed(#condition, __FILE__, __LINE__))

#endif  // ROPETEAM_CORE_BASE_CHECK_H_
