// SPDX-License-Identifier: Apache-2.0
//
// Writes shards from the arena to storage, and the manifests of steps.

#include <algorithm>
#include <ctime>
#include <set>
#include <utility>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "core/shard/manifest.h"
#include "node/storage_group.h"
#include "node/storage_workers.h"
#include "storage/format/checksums.h"
#include "storage/format/names.h"
#include "storage/steps/steps.h"

namespace ropeteam {
namespace {

// storage/ depends only on core/base, so both define these.
static_assert(storage::kMetadataObjectName == kMetadataObjectName);
static_assert(kStepMetadataBytesMax <= storage::kUserMetadataBytesMax);

void NoteBad(const std::optional<uint64_t>& chunk, std::vector<uint32_t>* bad) {
  if (chunk) bad->push_back(static_cast<uint32_t>(*chunk));
}

}  // namespace

Result<std::vector<storage::StreamObject>> StorageWorkers::ObjectsOf(const NameFiles& shard,
                                                                     std::vector<uint32_t>* bad) const {
  const ShardMeta& meta = shard.meta;
  const storage::StreamRange range{meta.manifest_offset, meta.stream_bytes - meta.manifest_offset};
  std::optional<uint64_t> bad_chunk;
  Result<std::vector<std::string>> encoded = storage::CopyChecked(StreamOf(shard), {&range, 1}, &bad_chunk);
  NoteBad(bad_chunk, bad);
  if (!encoded.ok()) return encoded.status();
  Result<Manifest> manifest = Manifest::Parse(encoded->front(), meta.manifest_offset);
  if (!manifest.ok()) return manifest.status();
  std::vector<storage::StreamObject> objects;
  objects.reserve(manifest->objects().size());
  for (const Object& object : manifest->objects())
    objects.push_back({object.name, object.offset, object.length});
  return objects;
}

Result<FileNames> StorageWorkers::Names(const NameFiles& shard, std::vector<uint32_t>* bad) const {
  Result<std::vector<storage::StreamObject>> objects = ObjectsOf(shard, bad);
  if (!objects.ok()) return objects.status();
  FileNames names;
  for (const storage::StreamObject& object : *objects)
    if (storage::IsFileName(object.name)) names.names.push_back(object.name);
  return names;
}

// Returns the step's metadata from the rank, or "". Metadata that are not a JSON object never stop a step.
Result<std::string> StorageWorkers::MetadataOf(const NameFiles& shard,
                                               const std::vector<storage::StreamObject>& objects,
                                               std::vector<uint32_t>* bad) const {
  const auto object = std::find_if(objects.begin(), objects.end(),
                                   [](const auto& each) { return each.name == kMetadataObjectName; });
  if (object == objects.end()) return std::string();
  Status status = Error(Code::kInvalidArgument, "metadata of %llu bytes, limit %zu",
                        static_cast<unsigned long long>(object->length), kStepMetadataBytesMax);
  if (object->length <= kStepMetadataBytesMax) {
    const storage::StreamRange range{object->offset, object->length};
    std::optional<uint64_t> bad_chunk;
    Result<std::vector<std::string>> copy = storage::CopyChecked(StreamOf(shard), {&range, 1}, &bad_chunk);
    NoteBad(bad_chunk, bad);
    if (!copy.ok()) return copy.status();
    status = storage::CompactMetadata(copy->front()).status();
    if (status.ok()) return std::move(copy->front());
  }
  LOG_WARNING("the metadata of shard %s is left out on storage: %s", shard.meta.id.ToString().c_str(),
              status.message().c_str());
  return std::string();
}

struct StorageWorkers::WriteRun {
  const WriteShard& write;
  storage::ShardStream stream;
  std::vector<storage::FilePlan> files;
  std::vector<std::unique_ptr<storage::Upload>>
      uploads;  // of large files; null for the others until they are written
  std::optional<storage::PartChecksums> checksums;
  std::optional<uint64_t> bad_chunk;
  std::string folder;
  StoredRank stored;
};

// Puts the file's parts in parallel, straight from the arena. Skips a file that is already complete there, if
// the store reports its checksum.
Status StorageWorkers::WriteFile(WriteRun* run, size_t index) {
  const storage::FilePlan& file = run->files[index];
  const std::string name = run->folder + "/" + file.path;
  const Result<uint32_t> whole = run->checksums->File(index, &run->bad_chunk);
  if (!whole.ok()) return whole.status();
  run->stored.files.push_back({file.path, file.bytes, *whole, 0, 0});
  if (!file.head.empty()) {
    run->stored.files.back().header_bytes = file.head.size();
    run->stored.files.back().header_crc32c = Crc32c(file.head.data(), file.head.size());
  }
  const Result<storage::FileInfo> there = config_.sink->Stat(name, CallDeadline());
  if (there.ok() && there->bytes == file.bytes && there->crc32c == *whole) {
    if (run->uploads[index] != nullptr) return run->uploads[index]->Abort(CallDeadline());
    return OkStatus();
  }
  if (!there.ok() && there.status().code() != Code::kNotFound) return there.status();
  if (run->uploads[index] == nullptr) {
    Result<std::unique_ptr<storage::Upload>> upload =
        config_.sink->Begin(name, file.bytes, std::max<uint64_t>(file.bytes, 1), CallDeadline());
    if (!upload.ok()) return upload.status();
    run->uploads[index] = std::move(*upload);
    ROPETEAM_CHECK(run->uploads[index]->part_count() == 1);
  }
  storage::Upload* upload = run->uploads[index].get();
  Group group(this, StorageWatch::Parts::kWritten);
  for (uint32_t part = 0; part < upload->part_count(); ++part) {
    const Result<uint32_t> crc = run->checksums->Part(index, part, &run->bad_chunk);
    if (!crc.ok()) return crc.status();
    if (upload->Has(part, *crc)) continue;
    group.Add([this, run, upload, &file, part, crc = *crc] {
      const uint64_t begin = part * upload->part_bytes();
      const uint64_t length = upload->PartLength(part);
      Pace(length);
      const std::vector<storage::Piece> pieces =
          storage::FilePieces(file, begin, begin + length, run->stream);
      return upload->PutPart(part, pieces, crc, CallDeadline());
    });
  }
  ROPETEAM_RETURN_IF_ERROR(group.Wait());
  ROPETEAM_RETURN_IF_ERROR(upload->Finish(*whole, CallDeadline()));
  run->uploads[index] = nullptr;
  return OkStatus();
}

Result<StoredRank> StorageWorkers::Write(const WriteShard& write, std::vector<uint32_t>* bad) {
  // A directory that is not mounted here would take the files, too. A leader of an older version gives no proof.
  if (!write.proof.empty()) ROPETEAM_RETURN_IF_ERROR(lock_->Prove(write.proof));
  const ShardMeta& meta = write.shard.meta;
  Result<std::vector<storage::StreamObject>> objects = ObjectsOf(write.shard, bad);
  if (!objects.ok()) return objects.status();
  WriteRun run{write, StreamOf(write.shard), {}, {}, {}, {}, FolderOf(StepOf(meta.id)), {}};
  Result<std::vector<storage::FilePlan>> files = storage::LayOut(
      meta.id.rank, *objects, run.stream, {write.taken.begin(), write.taken.end()}, &run.bad_chunk);
  NoteBad(run.bad_chunk, bad);
  if (!files.ok()) return files.status();
  Result<std::string> metadata = MetadataOf(write.shard, *objects, bad);
  if (!metadata.ok()) return metadata.status();
  run.stored.metadata = std::move(*metadata);
  objects->clear();
  objects->shrink_to_fit();
  run.files = std::move(*files);
  run.uploads.resize(run.files.size());
  std::vector<uint64_t> part_bytes;
  for (size_t i = 0; i < run.files.size(); ++i) {
    part_bytes.push_back(std::max<uint64_t>(run.files[i].bytes, 1));
    if (run.files[i].bytes <= kPartBytes) continue;
    Result<std::unique_ptr<storage::Upload>> upload = config_.sink->Begin(
        run.folder + "/" + run.files[i].path, run.files[i].bytes, kPartBytes, CallDeadline());
    if (!upload.ok()) return upload.status();
    part_bytes.back() = (*upload)->part_bytes();
    run.uploads[i] = std::move(*upload);
  }
  run.checksums.emplace(run.files, run.stream, std::move(part_bytes));
  for (size_t i = 0; i < run.files.size(); ++i) {
    const Status status = WriteFile(&run, i);
    if (status.ok()) continue;
    NoteBad(run.bad_chunk, bad);
    // The sink found bytes that do not match the checksum. The loop finds the chunks that contain them.
    for (uint32_t chunk = 0;
         status.code() == Code::kCorrupt && bad->empty() && chunk < write.shard.crcs.size(); ++chunk) {
      const std::span<const std::byte> bytes = run.stream.chunk(chunk);
      if (Crc32c(bytes.data(), bytes.size()) != write.shard.crcs[chunk]) bad->push_back(chunk);
    }
    return status;
  }
  run.stored.stream_bytes = meta.stream_bytes;
  run.stored.content = ContentDigest(meta, write.shard.crcs);
  return std::move(run.stored);
}

// One listing gives all sizes. A store that keeps checksums tells them for one file at a time, so a very large step is
// sampled. The store has compared each of them with the bytes when it took the file.
Status StorageWorkers::LookAtFiles(const StoredStep& step) {
  const std::string folder = FolderOf(step.id);
  const Result<storage::FileSizes> sizes = storage::ListFileSizes(
      config_.sink.get(), config_.job, {step.id.step, step.id.incarnation}, kCallTimeout);
  if (!sizes.ok()) return sizes.status();
  std::vector<const StoredFile*> files;
  for (const StoredRank& rank : step.ranks)
    for (const StoredFile& file : rank.files) {
      const Status there = storage::CheckFileSize(folder, *sizes, {file.path, file.bytes, 0, 0, 0});
      if (there.code() == Code::kCorrupt)
        return Error(Code::kNotFound, "%s; the step does not count yet", there.message().c_str());
      ROPETEAM_RETURN_IF_ERROR(there);
      files.push_back(&file);
    }
  const auto check = [&](const StoredFile& file, bool* has_checksum) {
    const std::string name = folder + "/" + file.path;
    const Result<storage::FileInfo> info = config_.sink->Stat(name, CallDeadline());
    if (!info.ok()) return info.status();
    *has_checksum = info->crc32c.has_value();
    if (info->crc32c.value_or(file.crc32c) == file.crc32c) return OkStatus();
    return Error(Code::kNotFound, "%s has the checksum %08x on storage, a node has written it with %08x",
                 name.c_str(), *info->crc32c, file.crc32c);
  };
  if (files.empty()) return OkStatus();
  // Some stores keep none of files in parts. So the smallest file tells whether this store keeps any.
  const auto smallest = std::min_element(files.begin(), files.end(),
                                         [](const auto* a, const auto* b) { return a->bytes < b->bytes; });
  bool keeps_checksums = false;
  ROPETEAM_RETURN_IF_ERROR(check(**smallest, &keeps_checksums));
  if (!keeps_checksums) return OkStatus();
  const size_t every = (files.size() + kChecksumLooksMax - 1) / kChecksumLooksMax;
  Group group(this, StorageWatch::Parts::kWritten);
  for (size_t thread = 0; thread < kPartThreads; ++thread)
    group.Add([&files, &check, every, thread] {
      bool ignored = false;
      for (size_t i = thread * every; i < files.size(); i += kPartThreads * every)
        ROPETEAM_RETURN_IF_ERROR(check(*files[i], &ignored));
      return OkStatus();
    });
  return group.Wait();
}

Status StorageWorkers::PutManifest(const StoredStep& step) {
  storage::StepHead head;
  head.job = config_.job;
  head.step = step.id.step;
  head.incarnation = step.id.incarnation;
  head.world_size = step.world_size;
  head.chunk_bytes = step.chunk_bytes;
  head.time_s = static_cast<uint64_t>(std::time(nullptr));
  if (!step.metadata.empty()) {
    Result<std::string> user = storage::CompactMetadata(step.metadata);
    if (!user.ok()) return user.status();  // the node that wrote the shard has checked it
    head.user = std::move(*user);
  }
  const auto entry_of = [&step](uint32_t rank) {
    const StoredRank& stored = step.ranks[rank];
    storage::RankEntry entry{rank, stored.stream_bytes, stored.content, {}};
    for (const StoredFile& file : stored.files)
      entry.files.push_back({file.path, file.bytes, file.crc32c, file.header_bytes, file.header_crc32c});
    return entry;
  };
  storage::StepManifestWriter writer(head);
  for (uint32_t rank = 0; rank < step.world_size; ++rank)
    ROPETEAM_RETURN_IF_ERROR(writer.Add(entry_of(rank)));
  const Result<std::string> text = writer.Finish();
  if (!text.ok()) return text.status();
  ROPETEAM_RETURN_IF_ERROR(LookAtFiles(step));
  // Again: looking at the files may have taken minutes.
  ROPETEAM_RETURN_IF_ERROR(lock_->Check());
  const std::string name = storage::ManifestPath(config_.job, {step.id.step, step.id.incarnation});
  Status status = config_.sink->Put(name, *text, storage::PutMode::kIfAbsent, CallDeadline());
  if (status.code() == Code::kUnsupported) {
    // This store cannot tell which writer was first. That is safe: only the job's leaders write here, one at
    // a time.
    const Result<storage::FileInfo> found = config_.sink->Stat(name, CallDeadline());
    if (!found.ok() && found.status().code() != Code::kNotFound) return found.status();
    status = found.ok() ? Error(Code::kAlreadyExists, "%s is there", name.c_str())
                        : config_.sink->Put(name, *text, storage::PutMode::kReplace, CallDeadline());
  }
  if (status.code() != Code::kAlreadyExists) return status;
  // Either this leader or an earlier one wrote it and the answer was lost, or another cluster uses this job's
  // name.
  const Place* place = nullptr;
  const Result<std::string> there = ReadManifest(step.id, &place);
  if (!there.ok()) return there.status();
  const Result<storage::StepHead> other = storage::ParseStepManifest(*there, [&](storage::RankEntry&& entry) {
    return entry.rank < step.world_size && entry == entry_of(entry.rank) ? OkStatus() : status;
  });
  if (!other.ok()) return other.status();
  head.time_s = other->time_s;
  return *other == head ? OkStatus() : status;
}

}  // namespace ropeteam
