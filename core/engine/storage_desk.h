// SPDX-License-Identifier: Apache-2.0
//
// A node's part in the leader's work on storage: it does what the leader orders (storage_keeper.h), and answers. The
// lock of storage is taken and released here, one work at a time and in the leader's order: if a release overtook the
// request before it, storage would be held for ever. A node whose leader has changed, or that has lost its lease, releases it by itself, because it
// may still reach storage when nobody can tell it to.

#ifndef ROPETEAM_CORE_ENGINE_STORAGE_DESK_H_
#define ROPETEAM_CORE_ENGINE_STORAGE_DESK_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>

#include "core/engine/context.h"
#include "core/engine/storage_works.h"

namespace ropeteam::engine {

class StorageDesk {
 public:
  StorageDesk(Context* context, StorageWorks* works) : context_(*context), works_(*works) {}

  using Done = StorageWorks::Done;
  using Stalled = std::function<void()>;
  void Do(RemoteWork work, Done done, Stalled stalled);
  // Orders of one leader are numbered from the oldest one that it has no answer to. A repeated order is done once.
  void OnOrder(NodeId from, const StorageOrder& order);
  void OnView(const View& before);
  void OnLeaseLost() { LetGo(); }

 private:
  // A work whose answer is lost and not kept any more is done again.
  static constexpr size_t kAnswersMax = 64;
  // Works that read. More of them are only waiting if storage hangs; then the oldest one fails.
  static constexpr size_t kQueuedReadsMax = 16;

  struct Task {
    RemoteWork work;
    Done done;
    Stalled stalled;
  };
  struct Lane {
    std::deque<Task> tasks;  // the first one is running
    bool stalls = false;
  };
  Lane* LaneOf(const RemoteWork& work);
  void Run(RemoteWork work, Done done, Stalled stalled);
  void RunFirst(Lane* lane);
  void LetGo();
  bool IsOvertaken(const StorageOrder& order);
  void Answer(uint64_t number, bool stalled, const Status& status, const StorageDone& done);

  Context& context_;
  StorageWorks& works_;
  Lane locks_;
  Lane reads_;
  bool held_ = false;  // the newest work on the lock takes it
  // The leader's orders. Those without an answer are running.
  std::map<uint64_t, std::optional<StorageResult>> orders_;
  uint64_t oldest_ = 0;
  uint64_t newest_lock_ = 0;  // the number of the newest order for the lock
  uint64_t generation_ = 0;   // of leaders: answers to an earlier one are not sent
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORAGE_DESK_H_
