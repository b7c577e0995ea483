// SPDX-License-Identifier: Apache-2.0
//
// Threads that compute checksums of arena memory for the Engine, off its thread. Ranges of one check are
// spread over all threads; checks are begun in the order they came. Submit() is safe from any thread.

#ifndef ROPETEAM_NODE_CHECK_WORKERS_H_
#define ROPETEAM_NODE_CHECK_WORKERS_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

#include "core/engine/engine.h"

namespace ropeteam {

class CheckWorkers {
 public:
  // `bad`: indices into the ranges that do not match, sorted; a range outside the memory is one. Called on a
  // worker.
  using Done = std::function<void(uint64_t tag, std::vector<uint32_t> bad)>;

  // `memory` must outlive the workers.
  CheckWorkers(std::span<const std::byte> memory, uint32_t threads, Done done);
  ~CheckWorkers();  // drops what has not begun; no Done after the return

  void Submit(StartCheck check);

  CheckWorkers(const CheckWorkers&) = delete;
  CheckWorkers& operator=(const CheckWorkers&) = delete;

 private:
  struct Job {
    StartCheck check;
    size_t next = 0;       // range not yet taken
    size_t remaining = 0;  // ranges not yet done
    std::vector<uint32_t> bad;
  };
  void Run();
  bool Matches(const StartCheck::Range& range) const;

  const std::span<const std::byte> memory_;
  const Done done_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;  // those with ranges not yet taken; guarded by mutex_
  bool stop_ = false;                      // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_CHECK_WORKERS_H_
