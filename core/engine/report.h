// SPDX-License-Identifier: Apache-2.0
//
// Reports of a node and of the leader for `ropeteam status`, `ls` and `verify`. They travel between nodes with the same
// codec as all messages.

#ifndef ROPETEAM_CORE_ENGINE_REPORT_H_
#define ROPETEAM_CORE_ENGINE_REPORT_H_

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/ids.h"
#include "core/store/store.h"

namespace ropeteam {

// Counters count since this daemon's start, in bytes and microseconds.
struct NodeCounters {
  uint64_t saves_begun = 0;
  uint64_t saves_sealed = 0;
  uint64_t saves_aborted = 0;
  uint64_t saves_refused = 0;       // for lack of memory
  uint64_t replica_bytes_sent = 0;  // put into other nodes' arenas and sealed there
  uint64_t replica_bytes_held = 0;  // sealed here for others
  uint64_t fetch_bytes = 0;         // pulled from others and checked
  uint64_t chunks_bad = 0;          // checksum mismatches found, here or in received chunks
  uint64_t chunks_repaired = 0;
  uint64_t messages_stale = 0;      // refused: older epoch or another instance
  uint64_t last_replicated_us = 0;  // save_begin → REPLICATED of the newest shard that was replicated
  uint64_t table_repairs = 0;       // places in the arena's tables that were repaired
  uint64_t persisted_bytes = 0;     // written to storage by this node
  uint64_t loaded_bytes = 0;        // read from storage by this node
  auto Fields() {
    return std::tie(saves_begun, saves_sealed, saves_aborted, saves_refused, replica_bytes_sent,
                    replica_bytes_held, fetch_bytes, chunks_bad, chunks_repaired, messages_stale,
                    last_replicated_us, table_repairs, persisted_bytes, loaded_bytes);
  }
};

// The background reads of the shards sealed on a node. A pass reads all of them once.
struct ScrubReport {
  uint64_t bytes_per_s = 0;  // the setting; 0: off
  uint64_t passes = 0;  // complete passes since the daemon's start; the fields below describe the last one
  TimeUs pass_ended_us_ago = 0;  // at the time of the report; a leader adds the time since it got the report
  TimeUs pass_us = 0;
  uint64_t pass_bytes = 0;
  auto Fields() { return std::tie(bytes_per_s, passes, pass_ended_us_ago, pass_us, pass_bytes); }
};

struct SessionReport {
  Rank rank = 0;
  uint32_t world_size = 0;
  Incarnation incarnation = 0;
  uint64_t token = 0;
  // The steps that this session's saves have ended, and those that are open. A save ends when it is sealed, refused or
  // aborted. A step that is below the highest ended one and not open will never get this rank's shard. A step below the
  // lowest ended one may have got it in an earlier session. If this node's store still has an earlier shard of the
  // rank, nothing was lost here since, and the lowest is the step after that.
  bool has_ended = false;
  Step oldest_ended = 0;
  Step newest_ended = 0;
  std::vector<Step> open_steps;
  auto Fields() {
    return std::tie(rank, world_size, incarnation, token, has_ended, oldest_ended, newest_ended, open_steps);
  }
  friend bool operator==(const SessionReport&, const SessionReport&) = default;
};

// One copy of one shard on one node.
struct CopyReport {
  ShardId id;
  uint32_t world_size = 0;
  uint32_t replicas = 0;
  uint64_t stream_bytes = 0;
  Role role = Role::kOwn;
  bool committed = false;
  bool seated = false;   // an own copy whose rank is open on this node
  bool readable = true;  // the node has `key`; otherwise the copy is none, except for its mark
  // Chunk indices, at most kBadListedMax; longer lists are cut, and the copy is unusable.
  std::vector<uint32_t> bad;
  uint64_t content = 0;    // ContentDigest()
  uint64_t agreement = 0;  // ShardMeta::agreement
  KeyId key = kPlaintext;  // that encrypted it
  bool good() const { return readable && bad.empty(); }
  auto Fields() {
    return Tie(id.incarnation, id.step, id.rank, world_size, replicas, stream_bytes, role, committed, bad,
               content, seated, SparseSince<9>(agreement), SparseSince<9>(key), Since<9>(readable));
  }
  friend bool operator==(const CopyReport&, const CopyReport&) = default;
};
inline constexpr size_t kBadListedMax = 16;  // a copy with more bad chunks is unusable

// A member that this node does not reach.
struct LostLinkReport {
  NodeId peer = kNoNode;
  std::string name;
  std::string reason;
  uint64_t lost_for_us = 0;  // at the time of the report
  bool data = true;          // the paths that are lost
  bool control = false;
  auto Fields() { return Tie(peer, name, reason, lost_for_us, Since<9>(data), Since<9>(control)); }
};

struct NodeReport {
  NodeId id = kNoNode;
  std::string name;
  uint64_t chunk_bytes = 0;
  uint64_t chunks_total = 0;
  uint64_t chunks_free = 0;
  std::vector<SessionReport> sessions;
  std::vector<CopyReport> copies;
  NodeCounters counters;
  bool has_lease = false;  // without a lease its saves stay LOCAL
  bool leaving = false;    // it is being drained: drainer.h
  std::vector<LostLinkReport> lost_links;
  ScrubReport scrub;
  uint32_t keep_on_storage = 0;  // set by its flags
  std::string keep_rules;        // the flags that define what is kept on storage; empty: none
  std::vector<KeyId> keys;       // the first one encrypts; empty: the job does not encrypt
  uint64_t reencrypted = 0;      // copies encrypted again with the first key since the daemon's start
  auto Fields() {
    return Tie(id, name, chunk_bytes, chunks_total, chunks_free, sessions, copies, counters, has_lease,
               lost_links, scrub, Since<9>(leaving), Since<9>(keep_on_storage), Since<9>(keep_rules),
               Since<9>(keys), Since<9>(reencrypted));
  }
};

// The progress of a drain (drainer.h). The numbers are from the leader's last answer.
struct DrainReport {
  bool begun = false;
  bool heard = false;        // the leader has answered
  bool done = false;         // nothing is left that can be done while this node stays in the job
  uint64_t shards_left = 0;  // kept shards with a copy here that need more copies elsewhere
  uint64_t bytes_left = 0;   // of those copies
  uint64_t bytes_most = 0;   // the maximum of bytes_left since the drain began
  // Shards that have a copy on every other node that stays, and still too few copies.
  uint64_t shards_short = 0;
  uint64_t steps_left = 0;      // steps that are being written to storage
  bool persist_failed = false;  // a step that was being written will not be persisted
  bool latest_safe = false;     // the newest committed step can be produced without this node
  bool others_leave = false;    // other members are also being drained
  bool no_room = false;         // some node has refused copies for lack of memory
};

struct StepReport {
  Incarnation incarnation = 0;
  Step step = 0;
  uint32_t world_size = 0;
  uint32_t ranks_sealed = 0;      // ranks with a copy on any node
  uint32_t ranks_replicated = 0;  // ranks with 1 + replicas good copies
  bool committed = false;
  bool producible = false;  // every rank's shard can be produced now
  uint32_t copies_min = 0;  // good copies of the rank that has the fewest
  uint64_t bytes = 0;       // total of one copy of every shard
  bool persisted = false;
  uint32_t restores = 0;     // by consecutive incarnations, without a newer commit
  bool quarantined = false;  // an older step is offered to the next incarnation instead
  auto Fields() {
    return Tie(incarnation, step, world_size, ranks_sealed, ranks_replicated, committed, producible,
               copies_min, bytes, persisted, Since<9>(restores), Since<9>(quarantined));
  }
};

// Storage settings of the ranks of an incarnation (policy.h). A field of 0: not set.
struct RankPolicy {
  Incarnation incarnation = 0;
  uint64_t persist_every = 0;  // steps
  Rank persist_by = 0;         // the rank that set it
  uint32_t keep_on_storage = 0;
  Rank keep_by = 0;
  auto Fields() { return std::tie(incarnation, persist_every, persist_by, keep_on_storage, keep_by); }
  friend bool operator==(const RankPolicy&, const RankPolicy&) = default;
};
// The policy in effect: the leader's flags, and the ranks' settings where the flags set nothing.
struct PolicyReport {
  bool has_storage = false;  // if false, the other fields are meaningless
  uint64_t persist_every = 0;
  bool persist_every_seconds = false;
  std::string keep_rules;
  RankPolicy ranks;
  std::string doubt;    // the reason why the ranks' policy deletes nothing
  std::string trouble;  // why steps are not persisted; empty: no failure since a step was persisted
  auto Fields() {
    return std::tie(has_storage, persist_every, persist_every_seconds, keep_rules, ranks, doubt, trouble);
  }
};

// The nodes that know of the newest commit (roster.h).
struct RosterReport {
  uint32_t nodes = 0;  // 0: nothing was committed yet
  uint32_t missing = 0;
  std::string missing_names;  // as far as they are known
  std::string waiting;        // why the choice of what to restore waits; empty: it does not
  auto Fields() { return std::tie(nodes, missing, missing_names, waiting); }
};

struct ClusterReport {
  std::string job;
  Epoch epoch = 0;
  std::string leader;
  uint32_t nodes_expected = 0;
  Incarnation incarnation = 0;  // the current one
  uint32_t world_size = 0;
  uint32_t ranks_open = 0;
  std::string incarnation_token;  // empty if the launcher gives no token
  bool has_latest = false;
  StepReport latest;  // set if has_latest
  std::vector<NodeReport> nodes;
  std::vector<StepReport> steps;  // newest first
  PolicyReport policy;
  RosterReport roster;
  auto Fields() {
    return Tie(job, epoch, leader, nodes_expected, incarnation, world_size, ranks_open, incarnation_token,
               has_latest, latest, nodes, steps, Since<9>(policy), Since<9>(roster));
  }
};

struct VerifiedCopy {
  std::string node;
  ShardId id;
  Role role = Role::kOwn;
  uint64_t chunks = 0;
  std::vector<uint32_t> bad;
  KeyId key = kPlaintext;  // as in CopyReport
  bool readable = true;
  auto Fields() {
    return Tie(node, id.incarnation, id.step, id.rank, role, chunks, bad, Since<9>(key), Since<9>(readable));
  }
};
struct VerifyReport {
  Incarnation incarnation = 0;
  Step step = 0;
  std::vector<std::string> nodes_asked;
  std::vector<VerifiedCopy> copies;
  auto Fields() { return std::tie(incarnation, step, nodes_asked, copies); }
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_REPORT_H_
