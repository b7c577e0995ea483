// SPDX-License-Identifier: Apache-2.0
#include "node/storage_watch.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/base/check.h"
#include "storage/forwarding_sink.h"

namespace ropeteam {
namespace {

thread_local StorageWatch::Work* t_work = nullptr;
thread_local std::atomic<StorageWatch::Time>* t_parts_moved =
    nullptr;  // null: this thread handles no part of a work

// Records the begin and the return of a sink's call as progress.
struct Call {
  explicit Call(StorageWatch* by) : watch(*by) { watch.Moved(); }
  ~Call() { watch.Moved(); }
  StorageWatch& watch;
};

class WatchedUpload final : public storage::Upload {
 public:
  WatchedUpload(StorageWatch* watch, std::unique_ptr<Upload> below, uint64_t bytes)
      : Upload(bytes, below->part_bytes()), watch_(watch), below_(std::move(below)) {}

  bool Has(uint32_t index, uint32_t crc32c) const override { return below_->Has(index, crc32c); }
  Status PutPart(uint32_t index, std::span<const storage::Piece> pieces, uint32_t crc32c,
                 storage::Deadline deadline) override {
    const Call call(watch_);
    return below_->PutPart(index, pieces, crc32c, deadline);
  }
  Status Finish(uint32_t crc32c, storage::Deadline deadline) override {
    const Call call(watch_);
    return below_->Finish(crc32c, deadline);
  }
  Status Abort(storage::Deadline deadline) override {
    const Call call(watch_);
    return below_->Abort(deadline);
  }

 private:
  StorageWatch* const watch_;
  const std::unique_ptr<Upload> below_;
};

class WatchedSink final : public storage::ForwardingSink {
 public:
  WatchedSink(StorageWatch* watch, std::shared_ptr<Sink> below)
      : ForwardingSink(std::move(below)), watch_(watch) {}

  Result<std::unique_ptr<storage::Upload>> Begin(const std::string& name, uint64_t bytes,
                                                 uint64_t part_bytes_wanted,
                                                 storage::Deadline deadline) override {
    const Call call(watch_);
    Result<std::unique_ptr<storage::Upload>> upload = below().Begin(name, bytes, part_bytes_wanted, deadline);
    if (!upload.ok()) return upload;
    return std::unique_ptr<storage::Upload>(
        std::make_unique<WatchedUpload>(watch_, std::move(*upload), bytes));
  }
  Status Put(const std::string& name, std::string_view bytes, storage::PutMode mode,
             storage::Deadline deadline) override {
    const Call call(watch_);
    return below().Put(name, bytes, mode, deadline);
  }
  Status Read(const std::string& name, uint64_t offset, std::span<const storage::Target> targets,
              storage::Deadline deadline) override {
    const Call call(watch_);
    return below().Read(name, offset, targets, deadline);
  }
  Result<storage::FileInfo> Stat(const std::string& name, storage::Deadline deadline) override {
    const Call call(watch_);
    return below().Stat(name, deadline);
  }
  Result<storage::ListPage> List(const std::string& folder, const std::string& page,
                                 storage::Deadline deadline) override {
    const Call call(watch_);
    return below().List(folder, page, deadline);
  }
  Status Delete(const std::string& name, storage::Deadline deadline) override {
    const Call call(watch_);
    return below().Delete(name, deadline);
  }
  Status DeleteFolder(const std::string& folder, storage::Deadline deadline) override {
    const Call call(watch_);
    return below().DeleteFolder(folder, deadline);
  }
  Result<uint64_t> AbortUploads(const std::string& folder, std::chrono::seconds age,
                                storage::Deadline deadline) override {
    const Call call(watch_);
    return below().AbortUploads(folder, age, deadline);
  }

 private:
  StorageWatch* const watch_;
};

}  // namespace

StorageWatch::Work* StorageWatch::Add(uint64_t tag) {
  const std::lock_guard lock(mutex_);
  Work& work = works_.emplace_back();
  work.tag = tag;
  work.moved = std::chrono::steady_clock::now();
  return &work;
}

void StorageWatch::Take(Work* work) {
  t_work = work;
  const std::lock_guard lock(mutex_);
  work->taken = true;
  work->moved = std::chrono::steady_clock::now();
}

void StorageWatch::Remove(Work* work) {
  t_work = nullptr;
  const std::lock_guard lock(mutex_);
  ROPETEAM_CHECK(work->parts_waiting == 0);
  std::erase_if(works_, [work](const Work& each) { return &each == work; });
}

StorageWatch::Work* StorageWatch::Current() { return t_work; }

void StorageWatch::AddPart(Work* work, Parts parts) {
  const std::lock_guard lock(mutex_);
  work->parts = parts;
  ++work->parts_waiting;
}

void StorageWatch::TakePart(Work* work, Parts parts) {
  t_work = work;
  t_parts_moved = &parts_moved_[static_cast<size_t>(parts)];
  {
    const std::lock_guard lock(mutex_);
    --work->parts_waiting;
  }
  Moved();
}

void StorageWatch::EndPart() {
  Moved();
  t_work = nullptr;
  t_parts_moved = nullptr;
}

void StorageWatch::Moved() {
  if (t_work == nullptr) return;
  const Time now = std::chrono::steady_clock::now();
  t_work->moved = now;
  if (t_parts_moved != nullptr) *t_parts_moved = now;
}

std::shared_ptr<storage::Sink> StorageWatch::Watched(std::shared_ptr<storage::Sink> below) {
  if (below == nullptr) return nullptr;
  return std::make_shared<WatchedSink>(this, std::move(below));
}

StorageWatch::Time StorageWatch::LastMoved(const Work& work) const {
  const Time moved = work.moved;
  return work.parts_waiting == 0 ? moved
                                 : std::max(moved, parts_moved_[static_cast<size_t>(work.parts)].load());
}

std::vector<uint64_t> StorageWatch::Stalled(Time now) {
  const std::lock_guard lock(mutex_);
  Time taken_moved;
  for (const Work& work : works_)
    if (work.taken) taken_moved = std::max(taken_moved, LastMoved(work));
  std::vector<uint64_t> tags;
  for (Work& work : works_) {
    const Time moved = work.taken ? LastMoved(work) : std::max(work.moved.load(), taken_moved);
    if (now - moved < stalled_after_) {
      work.told.reset();
    } else if (!work.told || now - *work.told >= kToldAgain) {
      work.told = now;
      tags.push_back(work.tag);
    }
  }
  return tags;
}

size_t StorageWatch::works() const {
  const std::lock_guard lock(mutex_);
  return works_.size();
}

}  // namespace ropeteam
