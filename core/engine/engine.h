// SPDX-License-Identifier: Apache-2.0
//
// The Engine makes all decisions of one node about steps, copies and incarnations: admission of ranks, saves,
// replication, holding others' replicas, the leader's decisions, retention, fetching, repair. It is a
// deterministic state machine: inputs are values (a view, a message, a completion, a request, the time),
// outputs are values in an Outbox. It has no socket, thread, clock, random source or environment; ropeteamd
// drives one, tests/simulation hundreds.
//
// How to drive it: call one input, then carry out everything in outbox() and clear it, before the next input.
// NextTimer() says when OnTimer() is due. All calls come from one thread. Only the Engine writes to the Store,
// with two exceptions: ranks write into chunks granted to them, and peers' puts land in chunks granted to them.
//
// Delivery: messages may be lost, repeated and reordered, and a link may reset. Every protocol here repeats
// unanswered messages and recognises repeats. Every envelope carries the epoch and both instances. A message of
// an older epoch, or for another instance, is dropped and counted. A message of a newer epoch is kept until that
// view has come.

#ifndef ROPETEAM_CORE_ENGINE_ENGINE_H_
#define ROPETEAM_CORE_ENGINE_ENGINE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/base/ids.h"
#include "core/base/status.h"
#include "core/base/trace_event.h"
#include "core/base/view.h"
#include "core/engine/metrics.h"
#include "core/engine/report.h"
#include "core/engine/storage_work.h"
#include "core/shard/extent.h"
#include "core/shard/pieces.h"
#include "core/store/store.h"

namespace ropeteam {

struct EngineConfig {
  NodeId self = kNoNode;
  std::string job;
  std::string node;
  // When a writer leaves the view, its chunks are quarantined for this long: longer than the fabric may still deliver
  // its writes. OnPeerFenced() ends the quarantine early if the transport can tell.
  TimeUs quarantine_us = 5'000'000;
  // How long the puts of a save wait for its commit; 0: a chunk is put as soon as it is full. If this node's processors
  // move the bytes, the copy into the arena goes first: the training loop waits for the copy, not for the puts.
  TimeUs puts_wait_us = 0;
  // The rate at which sealed shards are read again in the background to find damage; 0: off.
  uint64_t scrub_bytes_per_s = 0;
  // After so many incarnations in a row have restored a step without a newer commit, the next older step is offered
  // instead. 0: every step is offered for ever. The leader's value counts.
  uint32_t restores_max = 0;
  // What this node's driver keeps on storage by its own rules: the number of newest steps, and all flags that give rules.
  // Empty: there is no rule.
  uint32_t keep_on_storage = 0;
  std::string keep_rules = {};
  // The newest version of the protocol that this node speaks; the simulation has nodes of older ones.
  uint32_t protocol = kProtocolVersion;
  // The job encrypts all chunks that leave a node (docs/security.md). The salt's `instance` is random and drawn for each
  // engine; the store has tags.
  bool encrypts = false;
  EncryptionSalt salt = {};
};

using SessionId = uint64_t;  // one rank's or admin's connection; never reused
using RequestId = uint64_t;  // the client's own count within its session
using SaveId = uint64_t;
using ViewId = uint64_t;          // of an open shard; not a membership View
using DeviceBufferId = uint64_t;  // a GPU's memory that the driver can put from, by its own count; 0: none

// Levels as in ropeteam_level_t.
enum class Level : uint8_t { kNone = 0, kLocal = 1, kReplicated = 2, kCommitted = 3, kPersisted = 4 };
const char* LevelName(Level level);

// ---- outputs

// A message for the peer's OnMessage(). The driver may drop it if it cannot be delivered.
struct SendMessage {
  NodeId to = kNoNode;
  std::string envelope;
};
// Moves bytes between the two arenas; offsets are from the beginning of each node's arena memory. Answered by
// OnTransferDone(tag) exactly once, when the fabric no longer uses the local range, also when the peer is dead
// or unknown.
struct StartTransfer {
  uint64_t tag = 0;
  NodeId peer = kNoNode;
  bool get = false;  // true: from the peer's arena into ours
  uint64_t local_offset = 0;
  uint64_t remote_offset = 0;
  uint64_t length = 0;
  // Not 0 (puts only): the local range is in this device memory (OnSaveDirect) and not in the arena. If that memory is
  // gone or cannot be read, the answer is kNotFound, and no byte has left this node.
  DeviceBufferId buffer = 0;
};
// AES-256-GCM of one chunk from one place in the arena's memory to another (docs/security.md): key and nonce follow from
// the salt and the chunk's number, and the shard is authenticated with it.
struct ChunkCipher {
  bool encrypt = false;
  uint64_t to = 0;  // from the beginning of the arena's memory; to decrypt, it may be where the ciphertext is
  ShardId shard;
  uint32_t chunk = 0;
  EncryptionSalt salt;
  ChunkTag tag;  // to decrypt
};
// Copies pieces of one chunk (the range) to one place in the arena's memory, one after the other.
struct ChunkPack {
  uint64_t to = 0;  // from the beginning of the arena's memory
  std::vector<ChunkPiece> pieces;
};
struct EncryptedChunk {
  uint32_t crc = 0;  // of the ciphertext, or of what was packed
  ChunkTag tag;
};
// Computes CRC32Cs of arena memory off the engine's thread. Answered by OnCheckDone(tag) exactly once.
struct StartCheck {
  struct Range {
    uint64_t offset = 0;  // from the beginning of the arena's memory
    uint64_t length = 0;
    uint32_t crc = 0;  // expected; with a cipher, of the plaintext
    // The range is encrypted or decrypted as well. It is bad if the checksum or the tag does not match; the bytes at `to`
    // are then undefined. The bytes that are encrypted are those that were checked, even if others write to the range
    // meanwhile.
    std::optional<ChunkCipher> cipher = {};
    // If the range is good its pieces are packed as well. Not with a cipher.
    std::optional<ChunkPack> pack = {};
  };
  uint64_t tag = 0;
  std::vector<Range> ranges;
};

// Work on storage, off the engine's thread. Answered by OnStorageDone(tag) exactly once. Until then the chunks that it
// names are not freed or reused.
struct StartStorage {
  uint64_t tag = 0;
  StorageWork work;
};

struct AnswerStatus {
  Status status;
};
struct AnswerHello {
  Incarnation incarnation = 0;
};
struct AnswerGrant {
  SaveId save = 0;
  std::vector<Extent> extents;
};
struct AnswerLatest {
  StepId step;
  uint32_t world_size = 0;
  StepId passed_over;  // the newest quarantined step that would have been offered otherwise; {0, 0}: none
};
struct AnswerView {
  ViewId view = 0;
  ShardMeta meta;
  std::vector<Extent> extents;
  std::vector<uint32_t> crcs;
};
// A ranged read's parts: where each one's bytes are, at the beginning of a chunk of this arena, and their CRC32C.
struct AnswerRanges {
  std::vector<uint32_t> chunks;
  std::vector<uint32_t> crcs;
};
struct AnswerReport {
  ClusterReport report;
};
struct AnswerVerify {
  VerifyReport report;
};
// The times of the question and of its answer's arrival, on this node's clock, and of the answer, on the other node's.
struct AnswerTrace {
  TimeUs asked_at = 0;
  TimeUs node_at = 0;
  TimeUs answered_at = 0;
  std::vector<TraceEvent> events;
};
// To a session's request. A session that has closed gets none.
struct Answer {
  SessionId session = 0;
  RequestId request = 0;
  std::variant<AnswerStatus, AnswerHello, AnswerGrant, AnswerLatest, AnswerView, AnswerRanges, AnswerReport,
               AnswerVerify, AnswerTrace>
      body;
};

// The data path saw this member fail: ask membership to probe it.
struct PeerSuspicion {
  NodeId peer = kNoNode;
  std::string reason;
};
// A shard reached a level, or a step was committed (rank is then kNoRank). For logs, metrics and the tests' checks.
struct LevelEvent {
  static constexpr Rank kNoRank = UINT32_MAX;
  ShardId shard;
  Level level = Level::kNone;
  uint64_t bytes = 0;
  TimeUs since_begin_us = 0;  // from save_begin on this node; 0 where it began elsewhere
};

struct Outbox {
  std::vector<SendMessage> messages;
  std::vector<StartTransfer> transfers;
  std::vector<StartCheck> checks;
  std::vector<StartStorage> storage;
  std::vector<Answer> answers;
  std::vector<PeerSuspicion> suspicions;
  std::vector<LevelEvent> events;
  bool empty() const {
    return messages.empty() && transfers.empty() && checks.empty() && storage.empty() && answers.empty() &&
           suspicions.empty() && events.empty();
  }
  void clear() { *this = Outbox(); }
};

// ---- inputs

// What a rank sets for the job's storage; 0: not set.
struct PolicyInput {
  uint64_t persist_every = 0;    // steps, at most kPersistEveryMax
  uint32_t keep_on_storage = 0;  // at most kKeepOnStorageMax
  bool any() const { return persist_every != 0 || keep_on_storage != 0; }
};
struct HelloInput {
  Rank rank = 0;
  uint32_t world_size = 0;
  uint64_t token = 0;             // random, one for each handle; the same when the handle reconnects
  std::string incarnation_token;  // the token of the incarnation that the rank wants to join; may be empty
  TimeUs timeout_us = 0;
  Incarnation incarnation = 0;  // to which this handle was admitted before it reconnected; 0 at first
  PolicyInput policy = {};      // that this handle has set before it reconnected
};
struct SaveCommitInput {
  SaveId save = 0;
  uint64_t stream_bytes = 0;
  uint64_t manifest_offset = 0;
  uint32_t object_count = 0;
  std::vector<uint32_t> crcs;
};

// Chunks [first, first + count) of the stream, whole, are the bytes of `buffer` from `offset` on.
struct SaveDirectInput {
  SaveId save = 0;
  DeviceBufferId buffer = 0;
  uint64_t offset = 0;
  uint32_t first = 0;
  uint32_t count = 0;
};

class Engine {
 public:
  // `store` must outlive the Engine. The caller has checked an adopted store's chunks and marked the bad
  // ones.
  Engine(const EngineConfig& config, Store* store);
  ~Engine();

  Outbox& outbox();
  // When OnTimer() is due next; UINT64_MAX for never. May change with every input.
  TimeUs NextTimer() const;

  // ---- inputs from other nodes, transport, storage and membership
  void OnView(TimeUs now, const View& view);  // epochs must grow; an older one is ignored
  void OnMessage(TimeUs now, NodeId from, std::string_view envelope);  // `from` as the link authenticated it
  void OnTransferDone(TimeUs now, uint64_t tag, Code code);
  // `bad`: indices of the ranges whose bytes do not match. `encrypted`: one for each range, if they were encrypted or packed.
  void OnCheckDone(TimeUs now, uint64_t tag, const std::vector<uint32_t>& bad,
                   const std::vector<EncryptedChunk>& encrypted = {});
  // `done` holds the result that the work names if `status` is OK; StorageDone::bad also if it is kCorrupt.
  void OnStorageDone(TimeUs now, uint64_t tag, const Status& status, const StorageDone& done);
  // The work has made no progress for over a minute, longer than any call that keeps its deadline: for example, a file
  // system hangs. Called once or more. The work is still answered by OnStorageDone() when it ends, and until then its
  // chunks stay as they are. Requests that wait for it try another source.
  void OnStorageStalled(TimeUs now, uint64_t tag);
  // No byte of this (departed) instance's transfers can land any more.
  void OnPeerFenced(TimeUs now, NodeId peer);
  void OnTimer(TimeUs now);
  // Membership's lease lasts until then, on the clock of `now`; 0: no lease. Without a lease this node starts
  // no put, acknowledges no replica and accepts no announcement. If it leads, it decides nothing: the others may have
  // declared it dead. Saves stay LOCAL, reads go on. Everything resumes with the next lease.
  void OnLease(TimeUs now, TimeUs valid_until);
  // The data path has lost (`up` false) or regained this member of the view. While it is lost no transfer is
  // started with it, and copies are placed elsewhere.
  void OnPeerLink(TimeUs now, NodeId peer, bool up, const std::string& reason);

  // ---- sessions; each request is answered once unless the session closes first
  void OnSessionOpened(TimeUs now, SessionId session);
  void OnSessionClosed(TimeUs now, SessionId session);  // aborts its saves, ends its views and waits
  void OnHello(TimeUs now, SessionId session, RequestId request, const HelloInput& hello);
  // `agreement`: as in ShardMeta.
  void OnSaveBegin(TimeUs now, SessionId session, RequestId request, Step step, uint64_t stream_bytes,
                   uint64_t agreement = 0);
  void OnSaveExtend(TimeUs now, SessionId session, RequestId request, SaveId save, uint64_t chunks);
  void OnSaveFilled(TimeUs now, SessionId session, SaveId save, uint32_t first,
                    const std::vector<uint32_t>& crcs);
  // The chunks may be put to replicas from device memory, until they are filled or the save is settled,
  // committed or ended. The buffer must be there until every transfer that names it has been answered.
  void OnSaveDirect(TimeUs now, SessionId session, const SaveDirectInput& direct);
  // Answered when no put reads device memory of this save any more, and none will: kOk, or kDeadlineExceeded.
  void OnSaveSettle(TimeUs now, SessionId session, RequestId request, SaveId save, TimeUs timeout_us);
  void OnSaveCommit(TimeUs now, SessionId session, RequestId request, const SaveCommitInput& commit);
  void OnSaveAbort(TimeUs now, SessionId session, RequestId request, SaveId save);
  void OnWait(TimeUs now, SessionId session, RequestId request, Step step, Level level, TimeUs timeout_us);
  // Releases the step from all nodes' memory. Answered when no node of the view has a copy. A session without a hello is an
  // operator's.
  void OnDrop(TimeUs now, SessionId session, RequestId request, Step step, TimeUs timeout_us);
  // Persists the step once it is committed, also if it is not due. Answered when every node knows of the request.
  void OnPersist(TimeUs now, SessionId session, RequestId request, Step step, TimeUs timeout_us);
  // Sets what the daemons' flags do not. Answered when every node knows it.
  void OnSetPolicy(TimeUs now, SessionId session, RequestId request, const PolicyInput& policy,
                   TimeUs timeout_us);
  // kNone and kCommitted: the step to restore; the first rank that asks chooses it for its incarnation. kPersisted: the
  // newest good step on storage, also where memory has newer ones; nothing is chosen. kUnsupported: there is no storage.
  // Other levels: kInvalidArgument.
  void OnLatest(TimeUs now, SessionId session, RequestId request, Level level, TimeUs timeout_us);
  // `partial`: a shard that is not here is not fetched if a holder can be read from by ranges; the view is then without
  // extents and checksums, and holds no lease anywhere.
  void OnViewOpen(TimeUs now, SessionId session, RequestId request, Step step, Rank rank, TimeUs timeout_us,
                  bool partial = false);
  // Of a view without extents: at most kPackedPartsMax parts. Answered by AnswerRanges; its chunks are this rank's until its
  // next read of the view, or the view's close. No parts: releases them, answered with a status. kUnavailable, kNotFound,
  // kNoSpace: no holder can give them in this way; open the whole shard instead.
  void OnViewRead(TimeUs now, SessionId session, RequestId request, ViewId view,
                  const std::vector<PackedPart>& parts, TimeUs timeout_us);
  void OnViewRepair(TimeUs now, SessionId session, RequestId request, ViewId view,
                    const std::vector<uint32_t>& chunks, TimeUs timeout_us);
  void OnViewClose(TimeUs now, SessionId session, ViewId view);
  // An operator's order: latest no longer offers the newest step of this number or, with `undo`, offers it again. The step
  // stays readable by its number. Answered with a status when every node knows.
  void OnQuarantine(TimeUs now, SessionId session, RequestId request, Step step, bool undo,
                    TimeUs timeout_us);
  // The cluster as the leader sees it (AnswerReport); with `verify`, reads every chunk of a step (the newest
  // if `step` is null) on every node that holds any (AnswerVerify).
  void OnReport(TimeUs now, SessionId session, RequestId request, TimeUs timeout_us);
  void OnVerify(TimeUs now, SessionId session, RequestId request, const Step* step, TimeUs timeout_us);
  // A member's recorded events of the step, if `events`, and its clock. kNotFound: the member is not in the view.
  void OnTrace(TimeUs now, SessionId session, RequestId request, NodeId node, bool events, Step step,
               TimeUs timeout_us);

  // Drains this node: it accepts no new save or replica, and its shards are copied to other nodes. The driver ends the
  // node when drain().done is set, or earlier. A drain cannot be undone in this instance.
  void OnDrain(TimeUs now);

  // ---- state, for reports and tests
  DrainReport drain() const;
  NodeReport Report() const;      // this node alone, at once
  EngineMetrics Metrics() const;  // likewise, without lists that grow with steps
  bool is_leader() const;
  bool redundant() const;  // as in EngineMetrics
  bool saving() const;     // a save of this node's ranks has begun and has not ended
  const View& view() const;
  Incarnation incarnation() const;  // the current one, as far as this node knows
  // Recomputes derived state and compares it; ROPETEAM_CHECKs. For tests and the simulation.
  void CheckInvariants() const;

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_ENGINE_H_
