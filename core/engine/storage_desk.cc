// SPDX-License-Identifier: Apache-2.0
#include "core/engine/storage_desk.h"

#include <utility>

namespace ropeteam::engine {

StorageDesk::Lane* StorageDesk::LaneOf(const RemoteWork& work) {
  const bool lock = std::holds_alternative<HoldStorage>(work) || std::holds_alternative<ReleaseStorage>(work);
  const bool read = std::holds_alternative<ListStored>(work) || std::holds_alternative<ReadStored>(work);
  return lock ? &locks_ : read ? &reads_ : nullptr;
}

void StorageDesk::Do(RemoteWork work, Done done, Stalled stalled) {
  Lane* lane = LaneOf(work);
  if (lane == nullptr) return Run(std::move(work), std::move(done), std::move(stalled));
  if (lane == &locks_) held_ = std::holds_alternative<HoldStorage>(work);
  Task& task = lane->tasks.emplace_back();
  task.work = std::move(work);
  task.done = std::move(done);
  task.stalled = std::move(stalled);
  if (lane->tasks.size() == 1) return RunFirst(lane);
  const Stalled also = lane->stalls ? task.stalled : Stalled();
  // Of the works on the lock only the newest one counts. Storage that hangs for days must not queue them all.
  if (lane->tasks.size() > (lane == &locks_ ? 2 : kQueuedReadsMax)) {
    const Done overtaken = std::move(lane->tasks[1].done);
    lane->tasks.erase(lane->tasks.begin() + 1);
    overtaken(Error(Code::kUnavailable, "storage hangs, and a newer request has taken this one's place"), {});
  }
  if (also) also();
}

void StorageDesk::Run(RemoteWork work, Done done, Stalled stalled) {
  std::visit([&](auto&& each) { works_.Start(std::move(each), std::move(done), std::move(stalled)); },
             std::move(work));
}

void StorageDesk::RunFirst(Lane* lane) {
  const auto done = [this, lane](const Status& status, const StorageDone& result) {
    const Done then = std::move(lane->tasks.front().done);
    lane->tasks.pop_front();
    lane->stalls = false;
    if (!lane->tasks.empty()) RunFirst(lane);
    then(status, result);
  };
  Run(lane->tasks.front().work, done, [lane] {
    lane->stalls = true;
    std::vector<Stalled> waiting;
    for (const Task& task : lane->tasks)
      if (task.stalled) waiting.push_back(task.stalled);
    for (const Stalled& stalled : waiting) stalled();
  });
}

void StorageDesk::LetGo() {
  if (held_) Do(ReleaseStorage{}, [](const Status&, const StorageDone&) {}, {});
}

void StorageDesk::OnView(const View& before) {
  const View& view = context_.view;
  if (before.leader == view.leader && view.led_since <= before.epoch) return;
  ++generation_;
  orders_.clear();
  oldest_ = 0;
  for (Lane* lane : {&locks_, &reads_})
    if (!lane->tasks.empty())
      lane->tasks.erase(lane->tasks.begin() + 1, lane->tasks.end());  // nobody waits for them any more
  newest_lock_ = 0;
  held_ = held_ || !locks_.tasks.empty();  // a request that is running may still take it
  LetGo();
}

// Messages overtake each other. The leader has given up a request for the lock before it orders the next work on it.
bool StorageDesk::IsOvertaken(const StorageOrder& order) {
  if (LaneOf(order.work) != &locks_ || orders_.contains(order.number)) return false;
  if (order.number < newest_lock_) return true;
  newest_lock_ = order.number;
  return false;
}

void StorageDesk::OnOrder(NodeId from, const StorageOrder& order) {
  if (from != context_.view.leader || order.number < oldest_) return;
  oldest_ = std::max(oldest_, order.oldest);
  orders_.erase(orders_.begin(), orders_.lower_bound(oldest_));
  for (auto at = orders_.begin(); orders_.size() > kAnswersMax && at != orders_.end();)
    at = at->second ? orders_.erase(at) : std::next(at);
  // Without a lease nobody would tell this node to release it again.
  if (std::holds_alternative<HoldStorage>(order.work) && !context_.has_lease()) return;
  if (IsOvertaken(order)) {
    if (std::holds_alternative<ReleaseStorage>(order.work))
      context_.Send(from, StorageResult{order.number, false, Code::kOk, "", {}});
    return;
  }
  const auto [known, fresh] = orders_.try_emplace(order.number);
  if (!fresh) {
    if (known->second) context_.Send(from, *known->second);
    return;
  }
  const uint64_t number = order.number;
  Do(
      order.work,
      [this, number, generation = generation_](const Status& status, const StorageDone& done) {
        if (generation == generation_) Answer(number, false, status, done);
      },
      [this, number, generation = generation_] {
        if (generation == generation_) Answer(number, true, OkStatus(), {});
      });
}

void StorageDesk::Answer(uint64_t number, bool stalled, const Status& status, const StorageDone& done) {
  const auto order = orders_.find(number);
  if (order == orders_.end()) return;  // the leader no longer waits for it
  StorageResult result{number, stalled, status.code(), status.message(), {}};
  if (const auto* list = std::get_if<StoredList>(&done.result)) result.result = *list;
  if (const auto* step = std::get_if<StoredStep>(&done.result)) result.result = *step;
  if (const auto* proof = std::get_if<StorageProof>(&done.result)) result.result = *proof;
  if (!stalled) order->second = result;
  if (context_.view.leader != kNoNode) context_.Send(context_.view.leader, result);
}

}  // namespace ropeteam::engine
