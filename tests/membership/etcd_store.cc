// SPDX-License-Identifier: Apache-2.0
#include "tests/membership/etcd_store.h"

#include <algorithm>

namespace ropeteam {

bool FakeStore::Holds(const StoreCompare& compare) const {
  const auto found = keys_.find(compare.key);
  if (compare.kind == StoreCompare::kAbsent) return found == keys_.end();
  if (compare.kind == StoreCompare::kValue)
    return found != keys_.end() && found->second.value == compare.value;
  return (found == keys_.end() ? 0 : found->second.revision) == compare.revision;
}

void FakeStore::Delete(const std::string& key) {
  if (keys_.erase(key) != 0) changes_.push_back({revision_, key, std::nullopt});
}

StoreFound FakeStore::Do(const StoreOp& op) {
  StoreFound found;
  const auto begin = keys_.lower_bound(op.key);
  auto end = begin;
  while (end != keys_.end() && end->first.starts_with(op.key)) ++end;
  switch (op.kind) {
    case StoreOp::kGet:
      if (begin == keys_.end() || begin->first != op.key) break;
      found = {true, begin->second.value, begin->second.revision, 0};
      break;
    case StoreOp::kPut:
      keys_[op.key] = {op.value, revision_, op.lease};
      changes_.push_back({revision_, op.key, op.value});
      break;
    case StoreOp::kDelete:
      Delete(op.key);
      break;
    case StoreOp::kCountPrefix:
      found.count = std::distance(begin, end);
      break;
    case StoreOp::kDeletePrefix: {
      std::vector<std::string> gone;
      for (auto at = begin; at != end; ++at) gone.push_back(at->first);
      for (const std::string& key : gone) Delete(key);
      break;
    }
  }
  return found;
}

Result<StoreAnswer> FakeStore::Apply(TimeUs now, const StoreRequest& request) {
  Expire(now);
  StoreAnswer answer;
  if (const auto* grant = std::get_if<StoreGrant>(&request)) {
    answer.lease = ++leases_made_;
    leases_[answer.lease] = {grant->ttl_s, now + static_cast<TimeUs>(grant->ttl_s) * 1'000'000};
    answer.revision = revision_;
    return answer;
  }
  if (const auto* revoke = std::get_if<StoreRevoke>(&request)) {
    if (!leases_.contains(revoke->lease)) return Error(Code::kNotFound, "requested lease not found");
    EndLease(revoke->lease);
    answer.revision = revision_;
    return answer;
  }
  const auto& txn = std::get<StoreTxn>(request);
  answer.succeeded = std::all_of(txn.compare.begin(), txn.compare.end(),
                                 [this](const auto& compare) { return Holds(compare); });
  const std::vector<StoreOp>& ops = answer.succeeded ? txn.success : txn.failure;
  bool writes = false;
  for (const StoreOp& op : ops) {
    writes |= op.kind == StoreOp::kPut || op.kind == StoreOp::kDelete || op.kind == StoreOp::kDeletePrefix;
    if (op.lease != 0 && !leases_.contains(op.lease))
      return Error(Code::kNotFound, "requested lease not found");
  }
  if (writes) ++revision_;
  for (const StoreOp& op : ops) answer.found.push_back(Do(op));
  answer.revision = revision_;
  return answer;
}

int64_t FakeStore::KeepAlive(TimeUs now, StoreLease lease) {
  Expire(now);
  const auto found = leases_.find(lease);
  if (found == leases_.end()) return 0;
  found->second.ends = now + static_cast<TimeUs>(found->second.ttl_s) * 1'000'000;
  return found->second.ttl_s;
}

void FakeStore::EndLease(StoreLease lease) {
  leases_.erase(lease);
  std::vector<std::string> gone;
  for (const auto& [key, value] : keys_)
    if (value.lease == lease) gone.push_back(key);
  if (gone.empty()) return;
  ++revision_;
  for (const std::string& key : gone) Delete(key);
}

void FakeStore::Expire(TimeUs now) {
  std::vector<StoreLease> over;
  for (const auto& [id, lease] : leases_)
    if (now >= lease.ends) over.push_back(id);
  for (const StoreLease id : over) EndLease(id);
}

void FakeStore::Wipe() {
  keys_.clear();
  leases_.clear();
  changes_.clear();
  revision_ = 1;
}

void FakeStore::Restore(const FakeStore& copy) {
  const StoreLease made = leases_made_;
  *this = copy;
  leases_made_ = made;
}

std::optional<std::string> FakeStore::Get(const std::string& key) const {
  const auto found = keys_.find(key);
  return found == keys_.end() ? std::nullopt : std::optional<std::string>(found->second.value);
}

}  // namespace ropeteam
