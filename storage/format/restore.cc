// SPDX-License-Identifier: Apache-2.0
#include "storage/format/restore.h"

#include <algorithm>
#include <cinttypes>
#include <numeric>
#include <utility>

#include "core/base/checksum.h"
#include "storage/format/json.h"
#include "storage/format/manifest_check.h"
#include "storage/format/names.h"
#include "storage/format/rank_file.h"
#include "storage/format/safetensors.h"

namespace ropeteam::storage {
namespace {

// Reads the JSON object of texts in ropeteam.names, in its order.
class NamesReader : public JsonEvents {
 public:
  Status Begin(const JsonPath& path, bool array) override {
    return path.empty() && !array ? OkStatus() : Error(Code::kCorrupt, "not an object of texts");
  }
  Status End(const JsonPath&, bool) override { return OkStatus(); }
  Status Scalar(const JsonPath& path, const JsonScalar& value) override {
    if (path.empty() || value.kind != JsonKind::kString)
      return Error(Code::kCorrupt, "not an object of texts");
    names.emplace_back(path[0].key, value.text);
    return OkStatus();
  }
  std::vector<std::pair<std::string, std::string>> names;
};

class Restorer {
 public:
  explicit Restorer(const RankEntry& entry) : entry_(entry) {}

  Result<RestorePlan> Run(std::string_view head) {
    ROPETEAM_RETURN_IF_ERROR(CheckRank(entry_));
    if (entry_.HasRankFile()) {
      ROPETEAM_RETURN_IF_ERROR(ReadHead(head));
    } else {
      if (!head.empty())
        return Error(Code::kCorrupt, "a header, and no file %s", RankFileName(entry_.rank).c_str());
      for (size_t i = 0; i < entry_.files.size(); ++i) ROPETEAM_RETURN_IF_ERROR(AddFile());
    }
    return Finish();
  }

 private:
  Status ReadHead(std::string_view head) {
    const FileEntry& file = entry_.files[0];
    const uint32_t crc = Crc32c(head.data(), head.size());
    if (head.size() != file.header_bytes || crc != file.header_crc32c) {
      return Error(Code::kCorrupt,
                   "its header has %zu bytes with checksum 0x%08x, expected %" PRIu64 " with 0x%08x",
                   head.size(), crc, file.header_bytes, file.header_crc32c);
    }
    Result<SafetensorsHeader> header = ParseSafetensors(head);
    if (!header.ok()) return header.status();
    header_ = std::move(header).value();
    if (header_.data_bytes != file.bytes - file.header_bytes) {
      return Error(Code::kCorrupt, "its tensors have %" PRIu64 " bytes, the file has %" PRIu64,
                   header_.data_bytes, file.bytes - file.header_bytes);
    }
    next_file_ = 1;
    std::string order;
    ROPETEAM_RETURN_IF_ERROR(ReadMetadata(&order));
    OrderReader kinds(order);
    for (char kind = kinds.Next(); kind != 0; kind = kinds.Next()) {
      if (kind == kFileKind) ROPETEAM_RETURN_IF_ERROR(AddFile());
      if (kind == kTensorKind) ROPETEAM_RETURN_IF_ERROR(AddTensor());
      if (kind == kTextKind) ROPETEAM_RETURN_IF_ERROR(AddText());
    }
    if (!kinds.done()) {
      return Error(Code::kCorrupt, "%s is \"%s\", not a list of runs like t120 f2 j1",
                   std::string(kOrderKey).c_str(), Printable(order).c_str());
    }
    return OkStatus();
  }

  // Our entries come first, each once, in the order in which LayOut() writes them. The program's values
  // follow.
  Status ReadMetadata(std::string* order) {
    const auto& metadata = header_.metadata;
    const auto next_is = [&](std::string_view key) {
      return next_text_ < metadata.size() && metadata[next_text_].first == key;
    };
    if (!next_is(kVersionKey)) return Missing(kVersionKey);
    const std::string& version = metadata[next_text_++].second;
    if (version != kRankFileVersion) {
      return Error(Code::kUnsupported, "%s is \"%s\", this build reads \"%s\"",
                   std::string(kVersionKey).c_str(), Printable(version).c_str(),
                   std::string(kRankFileVersion).c_str());
    }
    if (!next_is(kOrderKey)) return Missing(kOrderKey);
    *order = metadata[next_text_++].second;
    if (next_is(kNamesKey)) {
      const Status status = WalkJson(metadata[next_text_++].second, 1, &names_);
      if (!status.ok())
        return Error(Code::kCorrupt, "%s: %s", std::string(kNamesKey).c_str(), status.message().c_str());
    }
    if (next_is(kDtypesKey)) ++next_text_;  // informational
    return OkStatus();
  }
  static Status Missing(std::string_view key) {
    return Error(Code::kCorrupt, "its metadata lacks %s", std::string(key).c_str());
  }

  // The object's original name: undoes the mapping of names that are not allowed in the header.
  Status NameOf(const std::string& shown, std::string* name) {
    *name = shown;
    if (!NeedsMapping(shown)) return OkStatus();
    if (next_name_ < names_.names.size()) {
      const auto& [mapped, escaped] = names_.names[next_name_];
      std::optional<std::string> original = UnescapeName(escaped);
      if (mapped == shown && mapped == MappedName(plan_.objects.size()) && original &&
          NeedsMapping(*original)) {
        ++next_name_;
        *name = *std::move(original);
        return OkStatus();
      }
    }
    return Error(Code::kCorrupt, "the name %s of object %zu is not in %s as it should be",
                 Printable(shown).c_str(), plan_.objects.size(), std::string(kNamesKey).c_str());
  }

  Status AddFile() {
    if (next_file_ >= entry_.files.size())
      return Error(Code::kCorrupt, "its order has more files than the manifest");
    const FileEntry& file = entry_.files[next_file_];
    const std::string name(ObjectNameOfPath(entry_.rank, file.path));
    return Add(name, file.bytes, static_cast<uint32_t>(next_file_++), 0);
  }
  Status AddTensor() {
    if (next_tensor_ >= header_.tensors.size())
      return Error(Code::kCorrupt, "its order has more tensors than the header");
    const SafetensorsEntry& tensor = header_.tensors[next_tensor_++];
    std::string name;
    ROPETEAM_RETURN_IF_ERROR(NameOf(tensor.name, &name));
    return Add(name, tensor.length, 0, entry_.files[0].header_bytes + tensor.begin);
  }
  Status AddText() {
    if (next_text_ >= header_.metadata.size())
      return Error(Code::kCorrupt, "its order has more JSON values than the metadata");
    const auto& [key, text] = header_.metadata[next_text_++];
    std::string name;
    ROPETEAM_RETURN_IF_ERROR(NameOf(key, &name));
    const uint64_t at = plan_.texts.size();
    plan_.texts += text;
    return Add(name, text.size(), RestorePiece::kTexts, at);
  }

  Status Add(const std::string& name, uint64_t length, uint32_t file, uint64_t source_offset) {
    if (name.empty() || name.size() > kStreamNameBytesMax || name.find('\0') != std::string::npos) {
      return Error(Code::kCorrupt, "object %zu has a name of %zu bytes, limit %zu, none of them 0: %s",
                   plan_.objects.size(), name.size(), kStreamNameBytesMax, Printable(name).c_str());
    }
    const uint64_t offset = AlignInStream(end_);
    if (plan_.objects.size() >= kStreamObjectsMax || offset > entry_.stream_bytes ||
        length > entry_.stream_bytes - offset) {
      return Error(Code::kCorrupt,
                   "object %s, number %zu, of %" PRIu64 " bytes at %" PRIu64
                   " is not within a stream of %" PRIu64,
                   Printable(name).c_str(), plan_.objects.size(), length, offset, entry_.stream_bytes);
    }
    plan_.objects.push_back({name, offset, length});
    end_ = offset + length;
    if (length == 0) return OkStatus();
    if (!plan_.pieces.empty()) {
      RestorePiece& last = plan_.pieces.back();
      if (last.file == file && last.stream_offset + last.length == offset &&
          last.source_offset + last.length == source_offset) {
        last.length += length;
        return OkStatus();
      }
    }
    plan_.pieces.push_back({offset, length, file, source_offset});
    return OkStatus();
  }

  Result<RestorePlan> Finish() {
    if (next_file_ != entry_.files.size() || next_tensor_ != header_.tensors.size() ||
        next_text_ != header_.metadata.size() || next_name_ != names_.names.size()) {
      return Error(
          Code::kCorrupt,
          "its order leaves out a file, a tensor or a JSON value: %zu of %zu, %zu of %zu, %zu of %zu; names "
          "%zu of %zu",
          next_file_, entry_.files.size(), next_tensor_, header_.tensors.size(), next_text_,
          header_.metadata.size(), next_name_, names_.names.size());
    }
    plan_.manifest_offset = AlignInStream(end_);
    if (plan_.manifest_offset >= entry_.stream_bytes) {
      return Error(Code::kCorrupt,
                   "its objects end at %" PRIu64 ", which leaves nothing of a stream of %" PRIu64
                   " for the shard's manifest",
                   plan_.manifest_offset, entry_.stream_bytes);
    }
    // Indexes are sorted, because copies of a million names would take too much memory.
    std::vector<uint32_t> order(plan_.objects.size());
    std::iota(order.begin(), order.end(), 0);
    const auto name = [&](uint32_t i) -> const std::string& { return plan_.objects[i].name; };
    std::sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) { return name(a) < name(b); });
    const auto twice = std::adjacent_find(order.begin(), order.end(),
                                          [&](uint32_t a, uint32_t b) { return name(a) == name(b); });
    if (twice != order.end())
      return Error(Code::kCorrupt, "it has two objects of the name %s", Printable(name(*twice)).c_str());
    return std::move(plan_);
  }

  const RankEntry& entry_;
  SafetensorsHeader header_;
  NamesReader names_;
  RestorePlan plan_;
  size_t next_file_ = 0;
  size_t next_tensor_ = 0;
  size_t next_text_ = 0;
  size_t next_name_ = 0;
  uint64_t end_ = 0;  // of the last object
};

}  // namespace

Result<RestorePlan> PlanRestore(const RankEntry& entry, std::string_view head) {
  Result<RestorePlan> plan = Restorer(entry).Run(head);
  if (plan.ok()) return plan;
  return Error(plan.status().code(), "rank %" PRIu32 ": %s", entry.rank, plan.status().message().c_str());
}

}  // namespace ropeteam::storage
