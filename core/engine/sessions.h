// SPDX-License-Identifier: Apache-2.0
//
// The ranks and operators connected to this node: their admission, saves, waits, views. The states of a save on this
// node:
//
//     filling ──commit, manifest good──> sealed (LOCAL) ── R copies ──> REPLICATED ── leader ──> COMMITTED
//        └── abort, bad commit, session closed ──> ending ── no put reads its chunks ──> freed

#ifndef ROPETEAM_CORE_ENGINE_SESSIONS_H_
#define ROPETEAM_CORE_ENGINE_SESSIONS_H_

#include <map>
#include <optional>
#include <set>
#include <vector>

#include "core/engine/context.h"
#include "core/engine/range_reader.h"
#include "core/engine/replicator.h"

namespace ropeteam::engine {

struct Parts;

class Sessions {
 public:
  explicit Sessions(Parts* parts) : parts_(*parts) {}

  void Open(SessionId session);
  void Close(SessionId session);
  void Hello(SessionId session, RequestId request, const HelloInput& hello);
  void SaveBegin(SessionId session, RequestId request, Step step, uint64_t stream_bytes, uint64_t agreement);
  void SaveExtend(SessionId session, RequestId request, SaveId save, uint64_t chunks);
  void SaveFilled(SessionId session, SaveId save, uint32_t first, const std::vector<uint32_t>& crcs);
  void SaveDirect(SessionId session, const SaveDirectInput& direct);
  void SaveSettle(SessionId session, RequestId request, SaveId save, TimeUs timeout_us);
  void SaveCommit(SessionId session, RequestId request, const SaveCommitInput& commit);
  std::function<Status()> ManifestCheck(SessionId id, const SaveCommitInput& commit) const;
  void SaveAbort(SessionId session, RequestId request, SaveId save);
  void Wait(SessionId session, RequestId request, Step step, Level level, TimeUs timeout_us);
  void Drop(SessionId session, RequestId request, Step step, TimeUs timeout_us);
  void Persist(SessionId session, RequestId request, Step step, TimeUs timeout_us);
  void SetPolicy(SessionId session, RequestId request, const PolicyInput& policy, TimeUs timeout_us);
  void Latest(SessionId session, RequestId request, Level level, TimeUs timeout_us);
  void ViewOpen(SessionId session, RequestId request, Step step, Rank rank, TimeUs timeout_us, bool partial);
  void ViewRead(SessionId session, RequestId request, ViewId view, const std::vector<PackedPart>& parts,
                TimeUs timeout_us);
  void ViewRepair(SessionId session, RequestId request, ViewId view, const std::vector<uint32_t>& chunks,
                  TimeUs timeout_us);
  void ViewClose(SessionId session, ViewId view);
  void Quarantine(SessionId session, RequestId request, Step step, bool undo, TimeUs timeout_us);
  void Forget(SessionId session, RequestId request, const std::string& node, TimeUs timeout_us);
  void Report(SessionId session, RequestId request, TimeUs timeout_us);
  void Verify(SessionId session, RequestId request, const Step* step, TimeUs timeout_us);
  void Trace(SessionId session, RequestId request, NodeId node, bool events, Step step, TimeUs timeout_us);
  void OnTraceAnswer(NodeId from, TraceAnswer answer);

  // This shard of this node now has the copies that REPLICATED requires.
  void OnReplicated(const ShardId& shard);
  // The leader's announcement has been applied to the context and the store.
  void OnLeaderState(const std::set<StepId>& told, const std::vector<ShardId>& released);
  void OnTimer();
  TimeUs NextTimer() const;

  std::vector<SessionReport> Report() const;
  bool HasRank(Rank rank) const;
  uint64_t asking_from() const;     // as in Inventory
  uint64_t filling_chunks() const;  // allocated to saves that are not sealed
  bool saving() const { return !saves_.empty(); }
  size_t saves_open() const { return saves_.size(); }
  size_t sessions_open() const { return sessions_.size(); }

 private:
  // The levels of this many of a node's newest shards are remembered: a rank waits only for its last few steps.
  static constexpr size_t kProgressMax = 4096;
  static constexpr size_t kSavesOpenMax = 4;  // ROPETEAM_SAVES_OPEN_MAX
  // Saved steps of a rank in its incarnation that are not committed. Ranks wait for each other within a few steps.
  static constexpr size_t kUncommittedMax = 256;
  static constexpr size_t kViewsOpenMax = 1024;         // ROPETEAM_VIEWS_OPEN_MAX
  static constexpr size_t kWaitsMax = 1024;             // at once, per session
  static constexpr TimeUs kPolicyAgainUs = 60'000'000;  // more than a new leader needs

  struct OpenView {
    ShardId shard;
    Store::LeaseToken lease = 0;  // of a whole view
    // Of a partial view:
    std::optional<RangeReader::Source> source;
    ShardMeta meta;
    uint64_t read = 0;  // the read whose bounce chunks the rank has; 0: none
  };
  struct Session {
    bool admitted = false;
    HelloInput hello;
    uint64_t question = 0;
    Incarnation incarnation = 0;
    std::map<ViewId, OpenView> views;
    uint32_t saves = 0;
    bool has_ended = false;  // as in SessionReport
    Step oldest_ended = 0;
    Step newest_ended = 0;
    uint32_t pending = 0;  // requests not answered yet: waits, latest, view_open, …
    bool is_rank() const { return admitted || question != 0; }  // it has sent hello; else it is an operator's
  };
  struct Save {
    SessionId session = 0;
    ShardId shard;
    uint32_t world_size = 0;
    uint64_t agreement = 0;
    std::vector<Extent> extents;
    std::vector<uint32_t> crcs;
    std::vector<bool> ready;
    EncryptionSalt salt;
    Replicator::SourceId source = 0;
    uint64_t device_chunks_end = 0;  // end of the last chunk announced in device memory
  };
  struct Progress {
    Level level = Level::kNone;
    TimeUs begun = 0;
    uint64_t bytes = 0;
    std::optional<Status> aborted;
  };
  // A request that waits for an event. It is counted in its session's `pending`.
  struct Waiter {
    SessionId session = 0;
    RequestId request = 0;
    ShardId shard;
    Level level = Level::kNone;
    TimeUs deadline = 0;
  };

  Session* Find(SessionId session);
  // The driver opens a session before it passes requests on, and closes it after the last.
  Session& SessionOf(SessionId session);
  // The session if it is an admitted rank of the current incarnation. Otherwise answers the request and returns null.
  Session* Admitted(SessionId session, RequestId request);
  void AnswerStatusTo(SessionId session, RequestId request, Status status);
  void AnswerTo(SessionId session, RequestId request, decltype(Answer::body) body);
  // Asks the leader, converts the reply with `to_answer`, and answers the request with it.
  template <typename Payload, typename ToAnswer>
  void AskLeader(SessionId session, RequestId request, Question::Topic topic, std::string question,
                 TimeUs timeout_us, ToAnswer to_answer);
  Status CheckForm(const Save& save, const SaveCommitInput& commit) const;
  std::function<Status()> ManifestCheckOf(const Save& save, const SaveCommitInput& commit) const;
  Status CheckNewer(const ShardId& shard) const;
  Status CheckFits(uint64_t chunks) const;
  Status CheckNotCommitted(const ShardId& shard) const;
  Status CheckUncommitted(const ShardId& shard) const;
  bool HasCommitted(const ShardId& shard) const;
  void EndSave(SaveId id, const char* why);
  void NoteEnded(SessionId session, Step step);
  // The step after the newest one before `ended` whose shard by this rank is in the store; `ended` if there is none.
  Step OldestUnsaved(const Session& session, Step ended) const;
  // The level that the leader has announced for a shard saved on this node; kNone: nothing was announced. The copy's
  // mark is not enough: it does not tell that every member has marked the step.
  Level Announced(const ShardId& shard) const;
  void Reached(const ShardId& shard, Level level);
  void ReachedBy(const std::set<StepId>& steps, Level level);
  Progress& ProgressOf(const ShardId& shard);
  void Settle();  // answers the waits that can be answered
  std::optional<Status> Outcome(const Waiter& waiter) const;
  // The reason why this committed step will not be persisted; empty while it may be.
  std::optional<Status> NotPersisted(const StepId& step) const;
  void OpenLocated(uint64_t pending, const LocateReply& located, bool partial);
  void OpenPartly(uint64_t pending, const LocateReply& located);
  void OpenWhole(uint64_t pending, const ShardId& shard, Origin origin);
  void GrantView(SessionId session, RequestId request, const ShardId& shard, Origin origin);
  void OnRangesRead(uint64_t pending, ViewId view, const Status& status, const RangeReader::Bytes& bytes);
  void EndView(OpenView* view);
  // The handle has set a policy before it reconnected: sets it again, because every node may have forgotten it.
  void SetPolicyAgain(const Session& session);
  TimeUs Deadline(TimeUs timeout_us) const;

  Parts& parts_;
  std::map<SessionId, Session> sessions_;
  std::map<SaveId, Save> saves_;
  std::map<ShardId, Progress> progress_;
  std::vector<Waiter> waiters_;
  // view_open, latest, …: answered with the result or at the deadline, whichever comes first.
  struct Pending {
    SessionId session;
    RequestId request;
    TimeUs deadline;
    const char* doing;                    // for the error when the deadline has passed
    NodeId asked = kNoNode;               // for Trace() only
    std::optional<ShardId> fetched = {};  // for the error: what its fetch waits for
  };
  std::map<uint64_t, Pending> pending_;
  uint64_t AddPending(SessionId session, RequestId request, TimeUs deadline,
                      const char* doing = "the shard was being fetched");
  std::optional<Pending> TakePending(uint64_t number);  // empty: already answered, or the session is gone
  uint64_t next_pending_ = 1;
  uint64_t quiescing_chunks_ = 0;
  SaveId next_save_ = 1;
  ViewId next_view_ = 1;
};

}  // namespace ropeteam::engine

#endif  // ROPETEAM_CORE_ENGINE_SESSIONS_H_
