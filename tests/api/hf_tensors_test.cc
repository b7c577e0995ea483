// SPDX-License-Identifier: Apache-2.0
#include "api/cli/hf_tensors.h"

#include <gtest/gtest.h>

#include <chrono>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>

namespace ropeteam::cli {
namespace {

std::string Index(const std::string& objects) {
  return R"({"version": 2, "world_size": 2, "objects": {)" + objects + "}}";
}
std::string Entry(const std::string& name, const std::string& more) {
  return '"' + name + R"(": {"kind": "tensor", "dtype": "float32", )" + more + "}";
}

Status AddAll(ModelIndex* index, const std::vector<std::string>& ranks) {
  for (uint32_t rank = 0; rank < ranks.size(); ++rank) {
    const Status status = index->Add(rank, static_cast<uint32_t>(ranks.size()), Index(ranks[rank]));
    if (!status.ok()) return status;
  }
  return OkStatus();
}

// A part of some rows and columns, in runs. Plain arithmetic gives the expected place of each element.
TEST(PartPlace, EveryElementIsWhereItsIndexesSay) {
  std::mt19937 random(1);
  const auto below = [&](uint64_t limit) {
    return std::uniform_int_distribution<uint64_t>(0, limit - 1)(random);
  };
  for (int round = 0; round < 500; ++round) {
    std::vector<uint64_t> shape(1 + below(4));
    PartLayout layout;
    std::vector<std::vector<uint64_t>> indexes;  // per dimension, in the part's order
    for (uint64_t& size : shape) {
      size = 1 + below(6);
      layout.push_back({{0, size}});
      if (below(2) == 0) {
        const uint64_t cut = below(size + 1);
        layout.back() = {{cut, size - cut}};
        if (below(2) == 0) layout.back().emplace_back(0, cut);
      }
      indexes.emplace_back();
      for (const auto& [start, length] : layout.back())
        for (uint64_t i = 0; i < length; ++i) indexes.back().push_back(start + i);
    }
    const uint64_t item = uint64_t{1} << below(4);
    const PartPlace place(shape, layout, item);
    uint64_t count = 1;
    for (const auto& each : indexes) count *= each.size();
    ASSERT_EQ(place.bytes(), count * item);
    for (uint64_t at = 0; at < count; ++at) {
      uint64_t left = at, expected = 0, stride = 1;
      for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) {
        expected += indexes[i][left % indexes[i].size()] * stride;
        left /= indexes[i].size();
      }
      const PartPlace::Run run = place.At(at * item);
      ASSERT_EQ(run.offset, expected * item);
      ASSERT_GE(run.length, item);
      // The elements of the run follow each other.
      for (uint64_t byte = 0; byte < run.length; byte += item)
        ASSERT_EQ(place.At(at * item + byte).offset, expected * item + byte);
    }
  }
  EXPECT_EQ(PartPlace({}, {}, 4).bytes(), 4u);
  EXPECT_EQ(PartPlace({}, {}, 4).At(1).length, 3u);
}

TEST(ModelIndex, PartsOfAllRanksCoverATensorAndReplicasCountOnce) {
  ModelIndex index;
  const std::string quarter = R"("shape": [2, 3], "global": [4, 6], "runs": )";
  ASSERT_TRUE(
      AddAll(&index, {Entry("model/w#0", quarter + "[[0, 2], [0, 3]]") + "," +
                          Entry("model/w#1", quarter + "[[2, 2], [0, 3]]") + "," +
                          Entry("model/b", R"("shape": [3])") + "," + Entry("optimizer/w", R"("shape": [9])"),
                      Entry("model/b", R"("shape": [3])") + "," +
                          Entry("model/w", R"("shape": [4, 3], "global": [4, 6], "runs": [[0, 4], [3, 3]])") +
                          "," + Entry("model/c", R"("shape": [3], "at": [0, "model/b"])")})
          .ok());
  const Result<ModelTensors> model = index.Take("");
  ASSERT_TRUE(model.ok()) << model.status().message();
  ASSERT_EQ(model->tensors.size(), 2u);
  EXPECT_EQ(model->tensors[0].name, "w");
  EXPECT_EQ(model->tensors[0].bytes, 96u);
  EXPECT_EQ(model->tensors[0].parts.size(), 3u);
  ASSERT_EQ(model->tensors[1].parts.size(), 1u) << "each rank has its own, and the lowest one's is taken";
  EXPECT_EQ(model->tensors[1].parts[0].rank, 0u);
  EXPECT_EQ(model->tied, (std::vector<std::pair<std::string, std::string>>{{"c", "b"}}));
}

// An index may come from anybody who writes to the storage. Whatever compares each name with all others, or walks the
// chain from each tensor, takes a hundred times as long as parsing the index.
TEST(ModelIndex, ALongChainOfTiesTakesNoLongerThanItsIndex) {
  using Clock = std::chrono::steady_clock;
  constexpr int kTensors = 30'000;
  std::string objects;
  for (int i = 0; i + 1 < kTensors; ++i)
    objects += Entry("model/t" + std::to_string(i),
                     R"("shape": [1], "at": [0, "model/t)" + std::to_string(i + 1) + R"("])") +
               ", ";
  objects += Entry("model/t" + std::to_string(kTensors - 1), R"("shape": [1])");
  const auto begin = Clock::now();
  ASSERT_TRUE(nlohmann::json::parse(Index(objects)).is_object());
  const auto parsed = Clock::now();
  ModelIndex index;
  ASSERT_TRUE(AddAll(&index, {objects}).ok());
  const Result<ModelTensors> model = index.Take("");
  const auto taken = Clock::now();
  ASSERT_TRUE(model.ok()) << model.status().message();
  ASSERT_EQ(model->tensors.size(), 1u);
  EXPECT_EQ(model->tensors[0].name, "t0");
  EXPECT_EQ(model->tied.size(), kTensors - 1u);
  EXPECT_EQ(model->tied.back().second, "t0");
  EXPECT_LT((taken - parsed).count(), 20 * (parsed - begin).count());
}

TEST(ModelIndex, ACircleOfTiesIsRefused) {
  const auto tied = [](const std::string& name, const std::string& to) {
    return Entry("model/" + name, R"("shape": [1], "at": [0, "model/)" + to + R"("])");
  };
  ModelIndex index;
  ASSERT_TRUE(AddAll(&index, {tied("in", "a") + ", " + tied("a", "b") + ", " + tied("b", "a")}).ok());
  const Result<ModelTensors> model = index.Take("");
  EXPECT_EQ(model.status().code(), Code::kCorrupt);
  EXPECT_NE(model.status().message().find("in has the memory of a"), std::string::npos)
      << model.status().message();
}

TEST(ModelIndex, AHoleIsNamed) {
  ModelIndex index;
  const std::string part = R"("shape": [2, 6], "global": [8, 6], "runs": )";
  ASSERT_TRUE(AddAll(&index, {Entry("model/w", part + "[[0, 2], [0, 6]]"),
                              Entry("model/w", part + "[[6, 2], [0, 6]]")})
                  .ok());
  const Status status = index.Take("").status();
  EXPECT_EQ(status.code(), Code::kNotFound);
  EXPECT_EQ(status.message(),
            "w of shape [8, 6] has a hole: no rank saved what begins at [2, 0], of size [4, 6]");
}

TEST(ModelIndex, RanksThatDifferAreNamed) {
  ModelIndex index;
  const Status status =
      AddAll(&index, {Entry("model/w", R"("shape": [2])"), Entry("model/w", R"("shape": [3])")});
  EXPECT_EQ(status.code(), Code::kInvalidArgument);
  EXPECT_EQ(status.message(), "w: rank 0 saved F32 of shape [2], rank 1 F32 of shape [3]");
}

TEST(ModelIndex, OneOfSeveralModelsIsTakenByItsName) {
  ModelIndex index;
  ASSERT_TRUE(AddAll(&index, {Entry("model/critic.w", R"("shape": [2])") + "," +
                              Entry("model/actor.w", R"("shape": [2], "at": [0, "model/critic.w"])") + "," +
                              Entry("model/actor.head", R"("shape": [4], "at": [0, "model/critic.w"])") +
                              R"(,"model/actor.extra": {"kind": "json"},)" +
                              Entry("model/actor.extra/inner", R"("shape": [5])")})
                  .ok());
  const Result<ModelTensors> model = index.Take("actor");
  ASSERT_TRUE(model.ok()) << model.status().message();
  ASSERT_EQ(model->tensors.size(), 1u) << "a value's own tensors are not the model's";
  EXPECT_EQ(model->tensors[0].name, "w") << "the tensor that has the bytes is of another model";
  EXPECT_EQ(model->tensors[0].parts[0].object, "model/critic.w");
  EXPECT_EQ(model->tied[0].first, "head");
  EXPECT_EQ(model->left_out, std::vector<std::string>{"extra"});
  const Status status = index.Take("teacher").status();
  EXPECT_EQ(status.code(), Code::kNotFound);
  EXPECT_EQ(status.message(),
            "there is no model teacher: names of the step's models begin with critic, actor");
}

TEST(ModelIndex, WhatIsNotAnIndexOrCannotBeWrittenIsRefused) {
  const auto added = [](const std::string& text, uint32_t world_size = 1) {
    ModelIndex index;
    return index.Add(0, world_size, text).code();
  };
  EXPECT_EQ(added(""), Code::kOk);
  EXPECT_EQ(added("{"), Code::kCorrupt);
  EXPECT_EQ(added(R"({"version": 3, "objects": {}})"), Code::kUnsupported);
  EXPECT_EQ(added(R"({"version": 1, "objects": {}})"), Code::kOk);
  EXPECT_EQ(added(R"({"version": 1, "objects": {}})", 2), Code::kUnsupported);
  EXPECT_EQ(added(Index(Entry("model/w", R"("shape": "x")"))), Code::kCorrupt);
  EXPECT_EQ(added(Index(Entry("model/w", R"("shape": [2], "global": [4], "runs": [[3, 2]])"))),
            Code::kCorrupt);
  EXPECT_EQ(added(Index(Entry("model/w", R"("shape": [2], "global": [4], "runs": [[0, 3]])"))),
            Code::kCorrupt);
  EXPECT_EQ(added(Index(Entry("model/w", R"("shape": [18446744073709551615, 9])"))), Code::kUnsupported);
  for (const char* size : {"-1", "1.5", "1e300"})
    EXPECT_EQ(added(Index(Entry("model/w", std::string(R"("shape": [)") + size + "]"))), Code::kCorrupt);
  // The lengths of the runs add up to 2^64 + 1.
  EXPECT_EQ(added(Index(R"("model/w": {"kind": "tensor", "dtype": "int8", "shape": [1], )"
                        R"("global": [9223372036854775808], )"
                        R"("runs": [[0, 9223372036854775808, 0, 9223372036854775808, 0, 1]]})")),
            Code::kCorrupt);
  EXPECT_EQ(added(Index(R"("model/w": {"kind": "tensor", "dtype": "complex64", "shape": [2]})")),
            Code::kUnsupported);
}

TEST(SplitIntoFiles, NoFileIsLargerUnlessItHasOneTensorOnly) {
  const auto sizes = [](std::vector<uint64_t> bytes) {
    std::vector<FullTensor> tensors(bytes.size());
    for (size_t i = 0; i < bytes.size(); ++i) tensors[i].bytes = bytes[i];
    std::vector<size_t> counts;
    for (const auto& file : SplitIntoFiles(tensors, 10)) counts.push_back(file.size());
    return counts;
  };
  EXPECT_EQ(sizes({}), (std::vector<size_t>{0}));
  EXPECT_EQ(sizes({4, 6, 1}), (std::vector<size_t>{2, 1}));
  EXPECT_EQ(sizes({11, 1, 30, 2, 8, 0}), (std::vector<size_t>{1, 1, 1, 3}));
}

}  // namespace
}  // namespace ropeteam::cli
