// SPDX-License-Identifier: Apache-2.0
//
// The indexes of a step's ranks, of which `ropeteam export --format hf` makes whole tensors. Each byte of a part has a place
// inside its tensor.

#include "api/cli/hf_tensors.h"
#include "core/base/check.h"
#include "storage/format/safetensors.h"
#include "tests/fuzz/fuzz.h"

namespace ropeteam::fuzz {
namespace {

// Between the indexes of an input.
constexpr char kSeparator = '\x1e';
// A part may claim any size, so only its first runs are looked at.
constexpr int kRunsMax = 100;

void CheckPart(const cli::FullTensor& tensor, const cli::TensorPart& part) {
  const cli::PartPlace place(tensor.shape, part.layout, storage::SafetensorsItemBytes(tensor.dtype));
  uint64_t at = 0;
  for (int i = 0; i < kRunsMax && at < place.bytes(); ++i) {
    const cli::PartPlace::Run run = place.At(at);
    ROPETEAM_CHECK(run.length > 0 && run.length <= place.bytes() - at);
    ROPETEAM_CHECK(run.offset <= tensor.bytes && run.length <= tensor.bytes - run.offset);
    at += run.length;
  }
}

void RunHfIndex(std::string_view input) {
  std::vector<std::string_view> texts;
  for (; !input.empty(); input.remove_prefix(std::min(texts.back().size() + 1, input.size())))
    texts.push_back(input.substr(0, input.find(kSeparator)));
  cli::ModelIndex index;
  for (uint32_t rank = 0; rank < texts.size(); ++rank)
    if (!index.Add(rank, static_cast<uint32_t>(texts.size()), texts[rank]).ok()) return;
  const Result<cli::ModelTensors> model = index.Take("");
  if (!model.ok()) return;
  for (const cli::FullTensor& tensor : model->tensors)
    for (const cli::TensorPart& part : tensor.parts) CheckPart(tensor, part);
  const auto files = cli::SplitIntoFiles(model->tensors, 100);
  size_t count = 0;
  for (const auto& file : files) count += file.size();
  ROPETEAM_CHECK(count == model->tensors.size());
}

std::vector<std::string> HfIndexSeeds() {
  const auto index = [](const std::string& objects) {
    return R"({"version": 2, "world_size": 2, "objects": {)" + objects + "}}";
  };
  const std::string whole = R"("model/w": {"kind": "tensor", "dtype": "bfloat16", "shape": [2, 3]})";
  const auto part = [](const std::string& runs) {
    return R"("model/v#0": {"kind": "tensor", "dtype": "float32", "shape": [3, 2], "global": [6, 4], "runs": )" +
           runs + "}";
  };
  return {
      R"({"version": 1, "objects": {)" + whole + R"(, "model/x": {"kind": "json"}}})",
      index(
          whole +
          R"(, "model/tied": {"kind": "tensor", "dtype": "bfloat16", "shape": [2, 3], "at": [0, "model/w"]})"),
      index(
          R"("model/v": {"kind": "tensor", "dtype": "float32", "shape": [6, 2], "global": [6, 4], "runs": [[0, 6], [2, 2]]})") +
          kSeparator + index(part("[[0, 1, 2, 2], [0, 2]]")) + kSeparator +
          index(part("[[1, 1, 4, 2], [0, 2]]")),
  };
}

const Target kHfIndex("hf_index", RunHfIndex, HfIndexSeeds);

}  // namespace
}  // namespace ropeteam::fuzz
