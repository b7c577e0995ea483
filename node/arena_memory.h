// SPDX-License-Identifier: Apache-2.0
//
// Makes a mapped arena resident before the first save: a first touch costs 0.1–2 GB/s on virtual machines,
// and no page fault may happen in the steady state of a save.

#ifndef ROPETEAM_NODE_ARENA_MEMORY_H_
#define ROPETEAM_NODE_ARENA_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <istream>
#include <span>
#include <string>

#include "core/base/status.h"

namespace ropeteam {

// Bytes that this process could still have resident, and what sets that limit: the host's free memory or the
// control group's. UINT64_MAX when neither is known.
uint64_t AvailableMemory(std::string* limited_by);

// The part of AvailableMemory() that control groups decide: the least that a group of this process, or one
// above it, leaves. `membership` is as /proc/self/cgroup, `mount` where control groups of version 2 are
// mounted, or the controllers of version 1 by name. Memory that the kernel takes back on demand (the cache of
// files that were read) counts as left: a pod that has read its data set is at its limit all the time.
// UINT64_MAX when nothing limits it.
uint64_t MemoryLeftByControlGroups(std::istream& membership, const std::string& mount);

// Requests huge pages and, if there is more than one NUMA node, spreads the memory over all of them; logs the
// result. `fd` is the file behind `memory`. A refusal is not an error: the arena works without.
void AdviseMemory(std::span<std::byte> memory);

// Faults all of `memory` (a shared mapping of `fd` from offset 0) in, in parallel, for writing; bytes that
// are there stay. Logs progress and rate. kNoSpace: the file system or the host has no more; how far it came
// is in the message. `progress` (may be empty) is called by the threads that do it.
Status PopulateMemory(int fd, std::span<std::byte> memory,
                      const std::function<void(uint64_t done, uint64_t total)>& progress = {});

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_ARENA_MEMORY_H_
