// SPDX-License-Identifier: Apache-2.0
#include "api/cli/plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <set>

#include "core/base/check.h"
#include "core/engine/placement.h"

namespace ropeteam::cli {
namespace {

// Groups of m nodes. If m does not divide N, the last m + N mod m nodes form a ring (theorem 1).
uint64_t LosingSets(uint32_t nodes, uint32_t copies) {
  if (nodes % copies == 0) return nodes / copies;
  return nodes / copies - 1 + copies + nodes % copies;
}

PlanRow RowOf(const PlanInput& input, uint32_t failures, uint64_t recovered) {
  constexpr double kZ = 1.959964;  // for 95 %
  const auto n = static_cast<double>(input.samples);
  const double p = static_cast<double>(recovered) / n;
  const double middle = (p + kZ * kZ / (2 * n)) / (1 + kZ * kZ / n);
  const double half = kZ / (1 + kZ * kZ / n) * std::sqrt(p * (1 - p) / n + kZ * kZ / (4 * n * n));
  return {failures, GeminiProbability(input.nodes, input.replicas, failures), p, std::max(0.0, middle - half),
          std::min(1.0, middle + half)};
}

}  // namespace

double GeminiProbability(uint32_t nodes, uint32_t replicas, uint32_t failures) {
  const uint32_t copies = replicas + 1;
  ROPETEAM_CHECK(copies <= nodes && failures <= nodes);
  // C(N - m, k - m) / C(N, k): the probability that k lost nodes include m given ones.
  double lost = static_cast<double>(LosingSets(nodes, copies));
  for (uint32_t i = 0; i < copies; ++i) lost *= failures > i ? double(failures - i) / double(nodes - i) : 0;
  return std::max(0.0, 1 - lost);
}

PlacedCopies::PlacedCopies(uint32_t nodes, uint32_t replicas, const std::vector<uint32_t>& domains)
    : owners_(nodes), lost_(nodes), copies_(replicas + 1) {
  ROPETEAM_CHECK(copies_ <= nodes);
  View view;
  view.members.resize(nodes);
  for (uint32_t i = 0; i < nodes; ++i) view.members[i].id = i + 1;  // 0 is kNoNode
  uint32_t first = 0;
  for (size_t domain = 0; domain < domains.size(); first += domains[domain++])
    for (uint32_t i = 0; i < domains[domain]; ++i)
      view.members[first + i].domain = "d" + std::to_string(domain);
  const Placement placement(view);
  std::set<std::vector<uint32_t>> sets;
  for (uint32_t owner = 0; owner < nodes; ++owner) {
    const Placement::Holders holders = placement.HoldersOf(owner + 1, replicas);
    std::vector<uint32_t> set = {owner};
    for (uint32_t i = 0; i < replicas; ++i) set.push_back(static_cast<uint32_t>(holders[i] - 1));
    for (const uint32_t holder : set) owners_[holder].push_back(owner);
    std::sort(set.begin(), set.end());
    sets.insert(std::move(set));
  }
  losing_sets_ = sets.size();
  for (const auto& owners : owners_)
    held_max_ = std::max(held_max_, static_cast<uint32_t>(owners.size() - 1));
  first = 0;
  for (const uint32_t size : domains) {
    bool recovers = true;
    for (uint32_t i = 0; i < size; ++i) recovers = Lose(first + i) && recovers;
    domains_alone_ += recovers;
    first += size;
    Reset();
  }
}

bool PlacedCopies::Lose(uint32_t node) {
  dead_.push_back(node);
  bool recovers = true;
  for (const uint32_t owner : owners_[node]) recovers = ++lost_[owner] < copies_ && recovers;
  return recovers;
}

void PlacedCopies::Reset() {
  for (const uint32_t node : dead_)
    for (const uint32_t owner : owners_[node]) lost_[owner] = 0;
  dead_.clear();
}

std::vector<uint64_t> CountRecovered(PlacedCopies* copies, uint32_t nodes, uint32_t failures_max,
                                     uint64_t samples, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint32_t> order(nodes);  // any order, also a shuffled one, is a valid start of a draw
  std::iota(order.begin(), order.end(), 0);
  std::vector<uint64_t> recovered(failures_max + 1);
  for (uint64_t sample = 0; sample < samples; ++sample) {
    ++recovered[0];
    for (uint32_t k = 1; k <= failures_max; ++k) {
      // The remainder favours no node by more than 2^-50. Unlike a library's distribution, it is the same
      // everywhere.
      std::swap(order[k - 1], order[k - 1 + random() % (nodes - (k - 1))]);
      if (!copies->Lose(order[k - 1])) break;
      ++recovered[k];
    }
    copies->Reset();
  }
  return recovered;
}

Plan MakePlan(const PlanInput& input) {
  PlacedCopies copies(input.nodes, input.replicas, input.domains);
  Plan plan;
  const std::vector<uint64_t> recovered =
      CountRecovered(&copies, input.nodes, input.failures, input.samples, input.seed);
  for (uint32_t k = 1; k <= input.failures; ++k) plan.rows.push_back(RowOf(input, k, recovered[k]));
  plan.losing_sets = copies.losing_sets();
  plan.losing_sets_gemini = LosingSets(input.nodes, input.replicas + 1);
  plan.held_max = copies.held_max();
  plan.domains_survived = copies.domains_survived();
  plan.detect_reset_s = ProbeMs(input.dead_after_ms) / 1000.0;
  plan.detect_silence_s = input.dead_after_ms / 1000.0;
  // One node's bytes of one step: its own shards and its copies of others'.
  const double step_bytes = static_cast<double>(input.shard_bytes) * (1 + plan.held_max);
  plan.memory_bytes = step_bytes * (input.keep_steps + 1);
  plan.memory_spare_bytes = plan.memory_bytes * (1 + 1.0 / std::max(1u, input.nodes - 1));
  // Node failures per second. Each is counted once for every losing set that contains the node.
  const double rate =
      static_cast<double>(plan.losing_sets) * (input.replicas + 1) / std::max(1.0, input.mtbf_s);
  if (input.mtbf_s != 0 && input.replicas == 0) plan.loss_s = 1 / rate;
  if (input.link_bytes_per_s == 0 || input.replicas == 0) return plan;
  plan.restore_s = static_cast<double>(input.shard_bytes) / input.link_bytes_per_s;
  plan.restore_all_s = plan.restore_s * std::clamp(plan.held_max, 1u, input.failures);
  // The lost node's data are read from the least busy of the R other holders of each shard.
  plan.redundancy_s =
      plan.detect_silence_s + step_bytes * input.keep_steps / (input.replicas * input.link_bytes_per_s);
  if (input.mtbf_s != 0)
    plan.loss_s = 1 / (rate * std::pow(-std::expm1(-plan.redundancy_s / input.mtbf_s), input.replicas));
  return plan;
}

}  // namespace ropeteam::cli
