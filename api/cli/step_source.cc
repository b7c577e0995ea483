// SPDX-License-Identifier: Apache-2.0
#include "api/cli/step_source.h"

#include <algorithm>
#include <cinttypes>

#include "api/cli/daemon_arena.h"
#include "api/cli/storage_steps.h"
#include "api/client/view.h"
#include "core/base/checksum.h"
#include "storage/format/restore.h"

namespace ropeteam::cli {
namespace {

// The size of one read of a view. A daemon packs this much per request with the default chunks.
constexpr uint64_t kMemoryBlockBytes = 32ull << 20;

class MemoryStep : public StepSource {
 public:
  MemoryStep(DaemonArena daemon, Step step, int64_t timeout_ms)
      : daemon_(std::move(daemon)), step_(step), timeout_ms_(timeout_ms) {}

  std::string Text() const override { return StepText(daemon_.link->hello.job, {id_.step, id_.incarnation}); }
  uint32_t world_size() const override { return world_size_; }

  Status Open(uint32_t rank) override {
    view_.reset();
    Result<std::unique_ptr<client::View>> view =
        client::View::Open(daemon_.link, step_, rank, /*partial=*/true, timeout_ms_);
    if (!view.ok()) return view.status();
    const ShardMeta& meta = (*view)->meta();
    if (world_size_ == 0) {
      id_ = StepOf(meta.id);
      world_size_ = meta.world_size;
    } else if (StepOf(meta.id) != id_ || meta.world_size != world_size_) {
      return Error(Code::kAborted, "%s has been saved again meanwhile: export it again",
                   id_.ToString().c_str());
    }
    view_ = std::move(*view);
    std::vector<SavedObject> objects;
    for (const Object& object : view_->objects()) objects.push_back({object.name, object.length});
    SetObjects(std::move(objects));
    return OkStatus();
  }

  Status ReadAll(const std::vector<std::string>& names, const Take& take) override {
    uint64_t bytes_max = 0;
    for (const std::string& name : names) {
      const Result<const Object*> object = view_->Find(name);
      if (!object.ok()) return object.status();
      bytes_max = std::max(bytes_max, (*object)->length);
    }
    const RangeBuffer buffer(std::min(bytes_max, kMemoryBlockBytes));
    for (size_t i = 0; i < names.size(); ++i) {
      const Object& object = **view_->Find(names[i]);
      for (uint64_t at = 0; at < object.length; at += kMemoryBlockBytes) {
        const uint64_t length = std::min(kMemoryBlockBytes, object.length - at);
        ROPETEAM_RETURN_IF_ERROR(view_->Read(object, at, buffer.data(), length, timeout_ms_));
        ROPETEAM_RETURN_IF_ERROR(take(i, at, buffer.data(), length));
        moved(length);
      }
    }
    return OkStatus();
  }

 protected:
  Status ReadObject(size_t object, std::byte* data) override {
    const Object& each = view_->objects()[object];
    return view_->Read(each, 0, data, each.length, timeout_ms_);
  }

 private:
  const DaemonArena daemon_;
  const Step step_;
  const int64_t timeout_ms_;
  StepId id_;
  uint32_t world_size_ = 0;
  std::unique_ptr<client::View> view_;
};

class StoredStepFiles : public StepSource {
 public:
  StoredStepFiles(StoragePlace place, std::string job, storage::StepName name)
      : place_(std::move(place)),
        job_(std::move(job)),
        name_(name),
        folder_(storage::StepPath(job_, name_)) {}

  // Reads the manifest, and compares the files' sizes with it.
  Status Begin() {
    const Result<std::string> text =
        storage::ReadManifestText(place_.sink.get(), job_, name_, place_.timeout);
    if (!text.ok()) return text.status();
    const Result<storage::StepHead> head =
        storage::ParseManifestOf(job_, name_, *text, [this](storage::RankEntry&& rank) {
          ranks_.push_back(std::move(rank));
          return OkStatus();
        });
    if (!head.ok())
      return Error(head.status().code(), "%s: %s", folder_.c_str(), head.status().message().c_str());
    const Result<storage::FileSizes> sizes =
        storage::ListFileSizes(place_.sink.get(), job_, name_, place_.timeout);
    if (!sizes.ok()) return sizes.status();
    for (const storage::RankEntry& rank : ranks_)
      for (const storage::FileEntry& file : rank.files)
        ROPETEAM_RETURN_IF_ERROR(storage::CheckFileSize(folder_, *sizes, file));
    return OkStatus();
  }

  std::string Text() const override { return StepText(job_, name_); }
  uint32_t world_size() const override { return static_cast<uint32_t>(ranks_.size()); }

  Status Open(uint32_t rank) override {
    rank_ = &ranks_[rank];
    std::string head(rank_->HasRankFile() ? rank_->files[0].header_bytes : 0, '\0');
    if (!head.empty()) ROPETEAM_RETURN_IF_ERROR(ReadFile(0, 0, head.data(), head.size()));
    Result<storage::RestorePlan> plan = storage::PlanRestore(*rank_, head);
    if (!plan.ok())
      return Error(plan.status().code(), "%s: rank %u: %s", folder_.c_str(), rank,
                   plan.status().message().c_str());
    plan_ = std::move(*plan);
    std::vector<SavedObject> objects;
    for (const storage::StreamObject& object : plan_.objects) objects.push_back({object.name, object.length});
    SetObjects(std::move(objects));
    return OkStatus();
  }

  // Reads the rank's own file as a whole, because its checksum is that of the whole file.
  Status ReadAll(const std::vector<std::string>& names, const Take& take) override {
    std::vector<Stretch> stretches;
    for (size_t i = 0; i < names.size(); ++i) ROPETEAM_RETURN_IF_ERROR(AddStretches(i, names[i], &stretches));
    if (!rank_->HasRankFile()) return OkStatus();
    std::sort(stretches.begin(), stretches.end(),
              [](const Stretch& a, const Stretch& b) { return a.file_offset < b.file_offset; });
    const storage::FileEntry& file = rank_->files[0];
    const size_t count = (file.bytes + kStorageRangeBytes - 1) / kStorageRangeBytes;
    const size_t threads = std::min(kStorageThreads, count);
    std::vector<RangeBuffer> buffers;
    for (size_t i = 0; i < threads; ++i) buffers.emplace_back(kStorageRangeBytes);
    std::vector<uint32_t> crcs(count);
    ROPETEAM_RETURN_IF_ERROR(RunParallel(count, threads, [&](size_t i, size_t thread) {
      const uint64_t begin = i * kStorageRangeBytes;
      const uint64_t length = std::min(kStorageRangeBytes, file.bytes - begin);
      std::byte* data = buffers[thread].data();
      ROPETEAM_RETURN_IF_ERROR(ReadFile(0, begin, data, length));
      crcs[i] = Crc32c(data, length);
      return HandOver(stretches, begin, data, length, take);
    }));
    uint32_t crc = 0;
    for (size_t i = 0; i < count; ++i)
      crc = Crc32cCombine(crc, crcs[i], std::min(kStorageRangeBytes, file.bytes - i * kStorageRangeBytes));
    return CheckCrc(file, crc);
  }

 protected:
  // Compares the checksum if the object is a file of its own.
  Status ReadObject(size_t object, std::byte* data) override {
    const storage::StreamObject& wanted = plan_.objects[object];
    return ForPieces(
        wanted, [&](const storage::RestorePiece& piece, uint64_t skip, uint64_t at, uint64_t length) {
          if (piece.file == storage::RestorePiece::kTexts) {
            plan_.texts.copy(reinterpret_cast<char*>(data + at), length, piece.source_offset + skip);
            return OkStatus();
          }
          ROPETEAM_RETURN_IF_ERROR(ReadFile(piece.file, piece.source_offset + skip, data + at, length));
          const storage::FileEntry& file = rank_->files[piece.file];
          return length == file.bytes ? CheckCrc(file, Crc32c(data + at, length)) : OkStatus();
        });
  }

 private:
  // Bytes of an object in the rank's own file.
  struct Stretch {
    uint64_t file_offset = 0;
    uint64_t length = 0;
    size_t name = 0;
    uint64_t offset = 0;  // in the object
  };

  // Calls each(piece, offset in it, offset in the object, length) for the pieces with an object's bytes.
  template <typename Each>
  Status ForPieces(const storage::StreamObject& object, const Each& each) const {
    const auto& pieces = plan_.pieces;
    auto piece = std::upper_bound(
        pieces.begin(), pieces.end(), object.offset,
        [](uint64_t offset, const storage::RestorePiece& p) { return offset < p.stream_offset; });
    if (piece != pieces.begin()) --piece;
    for (uint64_t at = 0; at < object.length; ++piece) {
      const uint64_t begin = object.offset + at;
      if (piece == pieces.end() || begin < piece->stream_offset)
        return Error(Code::kCorrupt, "%s of rank %u is in no file", object.name.c_str(), rank_->rank);
      const uint64_t skip = begin - piece->stream_offset;
      if (skip >= piece->length) continue;
      const uint64_t length = std::min(object.length - at, piece->length - skip);
      ROPETEAM_RETURN_IF_ERROR(each(*piece, skip, at, length));
      at += length;
    }
    return OkStatus();
  }

  Status AddStretches(size_t index, const std::string& name, std::vector<Stretch>* stretches) const {
    const Result<size_t> object = Find(name);
    if (!object.ok()) return object.status();
    return ForPieces(plan_.objects[*object], [&](const storage::RestorePiece& piece, uint64_t skip,
                                                 uint64_t at, uint64_t length) {
      if (piece.file != 0)
        return Error(Code::kUnsupported, "%s of rank %u is not a tensor", name.c_str(), rank_->rank);
      stretches->push_back({piece.source_offset + skip, length, index, at});
      return OkStatus();
    });
  }

  // Passes those of the file's bytes from `begin` on that are in the sorted `stretches`.
  Status HandOver(const std::vector<Stretch>& stretches, uint64_t begin, const std::byte* data,
                  uint64_t length, const Take& take) {
    auto stretch = std::partition_point(stretches.begin(), stretches.end(),
                                        [&](const Stretch& e) { return e.file_offset + e.length <= begin; });
    for (; stretch != stretches.end() && stretch->file_offset < begin + length; ++stretch) {
      const uint64_t from = std::max(begin, stretch->file_offset);
      const uint64_t to = std::min(begin + length, stretch->file_offset + stretch->length);
      ROPETEAM_RETURN_IF_ERROR(take(stretch->name, stretch->offset + (from - stretch->file_offset),
                                    data + (from - begin), to - from));
      moved(to - from);
    }
    return OkStatus();
  }

  Status ReadFile(size_t file, uint64_t offset, void* data, uint64_t length) {
    if (length == 0) return OkStatus();
    const storage::Target target{static_cast<std::byte*>(data), length};
    return place_.sink->Read(folder_ + "/" + rank_->files[file].path, offset, {&target, 1},
                             place_.CallDeadline());
  }
  Status CheckCrc(const storage::FileEntry& file, uint32_t crc) const {
    if (crc == file.crc32c) return OkStatus();
    return Error(Code::kCorrupt, "%s/%s in %s has the checksum %08x, its manifest says %08x", folder_.c_str(),
                 file.path.c_str(), place_.url.c_str(), crc, file.crc32c);
  }

  const StoragePlace place_;
  const std::string job_;
  const storage::StepName name_;
  const std::string folder_;
  std::vector<storage::RankEntry> ranks_;
  const storage::RankEntry* rank_ = nullptr;
  storage::RestorePlan plan_;
};

Result<std::unique_ptr<StepSource>> OpenMemory(const StorageOptions& options) {
  Result<DaemonArena> daemon = OpenDaemonArena(options);
  if (!daemon.ok()) return daemon.status();
  const Result<Step> step = StepInMemory(*daemon, options);
  if (!step.ok()) return step.status();
  return std::unique_ptr<StepSource>(std::make_unique<MemoryStep>(
      std::move(*daemon), *step, std::chrono::milliseconds(options.timeout).count()));
}

Result<std::unique_ptr<StepSource>> OpenStored(const StorageOptions& options) {
  Result<StoragePlace> place = OpenStorage(options.url, options.timeout);
  if (!place.ok()) return place.status();
  const Result<ChosenStep> step = FindStep(*place, options.job, options.step);
  if (!step.ok()) return step.status();
  auto source = std::make_unique<StoredStepFiles>(std::move(*place), step->job, step->name);
  ROPETEAM_RETURN_IF_ERROR(source->Begin());
  return std::unique_ptr<StepSource>(std::move(source));
}

}  // namespace

Result<size_t> StepSource::Find(const std::string& name) const {
  const auto found = places_.find(name);
  if (found == places_.end()) return Error(Code::kNotFound, "%s: no object %s", Text().c_str(), name.c_str());
  return found->second;
}

void StepSource::SetObjects(std::vector<SavedObject> objects) {
  objects_ = std::move(objects);
  places_.clear();
  for (size_t i = 0; i < objects_.size(); ++i) places_.emplace(objects_[i].name, i);
}

Status StepSource::CheckLength(const std::string& name, uint64_t length) const {
  const Result<size_t> object = Find(name);
  if (!object.ok()) return object.status();
  if (objects_[*object].length == length) return OkStatus();
  return Error(Code::kCorrupt, "%s: the object %s has %" PRIu64 " bytes, its index says %" PRIu64,
               Text().c_str(), name.c_str(), objects_[*object].length, length);
}

Result<std::string> StepSource::Read(const std::string& name, uint64_t bytes_max) {
  const Result<size_t> object = Find(name);
  if (!object.ok()) return object.status();
  const uint64_t length = objects()[*object].length;
  if (length > bytes_max)
    return Error(Code::kInvalidArgument, "%s: the object %s has %" PRIu64 " bytes, limit %" PRIu64,
                 Text().c_str(), name.c_str(), length, bytes_max);
  std::string bytes(length, '\0');
  ROPETEAM_RETURN_IF_ERROR(ReadObject(*object, reinterpret_cast<std::byte*>(bytes.data())));
  return bytes;
}

Result<std::unique_ptr<StepSource>> OpenStepSource(const StorageOptions& options) {
  if (options.url.empty()) return OpenMemory(options);
  return OpenStored(options);
}

}  // namespace ropeteam::cli
