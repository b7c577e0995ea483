// SPDX-License-Identifier: Apache-2.0
//
// The Engine makes all decisions of one node about steps, copies and incarnations: admission of ranks, saves,
// replication, replicas of other nodes, the leader's decisions, retention, fetching, repair. It is a deterministic
// state machine. Inputs are values: a view, a message, a completion, a request, the time. Outputs are values in an
// Outbox. It has no socket, thread, clock, random source or environment. ropeteamd drives one engine, tests/simulation
// drives hundreds.
//
// How to drive it: call one input, then carry out everything in outbox() and clear it, then call the next input.
// NextTimer() says when OnTimer() is due. All calls come from one thread. Only the Engine writes to the Store, with two
// exceptions: ranks write into chunks granted to them, and peers put into chunks granted to them.
//
// Delivery: messages may be lost, repeated and reordered, and a link may be reset. Every protocol here repeats
// unanswered messages and recognises repeats. Every envelope has the epoch and both instances. A message of an older
// epoch, or for another instance, is dropped and counted. A message of a newer epoch is kept until the node has that
// view.

#ifndef ROPETEAM_CORE_ENGINE_ENGINE_H_
#define ROPETEAM_CORE_ENGINE_ENGINE_H_

#include <cstdint>
#include <functional>
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
  // When a writer leaves the view, its chunks are quarantined for this long. The fabric must not deliver its writes
  // after that. If the transport can fence the writer, OnPeerFenced() ends the quarantine early.
  TimeUs quarantine_us = 5'000'000;
  // How long the puts of a save wait for its commit; 0: a chunk is put as soon as it is full. Set it if this node's
  // processors move the bytes: the training loop waits for the copy into the arena, so that goes before the puts.
  TimeUs puts_wait_us = 0;
  // The rate at which sealed shards are read again in the background to find damage; 0: off.
  uint64_t scrub_bytes_per_s = 0;
  // If this many incarnations in a row have restored a step without a newer commit, the next older step is offered
  // instead. 0: no limit. The leader's value counts.
  uint32_t restores_max = 0;
  // What this node's driver keeps on storage by its own rules: the number of newest steps, and the flags that define
  // the rules. Empty: there is no rule.
  uint32_t keep_on_storage = 0;
  std::string keep_rules = {};
  // The newest version of the protocol that this node speaks; the simulation has nodes of older ones.
  uint32_t protocol = kProtocolVersion;
  // The keys of a job that encrypts all chunks that leave a node (docs/security.md). The first one encrypts, all
  // decrypt, and the store has tags. Empty: the job does not encrypt. The salt's `instance` is random and drawn for each
  // engine.
  std::vector<KeyId> keys = {};
  EncryptionSalt salt = {};
  bool encrypts() const { return !keys.empty(); }
  KeyId key() const { return keys.empty() ? kPlaintext : keys.front(); }
};

using SessionId = uint64_t;  // one rank's or admin's connection; never reused
using RequestId = uint64_t;  // the client's own count within its session
using SaveId = uint64_t;
using ViewId = uint64_t;          // of an open shard; not a membership View
using DeviceBufferId = uint64_t;  // GPU memory that the driver can put from; the driver's number; 0: none

// Levels as in ropeteam_level_t.
enum class Level : uint8_t { kNone = 0, kLocal = 1, kReplicated = 2, kCommitted = 3, kPersisted = 4 };
const char* LevelName(Level level);

// ---- outputs

// A message for the peer's OnMessage(). The driver may drop it if it cannot be delivered.
struct SendMessage {
  NodeId to = kNoNode;
  std::string envelope;
};
// Moves bytes between two arenas. The local offset is from the beginning of this node's arena memory. The remote one is
// from the beginning of the peer's chunks, because a node exports nothing else. Answered by OnTransferDone(tag) exactly once, when the fabric no longer uses the local range. This holds also if the peer is dead
// or unknown.
struct StartTransfer {
  uint64_t tag = 0;
  NodeId peer = kNoNode;
  bool get = false;  // true: from the peer's arena into ours
  uint64_t local_offset = 0;
  uint64_t remote_offset = 0;
  uint64_t length = 0;
  // Not 0 (puts only): the local range is in this device memory (OnSaveDirect), not in the arena. If that memory is
  // gone or cannot be read, the answer is kNotFound, and no byte has left this node.
  DeviceBufferId buffer = 0;
};
// AES-256-GCM of one chunk from one place in the arena's memory to another (docs/security.md). It is decrypted if
// `from_key` is not kPlaintext, and then encrypted if `to_key` is not. Key and nonce are derived from the job's key, the
// salt and the chunk's number. The shard's id is authenticated with the chunk.
struct ChunkCipher {
  KeyId from_key = kPlaintext;
  KeyId to_key = kPlaintext;
  // From the beginning of the arena's memory; may be the range's own place if that is ciphertext.
  uint64_t to = 0;
  ShardId shard;
  uint32_t chunk = 0;
  EncryptionSalt salt;
  ChunkTag tag;  // for decryption
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
// Computes CRC32Cs of arena memory on another thread than the engine's. Answered by OnCheckDone(tag) exactly once.
struct StartCheck {
  struct Range {
    uint64_t offset = 0;  // from the beginning of the arena's memory
    uint64_t length = 0;
    uint32_t crc = 0;  // expected; with a cipher, of the plaintext
    // The range is also encrypted or decrypted. It is bad if the checksum or the tag does not match, and the bytes at
    // `to` are then undefined. The bytes that are encrypted are the checked ones, even if another thread writes to the
    // range meanwhile.
    std::optional<ChunkCipher> cipher = {};
    // If the range is good, its pieces are also packed. Not together with a cipher.
    std::optional<ChunkPack> pack = {};
  };
  uint64_t tag = 0;
  std::vector<Range> ranges;
};

// Work on storage, on another thread than the engine's. Answered by OnStorageDone(tag) exactly once. Until then the
// chunks that the work names are neither freed nor reused.
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
  // The newest quarantined step that would be offered if it were not quarantined; {0, 0}: none.
  StepId passed_over;
};
// Where a shard was when a view of it was opened. As ropeteam_origin_t.
enum class Origin : uint8_t { kHere = 1, kPeers = 2, kStorage = 3 };
struct AnswerView {
  ViewId view = 0;
  ShardMeta meta;
  std::vector<Extent> extents;
  std::vector<uint32_t> crcs;
  Origin origin = Origin::kHere;
};
// The parts of a ranged read. Each part's bytes are at the beginning of one chunk of this arena, with their CRC32C.
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
// `asked_at` and `answered_at` are on this node's clock: when the question was sent, and when the answer arrived.
// `node_at` is on the other node's clock.
struct AnswerTrace {
  TimeUs asked_at = 0;
  TimeUs node_at = 0;
  TimeUs answered_at = 0;
  std::vector<TraceEvent> events;
};
// The answer to a session's request. A closed session gets no answer.
struct Answer {
  SessionId session = 0;
  RequestId request = 0;
  std::variant<AnswerStatus, AnswerHello, AnswerGrant, AnswerLatest, AnswerView, AnswerRanges, AnswerReport,
               AnswerVerify, AnswerTrace>
      body;
};

// The data path reports a failure of this member: the driver asks membership to probe it.
struct PeerSuspicion {
  NodeId peer = kNoNode;
  std::string reason;
};
// Whether a member answers control messages. Sent when that changes, for a member that membership asked about
// (OnCheckMembers), and repeatedly while there is no answer: the driver tells membership, and makes the link to a silent
// member again.
struct PeerReached {
  NodeId peer = kNoNode;
  bool reached = false;
};
// A shard reached a level, or a step was committed (rank is then kNoRank). For logs, metrics and the tests' checks.
struct LevelEvent {
  static constexpr Rank kNoRank = UINT32_MAX;
  ShardId shard;
  Level level = Level::kNone;
  uint64_t bytes = 0;
  TimeUs since_begin_us = 0;  // from save_begin on this node; 0 if the save began on another node
};

struct Outbox {
  std::vector<SendMessage> messages;
  std::vector<StartTransfer> transfers;
  std::vector<StartCheck> checks;
  std::vector<StartStorage> storage;
  std::vector<Answer> answers;
  std::vector<PeerSuspicion> suspicions;
  std::vector<PeerReached> reached;
  std::vector<LevelEvent> events;
  bool empty() const {
    return messages.empty() && transfers.empty() && checks.empty() && storage.empty() && answers.empty() &&
           suspicions.empty() && reached.empty() && events.empty();
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
  uint64_t token = 0;             // random, one per handle; unchanged when the handle reconnects
  std::string incarnation_token;  // the token of the incarnation that the rank wants to join; may be empty
  TimeUs timeout_us = 0;
  Incarnation incarnation = 0;  // the incarnation that admitted this handle before it reconnected; 0 at first
  PolicyInput policy = {};      // set by this handle before it reconnected
};
struct SaveCommitInput {
  SaveId save = 0;
  uint64_t stream_bytes = 0;
  uint64_t manifest_offset = 0;
  uint32_t object_count = 0;
  std::vector<uint32_t> crcs;
  // The result of Engine::ManifestCheck(), if the driver has called it. None: the engine reads the manifest itself.
  std::optional<Status> manifest = {};
};

// The whole chunks [first, first + count) of the stream are the bytes of `buffer` from `offset` on.
struct SaveDirectInput {
  SaveId save = 0;
  DeviceBufferId buffer = 0;
  uint64_t offset = 0;
  uint32_t first = 0;
  uint32_t count = 0;
};

class Engine {
 public:
  // `store` must outlive the Engine. The caller has checked the chunks of an adopted store and marked the bad ones.
  Engine(const EngineConfig& config, Store* store);
  ~Engine();

  Outbox& outbox();
  // The time at which OnTimer() is due next; UINT64_MAX for never. It may change with every input.
  TimeUs NextTimer() const;

  // ---- inputs from other nodes, transport, storage and membership
  void OnView(TimeUs now, const View& view);  // epochs must grow; an older one is ignored
  void OnMessage(TimeUs now, NodeId from, std::string_view envelope);  // `from` as the link authenticated it
  void OnTransferDone(TimeUs now, uint64_t tag, Code code);
  // `bad`: indices of the ranges whose bytes do not match. `encrypted`: one per range, if the ranges were encrypted or
  // packed.
  void OnCheckDone(TimeUs now, uint64_t tag, const std::vector<uint32_t>& bad,
                   const std::vector<EncryptedChunk>& encrypted = {});
  // `done` has the result for this kind of work if `status` is OK. StorageDone::bad is also set if the status is
  // kCorrupt.
  void OnStorageDone(TimeUs now, uint64_t tag, const Status& status, const StorageDone& done);
  // The work has made no progress for over a minute, for example because a file system hangs. A call that keeps its
  // deadline ends sooner. May be called several times. OnStorageDone() still follows when the work ends, and its chunks
  // stay as they are until then. Requests that wait for the work try another source.
  void OnStorageStalled(TimeUs now, uint64_t tag);
  // Transfers of this departed instance cannot write any more bytes here.
  void OnPeerFenced(TimeUs now, NodeId peer);
  void OnTimer(TimeUs now);
  // Membership's lease is valid until `valid_until`, on the clock of `now`; 0: no lease. The others may have declared a
  // node without a lease dead. So it starts no put, acknowledges no replica and accepts no announcement. A leader
  // without a lease decides nothing. Saves stay LOCAL, reads go on. Everything resumes with the next lease.
  void OnLease(TimeUs now, TimeUs valid_until);
  // The data path has lost (`up` false) or regained this member of the view. While the link is lost, no transfer with
  // it is started, and copies are placed on other nodes.
  void OnPeerLink(TimeUs now, NodeId peer, bool up, const std::string& reason);
  // Membership wants to know which of these members answer this node, until the next call (Membership::on_check).
  void OnCheckMembers(TimeUs now, const std::vector<NodeId>& members);

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
  // The chunks may be put to replicas from device memory until they are filled, or the save is settled, committed or
  // ended. The buffer must stay valid until every transfer that names it has been answered.
  void OnSaveDirect(TimeUs now, SessionId session, const SaveDirectInput& direct);
  // Stops puts from device memory of this save. Answered kOk when no put reads that memory any more, or else
  // kDeadlineExceeded.
  void OnSaveSettle(TimeUs now, SessionId session, RequestId request, SaveId save, TimeUs timeout_us);
  void OnSaveCommit(TimeUs now, SessionId session, RequestId request, const SaveCommitInput& commit);
  // Reading a manifest takes up to seconds (kObjectsMax). A driver may do it on another thread: this function checks the
  // manifest of the commit in the arena, in any thread, as long as the Store exists. Its result goes into
  // SaveCommitInput::manifest. Null: OnSaveCommit() refuses the commit without reading a manifest. If the save ends
  // meanwhile, the result is meaningless, and OnSaveCommit() does not look at it.
  std::function<Status()> ManifestCheck(SessionId session, const SaveCommitInput& commit) const;
  void OnSaveAbort(TimeUs now, SessionId session, RequestId request, SaveId save);
  void OnWait(TimeUs now, SessionId session, RequestId request, Step step, Level level, TimeUs timeout_us);
  // Releases the step from all nodes' memory. Answered when no node of the view has a copy. A session that has sent no
  // hello is an operator's.
  void OnDrop(TimeUs now, SessionId session, RequestId request, Step step, TimeUs timeout_us);
  // Persists the step once it is committed, even if it is not due. Answered when every node has recorded the request.
  void OnPersist(TimeUs now, SessionId session, RequestId request, Step step, TimeUs timeout_us);
  // Sets what the daemons' flags leave open. Answered when every node has recorded it.
  void OnSetPolicy(TimeUs now, SessionId session, RequestId request, const PolicyInput& policy,
                   TimeUs timeout_us);
  // kNone and kCommitted: the step to restore. The first rank that asks chooses it for its incarnation. kPersisted: the
  // newest good step on storage, even if memory has newer ones; nothing is chosen. kUnsupported: there is no storage.
  // Other levels: kInvalidArgument.
  void OnLatest(TimeUs now, SessionId session, RequestId request, Level level, TimeUs timeout_us);
  // `partial`: a shard that is not here is not fetched if a holder supports ranged reads. The view then has no extents
  // and no checksums, and holds no lease on any node.
  void OnViewOpen(TimeUs now, SessionId session, RequestId request, Step step, Rank rank, TimeUs timeout_us,
                  bool partial = false);
  // Reads at most kPackedPartsMax parts of a view without extents. Answered by AnswerRanges. Its chunks belong to this
  // rank until its next read of the view or until the view is closed. Without parts: releases the chunks, answered with
  // a status. kUnavailable, kNotFound, kNoSpace: no holder can serve the parts; open the whole shard instead.
  void OnViewRead(TimeUs now, SessionId session, RequestId request, ViewId view,
                  const std::vector<PackedPart>& parts, TimeUs timeout_us);
  void OnViewRepair(TimeUs now, SessionId session, RequestId request, ViewId view,
                    const std::vector<uint32_t>& chunks, TimeUs timeout_us);
  void OnViewClose(TimeUs now, SessionId session, ViewId view);
  // An operator's order: latest no longer offers the newest step of this number or, with `undo`, offers it again. The
  // step stays readable by its number. Answered with a status when every node has recorded the order.
  void OnQuarantine(TimeUs now, SessionId session, RequestId request, Step step, bool undo,
                    TimeUs timeout_us);
  // An operator's order: the job no longer waits for this missing node, or for any (empty), and gives up the commits
  // that cannot be produced without it. Answered like OnQuarantine().
  void OnForget(TimeUs now, SessionId session, RequestId request, const std::string& node, TimeUs timeout_us);
  // OnReport: the cluster as the leader sees it (AnswerReport). OnVerify: reads every chunk of a step (the newest if
  // `step` is null) on every node that holds any (AnswerVerify).
  void OnReport(TimeUs now, SessionId session, RequestId request, TimeUs timeout_us);
  void OnVerify(TimeUs now, SessionId session, RequestId request, const Step* step, TimeUs timeout_us);
  // The member's clock and, if `events`, its recorded events of the step. kNotFound: the member is not in the view.
  void OnTrace(TimeUs now, SessionId session, RequestId request, NodeId node, bool events, Step step,
               TimeUs timeout_us);

  // Drains this node: it accepts no new save or replica, and its shards are copied to other nodes. The driver ends the
  // node when drain().done is set, or earlier. This instance cannot undo a drain.
  void OnDrain(TimeUs now);

  // ---- state, for reports and tests
  DrainReport drain() const;
  NodeReport Report() const;      // this node alone, at once
  EngineMetrics Metrics() const;  // likewise, without lists that grow with steps
  bool is_leader() const;
  bool redundant() const;  // as in EngineMetrics
  bool saving() const;     // a save of this node's ranks has begun and has not ended
  const View& view() const;
  Incarnation incarnation() const;  // the current one, as far as this node has heard
  // Recomputes derived state and compares it, with ROPETEAM_CHECK. For tests and the simulation.
  void CheckInvariants() const;

  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_CORE_ENGINE_ENGINE_H_
