// SPDX-License-Identifier: Apache-2.0
//
// `ropeteam plan`: its figures, compared with all subsets of small clusters, and its output.

#include "api/cli/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <nlohmann/json.hpp>

#include "api/cli/commands.h"
#include "core/engine/placement.h"

namespace ropeteam::cli {
namespace {

using ::testing::HasSubstr;

struct Exact {
  std::vector<double> probability;  // that memory recovers, by number of lost nodes
  uint64_t losing_sets = 0;         // the smallest ones
};

// Tries the loss of every subset of nodes on the placement itself.
Exact Enumerate(uint32_t nodes, uint32_t replicas, const std::vector<uint32_t>& domains) {
  View view;
  for (uint32_t i = 0; i < nodes; ++i) view.members.emplace_back().id = i + 1;
  uint32_t next = 0;
  for (const uint32_t size : domains)
    for (const uint32_t first = next; next < first + size; ++next)
      view.members[next].domain = "d" + std::to_string(first);
  const Placement placement(view);
  std::vector<uint32_t> copies;  // per node, as bits
  for (uint32_t i = 0; i < nodes; ++i) {
    copies.push_back(1u << i);
    for (uint32_t j = 0; j < replicas; ++j) copies[i] |= 1u << (placement.HoldersOf(i + 1, replicas)[j] - 1);
  }
  std::vector<double> all(nodes + 1), recovered(nodes + 1);
  for (uint32_t lost = 0; lost < 1u << nodes; ++lost) {
    const auto k = static_cast<size_t>(std::popcount(lost));
    ++all[k];
    recovered[k] +=
        std::none_of(copies.begin(), copies.end(), [&](uint32_t set) { return (set & ~lost) == 0; });
  }
  Exact exact;
  exact.losing_sets = static_cast<uint64_t>(all[replicas + 1] - recovered[replicas + 1]);
  for (uint32_t k = 0; k <= nodes; ++k) exact.probability.push_back(recovered[k] / all[k]);
  return exact;
}

TEST(Plan, TheFormulaHasThePapersFigures) {
  // Gemini, SOSP'23: 16 machines, two copies.
  EXPECT_NEAR(GeminiProbability(16, 1, 2), 0.933, 0.0005);
  EXPECT_NEAR(GeminiProbability(16, 1, 3), 0.800, 0.0005);
  EXPECT_EQ(GeminiProbability(16, 1, 1), 1);
  EXPECT_EQ(GeminiProbability(16, 1, 16), 0);
  EXPECT_EQ(GeminiProbability(1, 0, 1), 0);
}

TEST(Plan, TheFormulaIsExactUntilTwoSetsCanBeLostAndALowerBoundBeyond) {
  for (uint32_t nodes = 1; nodes <= 13; ++nodes) {
    for (uint32_t replicas = 0; replicas < std::min(nodes, 4u); ++replicas) {
      const uint32_t copies = replicas + 1;
      const Exact exact = Enumerate(nodes, replicas, {});
      for (uint32_t k = 0; k <= nodes; ++k) {
        const double formula = GeminiProbability(nodes, replicas, k);
        const bool alone = k <= (nodes % copies == 0 ? 2 * copies - 1 : copies);
        EXPECT_LE(formula, exact.probability[k] + 1e-12);
        EXPECT_NEAR(formula, exact.probability[k], alone ? 1e-12 : 1)
            << nodes << " nodes, " << replicas << " replicas, " << k << " lost";
      }
    }
  }
}

TEST(Plan, MonteCarloAgreesWithEnumerationOnThePlacementThatRuns) {
  // By Hoeffding's inequality a correct estimate is off by more than this with a probability of 1e-9. There
  // are fewer than 300 estimates.
  constexpr uint64_t kSamples = 40'000;
  const double bound = std::sqrt(std::log(2 / 1e-9) / (2.0 * kSamples));
  const std::vector<std::vector<uint32_t>> clusters = {{},      {6, 6},       {8, 2, 2},
                                                       {11, 1}, {3, 3, 3, 3}, {5, 4, 3}};
  for (const auto& domains : clusters) {
    for (uint32_t replicas = 0; replicas <= 3; ++replicas) {
      const Exact exact = Enumerate(12, replicas, domains);
      PlacedCopies copies(12, replicas, domains);
      EXPECT_EQ(copies.losing_sets(), exact.losing_sets);
      const std::vector<uint64_t> recovered = CountRecovered(&copies, 12, 12, kSamples, 7);
      for (uint32_t k = 0; k <= 12; ++k)
        EXPECT_NEAR(static_cast<double>(recovered[k]) / kSamples, exact.probability[k], bound)
            << domains.size() << " domains, " << replicas << " replicas, " << k << " lost";
    }
  }
}

TEST(Plan, ADomainThatIsLostWholeIsSurvivedWhereACopyIsOutside) {
  EXPECT_EQ(PlacedCopies(12, 1, {6, 6}).domains_survived(), 2u);
  EXPECT_EQ(PlacedCopies(12, 2, {10, 1, 1}).domains_survived(), 3u);
  EXPECT_EQ(PlacedCopies(12, 0, {6, 6}).domains_survived(), 0u);
  EXPECT_EQ(PlacedCopies(12, 3, {12}).domains_survived(), 0u);
  // The small domain holds the large one's copies, besides its own share.
  EXPECT_EQ(PlacedCopies(12, 1, {}).held_max(), 1u);
  EXPECT_GE(PlacedCopies(12, 1, {11, 1}).held_max(), 10u);
}

TEST(Plan, MemoryTimesAndMeanTimeToLossFollowFromTheInput) {
  PlanInput input;
  input.nodes = 64;
  input.failures = 2;
  input.shard_bytes = 10'000'000'000;
  input.link_bytes_per_s = 1e10;
  input.mtbf_s = 100 * 86400;
  const Plan plan = MakePlan(input);
  EXPECT_DOUBLE_EQ(plan.memory_bytes, 6e10);  // (2 + 1) steps, (1 + 1) copies
  EXPECT_DOUBLE_EQ(plan.memory_spare_bytes, 6e10 * 64 / 63);
  EXPECT_DOUBLE_EQ(plan.detect_silence_s, 1);
  EXPECT_DOUBLE_EQ(plan.detect_reset_s, 0.25);
  EXPECT_DOUBLE_EQ(plan.restore_s, 1);
  EXPECT_DOUBLE_EQ(plan.restore_all_s, 1);  // one copy per node
  EXPECT_DOUBLE_EQ(plan.redundancy_s, 5);   // detection, two steps of its own shard and of the held one
  // 32 pairs; a pair is lost if one node fails within 5 s of the other.
  EXPECT_NEAR(plan.loss_s, 8.64e6 * 8.64e6 / (64 * 5), 1e-6 * plan.loss_s);
  input.replicas = 0;
  EXPECT_DOUBLE_EQ(MakePlan(input).loss_s, 8.64e6 / 64);
}

// The command's output; `code` gets its exit code.
std::string Print(const std::vector<std::string>& arguments, int* code, bool errors = false) {
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  *code = PlanCommand(arguments);
  const std::string out = testing::internal::GetCapturedStdout();
  const std::string err = testing::internal::GetCapturedStderr();
  return errors ? err : out;
}

TEST(PlanCommand, PrintsTheSameFiguresAsTextAndAsJsonAndAgainForTheSameSeed) {
  const std::vector<std::string> arguments = {"--nodes", "16",      "--failures=3", "--domains",
                                              "8,8",     "--shard", "8G",           "--link",
                                              "100Gb",   "--mtbf",  "90d"};
  int code = -1;
  const std::string text = Print(arguments, &code);
  EXPECT_EQ(code, 0);
  EXPECT_THAT(text, HasSubstr("when one is lost whole: 2 of 2"));
  EXPECT_THAT(text, HasSubstr("memory       48.0 GiB a node: 3 steps x 2 copies x 8.0 GiB"));
  EXPECT_THAT(text, HasSubstr("0.933333"));
  EXPECT_EQ(Print(arguments, &code), text);
  auto as_json = arguments;
  as_json.push_back("--json");
  const nlohmann::json json = nlohmann::json::parse(Print(as_json, &code))["plan"];
  const nlohmann::json& three = json["rows"].at(2);
  EXPECT_NEAR(three["formula"], 0.8, 1e-12);
  EXPECT_LT(three["low"], 0.8);
  EXPECT_GT(three["high"], 0.8);
  EXPECT_NEAR(json["restore_s"], 8.589934592 / 12.5, 1e-9);
  as_json.push_back("--seed=2");
  EXPECT_NE(nlohmann::json::parse(Print(as_json, &code))["plan"]["rows"], json["rows"]);
}

TEST(PlanCommand, DrawsABarForEachNumberOfReplicasThatTheNodesAllow) {
  int code = -1;
  const std::string text = Print({"--nodes=3", "--failures=3", "--plot"}, &code);
  EXPECT_EQ(code, 0);
  EXPECT_THAT(text, HasSubstr("NODES LOST  R = 1                     R = 2\n"));
  EXPECT_THAT(text, HasSubstr("2  ................   0.0 %  ################ 100.0 %\n"));
}

TEST(PlanCommand, AWrongArgumentIsNamedWithItsValueAndLimit) {
  const std::vector<std::pair<std::vector<std::string>, std::string>> wrong = {
      {{}, "--nodes is required"},
      {{"--nodes", "0"}, "--nodes: Value 0 not in range 1 to 16384"},
      {{"--nodes", "x"}, "--nodes: Value x not in range 1 to 16384"},
      {{"--nodes=4", "--replicas=9"}, "--replicas: Value 9 not in range 0 to 8"},
      {{"--nodes=4", "--replicas=4"}, "--replicas 4 must be below --nodes 4"},
      {{"--nodes=4", "--failures=5"}, "--failures 5 is over --nodes 4"},
      {{"--nodes=4", "--domains=5"}, "--domains needs 5 nodes, --nodes is 4"},
      {{"--nodes=4", "--domains=2,3"}, "--domains needs 5 nodes, --nodes is 4"},
      {{"--nodes=4", "--shard=1.5G"}, "--shard \"1.5G\" is not a size"},
      {{"--nodes=4", "--shard=1G", "--link=10G"},
       "--link \"10G\" is not bits per second from 1Gb to 100000Gb"},
      {{"--nodes=4", "--link=10Gb"}, "--link needs --shard"},
      {{"--nodes=4", "--mtbf=90d"}, "--mtbf needs --shard and --link"},
      {{"--nodes=4", "--mtbf=90"}, "--mtbf \"90\" is not a duration"},
      {{"--nodes=4", "--samples=10000001"}, "--samples: Value 10000001 not in range 1 to 10000000"},
      {{"--nodes=4", "--plot", "--json"}, "--json excludes --plot"},
      {{"--nodes=4", "--what"}, "not expected: --what"}};
  for (const auto& [arguments, message] : wrong) {
    int code = -1;
    EXPECT_THAT(Print(arguments, &code, true), HasSubstr(message));
    EXPECT_EQ(code, 2) << message;
  }
}

}  // namespace
}  // namespace ropeteam::cli
