// SPDX-License-Identifier: Apache-2.0
//
// etcd as a value, on the caller's clock: keys with revisions, transactions, leases that expire, changes of
// one key, and the loss of all data. For tests of the seat; deterministic.

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
    std::optional<std::string> value;  // none: deleted
  };

  Result<StoreAnswer> Apply(TimeUs now, const StoreRequest& request);
  // Returns the time to live in seconds; 0: the lease has ended.
  int64_t KeepAlive(TimeUs now, StoreLease lease);
  // Ends the expired leases.
  void Expire(TimeUs now);
  void EndLease(StoreLease lease);
  // As after the loss of all etcd data: empty, and revisions begin again.
  void Wipe();
  // As after a restore from a backup. Lease ids never repeat.
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
