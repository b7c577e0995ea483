// SPDX-License-Identifier: Apache-2.0
//
// The Checker knows what every rank has saved, which bytes every host's memory has, and what was lost. It
// sees the outcome of every input, and compares it with what the engines say and do. By promise of
// ARCHITECTURE.md:
//
//   1  a shard that is reported REPLICATED or COMMITTED was sealed, with the right bytes, by R other nodes
//   2  every shard of a committed step has right, counted copies on R + 1 hosts, minus those that were lost
//      and not replaced, until a newer committed step has them. A committed step is dropped only after K
//      newer committed steps, however often daemons restart
//   3  `latest` is complete, of one opening and producible. It is not older than what the members hold and have
//      reported, nor than a step reported COMMITTED, unless more than R hosts that held it have lost their memory
//      before there were R + 1 copies again, the step is quarantined, its hosts were away for as long as the job
//      waits, or no member can know of it. "Nothing" is no answer while a member can know of a commit that all
//      memory together can produce. It is the same for all ranks of an incarnation
//   4  an open view has the bytes that were saved; repaired chunks are right
//   +  a step with a manifest on storage was committed, and its shards have the bytes that were saved. A step
//      reported PERSISTED has a manifest and all its bytes, and `latest` is not older than what storage has,
//      whatever memory is lost and whatever single nodes see of it
//   +  a step on storage is deleted only if ranks of the leader's incarnation or the flags say so, and never
//      if ranks were told that it is kept
//   5  a request is answered in time
//   +  in a healed cluster without saves, a wait for a saved shard ends soon, unless its step is incomplete
//   6  a refused save changes nothing
//   +  a step whose ranks gave different values is never committed, and never the answer of `latest`. Ranks
//      that agree are never told that they do not
//   +  when a drop is answered with OK, no member has a copy of the step. If it was not committed by then, it
//      never is. The newest committed step is never dropped
//   +  memory has one user at a time: grants, sealed shards, open views, transfers (also those of dead nodes)
//   +  a sealed copy has the right bytes from the moment it is sealed
//
// Copies with the roles own and replica are counted. A cache may be evicted at any time: it can be read, but
// does not count.
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

// One host's memory until it is lost. After that the host has another Place.
struct Place {
  size_t host = 0;
  uint64_t generation = 0;
  friend auto operator<=>(const Place&, const Place&) = default;
};

// A death is not known at once. For this long, decisions may rely on a copy that was just lost: a node is
// declared dead after 1 s of silence, and then a view and an inventory take some time.
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
    uint64_t ranges = 0;  // ranged reads that returned bytes
    uint64_t repairs = 0;
    uint64_t refused_for_space = 0;
    uint64_t refused_as_stale = 0;
    uint64_t flips = 0;
    uint64_t memories_lost = 0;
    uint64_t dropped = 0;      // drops that were answered with OK
    uint64_t disagreed = 0;    // waits that ended because the ranks do not agree
    uint64_t drains = 0;       // that ended because all was done
    uint64_t reencrypted = 0;  // copies that got another key
    uint64_t persisted = 0;
    uint64_t policies = 0;               // that were acknowledged
    uint64_t pruned = 0;                 // steps deleted by a policy of the ranks
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
  // The daemon says that it may leave: its copies of kept steps must be redundant on hosts that stay.
  void OnDrained(const Host& host);
  // After every input: notes what was sealed, dropped or marked in this store.
  void Observe(const Host& host);
  // Checks the drops that Observe() saw. Call it after the input's events, which may justify the drops.
  void JudgeDrops(const Host& host);
  void OnFlip(const Host& host, const ShardId& shard, uint32_t chunk);
  // A fault has changed bytes of the host's chunk: the shard there, or the next one there, may be wrong.
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
  // This host's daemon begins to delete steps on storage. OnPruned(): it has deleted the steps `gone`.
  void OnPrune(const Host& host, const PruneStored& prune);
  void OnPruned(const Host& host, const std::vector<StepId>& newest_first, const std::vector<StepId>& gone);
  // The bytes that a ranged read of the shard returned for each part.
  void OnRanges(const Session& session, const ShardId& id, const std::vector<PackedPart>& parts,
                const std::vector<std::string>& packed);
  // `free_before`: chunks free before the input that was answered; `dropped_before`: dropped() then.
  void OnRefusedForSpace(const Host& host, const Status& status, uint64_t free_before,
                         uint64_t dropped_before);
  uint64_t dropped() const { return dropped_.size(); }
  void OnEvent(const Host& host, const LevelEvent& event);
  // From now on the engines pass the step over, or no longer do. Meanwhile an older step is a right answer.
  void SetQuarantined(const StepId& step, bool quarantined) {
    quarantined ? (void)quarantined_.insert(step) : (void)quarantined_.erase(step);
  }
  // A manifest has become visible.
  void OnStored(const StepId& id, const StoredStep& step);
  // What `latest` last answered instead of a step; empty: nothing. For messages.
  const std::string& why_it_waits() const { return why_it_waits_; }
  TimeUs waits_at() const { return waits_at_; }  // time of that answer

  // Without a lease a node must acknowledge and announce nothing. A leader announces which step to restore.
  void OnMessage(const Host& host, bool has_lease, const SendMessage& message);

  // ---- memory
  // In a job that encrypts: the content of a save, the bytes of a transfer (null: the other end is gone), and
  // an encryption. No transfer may carry a plaintext chunk, and no nonce may serve two plaintexts. A target's store must
  // admit the transfer.
  void OnContent(const Content& content);
  void OnWire(const Transfer& transfer, const std::byte* bytes);
  void OnCipher(const Host& host, const StartCheck::Range& range);
  void OnTransferStart(const Transfer& transfer);
  void OnLanding(const Transfer& transfer, uint64_t offset, const std::string& bytes);

  // ---- the current state; for the end of a run and the stories
  bool Committed(const StepId& step) const;
  std::optional<StepId> newest_committed() const;
  // The newest step of which a shard was ever saved. CommittedAfter(): the number of newer committed steps.
  StepId newest_saved() const;
  size_t CommittedAfter(const StepId& step) const;
  // Whether the memory that is not lost has every byte of every shard of the step.
  bool Producible(const StepId& step) const;
  // The number of good copies, on running daemons, of the step's shard that has the fewest; 0: unknown step.
  size_t CopiesMin(const StepId& step) const;
  // The fate of every copy of each shard that has fewer good ones than `wanted`. For messages.
  std::string DescribeCopies(const StepId& step, size_t wanted) const;
  // In a healed cluster without saves: whether this wait must end soon, with success or a final error.
  bool MustEnd(const OpenWait& wait) const;
  bool FullyReplicated(const StepId& step) const;  // each of its shards has R + 1 copies
  std::vector<StepId> KeptSteps() const;           // committed, and not retired
  bool Retired(const StepId& step) const;          // by K newer committed steps, or by one and a drop
  // Whether another running daemon also has this chunk right.
  bool HasAnother(const Host& host, const ShardId& shard, uint32_t chunk) const;
  bool Flipped(const StepId& step) const;  // a bit of it was ever flipped
  // A later incarnation has a step of the same number. Operators name steps by number and get that one.
  bool Shadowed(const StepId& step) const;
  // In a cluster at rest every chunk of the host must be free, sealed, or a bounce chunk.
  void CheckNoLeak(const Host& host);
  static bool AtRest(const Host& host);
  // Checks each byte of every sealed copy on every host.
  void CheckAllBytes();
  const std::vector<uint32_t>* CrcsOf(const ShardId& shard) const;

 private:
  // kOther: present, but with other bytes under the same name; it does not count.
  enum class Fate : uint8_t { kPresent, kDropped, kLost, kOther };
  struct Copy {
    Fate fate = Fate::kPresent;
    TimeUs since = 0;  // of the fate
    Role role = Role::kOwn;
    std::vector<Extent> extents;
    std::vector<uint32_t> bad;   // as marked in the store
    bool committed = false;      // likewise
    Encryption encryption = {};  // of its bytes
    TimeUs repaired_at = 0;      // when marked chunks were last found to be good
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
    std::map<Place, Copy> copies;  // by where it was sealed; also former copies
    std::set<std::pair<Place, uint32_t>> flips;
    // Times when counted copies were lost with their host's memory or dropped as bad, and the last time when
    // there were R + 1 right copies.
    std::vector<TimeUs> lost_at;
    TimeUs full_at = 0;
    // By host: what the rank saves under the same name after it was opened on that host.
    std::map<size_t, Variant> candidates;
    std::vector<Variant> superseded;  // what the rank saved before on other hosts
  };
  struct RestoreRecord {
    uint64_t launch = 0;  // of the first that asked
    TimeUs asked_at = 0;  // time of the incarnation's first `latest`
    Epoch asked_in = 0;
    StepId floor;
    StepId stored_floor;
    bool answered = false;
    StepId answer;                            // {0, 0}: none
    bool completed = false;                   // has committed a step of its own
    std::set<StepId> chosen;                  // by leaders, to restore
    std::map<StepId, TimeUs> rightly_chosen;  // and when: no newer step was owed then
    // Daemons that know the answer: the members of its view, and those that later meet one of them in a view.
    std::set<NodeId> told;
  };
  struct ViewHeld {
    size_t host = 0;
    ShardId shard;
    std::vector<Extent> extents;
  };

  // Whether a daemon of the view knows the incarnation's answer. Otherwise the incarnation has no pin any
  // more (docs/recovery.md).
  bool Remembered(const Host& host, const RestoreRecord& restore) const;
  void NoteTold(const Host& host);
  void NoteSeen(const Host& host);
  // The memory has been outside every other host's view for so long.
  bool AwayFor(const Place& place, TimeUs time) const;
  // Some shard of the step is not in the view, and every host that has it was away for as long as the job waits.
  bool WaitedFor(const StepId& step, const View& view) const;

  Place PlaceOf(const Host& host) const { return {host.index, host.memory_generation}; }
  void OnSealed(const Host& host, const SealedShard& sealed);
  void OnMarked(const Host& host, const SealedShard& sealed, Shard* shard);
  void OnDropped(const Host& host, const ShardId& id, Role role);
  void JudgeDrop(const Host& host, const ShardId& id, Role role);
  bool ChunkRight(const Host& host, const std::vector<Extent>& extents, const Encryption& encryption,
                  const Shard& shard, size_t chunk) const;
  bool CopyRight(const Host& host, const Copy& copy, const Shard& shard, std::string* why) const;
  // It was lost after there were R + 1 copies, or within the last kNewsUs.
  bool Unhealed(const Shard& shard, TimeUs lost_at) const;
  size_t Losses(const Shard& shard) const;
  // The number of right, counted copies. `hurt`: the number of counted copies with bad chunks.
  size_t CountedRight(const Shard& shard, size_t* hurt) const;
  // Checks promise 2 for the newest committed steps.
  void CheckPromise();
  bool NobodyKnows(const View& view, const StepId& step) const;
  // An incarnation that asks under this view must be offered the step or a newer one.
  bool Owed(const StepId& step, const View& view) const;
  StepId NewestOwed(const View& view, TimeUs told_before) const;      // {0, 0}: none
  StepId KnownSomewhere(const View& view, TimeUs told_before) const;  // likewise
  StepId NewestStored(const Host& host) const;                        // likewise
  void OnChosen(const Host& host, Incarnation incarnation, const StepId& pin);
  void CheckReplicated(const Host& host, const ShardId& id, const char* said);
  void CheckCommitted(const Host& host, const StepId& step);
  // It will never be committed: some rank has begun a later step without a shard of it, or ranks disagree.
  bool Dead(const StepId& step) const;
  // Each of its shards has a counted copy.
  bool Complete(const StepId& step) const;
  // Its ranks gave different values: it must never be committed.
  bool Disagrees(const StepId& step) const;
  // Whether a daemon of the host's view knows that it is committed: it has reported it, or has a marked copy.
  bool KnownInViewOf(const Host& host, const StepId& step) const;
  // Whether this host's daemon has reported a newer step as committed.
  bool SaidToBeCommittedBeyond(const Host& host, const StepId& step) const;
  // No longer needed: dead, to be dropped, of a former incarnation, or older than a committed step.
  bool Superseded(const StepId& step) const;
  // Whether a greater incarnation began after this one. A greater one that began before it is unknown to all: two
  // coordinators gave out both, and the memory that knew of it is lost.
  bool FollowedByIncarnation(Incarnation incarnation) const;
  const Shard* Find(const ShardId& id) const;
  uint32_t WorldOf(const StepId& step) const;
  size_t GoodCopies(const Shard& shard) const;
  // Whether every chunk of every shard has a copy that `usable` accepts (place, shard, copy, chunk).
  template <typename Usable>
  bool Covered(const StepId& step, Usable usable) const;
  // By copies that have been as good as now since `since`.
  bool ProducibleOnMembers(const StepId& step, const Host& host, TimeUs since = kForever) const;
  StepId FloorOf(const Host& host) const;
  bool RetiredByNewer(const StepId& step) const;
  void CheckStoredBytes(const StepId& id);
  void CheckPersisted(const Host& host, const StepId& step);
  void CheckOffered(const StepId& step, uint32_t world_size);
  void OnStepDropped(const Host& host, const Session& session, Step step);
  void OnLatestAnswer(const Host& host, const Session& session, const Pending& request, const StepId& step,
                      uint32_t world_size);
  void OnViewAnswer(const Host& host, const Session& session, const Pending& request, const AnswerView& view);
  void OnGrant(const Host& host, const Session& session, const Pending& request, const AnswerGrant& grant);
  void OnPolicyAnswer(const Host& host, const Session& session, const PolicyInput& policy,
                      const Status& status);
  void ReleaseGrant(const Session& session, SaveId save);
  bool FlippedAt(const Host& host, uint32_t chunk) const;
  std::string TransferOn(const Host& host, uint32_t chunk) const;
  uint32_t ChunkOf(const Host& host, uint64_t offset) const;
  void CheckAdmitted(const Transfer& transfer);

  const Options options_;
  Scheduler& scheduler_;
  Network& network_;
  const SimStorage& storage_;
  const std::vector<std::unique_ptr<Host>>& hosts_;
  std::string failure_;
  Statistics statistics_;
  std::vector<StepId> dropped_;  // one for each dropped copy that counted, on any host
  std::vector<std::pair<ShardId, Role>> to_judge_;
  std::set<std::pair<Place, uint32_t>> damaged_;  // chunks without a sealed shard
  bool promise_dirty_ = false;                    // copies of a committed step have changed
  std::map<ShardId, Shard> shards_;
  std::map<StepId, TimeUs> committed_;
  std::set<StepId> quarantined_;
  std::set<StepId> drops_asked_;              // by any rank, with any outcome
  std::set<StepId> drops_of_saved_;           // by a rank when its node had its shard
  std::set<StepId> never_committed_;          // not committed when their drop was answered
  std::map<StepId, std::set<NodeId>> heard_;  // the daemons that have reported the step as committed
  std::set<StepId> persisted_;                // reported PERSISTED by any daemon
  // What ranks of an incarnation have asked to be kept on storage, and what they were told is kept.
  struct Policy {
    std::set<uint64_t> asked;
    uint64_t keep = 0;
    std::set<uint64_t> every_asked;
  };
  std::map<Incarnation, Policy> policies_;
  std::map<Incarnation, RestoreRecord> restores_;
  std::map<std::pair<Incarnation, Rank>, Step> begun_;  // the highest step that the rank has begun to save
  std::map<size_t, std::map<uint32_t, std::pair<SessionId, SaveId>>> grants_;  // by host and chunk
  std::map<std::pair<SessionId, ViewId>, ViewHeld> views_;
  std::set<uint64_t> plaintext_;  // fingerprints of chunks
  std::map<std::tuple<KeyId, uint64_t, uint64_t, uint64_t, uint32_t>, std::pair<uint32_t, uint64_t>> nonces_;
  std::map<NodeId, Place> places_;
  std::map<Place, TimeUs> last_seen_;                 // in the view of any host
  std::map<size_t, std::pair<NodeId, View>> viewed_;  // by host: its last view
  std::string why_it_waits_;
  TimeUs waits_at_ = 0;
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
