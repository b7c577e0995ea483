// SPDX-License-Identifier: Apache-2.0
//
// The leader's work on storage, done by any member. One of them, the keeper, holds storage: it writes manifests, marks
// and notes, and deletes. It is a member that has listed the newest step, the leader if possible. If its storage fails
// or hangs, the next member becomes the keeper, so a leader without storage leads on.
//
// An order is repeated until it is answered, its node leaves the view, or the leader gives it up. In a view with an
// older protocol, no other node can be ordered, and the leader is the keeper.

#ifndef ROPETEAM_CORE_ENGINE_STORAGE_KEEPER_H_
#define ROPETEAM_CORE_ENGINE_STORAGE_KEEPER_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/storage_desk.h"

namespace ropeteam::engine {

class StorageKeeper {
 public:
  StorageKeeper(Context* context, StorageDesk* desk) : context_(*context), desk_(*desk) {}

  using Done = StorageDesk::Done;
  using Stalled = StorageDesk::Stalled;
  void Begin();   // to lead, or no longer: no order before counts
  void OnView();  // orders to nodes that have left fail with kUnavailable

  // The members that can be ordered; the keeper is the first one.
  std::vector<NodeId> nodes() const;
  NodeId keeper() const { return keeper_; }
  // Another keeper: orders by Start() fail with kUnavailable, and the former one is to let go of the lock.
  void Appoint(NodeId node, const std::string& why);
  // The keeper's storage fails: the next member is the keeper.
  void PassOn(const std::string& why);

  // By the keeper. `stalled` is called each time the work has made no progress for over a minute. `done` still follows.
  // Returns the order's number.
  uint64_t Start(RemoteWork work, Done done, Stalled stalled = {}) {
    return Order(keeper_, true, std::move(work), std::move(done), std::move(stalled));
  }
  // By this member, whoever becomes the keeper.
  uint64_t StartAt(NodeId node, RemoteWork work, Done done, Stalled stalled = {}) {
    return Order(node, false, std::move(work), std::move(done), std::move(stalled));
  }
  // `done` is not called any more. The node may do the work all the same.
  void GiveUp(uint64_t number) { open_.erase(number); }

  void OnResult(NodeId from, const StorageResult& result);
  void OnTimer();
  TimeUs NextTimer() const;

 private:
  static constexpr TimeUs kAgainMaxUs = 5'000'000;  // storage takes seconds

  struct Open {
    NodeId node = kNoNode;
    bool of_keeper = false;
    RemoteWork work;
    Done done;
    Stalled stalled;
    TimeUs again_at = 0;
    TimeUs again_after = kRepeatUs;
  };
  uint64_t Order(NodeId node, bool of_keeper, RemoteWork work, Done done, Stalled stalled);
  void Send(uint64_t number, Open* open);
  void End(uint64_t number, const Status& status, const StorageDone& done);
  template <typename If>
  void Fail(const std::string& why, const If& condition);

  Context& context_;
  StorageDesk& desk_;
  NodeId keeper_ = kNoNode;
  uint64_t next_ = 1;  // never reused
  std::map<uint64_t, Open> open_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_STORAGE_KEEPER_H_
