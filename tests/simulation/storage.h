// SPDX-License-Identifier: Apache-2.0
//
// Simulated storage. It is slow, fails, loses acknowledgements, is unavailable for a while, and corrupts
// files. If a daemon dies, its work stops where it is. A request that was sent before may still take effect.

#ifndef ROPETEAM_TESTS_SIMULATION_STORAGE_H_
#define ROPETEAM_TESTS_SIMULATION_STORAGE_H_

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/engine/engine.h"
#include "tests/simulation/host.h"
#include "tests/simulation/options.h"
#include "tests/simulation/random.h"
#include "tests/simulation/scheduler.h"

namespace ropeteam::simulation {

class SimStorage {
 public:
  // Answers the work of a daemon, if that daemon still runs.
  using Answer =
      std::function<void(size_t host, NodeId instance, uint64_t tag, const Status&, const StorageDone&)>;
  using Stalled = std::function<void(size_t host, NodeId instance, uint64_t tag)>;
  // The host, if that daemon still runs and is not stopped.
  using FindHost = std::function<Host*(size_t host, NodeId instance)>;
  // Called when a step's manifest becomes visible, and when a daemon breaks a rule of storage.
  using OnStored = std::function<void(const StepId& id, const StoredStep& step)>;
  using OnViolation = std::function<void(const std::string& what)>;
  // A daemon begins to delete. Later, if it still runs: which of the steps with a manifest it has deleted.
  using OnPrune = std::function<void(size_t host, const PruneStored& prune)>;
  using OnPruned = std::function<void(size_t host, const std::vector<StepId>& newest_first,
                                      const std::vector<StepId>& gone)>;

  SimStorage(const StorageOptions& options, Scheduler* scheduler, Random* random)
      : options_(options), scheduler_(*scheduler), random_(*random) {}

  Answer answer;
  Stalled stalled;
  // Bytes that a dead daemon was reading land in its memory, if that is not lost.
  using Stray =
      std::function<void(size_t host, uint64_t memory_generation, uint32_t chunk, const std::string&)>;
  Stray stray;
  FindHost find_host;
  OnStored on_stored;
  OnViolation on_violation;
  OnPrune on_prune;
  OnPruned on_pruned;

  void Start(const Host& host, const StartStorage& start);
  // All requests fail until then. Ignored if it is too soon after the last time: `latest` waits only so long.
  void TakeAway(TimeUs until) {
    if (MayTrouble(until)) away_until_ = until;
  }
  // Work of this host makes no progress until then. Its daemon is told after a while.
  void HangUntil(size_t host, TimeUs until);
  bool away() const { return scheduler_.now() < away_until_; }
  // The host has an empty directory in the place of storage until then. What it writes there, storage never gets.
  void Unmount(size_t host, TimeUs until) { unmounted_[host].until = until; }
  // As HangUntil(), however soon after the last trouble and however long.
  void StickUntil(size_t host, TimeUs until);
  // Everything is refused by permission, or everything but listings. SpoilUntil(): the host's memory corrupts what it
  // loads.
  void RefuseUntil(size_t host, TimeUs until, bool lists) { refused_[host] = {until, lists}; }
  void SpoilUntil(size_t host, TimeUs until);
  // Another host has an empty directory in the place of storage, or bad memory.
  bool DiffersElsewhere(size_t host) const;
  // Damages or removes a file of a step. False: no step has a file.
  bool Rot();
  // No more failures.
  void Heal();

  // An operator gives storage to this daemon.
  void TakeOver(const Host& host) { hold_ = {host.index, host.id, 0, false, ++claims_}; }
  NodeId holder() const { return hold_.instance; }

  // ---- for the stories
  // Changes a byte of the rank's file, but not its size.
  void Damage(const StepId& id, Rank rank);
  void LoseFile(const StepId& id, Rank rank);
  // Listings do not show the step until Show(), as with a cache of directories or a late request.
  void Hide(const StepId& id);
  void Show();
  // Work of this host hangs until GoOn(), as on a hard mount.
  void Hang(size_t host) { hung_.insert(host); }
  void GoOn(size_t host);
  void HangPrunes(bool hang) { prunes_hang_ = hang; }
  // This host may write everything but manifests.
  void RefuseManifests(size_t host) { refuses_manifests_.insert(host); }
  // Files that are written are gone at once.
  void LoseWrites(bool lose) { loses_writes_ = lose; }
  uint64_t listings() const { return listings_; }  // number of those that were begun
  uint64_t loads() const { return loads_; }
  // The host's memory corrupts what it loads.
  void Spoil(size_t host) { spoilt_.insert(host); }
  bool Marked(const StepId& id) const { return At(id) != nullptr && At(id)->marked; }
  RestoreNote Restored(const StepId& id) const {
    return At(id) == nullptr ? RestoreNote() : At(id)->restored;
  }
  // The step's manifest cannot be read until Mend(). FailLoads(): its shards cannot be loaded.
  void FailReads(const StepId& id) {
    unreadable_.insert(id);
    steps_.at(id).rotten = true;
  }
  void Mend() {
    for (const std::set<StepId>* failing : {&unreadable_, &unloadable_})
      for (const StepId& id : *failing) steps_.at(id).rotten = false;
    unreadable_.clear();
    unloadable_.clear();
  }
  void FailLoads(const StepId& id) {
    unloadable_.insert(id);
    steps_.at(id).rotten = true;
  }

  // ---- the current state
  bool Has(const StepId& id) const { return At(id) != nullptr && At(id)->manifest.has_value(); }
  // Every listing that was begun within the last kListingAgeUs shows it.
  bool Listed(const StepId& id) const {
    if (options_.listing_lag_us == 0) return Has(id);
    return Has(id) && At(id)->stored_at + options_.listing_lag_us + kListingAgeUs <= scheduler_.now();
  }
  // The newest sound step that every listing has had the time to show; {0, 0}: none.
  StepId NewestSound() const;
  bool Pruned(const StepId& id) const { return pruned_.contains(id); }
  bool HasSound(Step step) const {
    return std::any_of(steps_.begin(), steps_.end(),
                       [&](const auto& each) { return each.first.step == step && Sound(each.first); });
  }
  bool Sound(const StepId& id) const { return Has(id) && !At(id)->rotten; }
  // The step's manifest, or null. Stream(): the bytes of a rank's shard, or null.
  const StoredStep* Manifest(const StepId& id) const { return Has(id) ? &*At(id)->manifest : nullptr; }
  const std::string* Stream(const ShardId& id) const;
  size_t steps() const;

 private:
  // Shortest time between two outages, for each of which `latest` has to wait.
  static constexpr TimeUs kBetweenAwayUs = 9 * kSecond;
  static constexpr TimeUs kListingAgeUs = 10 * kSecond;
  static constexpr TimeUs kHolderSilentUs = 15 * kSecond;  // then another daemon takes storage
  static constexpr TimeUs kRenewUs = kSecond;
  // The daemon that writes and deletes. It renews its hold until it is told to release it, even if the
  // release then fails.
  struct Hold {
    size_t host = 0;
    NodeId instance = kNoNode;
    uint64_t renewal = 0;  // as another daemon has seen it last
    bool renews = false;
    uint64_t claim = 0;  // tells this hold from all others
  };
  // What another daemon has seen of the holder.
  struct Watch {
    NodeId holder = kNoNode;
    uint64_t renewal = 0;
    TimeUs since = 0;
  };
  struct File {
    Rank rank = 0;
    std::string bytes;
    TimeUs torn_until = 0;  // half written
  };
  struct Step {
    std::map<std::string, File> files;
    std::map<Rank, ShardMeta> metas;
    std::optional<StoredStep> manifest;
    TimeUs stored_at = 0;  // the manifest
    bool rotten = false;
    bool marked = false;  // as damaged
    RestoreNote restored;
  };
  // Running work: what a thread of the daemon does, one stage after the other.
  struct Job {
    size_t host = 0;
    NodeId instance = kNoNode;
    StartStorage start;
    uint64_t memory_generation = 0;
    uint64_t chunk_bytes = 0;
    uint64_t releases = 0;  // of that daemon, that were begun before
    size_t stage = 0;
    bool hangs = false;
    bool stalled = false;  // the daemon was told
    std::string bytes;
    StorageDone done;
  };
  using JobPtr = std::shared_ptr<Job>;
  bool Refused(const Job& job) const;
  struct Refusal {
    TimeUs until = 0;
    bool lists = false;
  };
  // What a host without the mount sees instead.
  struct Directory {
    TimeUs until = 0;
    std::map<StepId, Step> steps;
    Hold hold;
  };

  const Step* At(const StepId& id) const {
    const auto at = steps_.find(id);
    return at == steps_.end() ? nullptr : &at->second;
  }
  bool MayTrouble(TimeUs until) {
    if (healed_ || trouble_until_ + kBetweenAwayUs > scheduler_.now()) return false;
    trouble_until_ = until;
    return true;
  }
  void Later(const JobPtr& job);
  void Stall(const JobPtr& job);
  void Advance(const JobPtr& job);
  void End(const JobPtr& job, const Status& status);
  // True: the work continues with another stage.
  bool Stage(const JobPtr& job, Host* host, Status* status);
  bool ReadChunk(const JobPtr& job, const NameFiles& shard, Host* host, Status* status);
  bool LoadChunk(const JobPtr& job, const LoadChunks& load, Host* host, Status* status);
  void LandLate(const Job& job, const LoadChunks& load);
  // The whole effect of a request that was sent. EffectOn(): on what the host sees.
  Status Effect(const JobPtr& job);
  Status EffectOn(const JobPtr& job);
  bool Unmounted(size_t host) const;
  Status Write(const WriteShard& write, const std::string& stream, StoredRank* stored);
  Status Put(const StepId& id, const std::string& path, Rank rank, std::string bytes);
  Status WriteTheManifest(const StoredStep& step);
  Status TakeHold(const Job& job);
  // Whether the daemon holds storage: a condition for a manifest, a deletion, a mark or a note.
  Status CheckHold(const Job& job) const;
  Status Prove(const std::string& proof) const;
  StoredList Prune(const Job& job, const PruneStored& prune);
  Status Read(const StepId& id, StoredStep* stored);
  // Whether the file is seen half written. Then the step may be found damaged, and the checker accepts that.
  bool IsTorn(const StepId& id, const std::string& path);
  static std::vector<std::string> NamesOf(const ShardId& shard);

  const StorageOptions options_;
  Scheduler& scheduler_;
  Random& random_;
  std::map<StepId, Step> steps_;
  TimeUs away_until_ = 0;
  TimeUs trouble_until_ = 0;
  bool healed_ = false;
  std::set<StepId> pruned_;
  Hold hold_;
  std::map<NodeId, Watch> watches_;
  std::map<NodeId, uint64_t> releases_;
  std::set<NodeId> told_;  // daemons that were ever told that they hold storage
  std::set<StepId> hidden_;
  std::set<StepId> unreadable_;
  std::set<StepId> unloadable_;
  std::set<size_t> hung_;
  bool prunes_hang_ = false;
  bool loses_writes_ = false;
  std::set<size_t> refuses_manifests_;
  uint64_t claims_ = 0;
  std::vector<JobPtr> hanging_;
  uint64_t listings_ = 0;
  uint64_t loads_ = 0;
  std::set<size_t> spoilt_;
  std::map<size_t, Directory> unmounted_;
  std::map<size_t, Refusal> refused_;
  bool elsewhere_ = false;  // steps_ and hold_ are a Directory's for the moment
};

}  // namespace ropeteam::simulation

#endif  // ROPETEAM_TESTS_SIMULATION_STORAGE_H_
