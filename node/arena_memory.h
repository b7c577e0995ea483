// SPDX-License-Identifier: Apache-2.0
//
// Makes a mapped arena resident before the first save. A first touch runs at 0.1–2 GB/s on virtual machines, and a save
// must cause no page fault in the steady state.

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

// How many more bytes this process could have resident, and what limits it: the host's free memory or the control
// group's. UINT64_MAX if neither is known.
uint64_t AvailableMemory(std::string* limited_by);

// The limit of AvailableMemory() set by control groups: the least that a group of this process, or one above it, has
// left. `membership` is as /proc/self/cgroup. `mount` is the mount point of control groups version 2, or of the
// controllers of version 1 by name. Memory that the kernel can reclaim (the cache of files that were read) counts as
// available: a pod that has read its data set is always at its limit. UINT64_MAX if there is no limit.
uint64_t MemoryLeftByControlGroups(std::istream& membership, const std::string& mount);

// Requests huge pages and, if there is more than one NUMA node, spreads the memory over all of them; logs the
// result. `fd` is the file behind `memory`. A refusal is not an error: the arena works without.
void AdviseMemory(std::span<std::byte> memory);

// Faults in all of `memory` (a shared mapping of `fd` from offset 0), in parallel, for writing; existing bytes stay.
// Logs progress and rate. kNoSpace: the file system or the host has no more memory; the message has the progress.
// Several threads call `progress` (may be empty).
Status PopulateMemory(int fd, std::span<std::byte> memory,
                      const std::function<void(uint64_t done, uint64_t total)>& progress = {});

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_ARENA_MEMORY_H_
