// SPDX-License-Identifier: Apache-2.0
//
// Tasks of one work on storage with a common end. The first failure is the work's result. Tasks that have not begun by
// then do nothing.

#ifndef ROPETEAM_NODE_STORAGE_GROUP_H_
#define ROPETEAM_NODE_STORAGE_GROUP_H_

#include <condition_variable>
#include <functional>
#include <mutex>
#include <utility>

#include "node/storage_workers.h"

namespace ropeteam {

struct StorageWorkers::Group {
 public:
  using Parts = StorageWatch::Parts;
  Group(StorageWorkers* workers, Parts parts)
      : parts_(parts),
        threads_(parts == Parts::kWritten ? *workers->write_parts_ : *workers->read_parts_),
        watch_(workers->watch_) {}
  ~Group() { (void)Wait(); }

  void Add(std::function<Status()> task) {
    {
      const std::lock_guard lock(mutex_);
      ++open_;
    }
    StorageWatch::Work* const work = StorageWatch::Current();
    watch_.AddPart(work, parts_);
    threads_.Submit([this, work, task = std::move(task)] {
      watch_.TakePart(work, parts_);
      bool failed = false;
      {
        const std::lock_guard lock(mutex_);
        failed = !status_.ok();
      }
      Status status = failed ? OkStatus() : task();
      watch_.EndPart();
      const std::lock_guard lock(mutex_);
      if (status_.ok() && !status.ok()) status_ = std::move(status);
      if (--open_ == 0) done_.notify_all();
    });
  }
  Status Wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return open_ == 0; });
    return status_;
  }

 private:
  const Parts parts_;
  TaskThreads& threads_;
  StorageWatch& watch_;
  std::mutex mutex_;
  std::condition_variable done_;
  size_t open_ = 0;  // guarded by mutex_
  Status status_;    // guarded by mutex_
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_STORAGE_GROUP_H_
