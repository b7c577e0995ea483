// SPDX-License-Identifier: Apache-2.0
#include "storage/format/layout.h"

#include <algorithm>
#include <cinttypes>
#include <unordered_set>

#include "storage/format/index.h"
#include "storage/format/json.h"
#include "storage/format/names.h"
#include "storage/format/rank_file.h"
#include "storage/format/safetensors.h"

namespace ropeteam::storage {
namespace {

// The objects must be packed as core/shard packs them, because a restore packs them again in this way.
Status CheckObjects(const std::vector<StreamObject>& objects, uint64_t stream_bytes) {
  if (objects.size() > kStreamObjectsMax) {
    return Error(Code::kInvalidArgument, "shard of %zu objects, limit %" PRIu64, objects.size(),
                 kStreamObjectsMax);
  }
  uint64_t end = 0;
  for (const StreamObject& object : objects) {
    if (object.name.empty() || object.name.size() > kStreamNameBytesMax ||
        object.name.find('\0') != std::string::npos) {
      return Error(Code::kInvalidArgument, "object name \"%s\" of %zu bytes, limit %zu, none of them 0",
                   Printable(object.name).c_str(), object.name.size(), kStreamNameBytesMax);
    }
    if (object.offset != AlignInStream(end) || object.length > stream_bytes ||
        object.offset > stream_bytes - object.length) {
      return Error(
          Code::kInvalidArgument,
          "object %s is at %" PRIu64 "+%" PRIu64 ", expected at %" PRIu64 " of a stream of %" PRIu64 " bytes",
          Printable(object.name).c_str(), object.offset, object.length, AlignInStream(end), stream_bytes);
    }
    end = object.offset + object.length;
  }
  return OkStatus();
}

// Appends a range, or makes the last one longer.
void AddRange(const StreamObject& object, FilePlan* file) {
  if (object.length == 0) return;
  const uint64_t at = file->bytes;
  file->bytes += object.length;
  if (!file->ranges.empty()) {
    FileRange& last = file->ranges.back();
    if (last.stream_offset + last.length == object.offset) {
      last.length += object.length;
      return;
    }
  }
  file->ranges.push_back({at, object.offset, object.length});
}

// The paths of a rank's files so far, and their folders: a directory cannot hold a file and a folder of one
// name.
class Paths {
 public:
  bool Add(const std::string& path) {
    if (folders_.count(path) != 0) return false;
    for (size_t slash = path.find('/'); slash != std::string::npos; slash = path.find('/', slash + 1))
      if (paths_.count(path.substr(0, slash)) != 0) return false;
    for (size_t slash = path.find('/'); slash != std::string::npos; slash = path.find('/', slash + 1))
      folders_.insert(path.substr(0, slash));
    return paths_.insert(path).second;
  }

 private:
  std::unordered_set<std::string> paths_;
  std::unordered_set<std::string> folders_;
};

class Planner {
 public:
  Planner(uint32_t rank, const std::vector<StreamObject>& objects, const ShardStream& stream,
          const std::set<std::string>& taken, std::optional<uint64_t>* bad_chunk)
      : rank_(rank), objects_(objects), stream_(stream), taken_(taken), bad_chunk_(bad_chunk) {}

  Result<std::vector<FilePlan>> Run() {
    ROPETEAM_RETURN_IF_ERROR(ReadIndex());
    PlanFiles();
    ROPETEAM_RETURN_IF_ERROR(ReadTexts());
    if (files_.size() < objects_.size()) {
      FilePlan rank_file;
      ROPETEAM_RETURN_IF_ERROR(PlanRankFile(&rank_file));
      files_.insert(files_.begin(), std::move(rank_file));
    }
    return std::move(files_);
  }

 private:
  const IndexEntry* Entry(const std::string& name) const {
    const auto found = index_.find(name);
    return found == index_.end() ? nullptr : &found->second;
  }

  Status ReadIndex() {
    for (size_t i = 0; i < objects_.size(); ++i) {
      if (objects_[i].name != kIndexObjectName || objects_[i].length > kIndexBytesMax) continue;
      const StreamRange range{objects_[i].offset, objects_[i].length};
      Result<std::vector<std::string>> copies = CopyChecked(stream_, {&range, 1}, bad_chunk_);
      if (!copies.ok()) return copies.status();
      index_ = ParseIndex(copies->front());
    }
    return OkStatus();
  }

  // A tensor is never a file: its bytes do not have the format of the name's ending. A JSON value is a file
  // only if its name ends in .json.
  bool IsFile(const StreamObject& object) const {
    if (!IsFileName(object.name)) return false;
    const IndexEntry* entry = Entry(object.name);
    return entry == nullptr || (entry->json && object.name.ends_with(".json"));
  }

  void PlanFiles() {
    kinds_.assign(objects_.size(), kTensorKind);
    Paths paths;
    for (size_t i = 0; i < objects_.size(); ++i) {
      const StreamObject& object = objects_[i];
      if (!IsFile(object)) continue;
      FilePlan file;
      file.path = taken_.count(object.name) != 0 ? RankFolderPath(rank_, object.name) : object.name;
      if (!paths.Add(file.path)) continue;
      AddRange(object, &file);
      files_.push_back(std::move(file));
      kinds_[i] = kFileKind;
    }
  }

  Status ReadTexts() {
    std::vector<size_t> numbers;
    std::vector<StreamRange> ranges;
    uint64_t total = 0;
    for (size_t i = 0; i < objects_.size(); ++i) {
      const StreamObject& object = objects_[i];
      const IndexEntry* entry = Entry(object.name);
      const bool json = object.name == kIndexObjectName || object.name == kMetadataObjectName ||
                        (entry != nullptr && entry->json);
      if (kinds_[i] == kFileKind || !json || object.length > kTextBytesMax ||
          total + object.length > kTextsBytesMax)
        continue;
      total += object.length;
      numbers.push_back(i);
      ranges.push_back({object.offset, object.length});
    }
    Result<std::vector<std::string>> copies = CopyChecked(stream_, ranges, bad_chunk_);
    if (!copies.ok()) return copies.status();
    for (size_t k = 0; k < numbers.size(); ++k) {
      if (!IsUtf8((*copies)[k])) continue;
      kinds_[numbers[k]] = kTextKind;
      texts_.push_back(std::move((*copies)[k]));
    }
    return OkStatus();
  }

  std::string NameInHeader(size_t object) const {
    const std::string& name = objects_[object].name;
    return NeedsMapping(name) ? MappedName(object) : name;
  }
  // Null: in the index it is not a tensor. `dtype` is null if the tensor is to be written as bytes.
  const IndexEntry* Tensor(size_t object, const char** dtype) const {
    const IndexEntry* entry = Entry(objects_[object].name);
    if (entry == nullptr || entry->json) return nullptr;
    *dtype = SafetensorsDtype(entry->dtype);
    if (*dtype != nullptr && !FitsShape(*dtype, entry->shape, objects_[object].length)) *dtype = nullptr;
    return entry;
  }

  Status AddOurMetadata(SafetensorsWriter* writer) const {
    OrderWriter order;
    std::string names;
    std::string dtypes;
    for (size_t i = 0; i < objects_.size(); ++i) {
      order.Add(kinds_[i]);
      if (kinds_[i] == kFileKind) continue;
      if (NeedsMapping(objects_[i].name)) {
        names += names.empty() ? "{\"" : ",\"";
        names += MappedName(i) + "\":\"" + EscapeName(objects_[i].name) + "\"";
      }
      const char* dtype = nullptr;
      const IndexEntry* entry = kinds_[i] == kTensorKind ? Tensor(i, &dtype) : nullptr;
      if (entry != nullptr && dtype == nullptr) AppendDtype(NameInHeader(i), *entry, &dtypes);
    }
    ROPETEAM_RETURN_IF_ERROR(writer->AddMetadata(kVersionKey, kRankFileVersion));
    ROPETEAM_RETURN_IF_ERROR(writer->AddMetadata(kOrderKey, order.Take()));
    if (!names.empty()) ROPETEAM_RETURN_IF_ERROR(writer->AddMetadata(kNamesKey, names + "}"));
    if (!dtypes.empty()) ROPETEAM_RETURN_IF_ERROR(writer->AddMetadata(kDtypesKey, dtypes + "}"));
    return OkStatus();
  }

  static void AppendDtype(const std::string& name, const IndexEntry& entry, std::string* dtypes) {
    *dtypes += dtypes->empty() ? "{" : ",";
    AppendJsonString(dtypes, name);
    *dtypes += ":{\"dtype\":";
    AppendJsonString(dtypes, entry.dtype);
    *dtypes += ",\"shape\":[";
    for (size_t i = 0; i < entry.shape.size(); ++i)
      *dtypes += (i == 0 ? "" : ",") + std::to_string(entry.shape[i]);
    *dtypes += "]}";
  }

  Status PlanRankFile(FilePlan* file) const {
    file->path = RankFileName(rank_);
    SafetensorsWriter writer;
    const auto named = [&](Status status) {
      if (status.ok()) return status;
      return Error(status.code(), "rank %" PRIu32 " of %zu objects: %s", rank_, objects_.size(),
                   status.message().c_str());
    };
    ROPETEAM_RETURN_IF_ERROR(named(AddOurMetadata(&writer)));
    size_t text = 0;
    for (size_t i = 0; i < objects_.size(); ++i)
      if (kinds_[i] == kTextKind)
        ROPETEAM_RETURN_IF_ERROR(named(writer.AddMetadata(NameInHeader(i), texts_[text++])));
    for (size_t i = 0; i < objects_.size(); ++i) {
      if (kinds_[i] != kTensorKind) continue;
      const StreamObject& object = objects_[i];
      const char* dtype = nullptr;
      const IndexEntry* entry = Tensor(i, &dtype);
      const bool typed = entry != nullptr && dtype != nullptr;
      ROPETEAM_RETURN_IF_ERROR(named(
          writer.AddTensor(NameInHeader(i), typed ? dtype : "U8",
                           typed ? entry->shape : std::vector<uint64_t>{object.length}, object.length)));
      AddRange(object, file);
    }
    Result<std::string> head = writer.Finish();
    if (!head.ok()) return named(head.status());
    file->head = std::move(head).value();
    for (FileRange& range : file->ranges) range.file_offset += file->head.size();
    file->bytes += file->head.size();
    return OkStatus();
  }

  const uint32_t rank_;
  const std::vector<StreamObject>& objects_;
  const ShardStream& stream_;
  const std::set<std::string>& taken_;
  std::optional<uint64_t>* const bad_chunk_;
  Index index_;
  std::string kinds_;               // one per object, as in ropeteam.order
  std::vector<std::string> texts_;  // of the objects of kTextKind
  std::vector<FilePlan> files_;
};

}  // namespace

Result<std::vector<FilePlan>> LayOut(uint32_t rank, const std::vector<StreamObject>& objects,
                                     const ShardStream& stream, const std::set<std::string>& taken,
                                     std::optional<uint64_t>* bad_chunk) {
  ROPETEAM_RETURN_IF_ERROR(CheckStream(stream));
  ROPETEAM_RETURN_IF_ERROR(CheckObjects(objects, stream.stream_bytes));
  return Planner(rank, objects, stream, taken, bad_chunk).Run();
}

size_t FindRange(const std::vector<FileRange>& ranges, uint64_t file_offset) {
  const auto found = std::partition_point(ranges.begin(), ranges.end(), [&](const FileRange& range) {
    return range.file_offset + range.length <= file_offset;
  });
  return static_cast<size_t>(found - ranges.begin());
}

std::vector<Piece> FilePieces(const FilePlan& file, uint64_t begin, uint64_t end, const ShardStream& stream) {
  ROPETEAM_CHECK(begin <= end && end <= file.bytes);
  std::vector<Piece> pieces;
  if (begin < file.head.size()) {
    const uint64_t length = std::min<uint64_t>(end, file.head.size()) - begin;
    if (length != 0) pieces.push_back({reinterpret_cast<const std::byte*>(file.head.data()) + begin, length});
    begin += length;
  }
  for (size_t i = FindRange(file.ranges, begin); begin < end; ++i) {
    const FileRange& range = file.ranges[i];
    const uint64_t range_end = std::min(end, range.file_offset + range.length);
    while (begin < range_end) {
      const uint64_t at = range.stream_offset + (begin - range.file_offset);
      const uint64_t index = at / stream.chunk_bytes;
      const uint64_t in_chunk = at % stream.chunk_bytes;
      const std::span<const std::byte> bytes = stream.chunk(index);
      ROPETEAM_CHECK(in_chunk < bytes.size());
      const uint64_t length = std::min<uint64_t>(range_end - begin, bytes.size() - in_chunk);
      pieces.push_back({bytes.data() + in_chunk, length});
      begin += length;
    }
  }
  return pieces;
}

}  // namespace ropeteam::storage
