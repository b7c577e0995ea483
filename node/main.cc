// SPDX-License-Identifier: Apache-2.0
//
// ropeteamd. Exit codes: 0 ended by a signal, or --help, --version and --list-devices; 1 it could not start
// or go on; 2 a wrong or missing option; 3 the job refused this node; 4 no coordinator has answered within
// --join-timeout; 5 and 6 it was drained (node/drain.h); 7 its arena was truncated (node/arena_guard.h);
// 128 + n ended by signal n before it was ready, or by a second signal at least a second after the first.

#include <malloc.h>
#include <unistd.h>

#include <cstdio>

#include "core/base/log.h"
#include "node/daemon.h"
#include "node/devices_text.h"
#include "node/logging.h"
#include "node/options.h"

namespace {
// One malloc arena per gRPC thread would hold megabytes that are never used again.
constexpr int kMallocArenas = 2;
constexpr int kExitUsage = 2;
constexpr int kExitRefused = 3;  // `ropeteam run` does not restart it then
constexpr int kExitAlone = 4;
}  // namespace

int main(int argc, char** argv) {
  mallopt(M_ARENA_MAX, kMallocArenas);
  ropeteam::Options options;
  std::string print;
  const ropeteam::Status parsed =
      ropeteam::ParseOptions(argc, argv, ropeteam::TakeSecrets(), &options, &print);
  if (!parsed.ok()) {
    std::fprintf(stderr, "ropeteamd: %s\n", parsed.message().c_str());
    return kExitUsage;
  }
  if (!print.empty()) {
    std::fputs(print.c_str(), stdout);
    return 0;
  }
  if (options.list_devices) {
    std::fputs(ropeteam::DevicesText(options.list_json).c_str(), stdout);
    return 0;
  }
  const ropeteam::Status logging = ropeteam::StartLogging(options.log_level, options.log_file);
  if (!logging.ok()) {
    std::fprintf(stderr, "ropeteamd: %s\n", logging.message().c_str());
    return 2;
  }
  ropeteam::Daemon daemon(options);
  options.job_keys.clear();
  const ropeteam::Status ended = daemon.Run();
  int code = daemon.drained();
  if (!ended.ok()) {
    LOG_ERROR("%s", ended.ToString().c_str());
    // The log may go to a file, so the program that started the daemon gets the reason on stderr too.
    if (!options.log_file.empty()) std::fprintf(stderr, "ropeteamd: %s\n", ended.ToString().c_str());
    code = daemon.refused() ? kExitRefused : daemon.alone() ? kExitAlone : daemon.misused() ? kExitUsage : 1;
  }
  if (daemon.hangs()) _exit(code);  // the log is flushed after each line
  return code;
}
