// SPDX-License-Identifier: Apache-2.0
#include "core/engine/inventory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/base/bytes.h"
#include "core/base/check.h"

namespace ropeteam::engine {
namespace {

SessionKey KeyOf(const SessionReport& session) { return {session.rank, session.incarnation, session.token}; }

// The report without its lists, its counters and the times of lost links.
NodeReport StandingOf(const NodeReport& report) {
  NodeReport standing;
  standing.id = report.id;
  standing.name = report.name;
  standing.chunk_bytes = report.chunk_bytes;
  standing.chunks_total = report.chunks_total;
  standing.has_lease = report.has_lease;
  standing.leaving = report.leaving;
  standing.keep_on_storage = report.keep_on_storage;
  standing.keep_rules = report.keep_rules;
  standing.keys = report.keys;
  standing.lost_links = report.lost_links;
  for (LostLinkReport& link : standing.lost_links) link.lost_for_us = 0;
  return standing;
}

// A 64-bit hash of a value's encoding. It protects against accidents, not against malice.
class Hasher {
 public:
  explicit Hasher(uint32_t protocol) : protocol_(protocol) {}
  template <typename T>
  uint64_t operator()(const T& value) {
    bytes_.clear();
    Encoder(&bytes_, protocol_).Put(value);
    uint64_t hash = 0x9e3779b97f4a7c15 ^ bytes_.size();
    bytes_.append((sizeof(uint64_t) - bytes_.size() % sizeof(uint64_t)) % sizeof(uint64_t), '\0');
    for (size_t at = 0; at < bytes_.size(); at += sizeof(uint64_t)) {
      uint64_t word;
      std::memcpy(&word, bytes_.data() + at, sizeof(word));
      hash = (hash ^ word) * 0xff51afd7ed558ccd;
      hash ^= hash >> 32;
    }
    hash *= 0xc4ceb9fe1a85ec53;
    return hash ^ (hash >> 29);
  }

  uint32_t protocol() const { return protocol_; }

 private:
  const uint32_t protocol_;
  std::string bytes_;
};

uint64_t DigestOfSessions(const std::vector<SessionReport>& sessions, Hasher* hash) {
  uint64_t digest = 0;
  for (const SessionReport& session : sessions) digest += (*hash)(session);
  return digest;
}

// The fields that an Inventory and an InventoryDelta both have complete.
template <typename T>
uint64_t DigestOfScalars(const T& inventory, Hasher* hash) {
  std::vector<uint64_t> words = {inventory.incarnation_max, inventory.asking_from,
                                 inventory.short_of_memory ? 1u : 0u, inventory.persisting.size()};
  if (hash->protocol() >= 9)
    words.insert(words.end(), {inventory.newest_committed.incarnation, inventory.newest_committed.step});
  for (const StepId& id : inventory.persisting) words.insert(words.end(), {id.incarnation, id.step});
  for (const ShardId& shard : inventory.loading)
    words.insert(words.end(), {shard.incarnation, shard.step, shard.rank});
  uint64_t digest = (*hash)(words);
  if (hash->protocol() >= 9)
    for (const RestoreNote& note : inventory.restores) digest += (*hash)(note);
  return digest;
}

template <typename T>  // a field since protocol 9
uint64_t DigestSince9(const T& value, Hasher* hash) {
  return hash->protocol() >= 9 ? (*hash)(value) : 0;
}

template <typename T, typename Key>
std::vector<T> ChangedIn(const std::vector<T>& before, const std::vector<T>& after, Key key) {
  std::vector<T> changed;
  auto old = before.begin();
  for (const T& value : after) {
    while (old != before.end() && key(*old) < key(value)) ++old;
    if (old == before.end() || key(value) < key(*old) || !(*old == value)) changed.push_back(value);
  }
  return changed;
}

template <typename T, typename Key>
auto GoneFrom(const std::vector<T>& before, const std::vector<T>& after, Key key) {
  std::vector<decltype(key(before[0]))> gone;
  auto now = after.begin();
  for (const T& value : before) {
    while (now != after.end() && key(*now) < key(value)) ++now;
    if (now == after.end() || key(value) < key(*now)) gone.push_back(key(value));
  }
  return gone;
}

// Replaces or adds the `changed` items and removes the `gone` ones in a sorted list.
template <typename T, typename Gone, typename Key, typename GoneKey>
void Merge(std::vector<T>* values, const std::vector<T>& changed, const std::vector<Gone>& gone, Key key,
           GoneKey gone_key) {
  const size_t before = values->size();
  for (const T& value : changed) {
    const auto end = values->begin() + static_cast<ptrdiff_t>(before);
    const auto at = std::lower_bound(values->begin(), end, value,
                                     [&](const T& a, const T& b) { return key(a) < key(b); });
    if (at != end && !(key(value) < key(*at))) {
      *at = value;
    } else {
      values->push_back(value);
    }
  }
  std::inplace_merge(values->begin(), values->begin() + static_cast<ptrdiff_t>(before), values->end(),
                     [&](const T& a, const T& b) { return key(a) < key(b); });
  if (gone.empty()) return;
  auto next = gone.begin();
  std::erase_if(*values, [&](const T& value) {
    while (next != gone.end() && gone_key(*next) < key(value)) ++next;
    return next != gone.end() && !(key(value) < gone_key(*next));
  });
}

template <typename T, typename Key>
bool Ascending(const std::vector<T>& values, Key key) {
  return std::adjacent_find(values.begin(), values.end(),
                            [&](const T& a, const T& b) { return !(key(a) < key(b)); }) == values.end();
}

constexpr auto kCopyKey = [](const CopyReport& copy) { return copy.id; };
constexpr auto kSessionKey = [](const SessionReport& session) { return KeyOf(session); };
constexpr auto kSelf = [](const auto& key) { return key; };

}  // namespace

void Normalize(Inventory* inventory) {
  std::vector<CopyReport>& copies = inventory->report.copies;
  if (!Ascending(copies, kCopyKey)) {
    std::stable_sort(copies.begin(), copies.end(),
                     [](const CopyReport& a, const CopyReport& b) { return a.id < b.id; });
    const auto same = [](const CopyReport& a, const CopyReport& b) { return a.id == b.id; };
    copies.erase(std::unique(copies.begin(), copies.end(), same), copies.end());
  }
  std::vector<SessionReport>& sessions = inventory->report.sessions;
  if (Ascending(sessions, kSessionKey)) return;
  std::stable_sort(sessions.begin(), sessions.end(),
                   [](const SessionReport& a, const SessionReport& b) { return KeyOf(a) < KeyOf(b); });
  // A reconnecting handle has two sessions for a moment: the rank has the saves of both.
  std::vector<SessionReport> merged;
  for (SessionReport& session : sessions) {
    if (merged.empty() || KeyOf(merged.back()) < KeyOf(session)) {
      merged.push_back(std::move(session));
      continue;
    }
    SessionReport& first = merged.back();
    if (session.has_ended) {
      first.oldest_ended =
          first.has_ended ? std::min(first.oldest_ended, session.oldest_ended) : session.oldest_ended;
      first.newest_ended = std::max(first.newest_ended, session.newest_ended);
      first.has_ended = true;
    }
    first.open_steps.insert(first.open_steps.end(), session.open_steps.begin(), session.open_steps.end());
  }
  sessions = std::move(merged);
}

uint64_t DigestOf(const Inventory& inventory, uint32_t protocol) {
  Hasher hash(protocol);
  uint64_t digest = DigestOfSessions(inventory.report.sessions, &hash) + hash(inventory.incarnation) +
                    DigestSince9(inventory.policy, &hash) + DigestSince9(inventory.roster, &hash) +
                    hash(StandingOf(inventory.report)) + DigestOfScalars(inventory, &hash);
  for (const CopyReport& copy : inventory.report.copies) digest += hash(copy);
  return digest;
}

InventoryDelta Difference(const Inventory& before, const Inventory& after, bool with_counters,
                          uint32_t protocol) {
  ROPETEAM_CHECK(before.sequence < after.sequence);
  InventoryDelta delta;
  delta.sequence = after.sequence;
  delta.base = before.sequence;
  delta.digest = DigestOf(after, protocol);
  delta.incarnation_max = after.incarnation_max;
  delta.asking_from = after.asking_from;
  delta.short_of_memory = after.short_of_memory;
  delta.persisting = after.persisting;
  delta.loading = after.loading;
  delta.restores = after.restores;
  if (!(before.policy == after.policy)) delta.policy.push_back(after.policy);
  if (!(before.roster == after.roster)) delta.roster.push_back(after.roster);
  delta.newest_committed = after.newest_committed;
  if (!(before.incarnation == after.incarnation)) delta.incarnation.push_back(after.incarnation);
  if (with_counters || Encode(StandingOf(before.report)) != Encode(StandingOf(after.report))) {
    NodeReport report = after.report;
    report.sessions.clear();
    report.copies.clear();
    delta.report.push_back(std::move(report));
  }
  delta.sessions = ChangedIn(before.report.sessions, after.report.sessions, kSessionKey);
  delta.sessions_gone = GoneFrom(before.report.sessions, after.report.sessions, kSessionKey);
  delta.copies = ChangedIn(before.report.copies, after.report.copies, kCopyKey);
  for (const ShardId& id : GoneFrom(before.report.copies, after.report.copies, kCopyKey))
    delta.copies_gone.push_back({id});
  return delta;
}

// ---- the leader's side

InventoryChange HeldInventory::Replace(Inventory whole, uint32_t protocol) {
  ROPETEAM_CHECK(whole.sequence > inventory_.sequence);
  Normalize(&whole);
  InventoryChange change;
  change.incarnation = change.seats = change.standing = true;
  change.sessions = whole.report.sessions;
  change.after = whole.report.copies;
  change.before = std::move(inventory_.report.copies);
  inventory_ = std::move(whole);
  Hasher hash(protocol);
  copies_digest_ = 0;
  for (const CopyReport& copy : inventory_.report.copies) copies_digest_ += hash(copy);
  sessions_digest_ = DigestOfSessions(inventory_.report.sessions, &hash);
  incarnation_digest_ = hash(inventory_.incarnation);
  policy_digest_ = DigestSince9(inventory_.policy, &hash);
  roster_digest_ = DigestSince9(inventory_.roster, &hash);
  standing_digest_ = hash(StandingOf(inventory_.report));
  return change;
}

const CopyReport* HeldInventory::Find(const ShardId& id) const {
  const auto& copies = inventory_.report.copies;
  const auto at =
      std::lower_bound(copies.begin(), copies.end(), id,
                       [](const CopyReport& copy, const ShardId& wanted) { return copy.id < wanted; });
  return at != copies.end() && at->id == id ? &*at : nullptr;
}

std::optional<InventoryChange> HeldInventory::Apply(const InventoryDelta& delta, uint32_t protocol) {
  if (delta.base == 0 || delta.base != inventory_.sequence || delta.sequence <= delta.base ||
      delta.incarnation.size() > 1 || delta.policy.size() > 1 || delta.roster.size() > 1 ||
      delta.report.size() > 1 || !Ascending(delta.copies, kCopyKey) || !Ascending(delta.copies_gone, kSelf) ||
      !Ascending(delta.sessions, kSessionKey) || !Ascending(delta.sessions_gone, kSelf))
    return std::nullopt;
  Hasher hash(protocol);
  InventoryChange change;
  uint64_t copies_digest = copies_digest_;
  for (const CopyReport& copy : delta.copies) {
    if (const CopyReport* old = Find(copy.id)) {
      copies_digest -= hash(*old);
      change.before.push_back(*old);
    }
    copies_digest += hash(copy);
  }
  for (const ShardId& shard : delta.copies_gone) {
    const CopyReport* old = Find(shard);
    if (old == nullptr) return std::nullopt;
    copies_digest -= hash(*old);
    change.before.push_back(*old);
  }
  std::vector<SessionReport> sessions;
  uint64_t sessions_digest = sessions_digest_;
  const bool sessions_changed = !delta.sessions.empty() || !delta.sessions_gone.empty();
  if (sessions_changed) {
    sessions = inventory_.report.sessions;
    Merge(&sessions, delta.sessions, delta.sessions_gone, kSessionKey, kSelf);
    sessions_digest = DigestOfSessions(sessions, &hash);
  }
  const uint64_t incarnation_digest =
      delta.incarnation.empty() ? incarnation_digest_ : hash(delta.incarnation.front());
  const uint64_t policy_digest =
      delta.policy.empty() ? policy_digest_ : DigestSince9(delta.policy.front(), &hash);
  const uint64_t roster_digest =
      delta.roster.empty() ? roster_digest_ : DigestSince9(delta.roster.front(), &hash);
  const uint64_t standing_digest =
      delta.report.empty() ? standing_digest_ : hash(StandingOf(delta.report.front()));
  if (copies_digest + sessions_digest + incarnation_digest + policy_digest + roster_digest + standing_digest +
          DigestOfScalars(delta, &hash) !=
      delta.digest)
    return std::nullopt;

  change.after = delta.copies;
  change.incarnation = !delta.incarnation.empty() || delta.incarnation_max != inventory_.incarnation_max;
  change.sessions = delta.sessions;
  change.seats = delta.asking_from != inventory_.asking_from || !delta.sessions_gone.empty() ||
                 (sessions_changed && sessions.size() != inventory_.report.sessions.size());
  change.standing = !delta.report.empty();
  copies_digest_ = copies_digest;
  sessions_digest_ = sessions_digest;
  incarnation_digest_ = incarnation_digest;
  policy_digest_ = policy_digest;
  roster_digest_ = roster_digest;
  standing_digest_ = standing_digest;
  inventory_.sequence = delta.sequence;
  inventory_.incarnation_max = delta.incarnation_max;
  inventory_.asking_from = delta.asking_from;
  inventory_.short_of_memory = delta.short_of_memory;
  inventory_.persisting = delta.persisting;
  inventory_.loading = delta.loading;
  inventory_.restores = delta.restores;
  if (!delta.policy.empty()) inventory_.policy = delta.policy.front();
  if (!delta.roster.empty()) inventory_.roster = delta.roster.front();
  inventory_.newest_committed = delta.newest_committed;
  if (change.incarnation && !delta.incarnation.empty()) inventory_.incarnation = delta.incarnation.front();
  if (change.standing) {
    NodeReport report = delta.report.front();
    report.copies = std::move(inventory_.report.copies);
    report.sessions = std::move(inventory_.report.sessions);
    inventory_.report = std::move(report);
  }
  if (sessions_changed) inventory_.report.sessions = std::move(sessions);
  Merge(&inventory_.report.copies, delta.copies, delta.copies_gone, kCopyKey, kSelf);
  return change;
}

// ---- the node's side

void InventorySender::OnView(NodeId leader) {
  leader_ = leader;
  in_flight_ = false;  // it was for the previous epoch
  due_now_ = true;
}

void InventorySender::OnLease() {
  repeat_at_ = 0;
  repeat_after_ = kRepeatUs;
}

void InventorySender::OnAck(NodeId from, const InventoryAck& ack) {
  if (from != leader_ || !in_flight_ || ack.sequence != sent_.sequence) return;
  in_flight_ = false;
  if (ack.want_whole) {
    known_by_ = kNoNode;
    due_now_ = true;
    return;
  }
  known_by_ = from;
  known_ = std::move(sent_);
}

TimeUs InventorySender::Due(bool more_soon, bool counters) const {
  if (leader_ == kNoNode) return kNever;
  if (in_flight_) return repeat_at_;
  if (due_now_) return 0;
  if (changed_) return more_soon ? sent_at_ + kInventoryWindowUs : 0;
  return counters ? counters_at_ + kCountersEveryUs : kNever;
}

const InventorySender::Message& InventorySender::Repeat(TimeUs now) {
  ROPETEAM_CHECK(in_flight_ && repeat_at_ <= now);
  AwaitAck(now);
  return message_;
}

void InventorySender::AwaitAck(TimeUs now) {
  repeat_at_ = now + repeat_after_;
  repeat_after_ = std::min(2 * repeat_after_, kRepeatMaxUs);
}

uint64_t InventorySender::FirstWith(const ShardId& shard, uint64_t content) const {
  const auto listed = listed_.find(shard);
  return listed == listed_.end() || listed->second.content != content ? UINT64_MAX : listed->second.first;
}

void InventorySender::NoteListed(const std::vector<CopyReport>& copies) {
  auto listed = listed_.begin();
  for (const CopyReport& copy : copies) {  // both are sorted
    while (listed != listed_.end() && listed->first < copy.id) listed = listed_.erase(listed);
    if (listed == listed_.end() || copy.id < listed->first)
      listed = listed_.emplace_hint(listed, copy.id, Listed{copy.content, sequence_});
    if (listed->second.content != copy.content) listed->second = {copy.content, sequence_};
    ++listed;
  }
  listed_.erase(listed, listed_.end());
}

const InventorySender::Message& InventorySender::Send(TimeUs now, Inventory current, uint32_t protocol) {
  ROPETEAM_CHECK(!in_flight_ && leader_ != kNoNode);
  current.sequence = ++sequence_;
  Normalize(&current);
  const bool with_counters = counters_at_ + kCountersEveryUs <= now;
  if (known_by_ == leader_) {
    message_ = {Kind::kInventoryDelta,
                Encode(Difference(known_, current, with_counters, protocol), protocol)};
  } else {
    message_ = {Kind::kInventory, Encode(current, protocol)};
  }
  if (with_counters || known_by_ != leader_) counters_at_ = now;
  NoteListed(current.report.copies);
  sent_ = std::move(current);
  in_flight_ = true;
  changed_ = due_now_ = false;
  sent_at_ = now;
  repeat_after_ = kRepeatUs;
  AwaitAck(now);
  return message_;
}

}  // namespace ropeteam::engine
