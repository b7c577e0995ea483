// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <thread>

#include "api/cli/ask.h"
#include "api/cli/commands.h"
#include "api/cli/text.h"

namespace ropeteam::cli {
namespace {

constexpr char kHelp[] =
    "ropeteam rejoin --coordinator HOST:PORT: the coordinator runs there now; this node registers with it, "
    "and the others\n"
    "                learn it from this one\n"
    "  --coordinator HOST:PORT\n"
    "  --force            leave a coordinator that answers; this node alone: say it on every node that is to "
    "go there\n"
    "  --job JOB, --node NODE  the daemon of this job and node, where several run on this machine\n"
    "  --socket PATH      the daemon's socket [ROPETEAM_SOCKET, else the only one of yours on this machine]\n"
    "  --timeout SECONDS  how long to wait until the node is registered there [10]\n";

// Interval of the check for the registration, which takes a few milliseconds.
constexpr auto kLookPause = std::chrono::milliseconds(20);

// The reason why the coordinator does not answer, as last seen by the daemon.
std::string ReasonIn(const nlohmann::json& membership, const std::string& coordinator) {
  for (const nlohmann::json& tried : membership.at("tried"))
    if (tried.at("address") == coordinator) return tried.at("reason").get<std::string>();
  return "no answer";
}

int WaitUntilRegistered(const AskOptions& options) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(options.timeout_s);
  std::string reason;
  for (;;) {
    const Result<std::string> answer = Ask(options, local::AdminCommand::kNode);
    if (!answer.ok()) return Fail("rejoin", answer.status());
    const nlohmann::json node = nlohmann::json::parse(*answer);
    const nlohmann::json& membership = node.at("daemon").at("membership");
    if (membership.at("registered").get<bool>() && membership.at("coordinator") == options.coordinator) {
      std::printf("%s is registered with the coordinator at %s\n", node.at("name").get<std::string>().c_str(),
                  options.coordinator.c_str());
      return 0;
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      std::fprintf(stderr,
                   "ropeteam rejoin: %s is not registered with %s after %.0f s: %s; it goes on trying\n",
                   node.at("name").get<std::string>().c_str(), options.coordinator.c_str(), options.timeout_s,
                   ReasonIn(membership, options.coordinator).c_str());
      return kExitFailed;
    }
    std::this_thread::sleep_for(kLookPause);
  }
}

}  // namespace

int RejoinCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kCoordinator);
  int code = 0;
  if (DoneWithOptions("rejoin", options, kHelp, &code)) return code;
  const Status status = AskToRejoin(*options);
  if (!status.ok()) return Fail("rejoin", status);
  try {
    return WaitUntilRegistered(*options);
  } catch (const nlohmann::json::exception& error) {
    std::fprintf(stderr, "ropeteam rejoin: the daemon's answer is not as expected: %s\n", error.what());
    return kExitFailed;
  }
}

}  // namespace ropeteam::cli
