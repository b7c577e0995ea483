// SPDX-License-Identifier: Apache-2.0
//
// Messages between the engines of two nodes. The sender repeats a message until it is answered or no longer needed, so
// every receiver recognises repeats. core/base/bytes.h encodes them, in the version that the view's members have in
// common (View::protocol()). A message belongs to one epoch, so both ends use the same version. Kinds, topics and
// fields are append-only: mark a new field Since<kProtocolVersion>(). The envelope and the questions' payloads never
// change: a question may be asked in one epoch and repeated in the next. HACKING.md has the rules.

#ifndef ROPETEAM_CORE_ENGINE_MESSAGES_H_
#define ROPETEAM_CORE_ENGINE_MESSAGES_H_

#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "core/base/bytes.h"
#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/base/trace_event.h"
#include "core/engine/report.h"
#include "core/engine/storage_work.h"
#include "core/shard/extent.h"
#include "core/shard/pieces.h"

namespace ropeteam {

enum class Kind : uint16_t {
  kReplicaReserve = 1,
  kReplicaGrant = 2,
  kReplicaArrived = 3,
  kReplicaSeal = 4,
  kReplicaSealed = 5,
  kReplicaAbort = 6,
  kCopyQuery = 7,
  kInventory = 8,
  kInventoryAck = 9,
  kLeaderState = 10,
  kLeaderStateAck = 11,
  kQuestion = 12,
  kReply = 13,
  kFetchOpen = 14,
  kFetchGrant = 15,
  kFetchClose = 16,
  kBadCopy = 17,
  kCopyOrder = 18,
  kVerifyOrder = 19,
  kVerifyResult = 20,
  kDropCopy = 21,
  kDemoteCopy = 22,
  kInventoryDelta = 23,
  kPersistOrder = 24,
  kPersistResult = 25,
  kStoredRead = 26,
  kFetchOrder = 27,
  kCheckStored = 28,
  kStoredChecked = 29,
  kTraceQuestion = 30,
  kTraceAnswer = 31,
  kEncryptedSeal = 32,
  kEncryptedGrant = 33,
  kEncryptCopy = 34,
  kRangesOpen = 35,
  kRangesGrant = 36,
  kRangesClose = 37,
  kStorageOrder = 38,
  kStorageResult = 39,
};

// Requests that any member answers within a round trip if the path to it works, and their answers.
constexpr bool IsRequest(Kind kind) {
  return kind == Kind::kReplicaReserve || kind == Kind::kInventory || kind == Kind::kInventoryDelta ||
         kind == Kind::kLeaderState || kind == Kind::kQuestion || kind == Kind::kFetchOpen ||
         kind == Kind::kRangesOpen || kind == Kind::kTraceQuestion;
}
constexpr bool IsAnswer(Kind kind) {
  return kind == Kind::kReplicaGrant || kind == Kind::kReplicaSealed || kind == Kind::kInventoryAck ||
         kind == Kind::kLeaderStateAck || kind == Kind::kReply || kind == Kind::kFetchGrant ||
         kind == Kind::kEncryptedGrant || kind == Kind::kRangesGrant || kind == Kind::kTraceAnswer;
}

struct Envelope {
  Epoch epoch = 0;
  NodeId from = kNoNode;
  NodeId to = kNoNode;
  Kind kind = Kind::kInventory;
  std::string payload;
  auto Fields() { return std::tie(epoch, from, to, kind, payload); }
};

// ---- replication: the node that has a shard (source) makes a copy of it on another (holder)

// One attempt at one copy. The id is never reused, so no message of an abandoned attempt can affect the next one.
struct CopyId {
  NodeId source = kNoNode;
  uint64_t number = 0;
  auto Fields() { return std::tie(source, number); }
  friend auto operator<=>(const CopyId&, const CopyId&) = default;
};

// Source → holder. `chunks` is the total wanted; a repeat with a larger total extends the grant.
struct ReplicaReserve {
  static constexpr Kind kKind = Kind::kReplicaReserve;
  CopyId copy;
  ShardId shard;
  uint64_t chunks = 0;
  uint64_t chunk_bytes = 0;
  KeyId key = kPlaintext;  // that the chunks will be encrypted with
  auto Fields() { return Tie(copy, shard, chunks, chunk_bytes, Since<9>(key)); }
};
// `sealed_already`: the holder has this shard. The source continues with ReplicaSeal and puts nothing.
struct ReplicaGrant {
  static constexpr Kind kKind = Kind::kReplicaGrant;
  CopyId copy;
  Code code = Code::kOk;
  std::string message;
  bool sealed_already = false;
  uint64_t chunks_begin = 0;    // offset of the holder's chunk 0 in the memory that it exports; see limits.h
  std::vector<Extent> extents;  // all granted so far, in the holder's chunk numbers
  // The holder's number for this memory. A reservation that arrives again after its copy has ended gets other memory
  // under the same CopyId. The number tells the two apart.
  uint64_t reservation = 0;
  auto Fields() { return std::tie(copy, code, message, sealed_already, chunks_begin, extents, reservation); }
};
// These whole chunks are in the holder's memory, so it may check them while others are on their way. This is only a
// hint: if it is lost, the chunks are checked at ReplicaSeal.
struct ReplicaArrived {
  static constexpr Kind kKind = Kind::kReplicaArrived;
  CopyId copy;
  std::vector<uint32_t> chunks;
  std::vector<uint32_t> crcs;
  auto Fields() { return std::tie(copy, chunks, crcs); }
};
// All bytes have been put. `attempt` grows when chunks that failed the check were put again.
struct ReplicaSeal {
  static constexpr Kind kKind = Kind::kReplicaSeal;
  CopyId copy;
  uint32_t attempt = 0;
  ShardMeta meta;
  std::vector<uint32_t> crcs;
  bool committed = false;    // the source's copy has the mark; the holder's copy takes it over
  uint64_t reservation = 0;  // the memory that the bytes were put into; 0: none, the holder had the shard
  auto Fields() { return std::tie(copy, attempt, meta, crcs, committed, reservation); }
};
// Replaces ReplicaSeal in a job that encrypts. With tags, `seal.crcs` are of the ciphertext. Without tags, nothing was
// put, and they are of the plaintext.
struct EncryptedSeal {
  static constexpr Kind kKind = Kind::kEncryptedSeal;
  ReplicaSeal seal;
  Encryption encryption;
  auto Fields() { return std::tie(seal, encryption); }
};
// kOk: the holder has checked every chunk, and the copy is sealed. kCorrupt: the `bad` chunks do not match.
struct ReplicaSealed {
  static constexpr Kind kKind = Kind::kReplicaSealed;
  CopyId copy;
  uint32_t attempt = 0;
  Code code = Code::kOk;
  std::string message;
  std::vector<uint32_t> bad;
  auto Fields() { return std::tie(copy, attempt, code, message, bad); }
};
// The source has no outstanding transfer of this copy and starts none, so the holder's chunks are free. If a put has
// `failed`, or the source does not remember the copy, bytes may still be on their way. The chunks are then quarantined.
struct ReplicaAbort {
  static constexpr Kind kKind = Kind::kReplicaAbort;
  CopyId copy;
  bool failed = false;
  auto Fields() { return std::tie(copy, failed); }
};
// Holder → source, after silence: is this copy still wanted? Answered by ReplicaAbort if not.
struct CopyQuery {
  static constexpr Kind kKind = Kind::kCopyQuery;
  CopyId copy;
  auto Fields() { return std::tie(copy); }
};

// ---- reports of every node to the leader, and announcements of the leader to every node

// An incarnation as the leader last announced it.
struct IncarnationState {
  Incarnation number = 0;
  std::string token;  // the launcher's name for it, or empty
  uint32_t world_size = 0;
  bool broken = false;  // a rank has left: the next process that opens a rank begins a new incarnation
  // The newest incarnation whose choice of what to restore is known, and the choice; {0, 0}: nothing. The choice of a
  // forgotten incarnation counts as nothing.
  Incarnation pinned_by = 0;
  StepId pin;
  // No node remembered more than the number. So it is unknown what this incarnation restores, and the statements of its
  // ranks are accepted.
  bool forgotten = false;
  std::vector<std::string> past_tokens;  // of superseded incarnations, newest last, at most kPastTokensMax
  auto Fields() {
    return std::tie(number, token, world_size, broken, pinned_by, pin.incarnation, pin.step, forgotten,
                    past_tokens);
  }
  bool has_pin() const { return pinned_by != 0 && pinned_by == number; }
  // Whether a leader can have sent this. Checked where messages are decoded.
  bool possible() const {
    return number < kIncarnationMax && pinned_by <= number &&
           (pinned_by == 0 ? pin == StepId() : pin.incarnation < pinned_by);
  }
  friend bool operator==(const IncarnationState&, const IncarnationState&) = default;
};
// Ranks left over from older incarnations are of the last few of them. A token has at most 255 bytes.
inline constexpr size_t kPastTokensMax = 32;

// The nodes that know of the newest commit: roster.h.
struct RosterRecord {
  uint64_t revision = 0;  // grows with every change; 0: there is no roster
  Epoch epoch = 0;        // of the view whose members are the roster
  uint32_t nodes = 0;     // of them, less those that an operator has given up
  // Of the first ones, as far as they are known. Empty in an announcement.
  std::vector<std::string> names;
  auto Fields() { return std::tie(revision, epoch, nodes, names); }
  friend bool operator==(const RosterRecord&, const RosterRecord&) = default;
};
// A message that names more nodes is not read.
inline constexpr size_t kRosterNamesMax = 64;

struct Inventory {
  static constexpr Kind kKind = Kind::kInventory;
  uint64_t sequence = 0;  // grows with every inventory of one instance
  NodeReport report;
  IncarnationState incarnation;
  Incarnation incarnation_max = 0;
  // The node waits for no answer to a join question with a lower number. Ignore such a question: it is a late repeat.
  // The rank that it was to admit is among the sessions or is gone.
  uint64_t asking_from = 0;
  // A replica of a step of this incarnation was refused here for lack of memory, and the source still asks.
  bool short_of_memory = false;
  std::set<StepId> persisting;        // as in the leader's last announcement
  std::vector<ShardId> loading;       // shards that are being read from storage here
  std::vector<RestoreNote> restores;  // as in the leader's last announcement
  RankPolicy policy;                  // as in the leader's last announcement
  RosterRecord roster;                // in this node's arena
  StepId newest_committed;            // likewise
  Epoch joined = 0;                   // of the first view that had this instance
  auto Fields() {
    return Tie(sequence, report, incarnation, incarnation_max, asking_from, short_of_memory, persisting,
               loading, Since<9>(restores), Since<9>(policy), Since<9>(roster), Since<9>(newest_committed),
               Since<9>(joined));
  }
};
struct SessionKey {
  Rank rank = 0;
  Incarnation incarnation = 0;
  uint64_t token = 0;
  auto Fields() { return std::tie(rank, incarnation, token); }
  friend auto operator<=>(const SessionKey&, const SessionKey&) = default;
};
// The changes since the node's inventory with the sequence `base`. Lists are sorted, and each key occurs once. What an
// instance never changes (`joined`) is only in the whole inventory.
struct InventoryDelta {
  static constexpr Kind kKind = Kind::kInventoryDelta;
  uint64_t sequence = 0;
  uint64_t base = 0;
  uint64_t digest = 0;  // of the whole inventory now (inventory.h)
  Incarnation incarnation_max = 0;
  uint64_t asking_from = 0;
  bool short_of_memory = false;
  std::set<StepId> persisting;  // the complete list; likewise `loading`
  std::vector<ShardId> loading;
  std::vector<RestoreNote> restores;
  std::vector<RankPolicy> policy;    // one entry if it has changed
  std::vector<RosterRecord> roster;  // one entry if it has changed
  StepId newest_committed;
  std::vector<IncarnationState> incarnation;  // one entry if it has changed
  std::vector<NodeReport> report;             // one entry if it has changed; without sessions and copies
  std::vector<SessionReport> sessions;
  std::vector<SessionKey> sessions_gone;
  std::vector<CopyReport> copies;
  std::vector<ShardId> copies_gone;
  auto Fields() {
    return Tie(sequence, base, digest, incarnation_max, asking_from, short_of_memory, persisting, loading,
               SparseSince<9>(restores), SparseSince<9>(policy), SparseSince<9>(roster),
               Since<9>(newest_committed), incarnation, report, sessions, sessions_gone, copies, copies_gone);
  }
};
// `want_whole`: the changes in this message could not be applied; send a whole inventory.
struct InventoryAck {
  static constexpr Kind kKind = Kind::kInventoryAck;
  uint64_t sequence = 0;
  bool want_whole = false;
  auto Fields() { return std::tie(sequence, want_whole); }
};

// The reason why a committed step will not be persisted.
struct NotPersisted {
  StepId step;
  std::string why;
  auto Fields() { return std::tie(step, why); }
};
// Two ranks gave different values for a step. The step is never committed.
struct Disagreement {
  StepId step;
  Rank rank = 0;
  uint64_t value = 0;
  Rank other_rank = 0;
  uint64_t other_value = 0;
  auto Fields() { return std::tie(step, rank, value, other_rank, other_value); }
};
// A step that a rank or an operator has dropped.
struct DroppedStep {
  static constexpr Rank kOperator = UINT32_MAX;
  StepId step;
  Rank by = 0;
  auto Fields() { return std::tie(step, by); }
};
// Every node releases its shards of two kinds of steps: those older than `release_before` that are not in `keep`, and
// those in `dead`, which can never be complete.
struct LeaderState {
  static constexpr Kind kKind = Kind::kLeaderState;
  uint64_t sequence = 0;  // grows with every change while one node leads
  IncarnationState incarnation;
  std::set<StepId> listed;  // the newest complete steps: mark their copies, …
  // … but only copies in the receiver's inventory of this sequence or an earlier one. If the leader had not heard of a
  // copy, its bytes may differ from the committed ones.
  uint64_t judged = 0;
  // The steps of `listed` whose mark every member has acknowledged. Only these are told to ranks as COMMITTED, and
  // only these release older steps. So the surviving nodes always know of the commit.
  std::set<StepId> told;
  std::set<StepId> keep;
  StepId release_before;
  std::set<StepId> dead;
  // Steps of former incarnations that are not committed and never will be: they may be evicted.
  std::set<StepId> evictable;
  // Steps that are being persisted or wait for it, and steps that a program has requested. Their copies are kept.
  std::set<StepId> persisting;
  std::set<StepId> persisted;               // the newest persisted steps
  std::vector<NotPersisted> not_persisted;  // the last few steps that were due or requested
  StepId persist_judged;                    // it is decided up to this told step whether each is due
  std::vector<RestoreNote> restores;        // by step, at most kRestoreNotesMax
  std::vector<Disagreement> disagreements;  // the newest, by step, at most kDisagreementsMax
  std::vector<DroppedStep> dropped;  // at most kDroppedMax: a wait for one of them that is not committed ends
  RankPolicy policy;                 // set by ranks for storage; incarnation 0: nothing is set
  // A member writes it into its arena if its epoch is that of the view, or if it is the roster there without forgotten
  // nodes: each of them adds one to the revision.
  RosterRecord roster;
  std::vector<std::string> forgotten;  // nodes that an operator has removed from it
  KeyId key = kPlaintext;              // the first key of every member, or kPlaintext while they differ
  auto Fields() {
    return Tie(sequence, incarnation, listed, judged, told, keep, release_before, dead, evictable, persisting,
               persisted, not_persisted, persist_judged, SparseSince<9>(restores),
               SparseSince<9>(disagreements), SparseSince<9>(dropped), SparseSince<9>(policy),
               Since<9>(roster), SparseSince<9>(forgotten), SparseSince<9>(key));
  }
};
struct LeaderStateAck {
  static constexpr Kind kKind = Kind::kLeaderStateAck;
  uint64_t sequence = 0;
  auto Fields() { return std::tie(sequence); }
};

// ---- questions to the leader: repeated until the answer is not kUnavailable, or until the asker's deadline

struct Question {
  static constexpr Kind kKind = Kind::kQuestion;
  enum class Topic : uint8_t {
    kJoin = 1,
    kLatest = 2,
    kLocate = 3,
    kReport = 4,
    kVerify = 5,
    kPersist = 6,
    kQuarantine = 7,
    kDrain = 8,
    kDrop = 9,
    kPolicy = 10,
    kForget = 11
  };
  uint64_t number = 0;
  Topic topic = Topic::kLatest;
  std::string payload;
  auto Fields() { return std::tie(number, topic, payload); }
};
struct Reply {
  static constexpr Kind kKind = Kind::kReply;
  uint64_t number = 0;
  Code code = Code::kOk;
  std::string message;
  std::string payload;
  auto Fields() { return std::tie(number, code, message, payload); }
};

struct JoinQuestion {
  Rank rank = 0;
  uint32_t world_size = 0;
  uint64_t token = 0;
  std::string incarnation_token;
  Incarnation incarnation = 0;  // of the handle's earlier admission; 0: none
  auto Fields() { return std::tie(rank, world_size, token, incarnation_token, incarnation); }
};
struct JoinReply {
  IncarnationState incarnation;
  auto Fields() { return std::tie(incarnation); }
};
struct LatestQuestion {
  Incarnation incarnation = 0;  // of the asking rank; 0: an operator
  bool persisted = false;       // the newest step on storage, whatever the incarnation restores
  auto Fields() { return std::tie(incarnation, persisted); }
};
struct LatestReply {
  StepId step;
  uint32_t world_size = 0;
  StepId passed_over;  // as in AnswerLatest
  auto Fields() { return Tie(step, world_size, Since<9>(passed_over)); }
};
struct QuarantineQuestion {
  Step step = 0;
  bool undo = false;
  auto Fields() { return std::tie(step, undo); }
};
struct LocateQuestion {
  Step step = 0;
  Rank rank = 0;
  Incarnation exact = 0;        // the shard's incarnation; 0: the one that this asker should see
  Incarnation incarnation = 0;  // of the asking rank; 0: an operator
  bool from_storage = false;    // every holder has failed
  bool stalled = false;         // the read from storage makes no progress on this node
  auto Fields() { return std::tie(step, rank, exact, incarnation, from_storage, stalled); }
};
// `stored`: the asker may read the shard from storage, and no other node does at the same time.
struct LocateReply {
  ShardId shard;
  std::vector<NodeId> holders;
  bool stored = false;
  uint64_t chunk_bytes = 0;   // if `stored`: the chunk size of `content`
  uint64_t stream_bytes = 0;  // if `stored`: of the shard
  uint64_t content = 0;       // if `stored`: the shard's digest
  auto Fields() { return std::tie(shard, holders, stored, chunk_bytes, stream_bytes, content); }
};
struct DropQuestion {
  Step step = 0;
  Incarnation incarnation = 0;  // of the asking rank; 0 for an operator
  Rank rank = 0;                // or DroppedStep::kOperator
  bool saved = false;  // by the rank, and its node has the shard: the leader may not have heard of it yet
  auto Fields() { return std::tie(step, incarnation, rank, saved); }
};
struct PersistQuestion {
  StepId step;
  auto Fields() { return std::tie(step); }
};
struct PolicyQuestion {
  Incarnation incarnation = 0;  // of the rank
  Rank rank = 0;
  uint64_t persist_every = 0;  // 0: not set
  uint32_t keep_on_storage = 0;
  // The rank was answered before, and has connected again. It is not refused, even if another value was set meanwhile.
  bool again = false;
  auto Fields() { return std::tie(incarnation, rank, persist_every, keep_on_storage, again); }
};
// From a node whose inventory says that it leaves.
struct DrainQuestion {
  std::set<StepId> awaited;  // steps that were being persisted when the drain began
  auto Fields() { return std::tie(awaited); }
};
struct DrainReply {
  uint64_t shards_left = 0;  // as in DrainReport
  uint64_t bytes_left = 0;
  uint64_t shards_short = 0;
  bool latest_safe = false;
  bool no_room = false;
  bool others_leave = false;
  std::set<StepId> persisting;  // committed steps that are being persisted
  std::set<StepId> persisted;   // the `awaited` steps that are persisted
  auto Fields() {
    return std::tie(shards_left, bytes_left, shards_short, latest_safe, no_room, others_leave, persisting,
                    persisted);
  }
};
// An operator gives up a node of the roster that is missing, or all of them (empty).
struct ForgetQuestion {
  std::string node;
  auto Fields() { return std::tie(node); }
};
struct VerifyQuestion {
  bool has_step = false;
  Step step = 0;
  auto Fields() { return std::tie(has_step, step); }
};
struct Nothing {
  uint8_t reserved = 0;
  auto Fields() { return std::tie(reserved); }
};

// ---- fetching: a node reads a shard's bytes from its holders' arenas

struct FetchOpen {
  static constexpr Kind kKind = Kind::kFetchOpen;
  uint64_t fetch = 0;  // the fetcher's own count
  ShardId shard;
  auto Fields() { return std::tie(fetch, shard); }
};
// The holder keeps the chunks in place until FetchClose, or until the fetcher has left the view.
struct FetchGrant {
  static constexpr Kind kKind = Kind::kFetchGrant;
  uint64_t fetch = 0;
  Code code = Code::kOk;
  std::string message;
  ShardMeta meta;
  std::vector<uint32_t> crcs;
  bool committed = false;     // as in ReplicaSeal
  uint64_t chunks_begin = 0;  // as in ReplicaGrant
  std::vector<Extent> extents;
  auto Fields() { return std::tie(fetch, code, message, meta, crcs, committed, chunks_begin, extents); }
};
// Replaces FetchGrant in a job that encrypts. Without tags: the copy is plaintext, and nothing is granted.
struct EncryptedGrant {
  static constexpr Kind kKind = Kind::kEncryptedGrant;
  FetchGrant grant;
  Encryption encryption;
  auto Fields() { return std::tie(grant, encryption); }
};
// Encrypt your copy with one of these keys and grant it: this fetch finds only copies that are plaintext, or encrypted
// with keys that are not here. Answered by EncryptedGrant or, if that is not possible, by FetchGrant.
struct EncryptCopy {
  static constexpr Kind kKind = Kind::kEncryptCopy;
  FetchOpen open;
  std::vector<KeyId> keys;
  auto Fields() { return Tie(open, Since<9>(keys)); }
};
struct FetchClose {
  static constexpr Kind kKind = Kind::kFetchClose;
  uint64_t fetch = 0;
  auto Fields() { return std::tie(fetch); }
};
// Reader → holder, since protocol 9, and not in a job that encrypts: check the chunks that the part touches, and pack
// its pieces into a chunk of your arena. `read` is the reader's own number. A part without pieces requests only the
// meta.
struct RangesOpen {
  static constexpr Kind kKind = Kind::kRangesOpen;
  uint64_t read = 0;
  ShardId shard;
  uint64_t content = 0;  // content that the copy must have; 0: any
  PackedPart part;
  auto Fields() { return std::tie(read, shard, content, part); }
};
// The packed bytes stay in place until RangesClose, or until the reader has left the view. kCorrupt: a chunk is bad and
// is being repaired. kUnavailable: ask again later.
struct RangesGrant {
  static constexpr Kind kKind = Kind::kRangesGrant;
  uint64_t read = 0;
  Code code = Code::kOk;
  std::string message;
  ShardMeta meta;
  uint64_t content = 0;
  uint64_t place = 0;  // from the beginning of the memory that the holder exports
  uint32_t crc = 0;    // of the packed bytes
  auto Fields() { return std::tie(read, code, message, meta, content, place, crc); }
};
struct RangesClose {
  static constexpr Kind kKind = Kind::kRangesClose;
  uint64_t read = 0;
  auto Fields() { return std::tie(read); }
};
// Bytes read from you do not match their checksum: check these chunks and repair them.
struct BadCopy {
  static constexpr Kind kKind = Kind::kBadCopy;
  ShardId shard;
  std::vector<uint32_t> chunks;
  auto Fields() { return std::tie(shard, chunks); }
};

// ---- the leader's orders

// Make a copy of your sealed shard on `target`, in the background.
struct CopyOrder {
  static constexpr Kind kKind = Kind::kCopyOrder;
  ShardId shard;
  NodeId target = kNoNode;
  auto Fields() { return std::tie(shard, target); }
};
// Another content of this shard counts: release your copy if it has this content.
struct DropCopy {
  static constexpr Kind kKind = Kind::kDropCopy;
  ShardId shard;
  uint64_t content = 0;         // of the copy to be dropped
  uint64_t content_counts = 0;  // of the shard that counts
  std::string holder;           // a node that has the shard that counts; for the log
  auto Fields() { return std::tie(shard, content, content_counts, holder); }
};
// This shard has more copies than it needs: your replica is a cache from now on.
struct DemoteCopy {
  static constexpr Kind kKind = Kind::kDemoteCopy;
  ShardId shard;
  uint64_t content = 0;
  uint64_t inventory = 0;  // the node's inventory that this order is based on; a late order is ignored
  auto Fields() { return std::tie(shard, content, inventory); }
};
// Persist your copy of this shard: first name its files, then write them.
struct PersistOrder {
  static constexpr Kind kKind = Kind::kPersistOrder;
  enum class Phase : uint8_t { kName = 1, kWrite = 2 };
  ShardId shard;
  Phase phase = Phase::kName;
  std::vector<std::string> taken;  // names already used by files of lower ranks
  std::string proof;               // of the keeper of storage; empty: the leader speaks an older version
  uint32_t attempt = 0;            // grows if what was written is not there
  auto Fields() { return Tie(shard, phase, taken, Since<9>(proof), Since<9>(attempt)); }
};
struct PersistResult {
  static constexpr Kind kKind = Kind::kPersistResult;
  ShardId shard;
  PersistOrder::Phase phase = PersistOrder::Phase::kName;
  Code code = Code::kOk;
  std::string message;
  std::vector<std::string> names;  // kName
  StoredRank stored;               // kWrite
  auto Fields() { return std::tie(shard, phase, code, message, names, stored); }
};
// What a load of the shard from storage has found. Before protocol 9: kOk says that the bytes are not the committed
// ones, and the leader takes every report for damage.
struct StoredRead {
  static constexpr Kind kKind = Kind::kStoredRead;
  ShardId shard;
  uint64_t stream_bytes = 0;
  Code code = Code::kOk;
  std::string why;
  auto Fields() { return std::tie(shard, stream_bytes, code, why); }
};
// From leaders before protocol 9. Read the shard from storage and report whether it is good. The bytes read are not kept.
struct CheckStored {
  static constexpr Kind kKind = Kind::kCheckStored;
  ShardId shard;
  uint64_t stream_bytes = 0;
  auto Fields() { return std::tie(shard, stream_bytes); }
};
struct StoredChecked {
  static constexpr Kind kKind = Kind::kStoredChecked;
  ShardId shard;
  Code code = Code::kOk;  // of the load; another code: there is no memory for it
  std::string message;
  auto Fields() { return std::tie(shard, code, message); }
};
// Fetch a copy of the shard: another node cannot read it from storage.
struct FetchOrder {
  static constexpr Kind kKind = Kind::kFetchOrder;
  ShardId shard;
  auto Fields() { return std::tie(shard); }
};
// Do this on your storage. Orders with numbers below `oldest` are answered or given up.
struct StorageOrder {
  static constexpr Kind kKind = Kind::kStorageOrder;
  uint64_t number = 0;  // the leader's own
  uint64_t oldest = 0;
  RemoteWork work;
  auto Fields() { return std::tie(number, oldest, work); }
};
// `stalled`: it has made no progress for a minute, and the answer follows.
struct StorageResult {
  static constexpr Kind kKind = Kind::kStorageResult;
  uint64_t number = 0;
  bool stalled = false;
  Code code = Code::kOk;
  std::string message;
  std::variant<std::monostate, StoredList, StoredStep, StorageProof> result;
  auto Fields() { return std::tie(number, stalled, code, message, result); }
};
// The first protocol version with these two.
inline constexpr uint32_t kStorageOrdersSince = 9;
struct VerifyOrder {
  static constexpr Kind kKind = Kind::kVerifyOrder;
  uint64_t number = 0;
  StepId step;
  auto Fields() { return std::tie(number, step); }
};
struct VerifyResult {
  static constexpr Kind kKind = Kind::kVerifyResult;
  uint64_t number = 0;
  std::vector<VerifiedCopy> copies;
  auto Fields() { return std::tie(number, copies); }
};

// ---- traces, between any two nodes

// Requests the recorded events of this step and the node's time. It is sent once: the asker repeats it if it wants the
// answer.
struct TraceQuestion {
  static constexpr Kind kKind = Kind::kTraceQuestion;
  uint64_t number = 0;  // the asker's own number
  TimeUs asked_at = 0;  // on the asker's clock
  bool events = false;  // false: the time alone
  Step step = 0;
  auto Fields() { return std::tie(number, asked_at, events, step); }
};
struct TraceAnswer {
  static constexpr Kind kKind = Kind::kTraceAnswer;
  uint64_t number = 0;
  TimeUs asked_at = 0;  // as in the question
  TimeUs node_at = 0;   // when it answered, on the answering node's clock
  std::vector<TraceEvent> events;
  auto Fields() { return std::tie(number, asked_at, node_at, events); }
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_MESSAGES_H_
