// SPDX-License-Identifier: Apache-2.0
#include "node/drain.h"

#include <nlohmann/json.hpp>

#include "core/base/sizes.h"

namespace ropeteam {

int DrainExitCode(const DrainReport& report) {
  if (!report.heard || !report.latest_safe) return kExitDrainedUnsafe;
  const bool all = report.done && report.shards_short == 0 && !report.persist_failed;
  return all ? 0 : kExitDrainedPartly;
}

std::string DrainText(const DrainReport& report) {
  if (!report.heard) return "no leader has answered, so it is unknown what can be restored without this node";
  const int code = DrainExitCode(report);
  if (code == 0) return "all that is kept is redundant on other nodes, and what was due is on storage";
  std::string text = code == kExitDrainedUnsafe
                         ? "the newest committed step CANNOT be restored without this node"
                         : "the newest committed step can be restored without this node";
  if (report.shards_left != 0)
    text += ", " + std::to_string(report.shards_left) + " shards lack copies (" +
            FormatSize(report.bytes_left) + (report.no_room ? "; other nodes have no room)" : ")");
  if (report.shards_short != 0)
    text += ", " + std::to_string(report.shards_short) +
            " shards have fewer copies than asked for: too few nodes stay";
  if (report.steps_left != 0)
    text += ", " + std::to_string(report.steps_left) + " steps are not on storage yet";
  if (report.persist_failed) text += ", a step that was due is not on storage (the log says why)";
  return text;
}

std::string DrainJson(const DrainReport& report, bool left) {
  return nlohmann::json{{"left", left},
                        {"heard", report.heard},
                        {"done", report.done},
                        {"shards_left", report.shards_left},
                        {"bytes_left", report.bytes_left},
                        {"bytes_most", report.bytes_most},
                        {"shards_short", report.shards_short},
                        {"steps_left", report.steps_left},
                        {"latest_safe", report.latest_safe},
                        {"no_room", report.no_room},
                        {"exit_code", DrainExitCode(report)},
                        {"text", DrainText(report)}}
      .dump();
}

}  // namespace ropeteam
