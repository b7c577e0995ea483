// SPDX-License-Identifier: Apache-2.0
//
// A node's part in persisting. It names and writes the files of its copies of shards by order of the leader, and reads
// shards from storage for the Fetcher. A shard's chunks are leased while the driver reads them.

#ifndef ROPETEAM_CORE_ENGINE_PERSISTER_H_
#define ROPETEAM_CORE_ENGINE_PERSISTER_H_

#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/storage_works.h"

namespace ropeteam::engine {

struct Parts;

class Persister {
 public:
  explicit Persister(Parts* parts) : parts_(*parts) {}

  // A repeated order gets the result of the first one, or no answer yet. Stalled work is reported to the leader as
  // failed, and another node does it. If the work succeeds after all, the leader gets a second report.
  void OnOrder(NodeId from, const PersistOrder& order);
  // The leader has announced the step that is being persisted. Results of other steps are no longer needed.
  void OnLeaderState(const std::set<StepId>& persisting);

  using Loaded = std::function<void(const Status&, const LoadedChunks&)>;
  // `stalled` is called once, if the load makes no progress for over a minute. `loaded` still follows. Returns the load's
  // number.
  uint64_t Load(LoadChunks load, Loaded loaded, std::function<void()> stalled);
  // No call follows for this load. It may still write to its chunks, so they are freed when it ends.
  void Abandon(uint64_t load, std::vector<Extent> extents);
  std::vector<ShardId> loading() const;  // loads that are running and not stalled
  // Another node reports that the shard is damaged on storage: this node reads it, too.
  void OnCheck(NodeId from, const CheckStored& check);
  uint64_t allocated_chunks() const;

 private:
  using Key = std::pair<ShardId, PersistOrder::Phase>;
  struct Job {
    PersistOrder order;
    bool running = false;
    bool stalled = false;
    PersistResult result;  // set if the job is not running, or stalls
  };
  void Begin(const PersistOrder& order);
  void Write(const Key& key);
  void Refuse(const Key& key, Code code, const std::string& why);
  void OnStalled(const Key& key);
  void OnDone(const Key& key, Store::LeaseToken lease, const Status& status, const StorageDone& done);
  void OnBadChunks(const ShardId& shard, Store::LeaseToken lease, const std::vector<uint32_t>& bad);

  Parts& parts_;
  std::map<Key, Job> jobs_;
  uint64_t next_load_ = 1;
  std::map<uint64_t, ShardId> loading_;
  std::map<uint64_t, std::vector<Extent>> abandoned_;
  std::map<ShardId, std::vector<Extent>> checking_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_PERSISTER_H_
