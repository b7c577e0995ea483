// SPDX-License-Identifier: Apache-2.0
//
// Finds work on storage that makes no progress, for example because a file system hangs and the kernel does not return
// from a call. Each work records the time of its last progress: a thread took it, a call of the sink for it began or
// returned, or it continued after an intended wait (Moved()).
//
// Work in a queue hangs only if the queue does. So a waiting part takes over the last progress of all threads that
// handle such parts, and a waiting work that of all running works.

#ifndef ROPETEAM_NODE_STORAGE_WATCH_H_
#define ROPETEAM_NODE_STORAGE_WATCH_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "storage/sink.h"

namespace ropeteam {

// Thread-safe. Must outlive the sinks that it watches.
class StorageWatch {
 public:
  using Time = std::chrono::steady_clock::time_point;
  // Work that still stalls is reported again after this time.
  static constexpr std::chrono::seconds kToldAgain{60};

  // Each kind has a queue and threads of its own; a work has parts of one kind.
  enum class Parts { kRead, kWritten };

  struct Work {
    uint64_t tag = 0;
    std::atomic<Time> moved;
    bool taken = false;  // by a thread
    Parts parts = Parts::kRead;
    uint32_t parts_waiting = 0;  // for a thread
    std::optional<Time> told;    // when this stall was reported
  };

  // `stalled_after`: longer than any call of a sink that keeps its deadline.
  explicit StorageWatch(std::chrono::seconds stalled_after) : stalled_after_(stalled_after) {}

  // A work waits for a thread from Add() on. It runs on the calling thread from Take() to Remove().
  Work* Add(uint64_t tag);
  void Take(Work* work);
  void Remove(Work* work);
  // The work of the calling thread; null: none.
  static Work* Current();
  // A part of the work waits for a thread. It runs on the calling thread between the other two calls.
  void AddPart(Work* work, Parts parts);
  void TakePart(Work* work, Parts parts);
  void EndPart();
  // The calling thread's work makes progress. It takes no lock: the thread may have the lowest priority, and a caller
  // of Stalled() would have to wait until it gets a processor.
  void Moved();

  // Wraps `below`: each call is progress of the calling thread's work. Returns null for null.
  std::shared_ptr<storage::Sink> Watched(std::shared_ptr<storage::Sink> below);

  // Tags of the works without progress for `stalled_after`: once per stall, and again every kToldAgain.
  std::vector<uint64_t> Stalled(Time now);
  size_t works() const;  // waiting or running

  StorageWatch(const StorageWatch&) = delete;
  StorageWatch& operator=(const StorageWatch&) = delete;

 private:
  Time LastMoved(const Work& work) const;
  const std::chrono::seconds stalled_after_;
  mutable std::mutex mutex_;
  std::list<Work> works_;  // guarded by mutex_, but for `moved`
  // By Parts: the last progress of any thread that handles such parts.
  std::array<std::atomic<Time>, 2> parts_moved_{};
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_STORAGE_WATCH_H_
