// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <nlohmann/json.hpp>

#include "api/cli/ask.h"
#include "api/cli/commands.h"
#include "api/cli/status_text.h"
#include "api/cli/text.h"

namespace ropeteam::cli {
namespace {

constexpr char kHelp[] =
    "ropeteam forget NODE: gives up a missing node, so that the job no longer waits for it. Committed steps "
    "that "
    "cannot\n"
    "                be produced without it are given up, too, and the next incarnation restores an older "
    "one. "
    "For a\n"
    "                node whose memory is lost for good. It prints what the job waits for, before and "
    "after.\n"
    "  --all              every missing node\n"
    "  --job JOB, --node NODE  the daemon of this job and node, where several run on this machine\n"
    "  --socket PATH      the daemon's socket [ROPETEAM_SOCKET, else the only one of yours on this machine]\n"
    "  --timeout SECONDS  how long to wait until every node knows [10]\n";

Status Forget(const AskOptions& options) {
  int64_t timeout_ms = 0;
  Result<std::unique_ptr<AdminClient>> client = Connect(options, &timeout_ms);
  if (!client.ok()) return client.status();
  return (*client)->Forget({options.name, static_cast<uint64_t>(timeout_ms)});
}

Status PrintRoster(const AskOptions& options) {
  const Result<std::string> answer = Ask(options, local::AdminCommand::kStatus);
  if (!answer.ok()) return answer.status();
  const nlohmann::json status = nlohmann::json::parse(*answer, nullptr, false);
  if (status.is_discarded()) return Error(Code::kInternal, "the daemon's status is not JSON");
  const std::string missing = RosterText(status);
  std::printf("%s", missing.empty() ? "no node is missing\n" : missing.c_str());
  std::printf("%s", LatestText(status).c_str());
  return OkStatus();
}

}  // namespace

int ForgetCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kName);
  int code = 0;
  if (DoneWithOptions("forget", options, kHelp, &code)) return code;
  Status status = PrintRoster(*options);
  if (status.ok()) status = Forget(*options);
  if (!status.ok()) return Fail("forget", status);
  std::printf("%s given up\n", options->all ? "all missing nodes are" : (options->name + " is").c_str());
  status = PrintRoster(*options);
  return status.ok() ? 0 : Fail("forget", status);
}

}  // namespace ropeteam::cli
