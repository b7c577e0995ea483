// SPDX-License-Identifier: Apache-2.0
#include "node/storage_workers.h"

#include <sys/resource.h>

#include <algorithm>
#include <utility>

#include "core/base/log.h"
#include "node/storage_group.h"
#include "node/storage_reads.h"
#include "storage/format/names.h"
#include "storage/steps/damaged.h"

namespace ropeteam {
namespace {

constexpr int kNicest = 19;

}  // namespace

TaskThreads::TaskThreads(uint32_t threads, Priority priority) {
  for (uint32_t i = 0; i < threads; ++i) threads_.emplace_back([this, priority] { Run(priority); });
}

TaskThreads::~TaskThreads() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void TaskThreads::Submit(std::function<void()> task) {
  {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
  }
  wake_.notify_one();
}

void TaskThreads::Run(Priority priority) {
  // Applies to this thread only (setpriority(2), "C library/kernel differences"). Lowering needs no
  // privilege.
  if (priority == Priority::kLowest) setpriority(PRIO_PROCESS, 0, kNicest);
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    const std::function<void()> task = std::move(tasks_.front());
    tasks_.pop_front();
    lock.unlock();
    task();
    lock.lock();
  }
}

StorageWorkers::StorageWorkers(Config config, Done done)
    : config_([this, &config] {
        config.sink = watch_.Watched(std::move(config.sink));
        config.lock_sink = SinkForReads(watch_.Watched(std::move(config.lock_sink)));
        return std::move(config);
      }()),
      done_(std::move(done)),
      own_{SinkForReads(config_.sink), config_.job} {
  lock_.emplace(storage::JobLock::Config{
      .sink = config_.lock_sink, .job = config_.job, .node = config_.node, .take_over = config_.take_over});
  if (own_.sink != nullptr) own_.sink->SetYield([this](size_t bytes) { Yield(bytes); });
  write_parts_.emplace(kPartThreads, TaskThreads::Priority::kLowest);
  read_parts_.emplace(kPartThreads);
  works_.emplace(kWorkThreads);
  lists_.emplace(1);
}

StorageWorkers::~StorageWorkers() {
  if (!ender_.joinable()) (void)Stop();
  ender_.join();
}

bool StorageWorkers::Stop(std::chrono::milliseconds timeout) {
  const std::future<void> left = left_.get_future(), ended = ended_.get_future();
  ender_ = std::thread([this] {
    lock_->Leave();
    left_.set_value();
    lists_.reset();
    works_.reset();
    write_parts_.reset();
    read_parts_.reset();
    lock_.reset();
    ended_.set_value();
  });
  (void)left.wait_for(timeout);
  {
    const std::lock_guard lock(pace_mutex_);
    stopping_ = true;
  }
  stops_.notify_all();
  if (own_.sink != nullptr) own_.sink->Stop();
  // Skipped while the source is being opened, because that may hang too.
  if (const std::unique_lock lock(source_mutex_, std::try_to_lock);
      lock.owns_lock() && source_.sink != nullptr)
    source_.sink->Stop();
  if (ended.wait_for(timeout) == std::future_status::ready) return true;
  LOG_ERROR("storage hangs: a call has not returned from %s, works that are not done %zu",
            own_.sink != nullptr ? own_.sink->Describe().c_str() : config_.restore_from.c_str(),
            watch_.works());
  return false;
}

void StorageWorkers::Submit(StartStorage start) {
  StorageWatch::Work* const work = watch_.Add(start.tag);
  if (std::holds_alternative<ReleaseStorage>(start.work)) ++releases_;
  works_->Submit([this, work, start = std::move(start), releases = releases_.load()] {
    watch_.Take(work);
    StorageDone done;
    Status status = Do(start.work, releases, &done);
    watch_.Remove(work);
    done_(start.tag, std::move(status), std::move(done));
  });
}

Status StorageWorkers::Do(const StorageWork& work, uint64_t releases, StorageDone* done) {
  const bool reads = std::holds_alternative<ListStored>(work) || std::holds_alternative<ReadStored>(work) ||
                     std::holds_alternative<LoadChunks>(work);
  if (own_.sink == nullptr && !reads) return Error(Code::kUnsupported, "this job has no storage");
  Status status;
  const auto take = [&](auto result) {
    status = result.status();
    if (result.ok()) done->result = std::move(*result);
  };
  if (std::holds_alternative<ListStored>(work)) take(List());
  if (const auto* read = std::get_if<ReadStored>(&work)) take(ReadStep(read->step));
  if (const auto* name = std::get_if<NameFiles>(&work)) take(Names(*name, &done->bad));
  if (const auto* write = std::get_if<WriteShard>(&work)) take(Write(*write, &done->bad));
  if (const auto* manifest = std::get_if<WriteManifest>(&work)) {
    status = lock_->Check();
    if (status.ok()) status = PutManifest(*manifest->step);
  }
  if (const auto* load = std::get_if<LoadChunks>(&work)) take(Load(*load));
  if (const auto* mark = std::get_if<MarkStored>(&work)) {
    status = lock_->Check();
    if (status.ok())
      status = storage::MarkDamaged(config_.sink.get(), config_.job,
                                    {mark->step.step, mark->step.incarnation}, mark->why, kCallTimeout);
  }
  if (const auto* noted = std::get_if<NoteStored>(&work)) {
    const RestoreNote& note = noted->note;
    status = lock_->Check();
    if (status.ok())
      status = storage::NoteRestores(
          config_.sink.get(), config_.job, {note.step.step, note.step.incarnation},
          {note.revision, note.restores, note.counted, note.quarantined, note.by_hand}, kCallTimeout);
  }
  if (std::holds_alternative<HoldStorage>(work)) {
    status = lock_->Hold();
    if (status.ok() && !leftovers_aborted_.exchange(true)) write_parts_->Submit([this] { AbortLeftovers(); });
    if (status.ok()) take(Proof());
  }
  if (const auto* prove = std::get_if<ProveStorage>(&work)) status = lock_->Prove(prove->proof);
  if (std::holds_alternative<ReleaseStorage>(work)) status = lock_->Release();
  if (const auto* prune = std::get_if<PruneStored>(&work)) take(Prune(*prune, releases));
  return status;
}

Result<StorageProof> StorageWorkers::Proof() {
  Result<std::string> text = lock_->Proof();
  if (!text.ok()) return text.status();
  return StorageProof{std::move(*text)};
}

std::string StorageWorkers::FolderOf(const StepId& step) const {
  return config_.job + "/" + storage::StepFolder({step.step, step.incarnation});
}

std::span<std::byte> StorageWorkers::ChunkAtPlace(const std::vector<Extent>& extents, uint64_t stream_bytes,
                                                  uint64_t index) const {
  return config_.memory.subspan(config_.chunks_begin + ChunkAt(extents, index) * config_.chunk_bytes,
                                ChunkLength(stream_bytes, config_.chunk_bytes, index));
}

storage::ShardStream StorageWorkers::StreamOf(const NameFiles& shard) const {
  return {shard.meta.stream_bytes, config_.chunk_bytes, shard.crcs, [this, &shard](uint64_t index) {
            return std::span<const std::byte>(ChunkAtPlace(shard.extents, shard.meta.stream_bytes, index));
          }};
}

void StorageWorkers::SetUrgent(bool urgent) {
  // Takes no mutex: a thread of the lowest priority may hold it while it waits for a processor. A part that
  // misses the notification waits for its time at kYieldingBytesPerS, some milliseconds.
  if (urgent_.exchange(urgent, std::memory_order_relaxed) && !urgent) not_urgent_.notify_all();
}

void StorageWorkers::Yield(uint64_t bytes) {
  watch_.Moved();
  if (!urgent_.load(std::memory_order_relaxed)) return;
  std::unique_lock lock(urgent_mutex_);
  not_urgent_.wait_for(lock, std::chrono::microseconds(bytes * 1'000'000 / kYieldingBytesPerS),
                       [this] { return !urgent_; });
}

// Each part gets its time at the configured rate, after the time of the previous part.
void StorageWorkers::Pace(uint64_t bytes) {
  if (config_.moved) config_.moved(bytes);
  if (config_.bytes_per_s == 0) return;
  const auto takes = std::chrono::microseconds(bytes * 1'000'000 / config_.bytes_per_s);
  std::unique_lock lock(pace_mutex_);
  auto now = std::chrono::steady_clock::now();
  const auto begin = std::max(pace_until_, now);
  pace_until_ = begin + takes;
  for (; now < begin && !stopping_; now = std::chrono::steady_clock::now()) {
    stops_.wait_until(lock, std::min(begin, now + kPaceTold));
    watch_.Moved();
  }
}

}  // namespace ropeteam
