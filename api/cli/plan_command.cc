// SPDX-License-Identifier: Apache-2.0
//
// ropeteam plan: its options and its output.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "api/cli/commands.h"
#include "api/cli/plan.h"
#include "api/cli/storage_progress.h"
#include "api/cli/text.h"
#include "core/base/sizes.h"
#include "core/base/view.h"
#include "storage/retention/retention.h"

namespace ropeteam::cli {

// --json has the fields of plan.h.
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PlanRow, failures, formula, measured, low, high)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PlanInput, nodes, replicas, failures, keep_steps, dead_after_ms, domains,
                                   shard_bytes, link_bytes_per_s, mtbf_s, samples, seed)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(Plan, rows, losing_sets, losing_sets_gemini, held_max, domains_survived,
                                   memory_bytes, memory_spare_bytes, detect_reset_s, detect_silence_s,
                                   restore_s, restore_all_s, redundancy_s, loss_s)

namespace {

constexpr uint64_t kSamplesMax = 10'000'000;            // gives a 95 % interval of 0.06 points
constexpr uint64_t kShardBytesMax = uint64_t{1} << 50;  // 1 PiB: no node has such memory
constexpr uint64_t kLinkGbMax = 100'000;                // a node has 3,200 today
constexpr size_t kRowsShownMax = 20;                    // on the screen; --json has all rows

struct Texts {
  std::string shard, link, mtbf;
  std::vector<uint32_t> domains;
  bool json = false;
  bool plot = false;
};

void Declare(CLI::App& app, PlanInput& input, Texts& texts) {
  const auto count = [&app](const char* name, auto& value, uint64_t low, uint64_t high, const char* what) {
    return app.add_option(name, value, what)->check(CLI::Range(low, high));
  };
  count("--nodes", input.nodes, 1, kNodesMax, "nodes of the job")->required();
  count("--replicas", input.replicas, 0, kReplicasMax,
        "verified copies on other nodes [1; 0 with --nodes 1]");
  count("--failures", input.failures, 1, kNodesMax, "show 1 to so many nodes lost together [--replicas + 1]");
  count("--domains", texts.domains, 1, kNodesMax,
        "so many failure domains of equal size; or the number of nodes of each: 8,8,4 [unknown]")
      ->delimiter(',');
  app.add_option("--shard", texts.shard,
                 "what a node's ranks save at a step, 24G: memory and, with --link, times");
  app.add_option("--link", texts.link, "what a node's network carries, 25Gb or 400Gb (bits per second)");
  app.add_option("--mtbf", texts.mtbf,
                 "mean time between failures of a node, 26w or 365d: mean time to loss");
  count("--keep-steps", input.keep_steps, 1, kKeepStepsMax, "committed steps that are kept [2]");
  count("--dead-after-ms", input.dead_after_ms, kDeadAfterMsMin, kDeadAfterMsMax,
        "silence after which a node is declared dead [1000]");
  count("--samples", input.samples, 1, kSamplesMax, "draws of the Monte Carlo [100000]");
  app.add_option("--seed", input.seed, "of its random numbers [1]");
  auto* json = app.add_flag("--json", texts.json, "as JSON");
  app.add_flag("--plot", texts.plot, "draw the Monte Carlo for 1, 2, 3 and R replicas")->excludes(json);
}

Status TakeTexts(const Texts& texts, PlanInput* input) {
  if (!texts.shard.empty() && (!ParseSize(texts.shard, &input->shard_bytes) || input->shard_bytes == 0 ||
                               input->shard_bytes > kShardBytesMax))
    return Error(Code::kInvalidArgument, "--shard \"%.80s\" is not a size such as 512M or 24G, up to 1024T",
                 texts.shard.c_str());
  if (!texts.link.empty()) {
    uint64_t gigabits = 0;
    if (!texts.link.ends_with("Gb") ||
        !CLI::detail::lexical_cast(texts.link.substr(0, texts.link.size() - 2), gigabits) || gigabits == 0 ||
        gigabits > kLinkGbMax)
      return Error(Code::kInvalidArgument, "--link \"%.80s\" is not bits per second from 1Gb to %lluGb",
                   texts.link.c_str(), static_cast<unsigned long long>(kLinkGbMax));
    input->link_bytes_per_s = static_cast<double>(gigabits) * 1e9 / 8;
  }
  if (!texts.mtbf.empty()) {
    const Result<uint64_t> seconds = storage::ParseDuration(texts.mtbf);
    if (!seconds.ok()) return Error(Code::kInvalidArgument, "--mtbf %s", seconds.status().message().c_str());
    input->mtbf_s = static_cast<double>(*seconds);
  }
  input->domains = texts.domains;
  if (texts.domains.size() == 1 && texts.domains[0] <= input->nodes) {
    const uint32_t domains = texts.domains[0];
    input->domains.assign(domains, input->nodes / domains);
    for (uint32_t i = 0; i < input->nodes % domains; ++i) ++input->domains[i];
  }
  return OkStatus();
}

Status CheckWhole(const PlanInput& input) {
  if (input.replicas >= input.nodes)
    return Error(Code::kInvalidArgument, "--replicas %u must be below --nodes %u: a copy is on another node",
                 input.replicas, input.nodes);
  if (input.failures > input.nodes)
    return Error(Code::kInvalidArgument, "--failures %u is over --nodes %u", input.failures, input.nodes);
  const uint64_t sum = std::accumulate(input.domains.begin(), input.domains.end(), uint64_t{0});
  if (!input.domains.empty() && sum != input.nodes)
    return Error(Code::kInvalidArgument, "--domains needs %llu nodes, --nodes is %u",
                 static_cast<unsigned long long>(sum), input.nodes);
  if (input.link_bytes_per_s != 0 && input.shard_bytes == 0)
    return Error(Code::kInvalidArgument, "--link needs --shard: times depend on both");
  if (input.mtbf_s != 0 && input.link_bytes_per_s == 0 && input.replicas != 0)
    return Error(Code::kInvalidArgument,
                 "--mtbf needs --shard and --link: they say how long copies are missing after a failure");
  return OkStatus();
}

std::string Number(const char* format, double value) {
  char text[64];
  std::snprintf(text, sizeof(text), format, value);
  return text;
}

std::string TimeText(double seconds) {
  constexpr double kDay = 86400, kYear = 365.25 * kDay;
  if (seconds < 60) return Number("%.2f s", seconds);
  if (seconds < 2 * kDay) return DurationText(seconds);
  return seconds < 2 * kYear ? Number("%.0f days", seconds / kDay) : Number("%.1f years", seconds / kYear);
}

// Chooses at most kRowsShownMax rows, evenly spaced, including the last one.
std::vector<size_t> Shown(size_t rows) {
  std::vector<size_t> shown;
  const size_t stride = (rows + kRowsShownMax - 1) / kRowsShownMax;
  for (size_t i = (rows - 1) % stride; i < rows; i += stride) shown.push_back(i);
  return shown;
}

std::string Plot(const PlanInput& input) {
  constexpr double kBarColumns = 16;
  std::vector<std::string> headers = {"NODES LOST"};
  std::vector<std::vector<PlanRow>> curves;
  for (const uint32_t replicas : std::set<uint32_t>{1, 2, 3, input.replicas}) {
    if (replicas >= input.nodes) continue;
    PlanInput one = input;
    one.replicas = replicas;
    curves.push_back(MakePlan(one).rows);
    headers.push_back("<R = " + std::to_string(replicas));
  }
  Table table(headers);
  for (const size_t i : Shown(input.failures)) {
    std::vector<std::string> cells = {std::to_string(i + 1)};
    for (const auto& rows : curves) {
      std::string bar(static_cast<size_t>(rows[i].measured * kBarColumns + 0.5), '#');
      bar.resize(static_cast<size_t>(kBarColumns), '.');
      cells.push_back(bar + Number(" %5.1f %%", rows[i].measured * 100));
    }
    table.Add(std::move(cells));
  }
  return table.Render() + "\n";
}

std::string Render(const PlanInput& input, const Plan& plan, bool plot) {
  std::string text = "losing sets  " + std::to_string(plan.losing_sets) + " of " +
                     std::to_string(input.replicas + 1) + " nodes each (without domains " +
                     std::to_string(plan.losing_sets_gemini) + ")\n";
  if (!input.domains.empty())
    text += "domains      memory recovers when one is lost whole: " + std::to_string(plan.domains_survived) +
            " of " + std::to_string(input.domains.size()) + "\n";
  Table table({"NODES LOST", "FORMULA", "MONTE CARLO", "<95 %"});
  for (const size_t i : Shown(plan.rows.size())) {
    const PlanRow& row = plan.rows[i];
    table.Add({std::to_string(row.failures), Number("%.6f", row.formula), Number("%.6f", row.measured),
               Number("%.6f", row.low) + " to " + Number("%.6f", row.high)});
  }
  text += "\n" + table.Render() + "\n" + (plot ? Plot(input) : "");
  if (plan.memory_bytes != 0)
    text += "memory       " + FormatSize(plan.memory_bytes) +
            " a node: " + std::to_string(input.keep_steps + 1) + " steps x " +
            std::to_string(1 + plan.held_max) + " copies x " + FormatSize(input.shard_bytes) +
            "; while a node is missing " + FormatSize(plan.memory_spare_bytes) + "\n";
  text += "detection    " + TimeText(plan.detect_reset_s) + " at most where the host resets connections, " +
          TimeText(plan.detect_silence_s) + " where it is silent\n";
  if (plan.restore_s != 0)
    text += "recovery     " + TimeText(plan.restore_s) +
            " to bring a lost node's shards to its replacement; of " + std::to_string(input.failures) +
            " nodes " + TimeText(plan.restore_all_s) + " at most\nredundancy   all copies are there again " +
            TimeText(plan.redundancy_s) + " after a node fell silent\n";
  if (plan.loss_s != 0)
    text += "loss         every " + TimeText(plan.loss_s) + " on average, where nodes fail independently\n";
  return text;
}

}  // namespace

int PlanCommand(const std::vector<std::string>& arguments) {
  CLI::App app("What a job survives from memory alone, needs and waits for.", "ropeteam plan");
  PlanInput input;
  Texts texts;
  Declare(app, input, texts);
  Status status;
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // in reverse order
  } catch (const CLI::CallForHelp&) {
    std::fputs(app.help().c_str(), stdout);
    return 0;
  } catch (const CLI::ParseError& error) {
    status = Error(Code::kInvalidArgument, "%s", error.what());
  }
  if (app.count("--replicas") == 0 && input.nodes == 1) input.replicas = 0;
  if (app.count("--failures") == 0) input.failures = std::min(input.replicas + 1, input.nodes);
  if (status.ok()) status = TakeTexts(texts, &input);
  if (status.ok()) status = CheckWhole(input);
  if (!status.ok()) {
    std::fprintf(stderr, "ropeteam plan: %s (ropeteam plan --help)\n", status.message().c_str());
    return kExitUsage;
  }
  const Plan plan = MakePlan(input);
  const std::string text = texts.json ? nlohmann::json{{"input", input}, {"plan", plan}}.dump(2) + "\n"
                                      : Render(input, plan, texts.plot);
  std::fputs(text.c_str(), stdout);
  return 0;
}

}  // namespace ropeteam::cli
