// SPDX-License-Identifier: Apache-2.0
//
// A model's whole tensors out of what the ranks of a step saved of it: which parts there are by the ranks' indexes
// (api/python/ropeteam/_values.py), which tensors are missing a part, and where a part's bytes go. No I/O.

#ifndef ROPETEAM_API_CLI_HF_TENSORS_H_
#define ROPETEAM_API_CLI_HF_TENSORS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::cli {

// Names of a model's objects begin with this.
inline constexpr std::string_view kModelPrefix = "model/";
// Objects whose names begin with this are files of a Hugging Face directory, such as hf/config.json.
inline constexpr std::string_view kHfFilePrefix = "hf/";

// The indexes in one dimension: (start, length) of runs of neighbours, in the order in which the part has them.
using IndexRuns = std::vector<std::pair<uint64_t, uint64_t>>;
// A part of a tensor: the product of one set of indexes for each dimension.
using PartLayout = std::vector<IndexRuns>;

// An object that one rank saved.
struct TensorPart {
  uint32_t rank = 0;
  std::string object;
  PartLayout layout;
};

struct FullTensor {
  std::string name;   // in the step, without the prefix
  std::string dtype;  // as safetensors names it: "BF16"
  std::vector<uint64_t> shape;
  uint64_t bytes = 0;
  std::vector<TensorPart> parts;  // by rank, ascending; of parts of the same place the lowest rank's
};

struct ModelTensors {
  std::vector<FullTensor> tensors;                        // in the order of the model's state
  std::vector<std::pair<std::string, std::string>> tied;  // left out, and the tensor that has the same memory
  std::vector<std::string> left_out;                      // of the model's state, no tensors
};

// Collects what the ranks had below `prefix`: kModelPrefix, or that of other weights with the same names.
class ModelIndex {
 public:
  explicit ModelIndex(std::string prefix = std::string(kModelPrefix)) : prefix_(std::move(prefix)) {}

  // What the index object of `rank` says; empty where it saved none. Ranks in ascending order from 0; `world_size` ranks
  // saved the step. kCorrupt: not an index, or a layout outside of its tensor. kUnsupported: another version; a dtype that
  // safetensors does not have. kInvalidArgument: two ranks have other dtypes or shapes under one name.
  Status Add(uint32_t rank, uint32_t world_size, std::string_view index);

  // The tensors of the model that was saved as `model`; empty: all. Their names are without that of the model.
  // kNotFound: there is no such model, or a part of a tensor, which is named, was saved by no rank. kCorrupt: tensors are
  // tied in a circle. Takes linear time, whatever is tied to what.
  Result<ModelTensors> Take(const std::string& model);

 private:
  struct Tensor {
    FullTensor full;
    uint32_t rank = 0;    // which told its dtype and shape
    std::string tied_to;  // a name without the prefix; empty: not tied
  };
  Status AddTensor(uint32_t rank, const std::string& object, std::string dtype, std::vector<uint64_t> shape,
                   PartLayout layout, const std::string* at);
  std::string ModelNames() const;
  // Index of the tensor whose bytes tensor `i` has. `sources` has it for all tensors that were asked for and for those
  // on their ways, and starts as tensors_.size() values of kUnknown.
  Result<size_t> SourceOf(size_t i, std::vector<size_t>* sources) const;

  std::string prefix_;
  std::vector<Tensor> tensors_;                      // in the order in which they were told
  std::unordered_map<std::string, size_t> by_name_;  // in tensors_
  std::vector<std::string> values_;                  // no tensors
  std::unordered_set<std::string> known_values_;     // the same
};

// Where the bytes of one part lie in its tensor.
class PartPlace {
 public:
  // `layout` lies inside `shape`.
  PartPlace(const std::vector<uint64_t>& shape, const PartLayout& layout, uint64_t item_bytes);

  uint64_t bytes() const { return bytes_; }
  struct Run {
    uint64_t offset = 0;  // in the tensor
    uint64_t length = 0;
  };
  // A run of neighbours in both that begins at byte `offset` of the part, which is below bytes().
  Run At(uint64_t offset) const;

 private:
  struct Dimension {
    IndexRuns runs;
    uint64_t size = 0;    // of the part
    uint64_t stride = 0;  // bytes between two indexes, in the tensor
  };
  // The tensor's index at place `at` of the part; `left` gets how many follow it without a gap, itself among them.
  static uint64_t IndexAt(const Dimension& dimension, uint64_t at, uint64_t* left);

  std::vector<Dimension> dimensions_;  // up to the last one that the part does not have whole
  uint64_t bytes_ = 0;
};

// Which tensors go into which file: in their order, so that none is larger than `bytes_max` unless it has one tensor only.
// Indexes in `tensors`; at least one file.
std::vector<std::vector<size_t>> SplitIntoFiles(const std::vector<FullTensor>& tensors, uint64_t bytes_max);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_HF_TENSORS_H_
