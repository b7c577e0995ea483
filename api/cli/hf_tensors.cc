// SPDX-License-Identifier: Apache-2.0
#include "api/cli/hf_tensors.h"

#include <algorithm>
#include <cinttypes>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "core/base/check.h"
#include "storage/format/safetensors.h"

namespace ropeteam::cli {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kIndexVersionMax = 2;
// A rank that has several parts of one tensor saves them as NAME#0, NAME#1, …
constexpr char kPartSign = '#';
constexpr size_t kNamesToldMax = 10;
// What ModelIndex::SourceOf() knows of a tensor, beside an index.
constexpr size_t kUnknown = SIZE_MAX;
constexpr size_t kOnTheWay = SIZE_MAX - 1;
// Limits one part: an uneven dimension has a few runs, and a tensor has few such dimensions.
constexpr uint64_t kBoxesMax = 1 << 20;

// A contiguous range in every dimension.
struct Box {
  std::vector<uint64_t> start;
  std::vector<uint64_t> size;
};

std::string ListText(const std::vector<uint64_t>& numbers) {
  std::string text = "[";
  for (const uint64_t number : numbers) text += (text.size() > 1 ? ", " : "") + std::to_string(number);
  return text + "]";
}

PartLayout Whole(const std::vector<uint64_t>& shape) {
  PartLayout layout;
  for (const uint64_t size : shape) layout.push_back({{0, size}});
  return layout;
}

// The boxes of the layout that are not empty.
std::vector<Box> BoxesOf(const PartLayout& layout) {
  std::vector<Box> boxes(1);
  for (const IndexRuns& runs : layout) {
    std::vector<Box> next;
    for (const Box& box : boxes) {
      for (const auto& [start, length] : runs) {
        if (length == 0) continue;
        next.push_back(box);
        next.back().start.push_back(start);
        next.back().size.push_back(length);
      }
    }
    boxes = std::move(next);
  }
  return boxes;
}

// Appends what `have` does not cover of `want` to `left`. False: they do not overlap.
bool Subtract(Box want, const Box& have, std::vector<Box>* left) {
  for (size_t i = 0; i < want.start.size(); ++i) {
    if (want.start[i] >= have.start[i] + have.size[i] || have.start[i] >= want.start[i] + want.size[i])
      return false;
  }
  for (size_t i = 0; i < want.start.size(); ++i) {
    const uint64_t end = want.start[i] + want.size[i];
    const uint64_t have_end = have.start[i] + have.size[i];
    if (want.start[i] < have.start[i]) {
      left->push_back(want);
      left->back().size[i] = have.start[i] - want.start[i];
      want.start[i] = have.start[i];
    }
    if (have_end < end) {
      left->push_back(want);
      left->back().start[i] = have_end;
      left->back().size[i] = end - have_end;
    }
    want.size[i] = std::min(end, have_end) - want.start[i];
  }
  return true;
}

// Removes what the layout covers from `left`. True: it covered something.
bool Cover(const PartLayout& layout, std::vector<Box>* left) {
  bool found = false;
  for (const Box& have : BoxesOf(layout)) {
    std::vector<Box> next;
    for (Box& want : *left) {
      if (Subtract(want, have, &next))
        found = true;
      else
        next.push_back(std::move(want));
    }
    *left = std::move(next);
  }
  return found;
}

Status CheckLeft(const FullTensor& tensor, const std::vector<Box>& left) {
  if (left.empty()) return OkStatus();
  return Error(Code::kNotFound, "%s of shape %s has a hole: no rank saved what begins at %s, of size %s",
               tensor.name.c_str(), ListText(tensor.shape).c_str(), ListText(left[0].start).c_str(),
               ListText(left[0].size).c_str());
}

// "layer.weight#3" → "layer.weight".
std::string WithoutPart(const std::string& name) {
  const size_t sign = name.rfind(kPartSign);
  const bool number = sign != std::string::npos && sign + 1 < name.size() &&
                      std::all_of(name.begin() + static_cast<std::ptrdiff_t>(sign) + 1, name.end(),
                                  [](char c) { return c >= '0' && c <= '9'; });
  return number ? name.substr(0, sign) : name;
}

// Throws nlohmann's exceptions if the JSON is something else, like all code here that reads an entry. get() would also
// convert negative numbers and fractions.
uint64_t NumberOf(const Json& json) { return json.get_ref<const Json::number_unsigned_t&>(); }
std::vector<uint64_t> NumbersOf(const Json& json) {
  std::vector<uint64_t> numbers;
  for (const Json& number : json.get_ref<const Json::array_t&>()) numbers.push_back(NumberOf(number));
  return numbers;
}

PartLayout LayoutOf(const Json& entry, const std::vector<uint64_t>& shape) {
  if (!entry.contains("runs")) return Whole(shape);
  PartLayout layout;
  for (const Json& dimension : entry.at("runs")) {
    const std::vector<uint64_t> numbers = NumbersOf(dimension);
    IndexRuns runs;
    for (size_t i = 0; i + 1 < numbers.size(); i += 2) runs.emplace_back(numbers[i], numbers[i + 1]);
    layout.push_back(std::move(runs));
  }
  return layout;
}

// Whether the layout has the shape of `part` and is inside the tensor.
bool IsInside(const PartLayout& layout, const std::vector<uint64_t>& part,
              const std::vector<uint64_t>& shape) {
  if (layout.size() != shape.size() || part.size() != shape.size()) return false;
  uint64_t boxes = 1;
  for (size_t i = 0; i < layout.size(); ++i) {
    uint64_t size = 0;
    for (const auto& [start, length] : layout[i]) {
      if (start > shape[i] || length > shape[i] - start || __builtin_add_overflow(size, length, &size))
        return false;
    }
    boxes *= layout[i].size();
    if (size != part[i] || boxes > kBoxesMax) return false;
  }
  return true;
}

// Reads the names of an index's objects in their order. (nlohmann::ordered_json keeps the order, but compares each name
// with all before it; so does its parser with a callback.)
class ObjectNames final : public nlohmann::json_sax<Json> {
 public:
  std::vector<std::string> all;

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return ++depth_ > 0; }
  bool end_object() override { return depth_-- > 0; }
  bool start_array(size_t) override { return true; }
  bool end_array() override { return true; }
  bool key(string_t& name) override {
    if (depth_ == 2 && of_objects_) all.push_back(name);
    if (depth_ == 1) of_objects_ = name == "objects";
    return true;
  }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception&) override { return false; }

 private:
  int depth_ = 0;
  bool of_objects_ = false;  // the last key of the index
};

// The bytes of a tensor; nullopt if no reader could open it.
std::optional<uint64_t> BytesOf(const std::string& dtype, const std::vector<uint64_t>& shape) {
  uint64_t bytes = storage::SafetensorsItemBytes(dtype);
  for (const uint64_t size : shape)
    if (__builtin_mul_overflow(bytes, size, &bytes)) return std::nullopt;
  if (!storage::FitsShape(dtype, shape, bytes)) return std::nullopt;
  return bytes;
}

}  // namespace

Status ModelIndex::Add(uint32_t rank, uint32_t world_size, std::string_view text) {
  if (text.empty()) return OkStatus();
  try {
    const Json index = Json::parse(text);
    // In the order of the model's state, which Json does not keep.
    ObjectNames names;
    Json::sax_parse(text, &names);
    const Json& objects = index.at("objects");
    const uint64_t version = NumberOf(index.at("version"));
    if (version == 0 || version > kIndexVersionMax)
      return Error(Code::kUnsupported,
                   "the index of rank %u has version %" PRIu64 ", known are 1 to %" PRIu64, rank, version,
                   kIndexVersionMax);
    if (version == 1 && world_size > 1)
      return Error(
          Code::kUnsupported,
          "the index of rank %u has version 1, which does not say which part of a tensor a rank has: "
          "load the step on %u ranks and save it again",
          rank, world_size);
    const std::string& prefix = prefix_;
    std::set<std::string> values;  // of the model's state that are not tensors
    for (const std::string& name : names.all)
      if (name.starts_with(prefix) && objects.at(name).at("kind") == "json") values.insert(name);
    for (const std::string& name : names.all) {
      const Json& entry = objects.at(name);
      if (!name.starts_with(prefix) || entry.at("kind") != "tensor") continue;
      // Skips the parts of a value that is not a tensor: they are below its name.
      const size_t slash = name.find('/', prefix.size());
      if (slash != std::string::npos && values.contains(name.substr(0, slash))) continue;
      const std::vector<uint64_t> part = NumbersOf(entry.at("shape"));
      const std::vector<uint64_t> shape = entry.contains("global") ? NumbersOf(entry.at("global")) : part;
      PartLayout layout = LayoutOf(entry, part);
      if (!IsInside(layout, part, shape))
        return Error(Code::kCorrupt, "%s of rank %u: its part is not inside its shape %s", name.c_str(), rank,
                     ListText(shape).c_str());
      std::string at;
      if (entry.contains("at")) at = entry.at("at").at(1).get<std::string>();
      ROPETEAM_RETURN_IF_ERROR(AddTensor(rank, name, entry.at("dtype").get<std::string>(), shape,
                                         std::move(layout), entry.contains("at") ? &at : nullptr));
    }
    for (const std::string& name : values) {
      const std::string inner = name.substr(prefix.size());
      if (known_values_.insert(inner).second) values_.push_back(inner);
    }
  } catch (const nlohmann::json::exception& error) {
    return Error(Code::kCorrupt, "the index of rank %u: %s", rank, error.what());
  }
  return OkStatus();
}

Status ModelIndex::AddTensor(uint32_t rank, const std::string& object, std::string dtype,
                             std::vector<uint64_t> shape, PartLayout layout, const std::string* at) {
  const std::string name = WithoutPart(object).substr(prefix_.size());
  const char* known = storage::SafetensorsDtype(dtype);
  const std::optional<uint64_t> bytes = known == nullptr ? std::nullopt : BytesOf(known, shape);
  if (!bytes)
    return Error(Code::kUnsupported, "%s is %s of shape %s, which a safetensors file cannot have",
                 name.c_str(), dtype.c_str(), ListText(shape).c_str());
  const auto [found, fresh] = by_name_.try_emplace(name, tensors_.size());
  if (fresh) tensors_.push_back({{name, known, shape, *bytes, {}}, rank, ""});
  Tensor& tensor = tensors_[found->second];
  if (tensor.full.dtype != known || tensor.full.shape != shape)
    return Error(Code::kInvalidArgument, "%s: rank %u saved %s of shape %s, rank %u %s of shape %s",
                 name.c_str(), tensor.rank, tensor.full.dtype.c_str(), ListText(tensor.full.shape).c_str(),
                 rank, known, ListText(shape).c_str());
  if (at == nullptr) {
    tensor.full.parts.push_back({rank, object, std::move(layout)});
  } else if (at->starts_with(prefix_)) {
    const std::string other = WithoutPart(*at).substr(prefix_.size());
    if (other != name) tensor.tied_to = other;
  }
  return OkStatus();
}

std::string ModelIndex::ModelNames() const {
  std::vector<std::string> names;
  for (const Tensor& tensor : tensors_) {
    if (names.size() > kNamesToldMax) break;
    std::string first = tensor.full.name.substr(0, tensor.full.name.find('.'));
    if (std::find(names.begin(), names.end(), first) == names.end()) names.push_back(std::move(first));
  }
  std::string text;
  for (size_t i = 0; i < names.size() && i < kNamesToldMax; ++i) text += (i == 0 ? "" : ", ") + names[i];
  return names.size() > kNamesToldMax ? text + ", …" : text;
}

Result<size_t> ModelIndex::SourceOf(size_t i, std::vector<size_t>* sources) const {
  std::vector<size_t> way;
  size_t source = i;
  while ((*sources)[source] == kUnknown && !tensors_[source].tied_to.empty()) {
    (*sources)[source] = kOnTheWay;
    way.push_back(source);
    const auto found = by_name_.find(tensors_[source].tied_to);
    if (found == by_name_.end())
      return Error(Code::kNotFound, "%s has the memory of %s, which no rank saved",
                   tensors_[i].full.name.c_str(), tensors_[source].tied_to.c_str());
    source = found->second;
  }
  if ((*sources)[source] == kOnTheWay)
    return Error(Code::kCorrupt, "%s has the memory of %s, which has that of another, and so on in a circle",
                 tensors_[i].full.name.c_str(), tensors_[i].tied_to.c_str());
  if ((*sources)[source] != kUnknown) source = (*sources)[source];
  (*sources)[source] = source;
  for (const size_t passed : way) (*sources)[passed] = source;
  return source;
}

Result<ModelTensors> ModelIndex::Take(const std::string& model) {
  const std::string prefix = model.empty() ? "" : model + ".";
  ModelTensors taken;
  std::unordered_map<size_t, std::string>
      names;  // by the index of the tensor that has the bytes: the name under which it is written
  std::vector<size_t> sources(tensors_.size(), kUnknown);
  bool any = false;
  for (const Tensor& tensor : tensors_) {
    if (!tensor.full.name.starts_with(prefix)) continue;
    any = true;
    const std::string name = tensor.full.name.substr(prefix.size());
    const Result<size_t> source = SourceOf(by_name_.at(tensor.full.name), &sources);
    if (!source.ok()) return source.status();
    const auto [other, fresh] = names.try_emplace(*source, name);
    if (!fresh) {
      taken.tied.emplace_back(name, other->second);
      continue;
    }
    FullTensor full = tensors_[*source].full;
    full.name = name;
    std::vector<Box> left = BoxesOf(Whole(full.shape));
    std::erase_if(full.parts, [&](const TensorPart& part) { return !Cover(part.layout, &left); });
    ROPETEAM_RETURN_IF_ERROR(CheckLeft(full, left));
    taken.tensors.push_back(std::move(full));
  }
  if (!any && !model.empty())
    return Error(Code::kNotFound, "there is no model %s: names of the step's models begin with %s",
                 model.c_str(), ModelNames().c_str());
  for (const std::string& name : values_)
    if (name.starts_with(prefix)) taken.left_out.push_back(name.substr(prefix.size()));
  return taken;
}

PartPlace::PartPlace(const std::vector<uint64_t>& shape, const PartLayout& layout, uint64_t item_bytes) {
  size_t count = shape.size();
  uint64_t stride = item_bytes;
  const auto whole = [&](size_t i) { return layout[i] == IndexRuns{{0, shape[i]}}; };
  while (count > 1 && whole(count - 1)) stride *= shape[--count];
  bytes_ = stride;
  dimensions_.resize(count);
  for (size_t i = count; i-- > 0;) {
    uint64_t size = 0;
    for (const auto& [start, length] : layout[i]) size += length;
    dimensions_[i] = {layout[i], size, stride};
    bytes_ *= size;
    stride *= shape[i];
  }
  if (dimensions_.empty()) dimensions_.push_back({{{0, 1}}, 1, item_bytes});  // a tensor without dimensions
}

uint64_t PartPlace::IndexAt(const Dimension& dimension, uint64_t at, uint64_t* left) {
  for (const auto& [start, length] : dimension.runs) {
    if (at < length) {
      *left = length - at;
      return start + at;
    }
    at -= length;
  }
  ROPETEAM_CHECK(false);
  return 0;
}

PartPlace::Run PartPlace::At(uint64_t offset) const {
  ROPETEAM_CHECK(offset < bytes_);
  const Dimension& last = dimensions_.back();
  uint64_t at = offset / last.stride;
  const uint64_t within = offset % last.stride;
  uint64_t left = 0;
  Run run;
  run.offset = IndexAt(last, at % last.size, &left) * last.stride + within;
  run.length = left * last.stride - within;
  at /= last.size;
  for (size_t i = dimensions_.size() - 1; i-- > 0; at /= dimensions_[i].size)
    run.offset += IndexAt(dimensions_[i], at % dimensions_[i].size, &left) * dimensions_[i].stride;
  return run;
}

std::vector<std::vector<size_t>> SplitIntoFiles(const std::vector<FullTensor>& tensors, uint64_t bytes_max) {
  std::vector<std::vector<size_t>> files(1);
  uint64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (!files.back().empty() && tensors[i].bytes > bytes_max - std::min(bytes, bytes_max)) {
      files.emplace_back();
      bytes = 0;
    }
    files.back().push_back(i);
    bytes += tensors[i].bytes;
  }
  return files;
}

}  // namespace ropeteam::cli
