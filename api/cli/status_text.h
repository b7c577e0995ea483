// SPDX-License-Identifier: Apache-2.0
//
// A daemon's answers (node/status_json.h) as text for people. Throws nlohmann::json::exception when a key is
// missing: the callers say so. Pure.

#ifndef ROPETEAM_API_CLI_STATUS_TEXT_H_
#define ROPETEAM_API_CLI_STATUS_TEXT_H_

#include <nlohmann/json.hpp>
#include <string>

namespace ropeteam::cli {

// With `before` (an earlier answer, `seconds` ago) the nodes' table has rates.
std::string RenderStatus(const nlohmann::json& status, const nlohmann::json* before, double seconds);
std::string RenderNode(const nlohmann::json& node);
// Of an answer to `status`: its line about the latest step, and its lines about missing nodes, or nothing.
std::string LatestText(const nlohmann::json& status);
std::string RosterText(const nlohmann::json& status);
std::string RenderList(const nlohmann::json& list);
std::string RenderVerify(const nlohmann::json& verify);

// Which ranks of the verified step have fewer copies than they were saved with, by the answer to `ls` of that step:
// adds "ranks_short" and "missing": [{rank, copies, wanted}…] to `verify`. Cached copies do not count. Without the list
// of copies, which a very large job's answers lack, "ranks_short" is the leader's count and "missing" is empty.
void AddMissingCopies(const nlohmann::json& list, nlohmann::json* verify);

// `text` for a screen of so many rows and columns, drawn over what is there without a flicker: from the upper left
// corner, longer lines cut, what does not fit replaced by its number of lines.
std::string Redraw(const std::string& text, size_t rows, size_t columns);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_STATUS_TEXT_H_
