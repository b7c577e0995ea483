// SPDX-License-Identifier: Apache-2.0
//
// A client of etcd's version 3 API over gRPC: calls, one keep-alive stream and one watch, all on one connection to one
// endpoint at a time. If that endpoint fails, the next one is used and both streams end; the user of this client starts
// them again. So every call is tried once, and a failed call may have taken effect.
//
// With a user, the client gets a token before its first call, and a new one when etcd reports that the token is no
// longer valid. Certificates are read again for every new connection; if a file cannot be read, its former content is
// used.
//
// Only answers with the cluster id of the first answer count. An endpoint of another cluster is skipped (OneCluster).
//
// Call the functions from one thread only: that of the loop to which the callbacks are posted.

#ifndef ROPETEAM_MEMBERSHIP_ETCD_CLIENT_H_
#define ROPETEAM_MEMBERSHIP_ETCD_CLIENT_H_

#include <bitset>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "membership/etcd/etcd.h"
#include "membership/etcd/store.h"

namespace ropeteam {

// Longer than an election in etcd. During an election the first cluster does not answer, but a wrongly configured one
// does.
inline constexpr TimeUs kOtherClusterUs = 3'000'000;
// Of one answer: a view of the largest job is 330 KB, and etcd limits a request to 1.5 MB.
inline constexpr int kEtcdMessageBytesMax = 4 << 20;

// Decides which cluster's answers count: the cluster of the first answer. Another cluster counts once all endpoints
// have answered for it in a row, or some of them for kOtherClusterUs: then etcd has lost its data. All nodes detect
// that at about the same time, well within the second for which a new coordinator waits for them.
class OneCluster {
 public:
  explicit OneCluster(size_t endpoints) : endpoints_(endpoints) {}

  // `endpoint`: the index of the one that answered.
  bool Counts(TimeUs now, uint64_t cluster, size_t endpoint) {
    if (cluster_ == 0) cluster_ = cluster;
    if (cluster == cluster_) {
      other_ = 0;
      return true;
    }
    if (other_ != cluster) {
      other_ = cluster;
      since_ = now;
      answered_.reset();
    }
    answered_.set(endpoint);
    if (answered_.count() < endpoints_ && now < since_ + kOtherClusterUs) return false;
    cluster_ = cluster;
    other_ = 0;
    return true;
  }
  uint64_t id() const { return cluster_; }

 private:
  const size_t endpoints_;
  uint64_t cluster_ = 0;                     // 0: no answer yet
  uint64_t other_ = 0;                       // answered since the last answer that counted; 0: none
  TimeUs since_ = 0;                         // its first answer
  std::bitset<kEtcdEndpointsMax> answered_;  // endpoints
};

class EtcdClient {
 public:
  // They run on gRPC's threads, one at a time for each stream and call. None runs after Stop() has returned.
  struct Handler {
    // kInvalidArgument: etcd refuses the request, the user, or the password. kNotFound: the lease is gone. kNoSpace:
    // etcd takes no writes, its space is used up. kUnavailable: no answer; the outcome is unknown.
    std::function<void(uint64_t id, Result<StoreAnswer>)> on_answer;
    std::function<void(StoreLease lease, int64_t ttl_s)> on_kept_alive;  // 0: the lease is gone
    // `value` null: the key was deleted. `revision` is that of the change.
    std::function<void(uint64_t watch, int64_t revision, const std::string* value)> on_changed;
    // Also called if changes from the wanted revision on have been compacted away.
    std::function<void(uint64_t watch, const std::string& why)> on_watch_ended;
  };

  // `config` comes from ParseEtcdUrl().
  EtcdClient(const EtcdConfig& config, Handler handler);
  ~EtcdClient();  // Stop()
  EtcdClient(const EtcdClient&) = delete;
  EtcdClient& operator=(const EtcdClient&) = delete;

  // Answered once, by `deadline_ms` from now at the latest.
  void Call(uint64_t id, const StoreRequest& request, int deadline_ms);
  // An answer may never come; the lease then runs out.
  void KeepAlive(StoreLease lease);
  // Replaces the previous watch; no callback has its number any more. `from`: the first revision of interest.
  void Watch(uint64_t watch, const std::string& key, int64_t from);
  // A failed call does this automatically.
  void NextEndpoint();
  // Cancels everything and waits for gRPC to be done. Not from a callback. Idempotent.
  void Stop();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_MEMBERSHIP_ETCD_CLIENT_H_
