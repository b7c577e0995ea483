// SPDX-License-Identifier: Apache-2.0
#include "storage/format/safetensors.h"

#include <array>
#include <cinttypes>
#include <cstring>

#include "storage/format/json.h"
#include "storage/format/stream.h"

namespace ropeteam::storage {
namespace {

struct DtypeRow {
  std::string_view torch;
  const char* safetensors;
  uint64_t bytes;
};
// Later versions of the library have more dtypes (C64, F8_E8M0, F8_E4M3FNUZ, F4, …). A reader without one of
// them refuses the whole file, so they are not used.
constexpr std::array<DtypeRow, 15> kDtypes = {{
    {"float64", "F64", 8},
    {"float32", "F32", 4},
    {"float16", "F16", 2},
    {"bfloat16", "BF16", 2},
    {"float8_e4m3fn", "F8_E4M3", 1},
    {"float8_e5m2", "F8_E5M2", 1},
    {"int64", "I64", 8},
    {"int32", "I32", 4},
    {"int16", "I16", 2},
    {"int8", "I8", 1},
    {"uint64", "U64", 8},
    {"uint32", "U32", 4},
    {"uint16", "U16", 2},
    {"uint8", "U8", 1},
    {"bool", "BOOL", 1},
}};

// The header's JSON text nests {name: {shape: [ ]}}.
constexpr size_t kHeaderDepthMax = 3;
constexpr std::string_view kMetadataKey = "__metadata__";

class HeaderReader : public JsonEvents {
 public:
  Status Begin(const JsonPath& path, bool array) override {
    switch (path.size()) {
      case 0:
        if (array) return Wrong(path, "is not an object");
        return OkStatus();
      case 1:
        if (array) return Wrong(path, "is not an object");
        metadata_ = path[0].key == kMetadataKey;
        if (metadata_ && (metadata_seen_ || !header_.tensors.empty()))
          return Wrong(path, "is not the first entry, or appears twice");
        metadata_seen_ = metadata_seen_ || metadata_;
        seen_ = 0;
        shape_.clear();
        offsets_.clear();
        return OkStatus();
      default:
        if (!array || metadata_) return Wrong(path, "is not a text");
        if (path[1].key == "shape") return Once(path, kShape);
        if (path[1].key == "data_offsets") return Once(path, kOffsets);
        return Wrong(path, "is not known");
    }
  }

  Status Scalar(const JsonPath& path, const JsonScalar& value) override {
    if (path.size() == 2 && metadata_) {
      if (value.kind != JsonKind::kString) return Wrong(path, "is not a text");
      header_.metadata.emplace_back(path[1].key, value.text);
      return OkStatus();
    }
    if (path.size() == 2 && path[1].key == "dtype" && value.kind == JsonKind::kString) {
      dtype_ = value.text;
      return Once(path, kDtype);
    }
    if (path.size() == 3 && value.kind == JsonKind::kUnsigned) {
      const bool shape = path[1].key == "shape";
      if ((shape ? shape_.size() : offsets_.size()) >= (shape ? kDimensionsMax : 2))
        return Wrong(path, "is one too many");
      (shape ? shape_ : offsets_).push_back(value.number);
      return OkStatus();
    }
    return Wrong(path, "is not expected there");
  }

  Status End(const JsonPath& path, bool) override {
    if (path.size() != 1 || metadata_) return OkStatus();
    if (seen_ != (kDtype | kShape | kOffsets) || offsets_.size() != 2)
      return Wrong(path, "lacks dtype, shape or data_offsets");
    if (offsets_[0] != header_.data_bytes || offsets_[1] < offsets_[0] || offsets_[1] > kStreamSizeMax) {
      return Error(Code::kCorrupt,
                   "%s has the data %" PRIu64 " to %" PRIu64 ", the one before ends at %" PRIu64,
                   JsonPlace(path).c_str(), offsets_[0], offsets_[1], header_.data_bytes);
    }
    const uint64_t length = offsets_[1] - offsets_[0];
    if (!FitsShape(dtype_, shape_, length)) {
      return Error(Code::kCorrupt, "%s has %" PRIu64 " bytes, which do not fit its dtype %s and shape",
                   JsonPlace(path).c_str(), length, Printable(dtype_).c_str());
    }
    if (header_.tensors.size() >= kStreamObjectsMax) return Wrong(path, "is one tensor too many");
    header_.tensors.push_back({path[0].key, offsets_[0], length});
    header_.data_bytes = offsets_[1];
    return OkStatus();
  }

  SafetensorsHeader Take() { return std::move(header_); }

 private:
  enum : unsigned { kDtype = 1, kShape = 2, kOffsets = 4 };
  static Status Wrong(const JsonPath& path, const char* what) {
    return Error(Code::kCorrupt, "%s %s", JsonPlace(path).c_str(), what);
  }
  Status Once(const JsonPath& path, unsigned field) {
    if ((seen_ & field) != 0) return Wrong(path, "appears twice");
    seen_ |= field;
    return OkStatus();
  }

  SafetensorsHeader header_;
  bool metadata_ = false;  // inside "__metadata__"
  bool metadata_seen_ = false;
  unsigned seen_ = 0;
  std::string dtype_;
  std::vector<uint64_t> shape_;
  std::vector<uint64_t> offsets_;
};

}  // namespace

const char* SafetensorsDtype(std::string_view torch_dtype) {
  for (const DtypeRow& row : kDtypes)
    if (row.torch == torch_dtype) return row.safetensors;
  return nullptr;
}

uint64_t SafetensorsItemBytes(std::string_view dtype) {
  for (const DtypeRow& row : kDtypes)
    if (row.safetensors == dtype) return row.bytes;
  return 0;
}

bool FitsShape(std::string_view dtype, const std::vector<uint64_t>& shape, uint64_t bytes) {
  const uint64_t item_bytes = SafetensorsItemBytes(dtype);
  if (item_bytes == 0 || shape.size() > kDimensionsMax) return false;
  // All dimensions are multiplied in this order, as readers do. So an overflow counts even if a zero follows.
  uint64_t elements = 1;
  for (const uint64_t dimension : shape) {
    if (dimension > INT64_MAX || __builtin_mul_overflow(elements, dimension, &elements)) return false;
  }
  return elements <= kStreamSizeMax && elements * item_bytes == bytes;
}

Status SafetensorsWriter::AddMetadata(std::string_view key, std::string_view value) {
  ROPETEAM_CHECK(tensors_ == 0);
  if (!in_metadata_) {
    AppendJsonString(&text_, kMetadataKey);
    text_ += ":{";
    in_metadata_ = true;
  } else {
    text_ += ',';
  }
  AppendJsonString(&text_, key);
  text_ += ':';
  AppendJsonString(&text_, value);
  return CheckSize();
}

Status SafetensorsWriter::CheckSize() const {
  if (text_.size() <= kSafetensorsJsonBytesMax - kSafetensorsAlignmentBytes) return OkStatus();
  return Error(Code::kInvalidArgument,
               "the header of a safetensors file is %zu bytes after %" PRIu64 " tensors, limit %" PRIu64
               " less a page: save fewer, larger objects",
               text_.size(), tensors_, kSafetensorsJsonBytesMax);
}

Status SafetensorsWriter::AddTensor(std::string_view name, std::string_view dtype,
                                    const std::vector<uint64_t>& shape, uint64_t bytes) {
  ROPETEAM_CHECK(FitsShape(dtype, shape, bytes));
  if (in_metadata_ && tensors_ == 0) text_ += '}';
  if (in_metadata_ || tensors_ != 0) text_ += ',';
  AppendJsonString(&text_, name);
  text_ += ":{\"dtype\":\"";
  text_ += dtype;
  text_ += "\",\"shape\":[";
  for (size_t i = 0; i < shape.size(); ++i) {
    if (i != 0) text_ += ',';
    text_ += std::to_string(shape[i]);
  }
  text_ += "],\"data_offsets\":[" + std::to_string(data_bytes_);
  data_bytes_ += bytes;
  text_ += "," + std::to_string(data_bytes_) + "]}";
  ++tensors_;
  return CheckSize();
}

Result<std::string> SafetensorsWriter::Finish() {
  if (in_metadata_ && tensors_ == 0) text_ += '}';
  text_ += '}';
  ROPETEAM_RETURN_IF_ERROR(CheckSize());
  const uint64_t pages = (text_.size() + kSafetensorsAlignmentBytes - 1) / kSafetensorsAlignmentBytes;
  text_.resize(pages * kSafetensorsAlignmentBytes, ' ');
  const uint64_t json_bytes = text_.size() - sizeof(uint64_t);
  std::memcpy(text_.data(), &json_bytes, sizeof(json_bytes));
  return std::move(text_);
}

Result<SafetensorsHeader> ParseSafetensors(std::string_view head) {
  uint64_t json_bytes = 0;
  if (head.size() < sizeof(json_bytes) || head.size() - sizeof(json_bytes) > kSafetensorsJsonBytesMax) {
    return Error(Code::kCorrupt, "a safetensors header of %zu bytes, limit %" PRIu64, head.size(),
                 kSafetensorsJsonBytesMax + sizeof(json_bytes));
  }
  std::memcpy(&json_bytes, head.data(), sizeof(json_bytes));
  if (json_bytes != head.size() - sizeof(json_bytes)) {
    return Error(Code::kCorrupt, "a safetensors header of %zu bytes says that it has %" PRIu64 " of JSON",
                 head.size(), json_bytes);
  }
  const std::string_view json = head.substr(sizeof(json_bytes));
  if (!json.starts_with('{')) return Error(Code::kCorrupt, "a safetensors header that does not begin with {");
  HeaderReader reader;
  const Status status = WalkJson(json, kHeaderDepthMax, &reader);
  if (!status.ok()) return Error(status.code(), "safetensors header: %s", status.message().c_str());
  return reader.Take();
}

}  // namespace ropeteam::storage
