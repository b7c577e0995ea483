// SPDX-License-Identifier: Apache-2.0
//
// A node's part in persisting: names and writes the files of its copies of shards, as the leader orders, and reads
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

  // A repeated order is answered with the result of the first, or not yet.
  void OnOrder(NodeId from, const PersistOrder& order);
  // The leader has announced what is being persisted: results of other steps are not asked for again.
  void OnLeaderState(const std::set<StepId>& persisting);

  using Loaded = std::function<void(const Status&, const LoadedChunks&)>;
  void Load(LoadChunks load, Loaded loaded);
  std::vector<ShardKey> loading() const;

 private:
  using Key = std::pair<ShardId, PersistOrder::Phase>;
  struct Job {
    std::vector<std::string> taken;
    bool running = false;
    PersistResult result;  // when it is not running
  };
  void Begin(const PersistOrder& order);
  void OnDone(const Key& key, Store::LeaseToken lease, const Status& status, const StorageDone& done);
  void OnBadChunks(const ShardId& shard, Store::LeaseToken lease, const std::vector<uint32_t>& bad);

  Parts& parts_;
  std::map<Key, Job> jobs_;
  std::multiset<ShardId> loading_;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_PERSISTER_H_
