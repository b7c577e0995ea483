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
std::string RenderList(const nlohmann::json& list);
std::string RenderVerify(const nlohmann::json& verify);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_STATUS_TEXT_H_
