// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "api/cli/ask.h"
#include "api/cli/commands.h"
#include "api/cli/text.h"

namespace ropeteam::cli {
namespace {

constexpr char kHelp[] =
    "ropeteam drop STEP: releases the step from the memory of all nodes now, as retention would later. What "
    "is on\n"
    "              storage stays. If several incarnations have saved a step of this number, all of them are "
    "released.\n"
    "              A step that a restart needs is refused, above all the newest committed one.\n"
    "  --job JOB, --node NODE  the daemon of this job and node, where several run on this machine\n"
    "  --socket PATH      the daemon's socket [ROPETEAM_SOCKET, else the only one of yours on this machine]\n"
    "  --timeout SECONDS  how long to wait until no node has a copy; after that the step may or may not be "
    "released\n"
    "                     later [10]\n";

Status Drop(const AskOptions& options) {
  int64_t timeout_ms = 0;
  Result<std::unique_ptr<AdminClient>> client = Connect(options, &timeout_ms);
  if (!client.ok()) return client.status();
  return (*client)->Drop({options.step, static_cast<uint64_t>(timeout_ms)});
}

}  // namespace

int DropCommand(const std::vector<std::string>& arguments) {
  const Result<AskOptions> options = ParseAskOptions(arguments, Takes::kStepAlone);
  int code = 0;
  if (DoneWithOptions("drop", options, kHelp, &code)) return code;
  const Status status = Drop(*options);
  if (!status.ok()) return Fail("drop", status);
  std::printf("step %llu is released: no node of the job has a copy in memory; what is on storage stays\n",
              static_cast<unsigned long long>(options->step));
  return 0;
}

}  // namespace ropeteam::cli
