// SPDX-License-Identifier: Apache-2.0
//
// Reads from storage: the list of steps, their manifests, and a shard's chunks into the arena.

#include <algorithm>
#include <cstring>
#include <deque>
#include <utility>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "core/shard/manifest.h"
#include "node/storage_group.h"
#include "node/storage_workers.h"
#include "storage/format/names.h"
#include "storage/steps/damaged.h"
#include "storage/steps/steps.h"

namespace ropeteam {

Result<StoredList> StorageWorkers::List() {
  StoredList list;
  if (own_.sink != nullptr) {
    const Result<std::vector<storage::StepPlace>> places =
        storage::ListSteps(own_.sink.get(), own_.job, kCallTimeout);
    if (!places.ok()) return places.status();
    for (const storage::StepPlace& place : *places) {
      list.incarnation_max = std::max(list.incarnation_max, place.name.incarnation);
      if (place.has_manifest) list.steps.push_back({place.name.incarnation, place.name.step});
    }
  }
  if (!list.steps.empty() || config_.restore_from.empty()) return list;
  Result<std::vector<StepId>> source = ListSource();
  if (!source.ok()) return source.status();
  list.source_steps = std::move(*source);
  return list;
}

Result<std::string> StorageWorkers::ReadManifest(const StepId& step, const Place** place) {
  {
    const std::lock_guard lock(manifest_mutex_);
    *place = manifest_place_;
    if (manifest_step_ == step && !manifest_text_.empty()) return manifest_text_;
  }
  Result<std::string> text = ReadManifestText(step, place);
  if (text.ok() && text->size() <= kManifestKeptBytesMax) {
    const std::lock_guard lock(manifest_mutex_);
    manifest_step_ = step;
    manifest_place_ = *place;
    manifest_text_ = *text;
  }
  return text;
}

Result<storage::StepHead> StorageWorkers::CheckStep(const StepId& id, std::vector<StoredRank>* ranks,
                                                    storage::StepRestores* restores) {
  const storage::StepName name{id.step, id.incarnation};
  const Place* place = nullptr;
  const Result<std::string> text = ReadManifestText(id, &place);
  if (!text.ok()) return text.status();
  const Result<storage::FileSizes> sizes =
      storage::ListFileSizes(place->sink.get(), place->job, name, kCallTimeout);
  if (!sizes.ok()) return sizes.status();
  const Result<std::string> damage =
      storage::DamageOf(place->sink.get(), place->job, name, *sizes, kCallTimeout);
  if (!damage.ok()) return damage.status();
  if (!damage->empty())
    return Error(Code::kCorrupt, "%s is marked as damaged: %s", storage::StepPath(place->job, name).c_str(),
                 damage->c_str());
  if (restores != nullptr) {
    const Result<storage::StepRestores> noted =
        storage::RestoresOf(place->sink.get(), place->job, name, *sizes, kCallTimeout);
    if (!noted.ok()) return noted.status();
    *restores = *noted;
  }
  Status files;
  Result<storage::StepHead> head =
      storage::ParseManifestOf(place->job, name, *text, [&](storage::RankEntry&& entry) {
        for (const storage::FileEntry& file : entry.files) {
          files = storage::CheckFileSize(storage::StepPath(place->job, name), *sizes, file);
          if (!files.ok()) return files;
        }
        if (ranks != nullptr) ranks->push_back({entry.stream_bytes, entry.digest, {}, {}});
        return OkStatus();
      });
  return files.ok() ? head : Judged(files, *place, id);
}

Status StorageWorkers::Judged(const Status& status, const Place& place, const StepId& id) {
  if (status.code() != Code::kNotFound && status.code() != Code::kCorrupt) return status;
  const std::string manifest = storage::ManifestPath(place.job, {id.step, id.incarnation});
  const Status there = place.sink->Stat(manifest, CallDeadline()).status();
  if (there.code() == Code::kNotFound)
    return Error(Code::kNotFound, "%s, and its manifest is gone", status.message().c_str());
  if (!there.ok()) return there;
  return Status(Code::kCorrupt, status.message());
}

Result<StoredStep> StorageWorkers::ReadStep(const StepId& id) {
  {
    const std::lock_guard lock(manifest_mutex_);
    manifest_text_.clear();  // it may have changed, so it is read again
  }
  StoredStep step;
  step.id = id;
  storage::StepRestores noted;
  const Result<storage::StepHead> head = CheckStep(id, &step.ranks, &noted);
  if (!head.ok()) return head.status();
  step.restored = {id, noted.revision, noted.restores, noted.counted, noted.quarantined, noted.by_hand};
  step.world_size = head->world_size;
  step.chunk_bytes = head->chunk_bytes;
  return step;
}

namespace {

// Below this size, reading the bytes again is cheaper than combining checksums.
constexpr size_t kCombineBytesMin = 16 << 10;

}  // namespace

// A shard that is being read.
struct StorageWorkers::LoadRun {
  const LoadChunks& load;
  storage::Sink* sink = nullptr;
  std::string folder;
  storage::StepHead head;
  storage::RankEntry entry;
  storage::RestorePlan plan;
  std::string tail;          // the shard's manifest
  std::vector<bool> wanted;  // by chunk
  bool whole = false;        // every chunk is wanted
  // Of the cuts that come from files, in the stream's order. Computed while the bytes were read.
  std::deque<uint32_t> checksums;
};

// Bytes of a wanted chunk that come from one source.
struct StorageWorkers::Cut {
  // Used instead of a file's index. The gaps between objects are zeros.
  static constexpr uint32_t kTexts = storage::RestorePiece::kTexts, kTail = kTexts - 1, kZeros = kTexts - 2;
  bool InFile() const { return file < kZeros; }
  uint32_t file = 0;
  uint64_t source = 0;  // the offset in it
  uint64_t chunk = 0;
  std::byte* place = nullptr;
  uint64_t length = 0;
};

// Visits the cuts in the stream's order.
template <typename Visit>
void StorageWorkers::ForEachCut(const LoadRun& run, const Visit& visit) const {
  const auto cut = [&](uint64_t begin, uint64_t end, uint32_t file, uint64_t source) {
    for (uint64_t at = begin; at < end;) {
      const uint64_t chunk = at / config_.chunk_bytes;
      const uint64_t length = std::min((chunk + 1) * config_.chunk_bytes, end) - at;
      if (run.wanted[chunk]) {
        std::byte* place = ChunkAtPlace(run.load.extents, run.load.stream_bytes, chunk).data();
        visit(Cut{file, source + (at - begin), chunk, place + at % config_.chunk_bytes, length});
      }
      at += length;
    }
  };
  uint64_t end = 0;
  for (const storage::RestorePiece& piece : run.plan.pieces) {
    cut(end, piece.stream_offset, Cut::kZeros, 0);
    end = piece.stream_offset + piece.length;
    cut(piece.stream_offset, end, piece.file, piece.source_offset);
  }
  cut(end, run.plan.manifest_offset, Cut::kZeros, 0);
  cut(run.plan.manifest_offset, run.load.stream_bytes, Cut::kTail, 0);
}

// Fills every cut with its bytes. Files are read in parallel, in stretches of about one part.
Status StorageWorkers::ReadCuts(LoadRun* run) {
  struct Task {
    uint32_t file = 0;
    uint64_t begin = 0, length = 0;
    std::vector<storage::Target> targets;
  };
  std::vector<Task> tasks;
  std::vector<size_t> open(run->entry.files.size(), SIZE_MAX);  // the file's last task
  ForEachCut(*run, [&](const Cut& cut) {
    if (cut.file == Cut::kZeros) std::memset(cut.place, 0, cut.length);
    if (cut.file == Cut::kTexts) std::memcpy(cut.place, run->plan.texts.data() + cut.source, cut.length);
    if (cut.file == Cut::kTail) std::memcpy(cut.place, run->tail.data() + cut.source, cut.length);
    if (!cut.InFile()) return;
    Task* task = open[cut.file] == SIZE_MAX ? nullptr : &tasks[open[cut.file]];
    if (task == nullptr || task->begin + task->length != cut.source || task->length >= kPartBytes) {
      open[cut.file] = tasks.size();
      task = &tasks.emplace_back(Task{cut.file, cut.source, 0, {}});
    }
    task->targets.push_back({cut.place, cut.length, &run->checksums.emplace_back()});
    task->length += cut.length;
  });
  Group group(this, StorageWatch::Parts::kRead);
  for (Task& task : tasks) {
    const std::string name = run->folder + "/" + run->entry.files[task.file].path;
    group.Add([this, run, name, begin = task.begin, length = task.length, targets = std::move(task.targets)] {
      ROPETEAM_RETURN_IF_ERROR(run->sink->Read(name, begin, targets, CallDeadline()));
      if (config_.moved) config_.moved(length);
      return OkStatus();
    });
  }
  return group.Wait();
}

// Returns the checksums of the chunks, combined from those of their cuts. If the whole shard was read,
// compares each file's checksum with the manifest.
Result<std::vector<uint32_t>> StorageWorkers::CheckCuts(const LoadRun& run) const {
  struct Seen {
    uint64_t bytes = 0;
    uint32_t crc = 0;
  };
  std::vector<Seen> files;
  for (const storage::FileEntry& file : run.entry.files)
    files.push_back({file.header_bytes, file.header_crc32c});
  std::vector<uint32_t> crcs;
  uint64_t chunk = UINT64_MAX;
  auto checksum = run.checksums.begin();
  ForEachCut(run, [&](const Cut& cut) {
    const bool combine = cut.InFile() && cut.length >= kCombineBytesMin;
    const auto append = [&](uint32_t crc) {
      return combine ? Crc32cCombine(crc, *checksum, cut.length) : Crc32c(cut.place, cut.length, crc);
    };
    if (cut.chunk != chunk) crcs.push_back(0);
    chunk = cut.chunk;
    crcs.back() = append(crcs.back());
    if (!cut.InFile()) return;
    Seen& file = files[cut.file];
    if (run.whole && cut.source == file.bytes) file = {file.bytes + cut.length, append(file.crc)};
    ++checksum;
  });
  for (size_t i = 0; run.whole && i < files.size(); ++i) {
    const storage::FileEntry& file = run.entry.files[i];
    if (files[i].bytes != file.bytes || files[i].crc != file.crc32c)
      return Error(Code::kCorrupt, "%s/%s has the checksum %08x, its manifest says %08x", run.folder.c_str(),
                   file.path.c_str(), files[i].crc, file.crc32c);
  }
  return crcs;
}

Result<LoadedChunks> StorageWorkers::Load(const LoadChunks& load) {
  const Place* place = nullptr;
  const Result<std::string> text = ReadManifest(StepOf(load.shard), &place);
  if (!text.ok()) return text.status();
  LoadRun run{load,
              place->sink.get(),
              storage::StepPath(place->job, {load.shard.step, load.shard.incarnation}),
              {},
              {},
              {},
              {},
              {},
              false,
              {}};
  Result<storage::StepHead> head = storage::ParseStepManifest(*text, [&](storage::RankEntry&& entry) {
    if (entry.rank == load.shard.rank) run.entry = std::move(entry);
    return OkStatus();
  });
  if (!head.ok()) return head.status();
  if (load.shard.rank >= head->world_size || run.entry.stream_bytes != load.stream_bytes)
    return Error(Code::kCorrupt, "%s: rank %u of %u ranks has %llu bytes, %llu were expected",
                 run.folder.c_str(), load.shard.rank, head->world_size,
                 static_cast<unsigned long long>(run.entry.stream_bytes),
                 static_cast<unsigned long long>(load.stream_bytes));
  std::string first;
  if (run.entry.HasRankFile()) {
    first.resize(run.entry.files[0].header_bytes);
    const storage::Target target{reinterpret_cast<std::byte*>(first.data()), first.size()};
    const Status read =
        run.sink->Read(run.folder + "/" + run.entry.files[0].path, 0, {&target, 1}, CallDeadline());
    if (!read.ok()) return Judged(read, *place, StepOf(load.shard));
  }
  Result<storage::RestorePlan> plan = storage::PlanRestore(run.entry, first);
  if (!plan.ok()) return plan.status();
  run.plan = std::move(*plan);
  Manifest manifest;
  for (const storage::StreamObject& object : run.plan.objects) {
    const Result<uint64_t> offset = manifest.Add(object.name, object.length);
    if (!offset.ok())
      return Error(Code::kCorrupt, "%s: %s", run.folder.c_str(), offset.status().message().c_str());
  }
  run.tail = manifest.Encode();
  if (manifest.manifest_offset() != run.plan.manifest_offset ||
      run.plan.manifest_offset + run.tail.size() != load.stream_bytes)
    return Error(Code::kCorrupt, "%s: rank %u does not add up to %llu bytes", run.folder.c_str(),
                 load.shard.rank, static_cast<unsigned long long>(load.stream_bytes));
  const uint64_t chunks = ChunksFor(load.stream_bytes, config_.chunk_bytes);
  run.wanted.resize(chunks);
  for (const uint32_t chunk : load.chunks) run.wanted[chunk] = true;
  run.whole = load.chunks.size() == chunks;
  if (const Status read = ReadCuts(&run); !read.ok()) return Judged(read, *place, StepOf(load.shard));
  Result<std::vector<uint32_t>> crcs = CheckCuts(run);
  if (!crcs.ok()) return crcs.status();
  LoadedChunks loaded;
  loaded.meta.id = load.shard;
  loaded.meta.world_size = head->world_size;
  loaded.meta.chunk_bytes = config_.chunk_bytes;
  loaded.meta.stream_bytes = load.stream_bytes;
  loaded.meta.manifest_offset = run.plan.manifest_offset;
  loaded.meta.object_count = static_cast<uint32_t>(run.plan.objects.size());
  loaded.crcs = std::move(*crcs);
  return loaded;
}

}  // namespace ropeteam
