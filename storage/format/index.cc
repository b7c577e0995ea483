// SPDX-License-Identifier: Apache-2.0
#include "storage/format/index.h"

#include "storage/format/json.h"
#include "storage/format/safetensors.h"

namespace ropeteam::storage {
namespace {

// A later version of the index may have more fields of an object, but does not nest deeper than this.
constexpr size_t kDepthMax = 16;
// Version 2 adds tensors that are parts of larger ones. Kind, dtype and shape are as in version 1.
constexpr uint64_t kIndexVersionMax = 2;

// Unknown fields are skipped.
class IndexReader : public JsonEvents {
 public:
  Status Begin(const JsonPath& path, bool array) override {
    if (path.size() == 2 && path[0].key == "objects") {
      entry_ = {};
      kind_.clear();
      shape_ok_ = dtype_ok_ = false;
    }
    if (IsShape(path, 3)) {
      entry_.shape.clear();
      shape_ok_ = array;
    } else if (IsShape(path, 4)) {
      shape_ok_ = false;
    }
    return OkStatus();
  }
  Status Scalar(const JsonPath& path, const JsonScalar& value) override {
    if (path.size() == 1 && path[0].key == "version")
      version_ok_ =
          value.kind == JsonKind::kUnsigned && value.number >= 1 && value.number <= kIndexVersionMax;
    if (path.size() == 3 && path[0].key == "objects" && value.kind == JsonKind::kString) {
      if (path[2].key == "kind") kind_ = value.text;
      if (path[2].key == "dtype") {
        entry_.dtype = value.text;
        dtype_ok_ = true;
      }
    }
    if (IsShape(path, 4)) {
      if (value.kind != JsonKind::kUnsigned || entry_.shape.size() >= kDimensionsMax) {
        shape_ok_ = false;
      } else {
        entry_.shape.push_back(value.number);
      }
    }
    return OkStatus();
  }
  Status End(const JsonPath& path, bool array) override {
    if (path.size() != 2 || array || path[0].key != "objects") return OkStatus();
    entry_.json = kind_ == "json";
    if (entry_.json || (kind_ == "tensor" && dtype_ok_ && shape_ok_))
      index_.insert_or_assign(path[1].key, std::move(entry_));
    return OkStatus();
  }
  Index Take() { return version_ok_ ? std::move(index_) : Index(); }

 private:
  static bool IsShape(const JsonPath& path, size_t depth) {
    return path.size() == depth && path[0].key == "objects" && path[2].key == "shape";
  }
  Index index_;
  IndexEntry entry_;
  std::string kind_;
  bool dtype_ok_ = false;
  bool shape_ok_ = false;
  bool version_ok_ = false;
};

}  // namespace

Index ParseIndex(std::string_view text) {
  IndexReader reader;
  if (!WalkJson(text, kDepthMax, &reader).ok()) return {};
  return reader.Take();
}

}  // namespace ropeteam::storage
