// SPDX-License-Identifier: Apache-2.0
//
// The Checker knows the truth: what every rank has saved, which bytes lie in which living memory, who has
// lost his. It is shown every input's outcome and compares what the engines say and do with it. By promise of
// ARCHITECTURE.md:
//
//   1  a shard said to be REPLICATED or COMMITTED has been sealed, with the right bytes, by R other nodes
//   2  every shard of a committed step has right, counted copies on R + 1 hosts, less those that were lost
//      and not made again; until a newer committed step has them. What is committed is not dropped before K newer
//      committed steps are there, however often daemons restart
//   3  `latest` is complete, of one incarnation, there; not older than what the members hold; not older than what
//      was ever told to be committed, unless more than R hosts of some shard are lost or away; the same for all ranks
//      of an incarnation
//   4  a view has the bytes that were saved, while it is open; chunks that were repaired are right
//   +  a step on storage that has a manifest was committed, and each of its shards has the bytes that were saved; a step
//      said to be PERSISTED has a manifest, and `latest` is not older than it, whatever memory is lost
//   +  a step on storage is deleted only by what ranks of the leader's incarnation have asked for, or by the flags; and never
//      one that they were told is kept
//   5  a request is answered within its time
//   +  a wait for what is there, committed or complete ends soon in a healed world in which nobody saves
//   6  a refused save changes nothing
//   +  a step whose ranks gave different values is never committed, and never the answer of `latest`; nobody is told that
//      ranks do not agree which do
//   +  a dropped step goes, and the newest committed one never does: when a drop is answered with OK no member has a copy of
//      the step, and one that was not committed by then never is
//   +  memory has one user at a time: grants, sealed shards, open views, transfers; also of the dead
//   +  a sealed copy has the right bytes from the moment it is sealed
//
// Counted are copies in the roles own and replica. A cache may be evicted at any time: it can be read, and counts for
// nothing.
//
// The first violation is kept and stops the run.

#ifndef ROPETEAM_TESTS_SIMULATION_CHECKER_H_
#define ROPETEAM_TESTS_SIMULATION_CHECKER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/engine/engine.h"
#include "core/store/store.h"
#include "tests/simulation/content.h"
#include "tests/simulation/host.h"
#include "tests/simulation/network.h"
#include "tests/simulation/options.h"
#include "tests/simulation/storage.h"

namespace ropeteam::simulation {

// The place that one host's memory is, until it is lost.
struct Place {
  size_t host = 0;
  uint64_t generation = 0;
  friend auto operator<=>(const Place&, const Place&) = default;
};

// A death is not known at once: within this, what was decided may rest on a copy that has just been lost.
// Silence is death after 1 s; a view and an inventory take their time.
inline constexpr TimeUs kNewsUs = 5 * kSecond;

class Checker {
 public:
  struct Statistics {
    uint64_t sealed = 0;
    uint64_t replicated = 0;
    uint64_t committed = 0;
    uint64_t latest_answers = 0;
    uint64_t latest_found = 0;
    uint64_t views = 0;
    uint64_t ranges = 0;  // of them: ranged reads that brought bytes
    uint64_t repairs = 0;
    uint64_t refused_for_space = 0;
    uint64_t refused_as_stale = 0;
    uint64_t flips = 0;
    uint64_t memories_lost = 0;
    uint64_t dropped = 0;    // steps, by ranks that were told so
    uint64_t disagreed = 0;  // steps whose ranks were told so
    uint64_t drains = 0;     // that ended because all was done
    uint64_t persisted = 0;
    uint64_t policies = 0;               // that were acknowledged
    uint64_t pruned = 0;                 // steps, as ranks wanted it
    uint64_t restored_from_storage = 0;  // answers of `latest` that memory alone could not have given
  };

  Checker(const Options& options, Scheduler* scheduler, Network* network, const SimStorage* storage,
          const std::vector<std::unique_ptr<Host>>* hosts)
      : options_(options), scheduler_(*scheduler), network_(*network), storage_(*storage), hosts_(*hosts) {}

  void Fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  const Statistics& statistics() const { return statistics_; }

  // ---- hosts
  // After a daemon has adopted its arena: every shard that was sealed must be there, unless bits of the tables have
  // flipped.
  void OnAdopted(const Host& host, bool table_damaged);
  // Before the memory is wiped.
  void OnMemoryLost(const Host& host);
  // The daemon says that it may leave: what it has of a kept step is redundant on hosts that stay.
  void OnDrained(const Host& host);
  // After every input: what has been sealed, dropped or marked in this store.
  void Observe(const Host& host);
  // Whether what Observe() saw dropped was to be dropped; after the input's events, which may say why.
  void JudgeDrops(const Host& host);
  void OnFlip(const Host& host, const ShardId& shard, uint32_t chunk);
  // Bytes of the host's chunk have changed unexpectedly: whatever shard lies there now or is sealed there next
  // may be wrong in it.
  void OnDamage(const Host& host, uint32_t chunk);

  // ---- sessions. Inputs are shown before the engine sees them, answers when the engine gives them.
  void OnCommitInput(const Session& session, Step step, const SaveCommitInput& commit, uint64_t chunk_bytes,
                     uint64_t agreement);
  void OnSaveBeginInput(const Session& session, Step step);
  void OnDropInput(const Session& session, Step step);
  void OnLatestInput(const Host& host, const Session& session);
  void OnSessionEnd(const Session& session);  // also when the daemon dies
  void OnAnswer(const Host& host, const Session& session, const Pending& request, const Answer& answer);
  // Before the session is told its incarnation; `others` are all sessions that engines know.
  void OnAdmitted(const Session& session, Incarnation incarnation,
                  const std::map<SessionId, Session>& others);
  // Chunks of an open view that its reader found wrong.
  void OnViewBytes(const Session& session, ViewId view, const std::vector<uint32_t>& bad);
  void OnViewClosed(const Session& session, ViewId view);
  void OnPolicyInput(const Session& session, const PolicyInput& policy);
  // This host's daemon begins to delete steps on storage; and what is gone.
  void OnPrune(const Host& host, const PruneStored& prune);
  void OnPruned(const Host& host, const std::vector<StepId>& newest_first, const std::vector<StepId>& gone);
  // What a ranged read of the shard brought, part for part, with the checksums that came with it.
  void OnRanges(const Session& session, const ShardId& id, const std::vector<PackedPart>& parts,
                const std::vector<std::string>& packed);
  // `free_before`: chunks free before the input that was answered; `dropped_before`: dropped() then.
  void OnRefusedForSpace(const Host& host, const Status& status, uint64_t free_before,
                         uint64_t dropped_before);
  uint64_t dropped() const { return dropped_.size(); }
  void OnEvent(const Host& host, const LevelEvent& event);
  // The engines pass it over from now on, or not any more: an older step is rightly offered.
  void SetQuarantined(const StepId& step, bool quarantined) {
    quarantined ? (void)quarantined_.insert(step) : (void)quarantined_.erase(step);
  }
  // A manifest has become visible.
  void OnStored(const StepId& id, const StoredStep& step);

  // Without a lease a node acknowledges no copy and announces nothing. A leader announces what it chooses to restore.
  void OnMessage(const Host& host, bool has_lease, const SendMessage& message);

  // ---- memory
  // In a cluster that encrypts: what ranks save, what transfers carry (null: the other end is gone) and what is encrypted.
  // No chunk leaves as it was saved, and no nonce serves twice.
  void OnContent(const Content& content);
  void OnWire(const Transfer& transfer, const std::byte* bytes);
  void OnCipher(const Host& host, const StartCheck::Range& range);
  void OnTransferStart(const Transfer& transfer);
  void OnLanding(const Transfer& transfer, uint64_t offset, const std::string& bytes);

  // ---- what is true now; for the end of a run and the stories
  bool Committed(const StepId& step) const;
  std::optional<StepId> newest_committed() const;
  // The newest step of which a shard was ever saved, and how many that are newer were committed.
  StepId newest_saved() const;
  size_t CommittedAfter(const StepId& step) const;
  // Whether living memory has every byte of every shard of the step.
  bool Producible(const StepId& step) const;
  // Good copies, on running daemons that all have `view`, of the shard that has fewest; 0 when the step is
  // unknown.
  size_t CopiesMin(const StepId& step) const;
  // What became of every copy of every shard that has fewer than `wanted`. For people.
  std::string DescribeCopies(const StepId& step, size_t wanted) const;
  // In a world that is healed and in which nobody saves: whether this wait must end soon, with success or for good.
  bool MustEnd(const OpenWait& wait) const;
  bool FullyReplicated(const StepId& step) const;  // each of its shards has R + 1 copies
  std::vector<StepId> KeptSteps() const;           // committed, and not retired
  bool Retired(const StepId& step) const;          // by K newer committed ones, or one and a drop
  // Whether this chunk is right on another running daemon as well.
  bool HasAnother(const Host& host, const ShardId& shard, uint32_t chunk) const;
  bool Flipped(const StepId& step) const;  // a bit of it was ever flipped
  // A later incarnation has saved a step of the same number: people, who name steps by numbers, cannot ask for this one.
  bool Shadowed(const StepId& step) const;
  // The chunks of a host add up: free, sealed, and nothing else. For a cluster at rest.
  void CheckNoLeak(const Host& host);
  static bool AtRest(const Host& host);
  // Each byte of every sealed copy on every host.
  void CheckAllBytes();
  const std::vector<uint32_t>* CrcsOf(const ShardId& shard) const;

 private:
  // kOther: a copy of other bytes under the same name; it is there and counts for nothing.
  enum class Fate : uint8_t { kPresent, kDropped, kLost, kOther };
  struct Copy {
    Fate fate = Fate::kPresent;
    TimeUs since = 0;  // of the fate
    Role role = Role::kOwn;
    std::vector<Extent> extents;
    std::vector<uint32_t> bad;   // as marked in the store
    bool committed = false;      // likewise
    Encryption encryption = {};  // of its bytes
    bool counted() const { return fate == Fate::kPresent && role != Role::kCache; }
  };
  struct Variant {
    uint64_t stream_bytes = 0;
    std::vector<uint32_t> crcs;
    uint64_t agreement = 0;
  };
  struct Shard {
    uint64_t launch = 0;
    uint32_t world_size = 0;
    uint64_t stream_bytes = 0;
    uint64_t chunk_bytes = 0;
    std::vector<uint32_t> crcs;
    uint64_t agreement = 0;
    size_t saver = 0;
    bool sealed = false;
    std::map<Place, Copy> copies;  // where it was ever sealed
    std::set<std::pair<Place, uint32_t>> flips;
    // When counted copies went with their host's memory, or were dropped as bad; when R + 1 right ones were there last.
    std::vector<TimeUs> lost_at;
    TimeUs full_at = 0;
    // By host: what a rank of the same incarnation, opened there later, saves under the same name.
    std::map<size_t, Variant> candidates;
    std::vector<Variant> superseded;  // what the rank saved elsewhere before
  };
  struct RestoreRecord {
    TimeUs asked_at = 0;  // the first `latest` of a rank of it
    Epoch asked_in = 0;
    StepId floor;
    StepId stored_floor;
    bool answered = false;
    StepId answer;                    // {0, 0}: none
    bool completed = false;           // has committed a step of its own
    std::set<StepId> chosen;          // by leaders, to restore
    std::set<StepId> rightly_chosen;  // with all newer committed steps lost or away beyond the promise
    // Daemons that were told of the answer: of the view it was given in, or beside one of those later.
    std::set<NodeId> told;
  };
  struct ViewHeld {
    size_t host = 0;
    ShardId shard;
    std::vector<Extent> extents;
  };

  // An incarnation that no daemon of the view remembers but by its number restores nothing any more
  // (docs/recovery.md).
  bool Remembered(const Host& host, const RestoreRecord& restore) const;
  void NoteTold(const Host& host);

  Place PlaceOf(const Host& host) const { return {host.index, host.memory_generation}; }
  void OnSealed(const Host& host, const SealedShard& sealed);
  void OnMarked(const Host& host, const SealedShard& sealed, Shard* shard);
  void OnDropped(const Host& host, const ShardId& id, Role role);
  void JudgeDrop(const Host& host, const ShardId& id, Role role);
  bool ChunkRight(const Host& host, const std::vector<Extent>& extents, const Encryption& encryption,
                  const Shard& shard, size_t chunk) const;
  bool CopyRight(const Host& host, const Copy& copy, const Shard& shard, std::string* why) const;
  // Copies that were lost since R + 1 were there, or so lately that not everybody knows.
  size_t Losses(const Shard& shard) const;
  // Distinct hosts with a right, counted copy; `hurt`: with one that has bad chunks.
  size_t CountedRight(const Shard& shard, size_t* hurt) const;
  // Promise 2 itself, of the newest committed steps.
  void CheckPromise();
  // Whether of each shard of the step at most R copies are lost or on hosts that are not in this view.
  bool WithinThePromise(const StepId& step, const View& view) const;
  StepId NewestWithinThePromise(const View& view) const;  // {0, 0}: none
  void OnChosen(const Host& host, Incarnation incarnation, const StepId& pin);
  void CheckReplicated(const Host& host, const ShardId& id, const char* said);
  void CheckCommitted(const Host& host, const StepId& step);
  // Some rank has gone on to a later step without a shard of this one: it will never be complete.
  bool Dead(const StepId& step) const;
  // Each of its shards is there.
  bool Complete(const StepId& step) const;
  // Its ranks gave different values: it must never be committed.
  bool Disagrees(const StepId& step) const;
  // Whether any member of the host's view knows that it is committed: its daemon has heard so, or its copy is
  // marked.
  bool KnownInViewOf(const Host& host, const StepId& step) const;
  // Whether this host's daemon has heard that a newer step is.
  bool SaidToBeCommittedBeyond(const Host& host, const StepId& step) const;
  // Nobody needs it any more: dead, of a former incarnation, or older than what is committed.
  bool Superseded(const StepId& step) const;
  const Shard* Find(const ShardId& id) const;
  uint32_t WorldOf(const StepId& step) const;
  size_t GoodCopies(const Shard& shard) const;
  // Whether every chunk of every shard has a copy that `usable` accepts (host, generation, copy, chunk).
  template <typename Usable>
  bool Covered(const StepId& step, Usable usable) const;
  bool ProducibleOnMembers(const StepId& step, const Host& host) const;
  StepId FloorOf(const Host& host) const;
  bool RetiredByNewer(const StepId& step) const;
  StepId NewestPersisted() const;  // that was said to be so, and has not rotted since; {0, 0}: none
  void OnStepDropped(const Host& host, const Session& session, Step step);
  void OnLatestAnswer(const Host& host, const Session& session, const StepId& step, uint32_t world_size);
  void OnViewAnswer(const Host& host, const Session& session, const Pending& request, const AnswerView& view);
  void OnGrant(const Host& host, const Session& session, const Pending& request, const AnswerGrant& grant);
  void OnPolicyAnswer(const Host& host, const Session& session, const PolicyInput& policy,
                      const Status& status);
  void ReleaseGrant(const Session& session, SaveId save);
  bool FlippedAt(const Host& host, uint32_t chunk) const;
  std::string TransferOn(const Host& host, uint32_t chunk) const;
  uint32_t ChunkOf(const Host& host, uint64_t offset) const;

  const Options options_;
  Scheduler& scheduler_;
  Network& network_;
  const SimStorage& storage_;
  const std::vector<std::unique_ptr<Host>>& hosts_;
  std::string failure_;
  Statistics statistics_;
  std::vector<StepId> dropped_;  // of every copy that counted, by anybody
  std::vector<std::pair<ShardId, Role>> to_judge_;
  std::set<std::pair<Place, uint32_t>> damaged_;  // chunks that no shard was in
  bool promise_dirty_ = false;                    // a copy of a committed step has come or gone
  std::map<ShardId, Shard> shards_;
  std::map<StepId, TimeUs> committed_;
  std::set<StepId> quarantined_;
  std::set<StepId> drops_asked_;              // by any rank, with whatever outcome
  std::set<StepId> drops_of_saved_;           // by a rank whose node had its shard
  std::set<StepId> never_committed_;          // they were not when their drop was answered
  std::map<StepId, std::set<NodeId>> heard_;  // the daemons that have said that the step is committed
  std::set<StepId> persisted_;                // said to be so, by any daemon
  // What ranks of an incarnation have asked to be kept on storage, and what they were told is kept.
  struct Policy {
    std::set<uint64_t> asked;
    uint64_t keep = 0;
    std::set<uint64_t> every_asked;
  };
  std::map<Incarnation, Policy> policies_;
  std::set<StepId> offered_;  // ever the answer of `latest`
  std::map<Incarnation, RestoreRecord> restores_;
  std::map<std::pair<Incarnation, Rank>, Step> begun_;  // the highest step that the rank has begun to save
  std::map<size_t, std::map<uint32_t, std::pair<SessionId, SaveId>>> grants_;  // by host and chunk
  std::map<std::pair<SessionId, ViewId>, ViewHeld> views_;
  std::set<uint64_t> plaintext_;  // fingerprints of chunks
  std::map<std::tuple<uint64_t, uint64_t, uint64_t, uint32_t>, std::pair<uint32_t, uint64_t>> nonces_;
  std::map<size_t, std::map<ShardId, Role>> known_;  // by host: what its store held when last looked at
  std::map<size_t, std::pair<NodeId, uint64_t>> observed_;  // by host: that store's daemon and changes() then
};

template <typename Usable>
bool Checker::Covered(const StepId& step, Usable usable) const {
  const uint32_t world = WorldOf(step);
  if (world == 0) return false;
  for (Rank rank = 0; rank < world; ++rank) {
    const Shard* shard = Find({step.incarnation, step.step, rank});
    if (shard == nullptr) return false;
    for (uint32_t chunk = 0; chunk < shard->crcs.size(); ++chunk) {
      bool found = false;
      for (const auto& [place, copy] : shard->copies)
        if (usable(place, *shard, copy, chunk)) {
          found = true;
          break;
        }
      if (!found) return false;
    }
  }
  return true;
}

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_CHECKER_H_
