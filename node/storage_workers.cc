// SPDX-License-Identifier: Apache-2.0
#include "node/storage_workers.h"

#include <algorithm>
#include <utility>

#include "core/base/log.h"
#include "node/storage_group.h"
#include "storage/format/names.h"
#include "storage/steps/damaged.h"

namespace ropeteam {

TaskThreads::TaskThreads(uint32_t threads) {
  for (uint32_t i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
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

void TaskThreads::Run() {
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
    : config_(std::move(config)),
      done_(std::move(done)),
      own_{config_.sink, config_.job},
      lock_({.sink = config_.lock_sink,
             .job = config_.job,
             .node = config_.node,
             .take_over = config_.take_over}) {
  if (own_.sink != nullptr) own_.sink->SetYield([this](size_t bytes) { Yield(bytes); });
  parts_.emplace(kPartThreads);
  works_.emplace(kWorkThreads);
  lists_.emplace(1);
}

StorageWorkers::~StorageWorkers() {
  lock_.Leave();
  if (own_.sink != nullptr) own_.sink->Stop();
  {
    const std::lock_guard lock(source_mutex_);
    if (source_.sink != nullptr) source_.sink->Stop();
  }
  lists_.reset();
  works_.reset();
  parts_.reset();
}

void StorageWorkers::Submit(StartStorage start) {
  works_->Submit([this, start = std::move(start)] { Do(start); });
}

void StorageWorkers::Do(const StartStorage& start) {
  StorageDone done;
  const bool reads = std::holds_alternative<ListStored>(start.work) ||
                     std::holds_alternative<ReadStored>(start.work) ||
                     std::holds_alternative<LoadChunks>(start.work);
  if (own_.sink == nullptr && !reads)
    return done_(start.tag, Error(Code::kUnsupported, "this job has no storage"), std::move(done));
  Status status;
  const auto take = [&](auto result) {
    status = result.status();
    if (result.ok()) done.result = std::move(*result);
  };
  if (std::holds_alternative<ListStored>(start.work)) take(List());
  if (const auto* read = std::get_if<ReadStored>(&start.work)) take(ReadStep(read->step));
  if (const auto* name = std::get_if<NameFiles>(&start.work)) take(Names(*name, &done.bad));
  if (const auto* write = std::get_if<WriteShard>(&start.work)) take(Write(*write, &done.bad));
  if (const auto* manifest = std::get_if<WriteManifest>(&start.work)) {
    status = lock_.Check();
    if (status.ok()) status = PutManifest(*manifest->step);
  }
  if (const auto* load = std::get_if<LoadChunks>(&start.work)) take(Load(*load));
  if (const auto* mark = std::get_if<MarkStored>(&start.work)) {
    status = lock_.Check();
    if (status.ok())
      status = storage::MarkDamaged(config_.sink.get(), config_.job,
                                    {mark->step.step, mark->step.incarnation}, mark->why, kCallTimeout);
  }
  if (std::holds_alternative<HoldStorage>(start.work)) {
    status = lock_.Hold();
    if (status.ok() && !leftovers_aborted_.exchange(true)) parts_->Submit([this] { AbortLeftovers(); });
  }
  if (std::holds_alternative<ReleaseStorage>(start.work)) status = lock_.Release();
  if (const auto* prune = std::get_if<PruneStored>(&start.work)) take(Prune(*prune));
  done_(start.tag, std::move(status), std::move(done));
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
  if (urgent_.load(std::memory_order_relaxed) == urgent) return;
  {
    const std::lock_guard lock(urgent_mutex_);
    urgent_ = urgent;
  }
  if (!urgent) not_urgent_.notify_all();
}

void StorageWorkers::Yield(uint64_t bytes) {
  if (!urgent_.load(std::memory_order_relaxed)) return;
  std::unique_lock lock(urgent_mutex_);
  not_urgent_.wait_for(lock, std::chrono::microseconds(bytes * 1'000'000 / kYieldingBytesPerS),
                       [this] { return !urgent_; });
}

// Each part takes its time at the rate from where the one before ended.
void StorageWorkers::Pace(uint64_t bytes) {
  if (config_.moved) config_.moved(bytes);
  if (config_.bytes_per_s == 0) return;
  const auto takes = std::chrono::microseconds(bytes * 1'000'000 / config_.bytes_per_s);
  std::chrono::steady_clock::time_point begin;
  {
    const std::lock_guard lock(pace_mutex_);
    begin = std::max(pace_until_, std::chrono::steady_clock::now());
    pace_until_ = begin + takes;
  }
  std::this_thread::sleep_until(begin);
}

}  // namespace ropeteam
