// SPDX-License-Identifier: Apache-2.0
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>

#include "api/cli/ask.h"
#include "api/cli/commands.h"
#include "api/cli/status_text.h"
#include "api/cli/text.h"

namespace ropeteam::cli {
namespace {

// For a terminal that does not report its size.
constexpr size_t kRowsDefault = 24;
constexpr size_t kColumnsDefault = 80;

// Limits the wait for a leader if the coordinator does not answer.
constexpr double kLostLeaderSeconds = 2;

constexpr char kCommonHelp[] =
    "  --job JOB, --node NODE  the daemon of this job and node, where several run on this machine\n"
    "  --socket PATH      the daemon's socket [ROPETEAM_SOCKET, else the only one of yours on this machine]\n"
    "  --timeout SECONDS  how long an answer may take [10]\n"
    "  --json             the answer as it came\n";

Result<int> AlwaysGood(const nlohmann::json&) { return 0; }

// A listing contains only steps that some node holds.
Result<int> JudgeListOfStep(const nlohmann::json& list) {
  if (list.at("steps").empty() && list.at("copies").empty())
    return Error(Code::kNotFound,
                 "no node holds a shard of this step; without STEP, ls lists those that are there");
  return 0;
}

Result<int> JudgeVerify(const nlohmann::json& verify) {
  return verify.at("chunks_bad") == 0 && verify.value("ranks_short", 0) == 0 ? 0 : kExitFailed;
}

// Returns what every node has read, and which ranks lack copies.
Result<std::string> AskVerify(AskOptions options) {
  const Result<std::string> answer = Ask(options, local::AdminCommand::kVerify);
  if (!answer.ok()) return answer;
  try {
    nlohmann::json verify = nlohmann::json::parse(*answer);
    options.has_step = true;
    options.step = verify.at("step");
    const Result<std::string> listed = Ask(options, local::AdminCommand::kList);
    if (!listed.ok()) return listed;
    AddMissingCopies(nlohmann::json::parse(*listed), &verify);
    return verify.dump();
  } catch (const nlohmann::json::exception& error) {
    return Error(Code::kUnsupported, "the daemon's answer is not as expected: %s", error.what());
  }
}

// Returns the cluster's status from its leader. If no leader answers: this node's own report, with the reason
// in `leader_error`.
Result<std::string> AskStatus(AskOptions options) {
  Result<std::string> node = Ask(options, local::AdminCommand::kNode);
  if (!node.ok()) return node;
  try {
    nlohmann::json json = nlohmann::json::parse(*node);
    // Without a coordinator, a lost leader is not replaced, so the wait is short. A daemon of another build
    // may not have this field.
    const nlohmann::json none = nlohmann::json::object();
    if (!json.value("daemon", none).value("membership", none).value("registered", true))
      options.timeout_s = std::min(options.timeout_s, kLostLeaderSeconds);
    Result<std::string> answer = Ask(options, local::AdminCommand::kStatus);
    if (answer.ok()) return answer;
    json["leader_error"] = answer.status().ToString();
    return json.dump();
  } catch (const nlohmann::json::exception& error) {
    return Error(Code::kUnsupported, "the daemon's answer is not as expected: %s", error.what());
  }
}

Result<int> JudgeStatus(const nlohmann::json& status) {
  return status.contains("leader_error") ? kExitFailed : 0;
}

std::string Render(const nlohmann::json& status, const nlohmann::json* before, double seconds) {
  if (status.contains("leader_error")) return RenderNode(status);
  return RenderStatus(status, before != nullptr && before->contains("leader_error") ? nullptr : before,
                      seconds);
}

std::string RenderOnce(const nlohmann::json& status) { return Render(status, nullptr, 0); }

int Watch(const AskOptions& options) {
  const bool screen = isatty(STDOUT_FILENO) != 0 && !options.json;
  if (screen) std::fputs("\x1b[2J", stdout);
  nlohmann::json before;
  auto before_at = std::chrono::steady_clock::now();
  int code = 0;
  for (uint64_t i = 0; options.watch_count == 0 || i < options.watch_count; ++i) {
    if (i != 0) std::this_thread::sleep_for(std::chrono::duration<double>(options.watch_s));
    const Result<std::string> answer = AskStatus(options);
    const auto now = std::chrono::steady_clock::now();
    // A restarting daemon is back soon, so watching continues. The exit code is that of the last answer.
    code = answer.ok() ? 0 : kExitFailed;
    std::string text = "ropeteam status: " + answer.status().ToString() + "\n";
    if (answer.ok()) {
      const nlohmann::json json = nlohmann::json::parse(*answer);
      const std::chrono::duration<double> since = now - before_at;
      text =
          options.json ? *answer + "\n" : Render(json, before.is_null() ? nullptr : &before, since.count());
      before = json;
      before_at = now;
    }
    winsize size{};
    if (screen) {
      const bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 && size.ws_col > 0;
      text = known ? Redraw(text, size.ws_row, size.ws_col) : Redraw(text, kRowsDefault, kColumnsDefault);
    } else if (answer.ok() && !options.json) {
      text += "\n";
    }
    std::fputs(text.c_str(), answer.ok() || screen ? stdout : stderr);
    std::fflush(stdout);
  }
  return code;
}

}  // namespace

int StatusCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kWatch);
  int code = 0;
  const std::string help =
      "ropeteam status: nodes, ranks, steps, levels, copies, bytes, as the leader sees them\n"
      "  --watch [SECONDS]  again and again, with rates [2]\n"
      "  --count N          stop after N times; exit code 1 when the last had no answer\n"
      "  --local            this node alone, without asking the leader\n";
  if (DoneWithOptions("status", options, help + kCommonHelp, &code)) return code;
  if (options->local)
    return PrintAnswer("status", *options, Ask(*options, local::AdminCommand::kNode), RenderNode, AlwaysGood);
  if (options->watch_s == 0)
    return PrintAnswer("status", *options, AskStatus(*options), RenderOnce, JudgeStatus);
  try {
    return Watch(*options);
  } catch (const nlohmann::json::exception& error) {
    std::fprintf(stderr, "ropeteam status: the daemon's answer is not as expected: %s\n", error.what());
    return kExitFailed;
  }
}

int ListCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kStep);
  int code = 0;
  const std::string help = "ropeteam ls [STEP]: the steps that are held; with STEP, its copies and objects\n";
  if (DoneWithOptions("ls", options, help + kCommonHelp, &code)) return code;
  return PrintAnswer("ls", *options, Ask(*options, local::AdminCommand::kList), RenderList,
                     options->has_step ? JudgeListOfStep : AlwaysGood);
}

int VerifyCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kStep);
  int code = 0;
  const std::string help =
      "ropeteam verify [STEP]: reads every chunk of a step [the newest] on every node; exit code 1 when one "
      "is bad, or a copy is missing\n";
  if (DoneWithOptions("verify", options, help + kCommonHelp, &code)) return code;
  return PrintAnswer("verify", *options, AskVerify(*options), RenderVerify, JudgeVerify);
}

}  // namespace ropeteam::cli
