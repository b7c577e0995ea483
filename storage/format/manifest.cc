// SPDX-License-Identifier: Apache-2.0
#include "storage/format/manifest.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <tuple>

#include "core/base/checksum.h"
#include "core/base/ids.h"
#include "storage/format/json.h"
#include "storage/format/manifest_check.h"
#include "storage/format/names.h"
#include "storage/format/safetensors.h"
#include "storage/format/stream.h"

namespace ropeteam::storage {
namespace {

constexpr std::string_view kFormatName = "ropeteam-step";
// The manifest's own levels are 5; the rest is for the program's metadata.
constexpr size_t kDepthMax = 64;
constexpr size_t kCrcDigits = 8;
constexpr size_t kDigestDigits = 16;

// The beginning of the second-to-last line, and the end. They stay the same in every later version, so that a
// damaged manifest does not look like a newer one.
constexpr std::string_view kTailBegin = "\"manifest_crc32c\": \"";
constexpr std::string_view kTailEnd = "\"\n}\n";

std::string TailOf(std::string_view text) {
  std::string tail(kTailBegin);
  tail += Hex(Crc32c(text.data(), text.size()), kCrcDigits);
  return tail.append(kTailEnd);
}

class IsObject : public JsonEvents {
 public:
  explicit IsObject(std::string* out) : copy_(out, 0) {}
  Status Begin(const JsonPath& path, bool array) override {
    if (path.empty() && array) return Error(Code::kCorrupt, "it is an array");
    return copy_.Begin(path, array);
  }
  Status End(const JsonPath& path, bool array) override { return copy_.End(path, array); }
  Status Scalar(const JsonPath& path, const JsonScalar& value) override {
    if (path.empty()) return Error(Code::kCorrupt, "it is a single value");
    return copy_.Scalar(path, value);
  }

 private:
  JsonCopy copy_;
};

void AppendFile(const FileEntry& file, std::string* out) {
  *out += "\n  {\"path\": ";
  AppendJsonString(out, file.path);
  *out +=
      ", \"bytes\": " + std::to_string(file.bytes) + ", \"crc32c\": \"" + Hex(file.crc32c, kCrcDigits) + '"';
  if (file.header_bytes != 0) {
    *out += ", \"header_bytes\": " + std::to_string(file.header_bytes) + ", \"header_crc32c\": \"" +
            Hex(file.header_crc32c, kCrcDigits) + '"';
  }
  *out += '}';
}

class ManifestReader : public JsonEvents {
 public:
  explicit ManifestReader(const std::function<Status(RankEntry&&)>& each)
      : each_(each), user_(&head_.user, 1) {
    head_.user.clear();
  }

  Status Begin(const JsonPath& path, bool array) override {
    if (InUser(path))
      return array && path.size() == 1 ? Wrong(path, "is not an object") : BeginUser(path, array);
    // {"ranks": [{"files": [{…}]}]}: objects and arrays alternate.
    if (array != (path.size() % 2 == 1)) return Wrong(path, array ? "is an array" : "is an object");
    switch (path.size()) {
      case 0:
        return OkStatus();
      case 1:
        if (path[0].key != "ranks") return Wrong(path, "is not known");
        return Once(path, &seen_, kRanks);
      case 2:
        rank_ = {};
        rank_seen_ = 0;
        return OkStatus();
      case 3:
        if (path[2].key != "files") return Wrong(path, "is not known");
        return Once(path, &rank_seen_, kFiles);
      case 4:
        rank_.files.emplace_back();
        file_seen_ = 0;
        return OkStatus();
      default:
        return Wrong(path, "is not known");
    }
  }

  Status End(const JsonPath& path, bool array) override {
    if (InUser(path)) return user_.End(path, array);
    if (path.size() == 4) return EndFile(path);
    if (path.size() == 2) return EndRank(path);
    return OkStatus();
  }

  Status Scalar(const JsonPath& path, const JsonScalar& value) override {
    if (InUser(path)) return path.size() == 1 ? Wrong(path, "is not an object") : user_.Scalar(path, value);
    switch (path.size()) {
      case 1:
        return HeadField(path, value);
      case 3:
        return RankField(path, value);
      case 5:
        return FileField(path, value);
      default:
        return Wrong(path, "is a single value");
    }
  }

  Result<StepHead> Finish() {
    if (seen_ != kHeadAll) return Error(Code::kCorrupt, "a field of the step is missing");
    if (next_rank_ != head_.world_size) {
      return Error(Code::kCorrupt, "ranks has %" PRIu32 " entries, world_size is %" PRIu32, next_rank_,
                   head_.world_size);
    }
    ROPETEAM_RETURN_IF_ERROR(CheckHead(head_));
    ROPETEAM_RETURN_IF_ERROR(shared_.Check());
    return std::move(head_);
  }

 private:
  enum : unsigned {
    kFormat = 1,
    kVersion = 2,
    kJob = 4,
    kStep = 8,
    kIncarnation = 16,
    kWorld = 32,
    kChunk = 64,
    kTime = 128,
    kUser = 256,
    kRanks = 512,
    kCrc = 1024,
    kHeadAll = 2047,
  };
  enum : unsigned { kRank = 1, kStream = 2, kDigest = 4, kFiles = 8, kRankAll = 15 };
  enum : unsigned { kPath = 1, kBytes = 2, kFileCrc = 4, kFileAll = 7, kHeaderBytes = 8, kHeaderCrc = 16 };

  static Status Wrong(const JsonPath& path, const char* what) {
    return Error(Code::kCorrupt, "%s %s", JsonPlace(path).c_str(), what);
  }
  static bool InUser(const JsonPath& path) { return !path.empty() && path[0].key == "user"; }
  static Status Once(const JsonPath& path, unsigned* seen, unsigned field) {
    if ((*seen & field) != 0) return Wrong(path, "appears twice");
    *seen |= field;
    return OkStatus();
  }
  Status BeginUser(const JsonPath& path, bool array) {
    if (path.size() == 1) ROPETEAM_RETURN_IF_ERROR(Once(path, &seen_, kUser));
    return user_.Begin(path, array);
  }

  static Status Number(const JsonPath& path, const JsonScalar& value, uint64_t limit, uint64_t* out) {
    if (value.kind != JsonKind::kUnsigned) return Wrong(path, "is not a whole number from 0 on");
    if (value.number > limit) {
      return Error(Code::kCorrupt, "%s is %" PRIu64 ", limit %" PRIu64, JsonPlace(path).c_str(), value.number,
                   limit);
    }
    *out = value.number;
    return OkStatus();
  }
  static Status Number32(const JsonPath& path, const JsonScalar& value, uint32_t limit, uint32_t* out) {
    uint64_t number = 0;
    ROPETEAM_RETURN_IF_ERROR(Number(path, value, limit, &number));
    *out = static_cast<uint32_t>(number);
    return OkStatus();
  }
  static Status Checksum(const JsonPath& path, const JsonScalar& value, uint32_t* out) {
    uint64_t number = 0;
    if (value.kind != JsonKind::kString || !ParseHex(value.text, kCrcDigits, &number))
      return Wrong(path, "is not a text of 8 hexadecimal digits");
    *out = static_cast<uint32_t>(number);
    return OkStatus();
  }
  static Status Text(const JsonPath& path, const JsonScalar& value, std::string* out) {
    if (value.kind != JsonKind::kString) return Wrong(path, "is not a text");
    *out = value.text;
    return OkStatus();
  }

  Status HeadField(const JsonPath& path, const JsonScalar& value) {
    const std::string& key = path[0].key;
    // "format" and "version" come first, also in every later version. The rest may differ in a newer version.
    if (key == "format") {
      if (value.kind != JsonKind::kString || value.text != kFormatName || seen_ != 0)
        return Wrong(path, "is not \"ropeteam-step\", or not the first field");
      return Once(path, &seen_, kFormat);
    }
    if (key == "version") {
      uint64_t version = 0;
      ROPETEAM_RETURN_IF_ERROR(Number(path, value, UINT64_MAX, &version));
      if (seen_ != kFormat || version == 0) return Wrong(path, "is 0, or not the second field");
      if (version > kStepManifestVersion) {
        return Error(Code::kUnsupported, "version %" PRIu64 ", this build reads up to %" PRIu32, version,
                     kStepManifestVersion);
      }
      return Once(path, &seen_, kVersion);
    }
    if ((seen_ & kVersion) == 0) return Wrong(path, "comes before the version");
    if (key == "job") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &seen_, kJob));
      return Text(path, value, &head_.job);
    }
    if (key == "step") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &seen_, kStep));
      return Number(path, value, UINT64_MAX, &head_.step);
    }
    if (key == "incarnation") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &seen_, kIncarnation));
      return Number(path, value, kIncarnationMax - 1, &head_.incarnation);
    }
    if (key == "world_size") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &seen_, kWorld));
      return Number32(path, value, kStepRanksMax, &head_.world_size);
    }
    if (key == "chunk_bytes") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &seen_, kChunk));
      return Number(path, value, kStreamSizeMax, &head_.chunk_bytes);
    }
    if (key == "time") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &seen_, kTime));
      if (value.kind != JsonKind::kString || !ParseTime(value.text, &head_.time_s))
        return Wrong(path, "is not a time like 2026-01-31T23:59:59Z");
      return OkStatus();
    }
    if (key == "manifest_crc32c") return Once(path, &seen_, kCrc);  // checked before anything else
    return Wrong(path, "is not known");
  }

  Status RankField(const JsonPath& path, const JsonScalar& value) {
    const std::string& key = path[2].key;
    if (key == "rank") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &rank_seen_, kRank));
      return Number32(path, value, kStepRanksMax - 1, &rank_.rank);
    }
    if (key == "stream_bytes") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &rank_seen_, kStream));
      return Number(path, value, kStreamSizeMax, &rank_.stream_bytes);
    }
    if (key == "digest") {
      if (value.kind != JsonKind::kString || !ParseHex(value.text, kDigestDigits, &rank_.digest))
        return Wrong(path, "is not a text of 16 hexadecimal digits");
      return Once(path, &rank_seen_, kDigest);
    }
    return Wrong(path, "is not known");
  }

  Status FileField(const JsonPath& path, const JsonScalar& value) {
    const std::string& key = path[4].key;
    FileEntry& file = rank_.files.back();
    if (key == "path") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &file_seen_, kPath));
      return Text(path, value, &file.path);
    }
    if (key == "bytes") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &file_seen_, kBytes));
      return Number(path, value, 2 * kStreamSizeMax, &file.bytes);
    }
    if (key == "crc32c") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &file_seen_, kFileCrc));
      return Checksum(path, value, &file.crc32c);
    }
    if (key == "header_bytes") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &file_seen_, kHeaderBytes));
      return Number(path, value, kSafetensorsJsonBytesMax + sizeof(uint64_t), &file.header_bytes);
    }
    if (key == "header_crc32c") {
      ROPETEAM_RETURN_IF_ERROR(Once(path, &file_seen_, kHeaderCrc));
      return Checksum(path, value, &file.header_crc32c);
    }
    return Wrong(path, "is not known");
  }

  Status EndFile(const JsonPath& path) {
    if ((file_seen_ & kFileAll) != kFileAll) return Wrong(path, "lacks path, bytes or crc32c");
    const bool header = file_seen_ == (kFileAll | kHeaderBytes | kHeaderCrc);
    if (file_seen_ != kFileAll && !header) return Wrong(path, "has one of header_bytes and header_crc32c");
    if (header && rank_.files.back().header_bytes == 0) return Wrong(path, "has a header of 0 bytes");
    return OkStatus();
  }

  Status EndRank(const JsonPath& path) {
    if (rank_seen_ != kRankAll) return Wrong(path, "lacks rank, stream_bytes, digest or files");
    if (rank_.rank != next_rank_) {
      return Error(Code::kCorrupt, "%s is rank %" PRIu32 ", expected %" PRIu32, JsonPlace(path).c_str(),
                   rank_.rank, next_rank_);
    }
    const Status status = CheckRank(rank_);
    if (!status.ok()) return Error(Code::kCorrupt, "%s%s", JsonPlace(path).c_str(), status.message().c_str());
    ++next_rank_;
    shared_.Add(rank_);
    return each_ ? each_(std::move(rank_)) : OkStatus();
  }

  const std::function<Status(RankEntry&&)>& each_;
  StepHead head_;
  JsonCopy user_;
  RankEntry rank_;
  SharedFiles shared_;
  uint32_t next_rank_ = 0;
  unsigned seen_ = 0;
  unsigned rank_seen_ = 0;
  unsigned file_seen_ = 0;
};

}  // namespace

Result<std::string> CompactMetadata(std::string_view user) {
  if (user.size() > kUserMetadataBytesMax) {
    return Error(Code::kInvalidArgument, "user metadata of %zu bytes, limit %" PRIu64, user.size(),
                 kUserMetadataBytesMax);
  }
  std::string compact;
  IsObject events(&compact);
  // The limit is one level less, because the metadata is one level deeper in the manifest.
  const Status status = WalkJson(user, kDepthMax - 1, &events);
  if (!status.ok())
    return Error(Code::kInvalidArgument, "user metadata is not a JSON object: %s", status.message().c_str());
  return compact;
}

StepManifestWriter::StepManifestWriter(const StepHead& head)
    : world_size_(head.world_size), head_status_(CheckHead(head)) {
  if (!head_status_.ok()) {
    head_status_ = Error(Code::kInvalidArgument, "%s", head_status_.message().c_str());
    return;
  }
  const Result<std::string> user = CompactMetadata(head.user);
  if (!user.ok()) {
    head_status_ = user.status();
    return;
  }
  text_ = "{\n\"format\": ";
  AppendJsonString(&text_, kFormatName);
  text_ += ",\n\"version\": " + std::to_string(kStepManifestVersion) + ",\n\"job\": ";
  AppendJsonString(&text_, head.job);
  text_ += ",\n\"step\": " + std::to_string(head.step);
  text_ += ",\n\"incarnation\": " + std::to_string(head.incarnation);
  text_ += ",\n\"world_size\": " + std::to_string(head.world_size);
  text_ += ",\n\"chunk_bytes\": " + std::to_string(head.chunk_bytes);
  text_ += ",\n\"time\": \"" + PrintTime(head.time_s) + "\",\n\"user\": " + *user + ",\n\"ranks\": [";
}

Status StepManifestWriter::CheckSize() const {
  if (text_.size() <= kStepManifestBytesMax) return OkStatus();
  return Error(Code::kInvalidArgument,
               "manifest of %zu bytes after %" PRIu32 " of %" PRIu32 " ranks, limit %" PRIu64
               ": save fewer files",
               text_.size(), count_, world_size_, kStepManifestBytesMax);
}

Status StepManifestWriter::Add(const RankEntry& rank) {
  ROPETEAM_RETURN_IF_ERROR(head_status_);
  if (rank.rank != count_ || count_ >= world_size_) {
    return Error(Code::kInvalidArgument, "rank %" PRIu32 " of %" PRIu32 ", expected rank %" PRIu32, rank.rank,
                 world_size_, count_);
  }
  const Status status = CheckRank(rank);
  if (!status.ok()) {
    return Error(Code::kInvalidArgument, "rank %" PRIu32 ": %s", rank.rank, status.message().c_str());
  }
  const size_t before = text_.size();
  text_ += count_ == 0 ? "\n" : ",\n";
  text_ += "{\"rank\": " + std::to_string(rank.rank) +
           ", \"stream_bytes\": " + std::to_string(rank.stream_bytes) + ", \"digest\": \"" +
           Hex(rank.digest, kDigestDigits) + "\", \"files\": [";
  for (size_t i = 0; i < rank.files.size(); ++i) {
    if (i != 0) text_ += ',';
    AppendFile(rank.files[i], &text_);
  }
  text_ += "]}";
  ++count_;
  // Ranks have similar sizes, so memory is reserved for all of them at once. A text that grows by doubling is
  // temporarily in memory twice.
  if (count_ == 1) {
    const uint64_t all = (text_.size() - before) * world_size_;
    text_.reserve(std::min(text_.size() + all + all / 4, kStepManifestBytesMax));
  }
  return CheckSize();
}

Result<std::string> StepManifestWriter::Finish() {
  ROPETEAM_RETURN_IF_ERROR(head_status_);
  if (count_ != world_size_) {
    return Error(Code::kInvalidArgument, "manifest of %" PRIu32 " ranks, world of %" PRIu32, count_,
                 world_size_);
  }
  text_ += "\n],\n";
  text_ += TailOf(text_);
  ROPETEAM_RETURN_IF_ERROR(CheckSize());
  return std::move(text_);
}

Result<StepHead> ParseStepManifest(std::string_view text, const std::function<Status(RankEntry&&)>& each) {
  const auto named = [](const Status& status) {
    return Error(status.code(), "%s: %s", std::string(kManifestName).c_str(), status.message().c_str());
  };
  const size_t tail_bytes = kTailBegin.size() + kCrcDigits + kTailEnd.size();
  if (text.size() > kStepManifestBytesMax || text.size() < tail_bytes) {
    return named(Error(Code::kCorrupt, "%zu bytes, at least %zu, limit %" PRIu64, text.size(), tail_bytes,
                       kStepManifestBytesMax));
  }
  const std::string_view checked = text.substr(0, text.size() - tail_bytes);
  if (const std::string tail = TailOf(checked); text.substr(checked.size()) != tail) {
    return named(Error(Code::kCorrupt, "it was changed or is cut: it should end with %s, and ends with %s",
                       Printable(tail).c_str(), Printable(text.substr(checked.size())).c_str()));
  }
  if (!text.starts_with('{')) return named(Error(Code::kCorrupt, "it does not begin with {"));
  ManifestReader reader(each);
  const Status status = WalkJson(text, kDepthMax, &reader);
  if (!status.ok()) return named(status);
  Result<StepHead> head = reader.Finish();
  if (!head.ok()) return named(head.status());
  return head;
}

}  // namespace ropeteam::storage
