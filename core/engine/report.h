// SPDX-License-Identifier: Apache-2.0
//
// What a node and the leader tell people: values for `ropeteam status`, `ls` and `verify`. They travel
// between nodes with the same codec as every message.

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

// Counters are since this daemon's start; bytes and microseconds.
struct NodeCounters {
  uint64_t saves_begun = 0;
  uint64_t saves_sealed = 0;
  uint64_t saves_aborted = 0;
  uint64_t saves_refused = 0;       // for want of memory
  uint64_t replica_bytes_sent = 0;  // put into other nodes' arenas and sealed there
  uint64_t replica_bytes_held = 0;  // sealed here for others
  uint64_t fetch_bytes = 0;         // pulled from others and checked
  uint64_t chunks_bad = 0;          // checksum mismatches met, here or in what came
  uint64_t chunks_repaired = 0;
  uint64_t messages_stale = 0;      // refused: older epoch or another instance
  uint64_t last_replicated_us = 0;  // save_begin → REPLICATED of the newest shard that got there
  uint64_t table_repairs = 0;       // places of the arena's tables that had to be written again
  uint64_t persisted_bytes = 0;     // written to storage by this node
  uint64_t loaded_bytes = 0;        // read from storage by this node
  auto Fields() {
    return std::tie(saves_begun, saves_sealed, saves_aborted, saves_refused, replica_bytes_sent,
                    replica_bytes_held, fetch_bytes, chunks_bad, chunks_repaired, messages_stale,
                    last_replicated_us, table_repairs, persisted_bytes, loaded_bytes);
  }
};

// The reading of what is sealed on a node. A pass reads all of it once.
struct ScrubReport {
  uint64_t bytes_per_s = 0;      // the setting; 0: off
  uint64_t passes = 0;           // whole ones since the daemon's start; the others are of the last of them
  TimeUs pass_ended_us_ago = 0;  // when the report was made; a leader adds the time since it got it
  TimeUs pass_us = 0;
  uint64_t pass_bytes = 0;
  auto Fields() { return std::tie(bytes_per_s, passes, pass_ended_us_ago, pass_us, pass_bytes); }
};

struct SessionReport {
  Rank rank = 0;
  uint32_t world_size = 0;
  Incarnation incarnation = 0;
  uint64_t token = 0;
  // Of this session's saves: the lowest and the highest step whose save has ended in any way (sealed, refused,
  // aborted), and those that are open. A step below the highest and not open will never get this rank's shard; one
  // below the lowest may have got it in an earlier session. If the store here still has an earlier shard of the rank,
  // nothing was lost here since, and the lowest is the step after that.
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
  std::vector<uint32_t> bad;  // chunk indices, at most kBadListedMax; more are cut and make the copy unusable
  uint64_t content = 0;       // ContentDigest()
  bool seated = false;        // an own copy, and its rank is open on this node
  uint64_t agreement = 0;     // ShardMeta::agreement
  auto Fields() {
    return Tie(id.incarnation, id.step, id.rank, world_size, replicas, stream_bytes, role, committed, bad,
               content, seated, Since<9>(agreement));
  }
  friend bool operator==(const CopyReport&, const CopyReport&) = default;
};
inline constexpr size_t kBadListedMax = 16;  // more bad chunks than that in one copy is a broken copy

// A member that a node's data path has lost.
struct LostLinkReport {
  NodeId peer = kNoNode;
  std::string name;
  std::string reason;
  uint64_t lost_for_us = 0;  // when the report was made
  auto Fields() { return std::tie(peer, name, reason, lost_for_us); }
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
  bool has_lease = false;  // without one its saves stay LOCAL
  bool leaving = false;    // it is drained: drainer.h
  std::vector<LostLinkReport> lost_links;
  ScrubReport scrub;
  uint32_t keep_on_storage = 0;  // by its flags
  std::string keep_rules;        // the flags that say what is kept on storage; empty: none
  auto Fields() {
    return Tie(id, name, chunk_bytes, chunks_total, chunks_free, sessions, copies, counters, has_lease,
               lost_links, scrub, Since<9>(leaving), Since<9>(keep_on_storage), Since<9>(keep_rules));
  }
};

// How far a drain is (drainer.h). Numbers are the leader's last answer.
struct DrainReport {
  bool begun = false;
  bool heard = false;        // the leader has answered
  bool done = false;         // nothing is left that can be done while this node stays
  uint64_t shards_left = 0;  // kept shards with a copy here that are to get more copies elsewhere
  uint64_t bytes_left = 0;   // of those copies
  uint64_t bytes_most = 0;   // the most that were left since the drain began
  uint64_t shards_short =
      0;  // shards that have a copy on every other node that stays, and are still short of one
  uint64_t steps_left = 0;      // that are being written to storage
  bool persist_failed = false;  // a step that was being written will not be
  bool latest_safe = false;     // the newest committed step can be produced without this node
  bool others_leave = false;    // other members are drained, too
  bool no_room = false;         // some node has refused copies for want of memory
};

struct StepReport {
  Incarnation incarnation = 0;
  Step step = 0;
  uint32_t world_size = 0;
  uint32_t ranks_sealed = 0;      // ranks of which there is a copy somewhere
  uint32_t ranks_replicated = 0;  // ranks with 1 + replicas good copies
  bool committed = false;
  bool producible = false;  // every rank's shard can be produced now
  uint32_t copies_min = 0;  // good copies of the rank that has fewest
  uint64_t bytes = 0;       // of one copy of every shard
  bool persisted = false;
  uint32_t restores = 0;     // by one incarnation after the other, without a newer commit
  bool quarantined = false;  // an older step is offered to the next incarnation instead
  auto Fields() {
    return Tie(incarnation, step, world_size, ranks_sealed, ranks_replicated, committed, producible,
               copies_min, bytes, persisted, Since<9>(restores), Since<9>(quarantined));
  }
};

// What ranks of an incarnation have set for storage (policy.h). A field of 0: not set.
struct RankPolicy {
  Incarnation incarnation = 0;
  uint64_t persist_every = 0;  // steps
  Rank persist_by = 0;         // the rank that has set it
  uint32_t keep_on_storage = 0;
  Rank keep_by = 0;
  auto Fields() { return std::tie(incarnation, persist_every, persist_by, keep_on_storage, keep_by); }
  friend bool operator==(const RankPolicy&, const RankPolicy&) = default;
};
// What is in effect: the leader's flags, and what ranks have set where the flags set nothing.
struct PolicyReport {
  bool has_storage = false;  // else the other fields mean nothing
  uint64_t persist_every = 0;
  bool persist_every_seconds = false;
  std::string keep_rules;
  RankPolicy ranks;
  std::string doubt;  // why nothing is deleted by the ranks' policy
  auto Fields() {
    return std::tie(has_storage, persist_every, persist_every_seconds, keep_rules, ranks, doubt);
  }
};

struct ClusterReport {
  std::string job;
  Epoch epoch = 0;
  std::string leader;
  uint32_t nodes_expected = 0;
  Incarnation incarnation = 0;  // the current one
  uint32_t world_size = 0;
  uint32_t ranks_open = 0;
  std::string incarnation_token;  // empty where the launcher gives none
  bool has_latest = false;
  StepReport latest;  // when has_latest
  std::vector<NodeReport> nodes;
  std::vector<StepReport> steps;  // newest first
  PolicyReport policy;
  auto Fields() {
    return Tie(job, epoch, leader, nodes_expected, incarnation, world_size, ranks_open, incarnation_token,
               has_latest, latest, nodes, steps, Since<9>(policy));
  }
};

struct VerifiedCopy {
  std::string node;
  ShardId id;
  Role role = Role::kOwn;
  uint64_t chunks = 0;
  std::vector<uint32_t> bad;
  auto Fields() { return std::tie(node, id.incarnation, id.step, id.rank, role, chunks, bad); }
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
