// SPDX-License-Identifier: Apache-2.0
//
// Identifies a process, so that another one on the same machine can tell whether it is gone.

#ifndef ROPETEAM_STORAGE_LOCK_PROCESS_MARK_H_
#define ROPETEAM_STORAGE_LOCK_PROCESS_MARK_H_

#include <cstdint>
#include <string>

namespace ropeteam::storage {

struct ProcessMark {
  std::string boot;           // the kernel's boot id; empty: unknown, which matches nothing
  std::string pid_namespace;  // "pid:[4026531836]"
  int64_t pid = 0;            // in that namespace
  uint64_t started = 0;       // field 22 of /proc/PID/stat: pids are used again
  friend bool operator==(const ProcessMark&, const ProcessMark&) = default;
};

// The mark of this process. `boot` is empty if /proc is missing or belongs to another pid namespace.
ProcessMark OwnProcess();

// True only when it is certain: `mark` is of this boot and of `own`'s pid namespace, and its pid is free or belongs to
// a process that was started at another time.
bool IsGone(const ProcessMark& mark, const ProcessMark& own);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_LOCK_PROCESS_MARK_H_
