// SPDX-License-Identifier: Apache-2.0
//
// etcd as a value, on the caller's clock: keys with revisions, transactions, leases that end, changes of one key, and the
// loss of all its data. For tests of the seat; deterministic.

#ifndef ROPETEAM_TESTS_MEMBERSHIP_ETCD_STORE_H_
#define ROPETEAM_TESTS_MEMBERSHIP_ETCD_STORE_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "membership/etcd/store.h"

namespace ropeteam {

class FakeStore {
 public:
  struct Change {
    int64_t revision;
    std::string key;
    std::optional<std::string> value;  // nothing: deleted
  };

  Result<StoreAnswer> Apply(TimeUs now, const StoreRequest& request);
  // The time to live, in seconds; 0: the lease is gone.
  int64_t KeepAlive(TimeUs now, StoreLease lease);
  // Ends the leases that have run out.
  void Expire(TimeUs now);
  void EndLease(StoreLease lease);
  // As after the loss of all of etcd's data: empty, and revisions begin again.
  void Wipe();
  // As after a restore from a backup. Ids of leases never repeat.
  void Restore(const FakeStore& copy);

  std::optional<std::string> Get(const std::string& key) const;
  const std::vector<Change>& changes() const { return changes_; }  // since the last Wipe(), oldest first
  int64_t revision() const { return revision_; }

 private:
  struct Value {
    std::string value;
    int64_t revision = 0;
    StoreLease lease = 0;
  };
  struct Lease {
    int64_t ttl_s = 0;
    TimeUs ends = 0;
  };
  bool Holds(const StoreCompare& compare) const;
  StoreFound Do(const StoreOp& op);
  void Delete(const std::string& key);

  std::map<std::string, Value> keys_;
  std::map<StoreLease, Lease> leases_;
  std::vector<Change> changes_;
  int64_t revision_ = 1;
  StoreLease leases_made_ = 100;
};

}  // namespace ropeteam

#endif  // ROPETEAM_TESTS_MEMBERSHIP_ETCD_STORE_H_
