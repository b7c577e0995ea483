// SPDX-License-Identifier: Apache-2.0
//
// From storage: what lies there, and a shard's chunks back into the arena.

#include <algorithm>
#include <cstring>
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

Result<storage::StepHead> StorageWorkers::CheckStep(const StepId& id, std::vector<StoredRank>* ranks) {
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
  return storage::ParseManifestOf(place->job, name, *text, [&](storage::RankEntry&& entry) {
    for (const storage::FileEntry& file : entry.files)
      ROPETEAM_RETURN_IF_ERROR(storage::CheckFileSize(storage::StepPath(place->job, name), *sizes, file));
    if (ranks != nullptr) ranks->push_back({entry.stream_bytes, entry.digest, {}, {}});
    return OkStatus();
  });
}

Result<StoredStep> StorageWorkers::ReadStep(const StepId& id) {
  {
    const std::lock_guard lock(manifest_mutex_);
    manifest_text_.clear();  // as it is now, not as it was
  }
  StoredStep step;
  step.id = id;
  const Result<storage::StepHead> head = CheckStep(id, &step.ranks);
  if (!head.ok()) return head.status();
  step.world_size = head->world_size;
  step.chunk_bytes = head->chunk_bytes;
  return step;
}

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
  // Of a whole shard, by file: checksums of its stretches, as they were read.
  struct Stretch {
    uint64_t begin = 0;
    uint64_t length = 0;
    uint32_t crc = 0;
  };
  std::vector<std::vector<Stretch>> stretches;
};

// Bytes of the plan's pieces that lie in wanted chunks, file by file in stretches of at most a part.
void StorageWorkers::ReadFiles(LoadRun* run, Group* group) {
  struct Task {
    uint32_t file = 0;
    LoadRun::Stretch stretch;
    std::vector<storage::Target> targets;
  };
  std::vector<Task> tasks;
  std::vector<size_t> open(run->entry.files.size(), SIZE_MAX);  // the file's last task
  for (const storage::RestorePiece& piece : run->plan.pieces) {
    for (uint64_t at = piece.stream_offset; at < piece.stream_offset + piece.length;) {
      const uint64_t chunk = at / config_.chunk_bytes;
      const uint64_t in_chunk = at % config_.chunk_bytes;
      uint64_t length = std::min(config_.chunk_bytes - in_chunk, piece.stream_offset + piece.length - at);
      const uint64_t source = piece.source_offset + (at - piece.stream_offset);
      at += length;
      if (!run->wanted[chunk]) continue;
      std::byte* place = ChunkAtPlace(run->load.extents, run->load.stream_bytes, chunk).data() + in_chunk;
      if (piece.file == storage::RestorePiece::kTexts) {
        std::memcpy(place, run->plan.texts.data() + source, length);
        continue;
      }
      Task* task = open[piece.file] == SIZE_MAX ? nullptr : &tasks[open[piece.file]];
      if (task == nullptr || task->stretch.begin + task->stretch.length != source ||
          task->stretch.length >= kPartBytes) {
        open[piece.file] = tasks.size();
        tasks.push_back({piece.file, {source, 0, 0}, {}});
        task = &tasks.back();
      }
      task->targets.push_back({place, length});
      task->stretch.length += length;
    }
  }
  run->stretches.resize(run->entry.files.size());
  std::vector<size_t> count(run->entry.files.size(), 0);
  for (const Task& task : tasks) run->stretches[task.file].push_back(task.stretch);
  for (Task& task : tasks) {
    LoadRun::Stretch* stretch = &run->stretches[task.file][count[task.file]++];
    const std::string name = run->folder + "/" + run->entry.files[task.file].path;
    group->Add([sink = run->sink, name, stretch, targets = std::move(task.targets)] {
      ROPETEAM_RETURN_IF_ERROR(sink->Read(name, stretch->begin, targets, CallDeadline()));
      for (const storage::Target& target : targets)
        stretch->crc = Crc32c(target.data, target.bytes, stretch->crc);
      return OkStatus();
    });
  }
}

// Zeros between objects, and the shard's manifest at its end.
void StorageWorkers::FillBetween(const LoadRun& run) {
  const auto put = [&](uint64_t begin, uint64_t end, const char* bytes) {
    for (uint64_t at = begin; at < end;) {
      const uint64_t chunk = at / config_.chunk_bytes;
      const uint64_t length = std::min((chunk + 1) * config_.chunk_bytes, end) - at;
      if (run.wanted[chunk]) {
        std::byte* place =
            ChunkAtPlace(run.load.extents, run.load.stream_bytes, chunk).data() + at % config_.chunk_bytes;
        if (bytes == nullptr) {
          std::memset(place, 0, length);
        } else {
          std::memcpy(place, bytes + (at - begin), length);
        }
      }
      at += length;
    }
  };
  uint64_t end = 0;
  for (const storage::RestorePiece& piece : run.plan.pieces) {
    put(end, piece.stream_offset, nullptr);
    end = piece.stream_offset + piece.length;
  }
  put(end, run.plan.manifest_offset, nullptr);
  put(run.plan.manifest_offset, run.load.stream_bytes, run.tail.data());
}

// Reads what is wanted, and checks whole files against their checksums.
Status StorageWorkers::ReadPieces(LoadRun* loading) {
  const LoadRun& run = *loading;
  {
    Group group(&*parts_);
    ReadFiles(loading, &group);
    FillBetween(run);
    ROPETEAM_RETURN_IF_ERROR(group.Wait());
  }
  for (size_t i = 0; run.whole && i < run.entry.files.size(); ++i) {
    const storage::FileEntry& file = run.entry.files[i];
    uint32_t crc = file.header_crc32c;
    uint64_t at = file.header_bytes;
    for (const LoadRun::Stretch& stretch : run.stretches[i]) {
      if (stretch.begin != at) break;
      crc = Crc32cCombine(crc, stretch.crc, stretch.length);
      at += stretch.length;
    }
    if (at != file.bytes || crc != file.crc32c)
      return Error(Code::kCorrupt, "%s/%s has the checksum %08x, its manifest says %08x", run.folder.c_str(),
                   file.path.c_str(), crc, file.crc32c);
  }
  return OkStatus();
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
    return Error(Code::kCorrupt, "%s: rank %u of a world of %u has %llu bytes, %llu were expected",
                 run.folder.c_str(), load.shard.rank, head->world_size,
                 static_cast<unsigned long long>(run.entry.stream_bytes),
                 static_cast<unsigned long long>(load.stream_bytes));
  std::string first;
  if (run.entry.HasRankFile()) {
    first.resize(run.entry.files[0].header_bytes);
    const storage::Target target{reinterpret_cast<std::byte*>(first.data()), first.size()};
    ROPETEAM_RETURN_IF_ERROR(
        run.sink->Read(run.folder + "/" + run.entry.files[0].path, 0, {&target, 1}, CallDeadline()));
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
  ROPETEAM_RETURN_IF_ERROR(ReadPieces(&run));
  LoadedChunks loaded;
  loaded.meta.id = load.shard;
  loaded.meta.world_size = head->world_size;
  loaded.meta.chunk_bytes = config_.chunk_bytes;
  loaded.meta.stream_bytes = load.stream_bytes;
  loaded.meta.manifest_offset = run.plan.manifest_offset;
  loaded.meta.object_count = static_cast<uint32_t>(run.plan.objects.size());
  loaded.crcs.resize(load.chunks.size());
  Group group(&*parts_);
  for (size_t i = 0; i < load.chunks.size(); ++i)
    group.Add([this, &load, &loaded, i] {
      const std::span<std::byte> bytes = ChunkAtPlace(load.extents, load.stream_bytes, load.chunks[i]);
      loaded.crcs[i] = Crc32c(bytes.data(), bytes.size());
      return OkStatus();
    });
  ROPETEAM_RETURN_IF_ERROR(group.Wait());
  return loaded;
}

}  // namespace ropeteam
