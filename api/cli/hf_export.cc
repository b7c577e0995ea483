// SPDX-License-Identifier: Apache-2.0
//
// ropeteam export STEP DIR --format hf: writes a step's model as a directory that Hugging Face's
// from_pretrained opens. It first reads the ranks' indexes. Then it writes each part of a tensor to its place
// in the files, rank by rank and block by block, so no tensor is in memory as a whole.

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "api/cli/daemon_arena.h"
#include "api/cli/hf_directory.h"
#include "api/cli/hf_tensors.h"
#include "api/cli/step_source.h"
#include "api/cli/storage_progress.h"
#include "core/base/sizes.h"
#include "storage/format/layout.h"
#include "storage/format/safetensors.h"
#include "storage/sink.h"

namespace ropeteam::cli {
namespace {

constexpr char kConfigName[] = "config.json";
constexpr char kDataName[] = "data";                          // a Checkpointer's plain state
constexpr std::string_view kBestPrefix = "data/extra/best/";  // RopeteamCallback's tensors in it
// All files are open while the export runs. With files of 5 GB, the limit is 2.5 TB.
constexpr size_t kFilesMax = 512;
// For a configuration or a tokenizer's vocabulary. The largest ones in use have some 40 MB.
constexpr uint64_t kSmallFileBytesMax = 256ull << 20;
constexpr uint64_t kIndexBytesMax = 1ull << 30;
constexpr size_t kNamesPrintedMax = 10;

// Whether a file in --config DIR is left out.
bool IsWeights(const std::string& name) {
  for (const char* end : {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx",
                          ".index.json", ".distcp"})
    if (name.ends_with(end)) return true;
  return name.starts_with(".");
}

Result<std::string> ReadSmallFile(const std::filesystem::path& path) {
  std::error_code error;
  const uint64_t bytes = std::filesystem::file_size(path, error);
  if (error) return ErrnoError(error.value(), "--config: read %s", path.c_str());
  if (bytes > kSmallFileBytesMax)
    return Error(Code::kInvalidArgument, "--config: %s has %" PRIu64 " bytes, limit %" PRIu64, path.c_str(),
                 bytes, kSmallFileBytesMax);
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file || text.size() != bytes) return Error(Code::kIo, "--config: cannot read %s", path.c_str());
  return text;
}

std::string Joined(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < kNamesPrintedMax; ++i) text += (i == 0 ? "" : ", ") + names[i];
  return names.size() > kNamesPrintedMax ? text + ", …" : text;
}

class HfExport {
 public:
  HfExport(const StorageOptions& options, std::unique_ptr<StepSource> source)
      : options_(options), source_(std::move(source)) {}

  Status Run() {
    if (options_.hf.best) ROPETEAM_RETURN_IF_ERROR(ChooseBest());
    ROPETEAM_RETURN_IF_ERROR(ReadIndexes());
    ROPETEAM_RETURN_IF_ERROR(ReadGivenFiles());
    Result<ModelTensors> model = index_.Take(options_.hf.model);
    if (!model.ok())
      return Error(model.status().code(), "%s: %s", source_->Text().c_str(),
                   model.status().message().c_str());
    model_ = std::move(*model);
    ROPETEAM_RETURN_IF_ERROR(CheckAll());
    Result<HfDirectory> directory = HfDirectory::Open(options_.destination);
    if (!directory.ok()) return directory.status();
    ROPETEAM_RETURN_IF_ERROR(PlanFiles(&*directory));
    ROPETEAM_RETURN_IF_ERROR(WriteParts(&*directory));
    for (const auto& [name, text] : small_)
      if (name != kConfigName) ROPETEAM_RETURN_IF_ERROR(directory->Put(name, text));
    ROPETEAM_RETURN_IF_ERROR(directory->Put(kConfigName, small_.at(kConfigName)));
    ROPETEAM_RETURN_IF_ERROR(directory->Finish());
    Print();
    return OkStatus();
  }

 private:
  // Takes the best step's weights in place of the step's own (api/python/ropeteam/transformers.py). If the step is the
  // best one, it has them as its own.
  Status ChooseBest() {
    ROPETEAM_RETURN_IF_ERROR(source_->Open(0));
    const std::string step = source_->Text();
    const Result<std::string> text = source_->Read(kDataName, kIndexBytesMax);
    const nlohmann::json data =
        text.ok() ? nlohmann::json::parse(*text, nullptr, false) : nlohmann::json::object();
    const nlohmann::json saved = data.is_object() ? data.value("extra", nlohmann::json()) : nlohmann::json();
    if (!saved.is_object() || !saved.value("best_step", nlohmann::json()).is_number_unsigned())
      return Error(Code::kInvalidArgument,
                   "--best: %s has no best weights: RopeteamCallback saves them where a Trainer has "
                   "load_best_model_at_end",
                   step.c_str());
    const uint64_t best = saved["best_step"];
    if (const auto mesh = saved.find("best_mesh"); mesh != saved.end() && mesh->is_array() && !mesh->empty())
      return Error(
          Code::kUnsupported,
          "--best: the ranks of %s have their parts of the best weights, which fit only their mesh: export "
          "step %" PRIu64 " without --best",
          step.c_str(), best);
    std::printf("the best weights are those of step %" PRIu64 "\n", best);
    if (!saved.value("best", nlohmann::json()).is_null()) index_ = ModelIndex(std::string(kBestPrefix));
    return OkStatus();
  }

  Status ReadIndexes() {
    uint32_t world_size = 1;
    for (uint32_t rank = 0; rank < world_size; ++rank) {
      ROPETEAM_RETURN_IF_ERROR(source_->Open(rank));
      world_size = source_->world_size();
      std::string index;
      for (const SavedObject& object : source_->objects()) {
        const std::string& name = object.name;
        dcp_ = dcp_ || name == ".metadata" || name.ends_with(".distcp");
        if (name == storage::kIndexObjectName) {
          Result<std::string> text = source_->Read(name, kIndexBytesMax);
          if (!text.ok()) return text.status();
          index = std::move(*text);
        } else if (name.starts_with(kHfFilePrefix) && !small_.contains(name.substr(kHfFilePrefix.size()))) {
          ROPETEAM_RETURN_IF_ERROR(ReadSavedFile(name));
        }
      }
      const Status status = index_.Add(rank, world_size, index);
      if (!status.ok())
        return Error(status.code(), "%s: %s", source_->Text().c_str(), status.message().c_str());
    }
    return OkStatus();
  }

  Status ReadSavedFile(const std::string& object) {
    const std::string name = object.substr(kHfFilePrefix.size());
    const Status valid = storage::CheckFileName(name);
    if (!valid.ok() || IsWeights(name))
      return Error(Code::kInvalidArgument, "%s: the object %s cannot be a file of the export%s%s",
                   source_->Text().c_str(), object.c_str(), valid.ok() ? "" : ": ", valid.message().c_str());
    Result<std::string> text = source_->Read(object, kSmallFileBytesMax);
    if (!text.ok()) return text.status();
    small_[name] = std::move(*text);
    return OkStatus();
  }

  // Files of --config replace the step's.
  Status ReadGivenFiles() {
    const std::filesystem::path given = options_.hf.config;
    if (given.empty()) return OkStatus();
    if (!std::filesystem::is_directory(given)) return Take(kConfigName, given);
    std::error_code error;
    for (std::filesystem::directory_iterator each(given, error), end; !error && each != end;
         each.increment(error)) {
      const std::string name = each->path().filename();
      if (each->is_regular_file(error) && !IsWeights(name))
        ROPETEAM_RETURN_IF_ERROR(Take(name, each->path()));
    }
    return error ? ErrnoError(error.value(), "--config: read %s", given.c_str()) : OkStatus();
  }
  Status Take(const std::string& name, const std::filesystem::path& path) {
    Result<std::string> text = ReadSmallFile(path);
    if (!text.ok()) return text.status();
    small_[name] = std::move(*text);
    return OkStatus();
  }

  // Called before anything is written.
  Status CheckAll() const {
    const std::string text = source_->Text();
    if (model_.tensors.empty() && dcp_)
      return Error(
          Code::kInvalidArgument,
          "%s was saved by torch.distributed.checkpoint: export it without --format, then torch makes one "
          "file of it: python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE",
          text.c_str());
    if (model_.tensors.empty())
      return Error(Code::kNotFound,
                   "%s has no model: no rank saved a tensor whose name begins with %s, as save_state() and "
                   "Checkpointer do",
                   text.c_str(), std::string(kModelPrefix).c_str());
    if (!small_.contains(kConfigName))
      return Error(
          Code::kInvalidArgument,
          "%s has no %s%s: give --config FILE or --config DIR (RopeteamCallback saves it with each step)",
          text.c_str(), std::string(kHfFilePrefix).c_str(), kConfigName);
    return OkStatus();
  }

  // Plans the tensors' places and the files' headers. In a file, tensors with larger elements come first, so
  // that each tensor is aligned to its element size.
  Status PlanFiles(HfDirectory* directory) {
    std::vector<std::vector<size_t>> files = SplitIntoFiles(model_.tensors, options_.hf.shard_bytes_max);
    if (files.size() > kFilesMax)
      return Error(Code::kInvalidArgument, "--max-shard-size %s makes %zu files, limit %zu",
                   FormatSize(options_.hf.shard_bytes_max).c_str(), files.size(), kFilesMax);
    nlohmann::ordered_json::object_t weight_map;  // its operator[] compares a name with all before it
    places_.resize(model_.tensors.size());
    for (size_t i = 0; i < files.size(); ++i) {
      char name[64] = "model.safetensors";
      if (files.size() > 1)
        std::snprintf(name, sizeof(name), "model-%05zu-of-%05zu.safetensors", i + 1, files.size());
      for (const size_t tensor : files[i]) weight_map.emplace_back(model_.tensors[tensor].name, name);
      ROPETEAM_RETURN_IF_ERROR(PlanFile(name, std::move(files[i]), directory));
    }
    file_count_ = files.size();
    if (files.size() == 1) return OkStatus();
    const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes_}}}, {"weight_map", weight_map}};
    return directory->Put("model.safetensors.index.json", index.dump(2) + "\n");
  }
  Status PlanFile(const std::string& name, std::vector<size_t> tensors, HfDirectory* directory) {
    const auto item_bytes = [this](size_t tensor) {
      return storage::SafetensorsItemBytes(model_.tensors[tensor].dtype);
    };
    std::stable_sort(tensors.begin(), tensors.end(),
                     [&](size_t a, size_t b) { return item_bytes(a) > item_bytes(b); });
    storage::SafetensorsWriter writer;
    ROPETEAM_RETURN_IF_ERROR(writer.AddMetadata("format", "pt"));  // from_pretrained requires it
    for (const size_t i : tensors) {
      const FullTensor& tensor = model_.tensors[i];
      places_[i].offset = writer.data_bytes();
      ROPETEAM_RETURN_IF_ERROR(writer.AddTensor(tensor.name, tensor.dtype, tensor.shape, tensor.bytes));
    }
    const uint64_t data_bytes = writer.data_bytes();
    const Result<std::string> head = writer.Finish();
    if (!head.ok()) return head.status();
    const Result<size_t> file = directory->Create(name, head->size() + data_bytes);
    if (!file.ok()) return file.status();
    for (const size_t i : tensors) places_[i] = {*file, head->size() + places_[i].offset};
    bytes_ += data_bytes;
    return directory->Write(*file, 0, head->data(), head->size());
  }

  Status WriteParts(HfDirectory* directory) {
    struct Part {
      size_t tensor;
      PartPlace place;
    };
    std::vector<std::vector<std::string>> names(source_->world_size());
    std::vector<std::vector<Part>> parts(source_->world_size());
    for (size_t i = 0; i < model_.tensors.size(); ++i) {
      const FullTensor& tensor = model_.tensors[i];
      const uint64_t item_bytes = storage::SafetensorsItemBytes(tensor.dtype);
      for (const TensorPart& part : tensor.parts) {
        names[part.rank].push_back(part.object);
        parts[part.rank].push_back({i, PartPlace(tensor.shape, part.layout, item_bytes)});
      }
    }
    Progress progress("export " + source_->Text(), bytes_);
    source_->moved = [&](uint64_t bytes) { progress.Add(bytes); };
    for (uint32_t rank = 0; rank < names.size(); ++rank) {
      ROPETEAM_RETURN_IF_ERROR(source_->Open(rank));
      for (size_t i = 0; i < names[rank].size(); ++i)
        ROPETEAM_RETURN_IF_ERROR(source_->CheckLength(names[rank][i], parts[rank][i].place.bytes()));
      ROPETEAM_RETURN_IF_ERROR(source_->ReadAll(
          names[rank], [&](size_t i, uint64_t offset, const std::byte* data, uint64_t length) {
            const Part& part = parts[rank][i];
            const Place& to = places_[part.tensor];
            for (uint64_t at = 0; at < length;) {
              const PartPlace::Run run = part.place.At(offset + at);
              const uint64_t bytes = std::min(run.length, length - at);
              ROPETEAM_RETURN_IF_ERROR(directory->Write(to.file, to.offset + run.offset, data + at, bytes));
              at += bytes;
            }
            return OkStatus();
          }));
    }
    return OkStatus();
  }

  void Print() const {
    std::vector<std::string> tied;
    for (const auto& [name, other] : model_.tied) tied.push_back(name + " (= " + other + ")");
    if (!tied.empty()) std::printf("tied, written once: %s\n", Joined(tied).c_str());
    if (!model_.left_out.empty()) std::printf("no tensors, left out: %s\n", Joined(model_.left_out).c_str());
    std::printf("%s: %zu tensors, %s, in %zu file%s, and %zu small files are in %s\n",
                source_->Text().c_str(), model_.tensors.size(), FormatSize(bytes_).c_str(), file_count_,
                file_count_ == 1 ? "" : "s", small_.size(), options_.destination.c_str());
  }

  struct Place {
    size_t file = 0;
    uint64_t offset = 0;
  };
  const StorageOptions& options_;
  const std::unique_ptr<StepSource> source_;
  ModelIndex index_;
  std::map<std::string, std::string> small_;  // configuration and tokenizer
  bool dcp_ = false;                          // the step has torch.distributed.checkpoint's files
  ModelTensors model_;
  std::vector<Place> places_;  // of the model's tensors
  size_t file_count_ = 0;
  uint64_t bytes_ = 0;
};

}  // namespace

Status ExportHf(const StorageOptions& options) {
  Result<std::unique_ptr<StepSource>> source = OpenStepSource(options);
  if (!source.ok()) return source.status();
  return HfExport(options, std::move(*source)).Run();
}

}  // namespace ropeteam::cli
