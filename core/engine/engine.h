// SPDX-License-Identifier: Apache-2.0
//
// The Engine is all that one node decides about steps, copies and lives: admission of ranks, saves,
// replication, holding others' replicas, the leader's judgement, retention, fetching, repair. It is a
// deterministic state machine: inputs are values (a view, a message, a completion, a request, the time),
// outputs are values in an Outbox. It has no socket, thread, clock, random source or environment; ropeteamd
// drives one, tests/simulation hundreds.
//
// Driving it: call one input, then carry out everything in outbox() and clear it, before the next input.
// NextTimer() says when OnTimer() is due. All calls from one thread. The Store is the Engine's alone, except
// that ranks write into chunks granted to them and peers' puts land in chunks granted to them.
//
// Delivery: messages may be lost, repeated and reordered, and a link may reset; every protocol here repeats
// what is unanswered and takes repeats as such. Every envelope carries the epoch and both instances: one of
// an older epoch, or for another instance, is dropped and counted; one of a newer epoch is kept until the
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
  // How long chunks stay out of use whose writer has left the view without giving them back: longer than
  // anything the fabric may still deliver. OnPeerFenced() ends it early where the transport can tell.
  TimeUs quarantine_us = 5'000'000;
  // How long the puts of a save wait for its commit; 0: a chunk is put as soon as it is full. Where this node's processors
  // carry what is put, the copy into the arena gets them first: the training loop waits for the copy, not for the puts.
  TimeUs puts_wait_us = 0;
  // How much of what is sealed here is read again, to find what has gone bad; 0: none.
  uint64_t scrub_bytes_per_s = 0;
  // A step that so many incarnations have restored, one after the other and without a newer commit, is not offered any
  // more: the next older one is. 0: every step is offered for ever. The leader's value counts.
  uint32_t restores_max = 0;
  // The newest version of the protocol that this node speaks; the simulation has nodes of older ones.
  uint32_t protocol = kProtocolVersion;
  // The job encrypts what leaves a node (docs/security.md). The salt's `instance` is random and drawn for each engine; the
  // store has tags.
  bool encrypts = false;
  EncryptionSalt salt = {};
};

using SessionId = uint64_t;  // one rank's or admin's connection; never used again
using RequestId = uint64_t;  // the client's own count within its session
using SaveId = uint64_t;
using ViewId = uint64_t;          // of an open shard; not a membership View
using DeviceBufferId = uint64_t;  // a GPU's memory that the driver can put from, by its own count; 0: none

// Levels as in ropeteam_level_t.
enum class Level : uint8_t { kNone = 0, kLocal = 1, kReplicated = 2, kCommitted = 3, kPersisted = 4 };
const char* LevelName(Level level);

// ---- outputs

// To the peer's OnMessage(). Undeliverable ones may be dropped.
struct SendMessage {
  NodeId to = kNoNode;
  std::string envelope;
};
// Moves bytes between the two arenas; offsets are from the beginning of each node's arena memory. Answered by
// OnTransferDone(tag) exactly once, when the fabric has let go of the local range, also when the peer is dead
// or unknown.
struct StartTransfer {
  uint64_t tag = 0;
  NodeId peer = kNoNode;
  bool get = false;  // true: from the peer's arena into ours
  uint64_t local_offset = 0;
  uint64_t remote_offset = 0;
  uint64_t length = 0;
  // Not 0, only of a put: the local range is in this memory (OnSaveDirect) and not in the arena. kNotFound
  // answers one whose memory is gone or cannot be read: then no byte has left this node.
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
// Pieces of one chunk, which is the range, are copied to one place in the arena's memory, one run behind the other.
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
    // The range is encrypted or decrypted as well. It is bad if checksum or tag do not match; what lies at `to` is then
    // neither the plaintext nor the ciphertext. What is encrypted is what was checked, whatever others write to it meanwhile.
    std::optional<ChunkCipher> cipher = {};
    // If the range is good its pieces are packed as well. Not with a cipher.
    std::optional<ChunkPack> pack = {};
  };
  uint64_t tag = 0;
  std::vector<Range> ranges;
};

// Work on storage, off the engine's thread. Answered by OnStorageDone(tag) exactly once. Until then the chunks that it
// names are neither freed nor reused.
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
// When it was asked for and arrived, on this node's clock, and when the other node answered, on its own.
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

// The data path saw this member fail: ask membership to look.
struct PeerSuspicion {
  NodeId peer = kNoNode;
  std::string reason;
};
// A shard climbed a level, or a step was committed (rank is then kNoRank); for logs, metrics and the tests'
// checks.
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

struct HelloInput {
  Rank rank = 0;
  uint32_t world_size = 0;
  uint64_t token = 0;  // random, one a handle; the same when the handle reconnects
  std::string life;    // may be empty
  TimeUs timeout_us = 0;
  Incarnation incarnation = 0;  // what this handle was admitted to before it reconnected; 0 at first
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

  // ---- the world
  void OnView(TimeUs now, const View& view);  // epochs must grow; an older one is ignored
  void OnMessage(TimeUs now, NodeId from, std::string_view envelope);  // `from` as the link authenticated it
  void OnTransferDone(TimeUs now, uint64_t tag, Code code);
  // `bad`: indices into the ranges whose bytes do not match. `encrypted`: one for each range, where they were encrypted or packed.
  void OnCheckDone(TimeUs now, uint64_t tag, const std::vector<uint32_t>& bad,
                   const std::vector<EncryptedChunk>& encrypted = {});
  // `done` holds the result that the work names if `status` is OK; StorageDone::bad also if it is kCorrupt.
  void OnStorageDone(TimeUs now, uint64_t tag, const Status& status, const StorageDone& done);
  // The work has made no progress for over a minute, which is longer than a call that keeps its deadline: a file system
  // hangs, say. Called once or more. It is still answered by OnStorageDone() when it ends, and until then its chunks stay as
  // they are; whoever waits for it looks elsewhere.
  void OnStorageStalled(TimeUs now, uint64_t tag);
  // No byte of this (departed) instance's transfers can land any more.
  void OnPeerFenced(TimeUs now, NodeId peer);
  void OnTimer(TimeUs now);
  // Membership's lease lasts until then, on the clock of `now`; 0: no lease. Without one this node starts
  // no put, acknowledges no replica, believes no leader and, if it leads, decides nothing: the others may have
  // declared it dead. Saves stay LOCAL, reads go on. All of it resumes with the next lease.
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
  // Has the step released from all nodes' memory. Answered when no node of the view has a copy.
  void OnDrop(TimeUs now, SessionId session, RequestId request, Step step, TimeUs timeout_us);
  // Has the step persisted once it is committed, whether it is due or not. Answered when every node has heard of it.
  void OnPersist(TimeUs now, SessionId session, RequestId request, Step step, TimeUs timeout_us);
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
  // By hand: the newest step of this number is not offered by latest any more, or, if `undo`, is again. It stays readable
  // by its number. Answered with a status, when every node has heard of it.
  void OnQuarantine(TimeUs now, SessionId session, RequestId request, Step step, bool undo,
                    TimeUs timeout_us);
  // The cluster as the leader sees it (AnswerReport); with `verify`, reads every chunk of a step (the newest
  // if `step` is null) on every node that holds any (AnswerVerify).
  void OnReport(TimeUs now, SessionId session, RequestId request, TimeUs timeout_us);
  void OnVerify(TimeUs now, SessionId session, RequestId request, const Step* step, TimeUs timeout_us);
  // What a member has noted of the step, if `events`, and its clock. kNotFound: it is not in the view.
  void OnTrace(TimeUs now, SessionId session, RequestId request, NodeId node, bool events, Step step,
               TimeUs timeout_us);

  // This node is to leave the job: it takes on nothing new, and what it holds gets its copies elsewhere. It leaves when
  // drain().done says so, or earlier. Nothing takes it back but another instance.
  void OnDrain(TimeUs now);

  // ---- looking in
  DrainReport drain() const;
  NodeReport Report() const;      // this node alone, at once
  EngineMetrics Metrics() const;  // likewise, without lists that grow with steps
  bool is_leader() const;
  bool redundant() const;  // as in EngineMetrics
  bool saving() const;     // a save of this node's ranks has begun and has not ended
  const View& view() const;
  Incarnation incarnation() const;  // the current life as far as this node knows
  // Ours, recomputed and compared; ROPETEAM_CHECKs. For tests and the simulation.
  void CheckInvariants() const;

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_ENGINE_H_
