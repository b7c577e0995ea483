// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <thread>

#include "api/cli/ask.h"
#include "api/cli/commands.h"
#include "api/cli/status_text.h"

namespace ropeteam::cli {
namespace {

constexpr char kCommonHelp[] =
    "  --socket PATH      the daemon's socket [ROPETEAM_SOCKET, else the only one of yours on this machine]\n"
    "  --timeout SECONDS  how long an answer may take [10]\n"
    "  --json             the answer as it came\n";

// Prints help or the reason why there is nothing to do; true when that was all.
bool DoneWith(const char* name, const Result<AskOptions>& options, const char* help, int* code) {
  if (!options.ok()) {
    std::fprintf(stderr, "ropeteam %s: %s (ropeteam %s --help)\n", name, options.status().message().c_str(),
                 name);
    *code = kExitUsage;
    return true;
  }
  if (!options->help) return false;
  std::printf("%s%s", help, kCommonHelp);
  *code = 0;
  return true;
}

Result<int> AlwaysGood(const nlohmann::json&) { return 0; }

// The steps of a listing are those that somebody holds.
Result<int> JudgeListOfStep(const nlohmann::json& list) {
  if (list.at("steps").empty() && list.at("copies").empty())
    return Error(Code::kNotFound, "no node holds a shard of this step");
  return 0;
}

Result<int> JudgeVerify(const nlohmann::json& verify) {
  return verify.at("chunks_bad").get<uint64_t>() == 0 ? 0 : kExitFailed;
}

std::string RenderOnce(const nlohmann::json& status) { return RenderStatus(status, nullptr, 0); }

int Watch(const AskOptions& options) {
  const bool screen = isatty(STDOUT_FILENO) != 0 && !options.json;
  nlohmann::json before;
  auto before_at = std::chrono::steady_clock::now();
  for (uint64_t i = 0; options.watch_count == 0 || i < options.watch_count; ++i) {
    if (i != 0) std::this_thread::sleep_for(std::chrono::duration<double>(options.watch_s));
    const Result<std::string> answer = Ask(options, local::AdminCommand::kStatus);
    const auto now = std::chrono::steady_clock::now();
    if (screen) std::fputs("\x1b[H\x1b[J", stdout);
    if (!answer.ok()) {
      // A daemon that restarts is there again soon: watching goes on.
      std::fprintf(stderr, "ropeteam status: %s\n", answer.status().ToString().c_str());
      continue;
    }
    const nlohmann::json json = nlohmann::json::parse(*answer);
    const std::chrono::duration<double> since = now - before_at;
    const std::string text = options.json
                                 ? *answer + "\n"
                                 : RenderStatus(json, before.is_null() ? nullptr : &before, since.count());
    std::fputs(text.c_str(), stdout);
    std::fputs(options.json || screen ? "" : "\n", stdout);
    std::fflush(stdout);
    before = json;
    before_at = now;
  }
  return 0;
}

}  // namespace

int StatusCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kWatch);
  int code = 0;
  if (DoneWith("status", options,
               "ropeteam status: nodes, ranks, steps, levels, copies, bytes, as the leader sees them\n"
               "  --watch [SECONDS]  again and again, with rates [2]\n"
               "  --count N          with --watch: stop after N times\n"
               "  --local            this node alone, without asking the leader\n",
               &code))
    return code;
  if (options->local)
    return AskAndPrint("status", *options, local::AdminCommand::kNode, RenderNode, AlwaysGood);
  if (options->watch_s == 0)
    return AskAndPrint("status", *options, local::AdminCommand::kStatus, RenderOnce, AlwaysGood);
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
  if (DoneWith("ls", options,
               "ropeteam ls [STEP]: the steps that are held; with STEP, its copies and objects\n", &code))
    return code;
  return AskAndPrint("ls", *options, local::AdminCommand::kList, RenderList,
                     options->has_step ? JudgeListOfStep : AlwaysGood);
}

int VerifyCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kStep);
  int code = 0;
  if (DoneWith("verify", options,
               "ropeteam verify [STEP]: reads every chunk of a step [the newest] on every node; exit code 1 "
               "when one is "
               "bad\n",
               &code))
    return code;
  return AskAndPrint("verify", *options, local::AdminCommand::kVerify, RenderVerify, JudgeVerify);
}

}  // namespace ropeteam::cli
