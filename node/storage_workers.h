// SPDX-License-Identifier: Apache-2.0
//
// Carries out the Engine's work on storage, off its thread. It lays out shards as files, and writes and reads them
// through a Sink, in parallel parts straight from and into the arena. There are three pools: a few threads handle one
// work each, others write parts, others read them. So a hanging store delays only other storage work, and a restore
// does not wait behind a step that is being written.
//
// docs/format-on-storage.md describes the files.

#ifndef ROPETEAM_NODE_STORAGE_WORKERS_H_
#define ROPETEAM_NODE_STORAGE_WORKERS_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "api/client/local_protocol.h"
#include "core/engine/engine.h"
#include "node/storage_watch.h"
#include "storage/format/layout.h"
#include "storage/format/manifest.h"
#include "storage/format/restore.h"
#include "storage/lock/job_lock.h"
#include "storage/retention/retention.h"
#include "storage/sink.h"
#include "storage/steps/damaged.h"

namespace ropeteam {

// Threads that take tasks in the order they came.
class TaskThreads {
 public:
  enum class Priority {
    kNormal,
    kLowest  // nice 19: what else is to run goes first
  };
  explicit TaskThreads(uint32_t threads, Priority priority = Priority::kNormal);
  ~TaskThreads();  // runs what was submitted, to its end
  void Submit(std::function<void()> task);

 private:
  void Run(Priority priority);
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::function<void()>> tasks_;  // guarded by mutex_
  bool stop_ = false;                        // guarded by mutex_
  std::vector<std::thread> threads_;
};

class StorageWorkers {
 public:
  struct Config {
    std::shared_ptr<storage::Sink> sink;  // null: the job has no storage, so nothing is written
    // The same store for the job's lock, without the audit log. Null: this process writes to a place of its own, where no
    // lock is used, so WriteShard needs no proof.
    std::shared_ptr<storage::Sink> lock_sink;
    std::string job;
    std::string node;        // of this daemon, for the lock that others read
    bool take_over = false;  // the lock, once
    // URL[@STEP] of another job's steps: read where this job has none, never written to. Opened when it is wanted first.
    std::string restore_from;
    std::span<std::byte> memory;  // the arena; must outlive the workers
    uint64_t chunks_begin = 0;    // in it
    uint64_t chunk_bytes = 0;
    uint64_t bytes_per_s = 0;  // written by this node; 0: no bound
    storage::RetentionRules rules;
    // Told of bytes that go to storage or have come from there; on any worker. May be empty.
    std::function<void(uint64_t bytes)> moved;
  };
  // Called on a worker, once for every work.
  using Done = std::function<void(uint64_t tag, Status status, StorageDone done)>;

  StorageWorkers(Config config, Done done);
  ~StorageWorkers();  // as Stop(), then waits for as long as a call of the sink takes to return

  // Releases the lock, stops the sink and waits for the threads to end. False: a thread is still inside the sink after
  // twice kStopTimeout, for example because a file system hangs. It still uses this object, which must not be destroyed
  // then: the process must end by _exit(). Once, by the thread that made the workers; no call may follow.
  bool Stop(std::chrono::milliseconds timeout = kStopTimeout);

  void Submit(StartStorage start);  // from any thread
  // Tags of works that have made no progress for kStalledAfter; told again every minute. From any thread.
  std::vector<uint64_t> Stalled(StorageWatch::Time now) { return watch_.Stalled(now); }
  // The newest steps that have a manifest; see local::StorageList. Listings are made one after the other, on a thread
  // of their own. `done` is called there once; one that has not begun in time does nothing more.
  using ListDone = std::function<void(Status status, local::StorageListReply reply)>;
  void ListNewest(uint32_t steps_max, std::chrono::microseconds timeout, ListDone done);

  // While this node has more urgent transfers or saves (`urgent`), each part under way reads the arena at
  // kYieldingBytesPerS. From any thread.
  void SetUrgent(bool urgent);

  // For one call of the sink, in which it retries by itself.
  static constexpr std::chrono::seconds kCallTimeout{60};
  // A sink that keeps its deadlines has failed by then, and the work is answered.
  static constexpr std::chrono::seconds kStalledAfter = kCallTimeout + std::chrono::seconds{5};
  // Of giving the lock back, and then of the threads' end: more than the lock's own timeout, and both together less than the
  // 10 s after which `ropeteam run` kills its daemon.
  static constexpr std::chrono::seconds kStopTimeout{3};
  static_assert(storage::JobLock::kLeaveTimeout < kStopTimeout);

  StorageWorkers(const StorageWorkers&) = delete;
  StorageWorkers& operator=(const StorageWorkers&) = delete;

 private:
  // Of one work: two writes, as the leader orders, besides loads for ranks and a listing.
  static constexpr uint32_t kWorkThreads = 4;
  // A store's latency is hidden by parts that are under way at the same time.
  // So many write, and so many read.
  static constexpr uint32_t kPartThreads = 8;
  // A part of a file: large beside a request's overhead, small beside what a retry repeats.
  static constexpr uint64_t kPartBytes = 16ull << 20;
  // Saves and fetches go first, but persisting always makes progress: half a GB/s with 8 parts.
  static constexpr uint64_t kYieldingBytesPerS = 64ull << 20;
  // How often work that waits because of `bytes_per_s` reports that the wait is intended.
  static constexpr std::chrono::seconds kPaceTold{1};
  // No upload of a step takes a day; a younger one may still be continued.
  static constexpr std::chrono::hours kLeftoverAge{24};
  // Of a step: each is a request of its own. 10 s at 20 ms each, while the step may be abandoned after a minute.
  static constexpr size_t kChecksumLooksMax = 4096;
  // Manifests up to this size are kept between the shards of one restore; 30,000 ranks.
  static constexpr size_t kManifestKeptBytesMax = 8u << 20;

  struct Group;  // tasks that are waited for together
  struct Place {
    std::shared_ptr<storage::Sink> sink;  // SinkForReads()
    std::string job;                      // empty: the sink's URL is the job's folder
  };
  // `releases`: of the lock, that were submitted before it.
  Status Do(const StorageWork& work, uint64_t releases, StorageDone* done);
  static storage::Deadline CallDeadline() { return std::chrono::steady_clock::now() + kCallTimeout; }
  Result<StorageProof> Proof();
  std::string FolderOf(const StepId& step) const;
  std::span<std::byte> ChunkAtPlace(const std::vector<Extent>& extents, uint64_t stream_bytes,
                                    uint64_t index) const;
  // The shard as it lies in the arena; the extents and checksums of `shard` must outlive it.
  storage::ShardStream StreamOf(const NameFiles& shard) const;
  void Pace(uint64_t bytes);
  void Yield(uint64_t bytes);

  // storage_read.cc
  Result<StoredList> List();
  // Its manifest, and that each file is there with its size. `ranks` may be null.
  Result<storage::StepHead> CheckStep(const StepId& step, std::vector<StoredRank>* ranks,
                                      storage::StepRestores* restores = nullptr);
  Result<StoredStep> ReadStep(const StepId& step);
  Result<LoadedChunks> Load(const LoadChunks& load);
  Result<std::string> ReadManifest(const StepId& step, const Place** place);
  // `status` is of a file that the step's manifest names. A missing file is damage only while the manifest is there:
  // where a step is deleted, or a mount is lost, both are missing.
  static Status Judged(const Status& status, const Place& place, const StepId& step);
  struct LoadRun;
  struct Cut;
  template <typename Visit>
  void ForEachCut(const LoadRun& run, const Visit& visit) const;
  Status ReadCuts(LoadRun* run);
  Result<std::vector<uint32_t>> CheckCuts(const LoadRun& run) const;

  // storage_list.cc
  Result<local::StorageListReply> Newest(uint32_t steps_max, storage::Deadline deadline);

  // storage_source.cc
  Result<const Place*> Source();
  Result<std::vector<StepId>> ListSource();
  // From where the step lies: this job's storage, or else the other job's.
  Result<std::string> ReadManifestText(const StepId& step, const Place** place);

  // storage_prune.cc
  Result<StoredList> Prune(const PruneStored& prune, uint64_t releases);
  void AbortLeftovers();

  // storage_write.cc
  Result<std::vector<storage::StreamObject>> ObjectsOf(const NameFiles& shard,
                                                       std::vector<uint32_t>* bad) const;
  Result<FileNames> Names(const NameFiles& shard, std::vector<uint32_t>* bad) const;
  Result<StoredRank> Write(const WriteShard& write, std::vector<uint32_t>* bad);
  Result<std::string> MetadataOf(const NameFiles& shard, const std::vector<storage::StreamObject>& objects,
                                 std::vector<uint32_t>* bad) const;
  struct WriteRun;
  Status WriteFile(WriteRun* run, size_t file);
  // kNotFound: a file of the step is not there, or is not the one that was written.
  Status LookAtFiles(const StoredStep& step);
  Status PutManifest(const StoredStep& step);

  StorageWatch watch_{kStalledAfter};  // first: the sinks below tell it
  const Config config_;
  const Done done_;
  const Place own_;
  std::mutex source_mutex_;
  Place source_;  // without a sink until it is wanted, then as it is; guarded by source_mutex_ until then
  std::optional<storage::JobLock> lock_;
  std::atomic<uint64_t> releases_{0};  // submitted: each ends the deletions before it
  std::atomic<bool> leftovers_aborted_{false};
  std::mutex pace_mutex_;
  std::chrono::steady_clock::time_point pace_until_;  // guarded by pace_mutex_
  bool stopping_ = false;                             // guarded by pace_mutex_
  std::condition_variable stops_;
  std::atomic<bool> urgent_{false};
  std::mutex urgent_mutex_;  // for not_urgent_ alone
  std::condition_variable not_urgent_;
  std::mutex manifest_mutex_;
  StepId manifest_step_;                   // of manifest_text_; guarded by manifest_mutex_
  const Place* manifest_place_ = nullptr;  // likewise
  std::string manifest_text_;              // guarded by manifest_mutex_
  // Declared last, so that they end first; the works wait for parts. Writers have the lowest priority: otherwise a save's
  // thread or the daemon's own would wait for a processor while a writer is inside a send().
  std::optional<TaskThreads> write_parts_;
  std::optional<TaskThreads> read_parts_;
  std::optional<TaskThreads> works_;
  std::optional<TaskThreads> lists_;
  // Releases the lock and ends the threads, so that Stop() can wait for a bounded time.
  std::thread ender_;
  std::promise<void> left_, ended_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_STORAGE_WORKERS_H_
