// SPDX-License-Identifier: Apache-2.0
//
// Threads that compute checksums of arena memory for the Engine, and encrypt and decrypt it, off the Engine's thread.
// All threads share the ranges of one check. Checks and tasks begin in the order of Submit() and Run(), which are safe
// from any thread.

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
#include "node/replica_cipher.h"

namespace ropeteam {

class CheckWorkers {
 public:
  // As Engine::OnCheckDone(). `bad` is sorted and includes ranges outside the memory. Called on a worker.
  using Done =
      std::function<void(uint64_t tag, std::vector<uint32_t> bad, std::vector<EncryptedChunk> encrypted)>;

  // `memory` must outlive the workers. `cipher` may be null: no encryption.
  CheckWorkers(std::span<std::byte> memory, std::shared_ptr<const ReplicaCipher> cipher, uint32_t threads,
               Done done);
  ~CheckWorkers();  // drops checks that have not begun; Done is not called after the return

  void Submit(StartCheck check);
  // Calls `task` on a worker. A task that has not begun is dropped with the workers.
  void Run(std::function<void()> task);

  CheckWorkers(const CheckWorkers&) = delete;
  CheckWorkers& operator=(const CheckWorkers&) = delete;

 private:
  struct Job {
    std::function<void()> task;  // if set: nothing else is
    StartCheck check;
    size_t next = 0;       // range not yet taken
    size_t remaining = 0;  // ranges not yet done
    std::vector<uint32_t> bad;
    std::vector<EncryptedChunk> encrypted;
  };
  void Add(std::shared_ptr<Job> job, bool many);
  void Work();
  bool Matches(const StartCheck::Range& range, EncryptedChunk* encrypted) const;

  const std::span<std::byte> memory_;
  const std::shared_ptr<const ReplicaCipher> cipher_;
  const Done done_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;  // those with ranges not yet taken; guarded by mutex_
  bool stop_ = false;                      // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_CHECK_WORKERS_H_
