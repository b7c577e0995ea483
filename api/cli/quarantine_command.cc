// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "api/cli/ask.h"
#include "api/cli/commands.h"
#include "api/cli/text.h"

namespace ropeteam::cli {
namespace {

constexpr char kHelp[] =
    "ropeteam quarantine STEP [--undo]: the next incarnation is offered an older step than this one. The "
    "step stays, "
    "and is\n"
    "                    read by its number. Of several steps of this number the newest is meant.\n"
    "  --undo             offer it again, and count its restores from 0\n"
    "  --job JOB, --node NODE  the daemon of this job and node, where several run on this machine\n"
    "  --socket PATH      the daemon's socket [ROPETEAM_SOCKET, else the only one of yours on this machine]\n"
    "  --timeout SECONDS  how long to wait until every node knows [10]\n";

}  // namespace

int QuarantineCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kStepAndUndo);
  int code = 0;
  if (DoneWithOptions("quarantine", options, kHelp, &code)) return code;
  const Status status = AskToQuarantine(*options);
  if (!status.ok()) return Fail("quarantine", status);
  const auto step = static_cast<unsigned long long>(options->step);
  if (options->undo) {
    std::printf("step %llu is offered again\n", step);
  } else {
    std::printf("step %llu is quarantined: the next incarnation is offered an older one, if there is one\n",
                step);
  }
  return 0;
}

}  // namespace ropeteam::cli
