// SPDX-License-Identifier: Apache-2.0
//
// Finds work on storage that makes no progress, for example because a file system hangs and the kernel does not return
// from a call. Each work has the time of its last progress: when a thread took it, when a call of the sink for it began or
// returned, or when it continued after an intended wait (Moved()).
//
// Work that waits in a queue hangs only when the queue does. So a waiting part has the last progress of all threads that
// move such parts, and a waiting work that of all works that threads have taken.

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
  // A work that still stalls is told again after this time.
  static constexpr std::chrono::seconds kToldAgain{60};

  // Each kind has a queue and threads of its own; a work has parts of one kind.
  enum class Parts { kRead, kWritten };

  struct Work {
    uint64_t tag = 0;
    std::atomic<Time> moved;
    bool taken = false;  // by a thread
    Parts parts = Parts::kRead;
    uint32_t parts_waiting = 0;  // for a thread
    std::optional<Time> told;    // in this stall
  };

  // `stalled_after`: longer than any call of a sink may take that keeps its deadline.
  explicit StorageWatch(std::chrono::seconds stalled_after) : stalled_after_(stalled_after) {}

  // A work waits for a thread from Add() on, and runs on the calling thread from Take() to Remove().
  Work* Add(uint64_t tag);
  void Take(Work* work);
  void Remove(Work* work);
  // Of the calling thread; null: it runs none.
  static Work* Current();
  // A part of the work waits for a thread; it runs on the calling thread between the other
  // two.
  void AddPart(Work* work, Parts parts);
  void TakePart(Work* work, Parts parts);
  void EndPart();
  // The calling thread's work makes progress. Without a lock: the thread may have the lowest priority, and a caller of
  // Stalled() would wait until it gets a processor.
  void Moved();

  // Wraps `below`: each call is progress of the calling thread's work. Null for null.
  std::shared_ptr<storage::Sink> Watched(std::shared_ptr<storage::Sink> below);

  // Tags of the works that have made no progress for `stalled_after`: once for each stall, and again every kToldAgain.
  std::vector<uint64_t> Stalled(Time now);
  size_t works() const;  // that wait or run

  StorageWatch(const StorageWatch&) = delete;
  StorageWatch& operator=(const StorageWatch&) = delete;

 private:
  Time LastMoved(const Work& work) const;
  const std::chrono::seconds stalled_after_;
  mutable std::mutex mutex_;
  std::list<Work> works_;                           // guarded by mutex_, but for `moved`
  std::array<std::atomic<Time>, 2> parts_moved_{};  // by Parts: any thread's that moves such parts
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_STORAGE_WATCH_H_
