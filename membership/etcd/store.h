// SPDX-License-Identifier: Apache-2.0
//
// Requests to etcd and its answers, as plain values. seat.h makes requests and takes answers, client.h transports them.
// The tests have a store of their own that implements them.

#ifndef ROPETEAM_MEMBERSHIP_ETCD_STORE_H_
#define ROPETEAM_MEMBERSHIP_ETCD_STORE_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace ropeteam {

using StoreLease = int64_t;  // etcd's id of a lease; 0: none

struct StoreCompare {
  enum Kind { kAbsent, kValue, kRevision };
  std::string key;
  Kind kind = kAbsent;
  std::string value = {};  // kValue: the key has exactly these bytes
  int64_t revision = 0;    // kRevision: the key was last written at this revision; 0: it is absent
};

struct StoreOp {
  enum Kind { kGet, kPut, kDelete, kCountPrefix, kDeletePrefix };
  Kind kind = kGet;
  std::string key;
  std::string value = {};  // kPut
  StoreLease lease = 0;    // kPut: the key is deleted when the lease ends
};

// If all of `compare` is true, all of `success` is done, else all of `failure`. Without a compare it succeeds. It is
// atomic, and an answer needs a majority of etcd's members.
struct StoreTxn {
  std::vector<StoreCompare> compare;
  std::vector<StoreOp> success;
  std::vector<StoreOp> failure;
};
struct StoreGrant {
  int64_t ttl_s = 0;
};
struct StoreRevoke {
  StoreLease lease = 0;
};
using StoreRequest = std::variant<StoreTxn, StoreGrant, StoreRevoke>;

// The result of one StoreOp; empty for kPut and kDelete.
struct StoreFound {
  bool present = false;  // kGet
  std::string value = {};
  int64_t revision = 0;  // at which the key was last written
  int64_t count = 0;     // kCountPrefix
};
struct StoreAnswer {
  int64_t revision = 0;  // of the whole store, after the request
  bool succeeded = false;
  std::vector<StoreFound> found;  // one per op of the executed branch
  StoreLease lease = 0;           // of a StoreGrant
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_ETCD_STORE_H_
