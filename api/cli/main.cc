// SPDX-License-Identifier: Apache-2.0
//
// ropeteam: the command line.

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "api/cli/commands.h"
#include "api/cli/storage_options.h"
#include "api/include/ropeteam/ropeteam.h"

namespace {

constexpr char kHelp[] =
    "ropeteam COMMAND\n"
    "\n"
    "  run [options] -- COMMAND…   start ropeteamd beside COMMAND, and end with it\n"
    "  status                      nodes, ranks, steps, levels, copies, bytes\n"
    "  ls [STEP]                   the steps that are held; a step's copies and objects\n"
    "  ls --storage URL            the steps that lie on storage\n"
    "  verify [STEP]               read every chunk of a step everywhere\n"
    "  verify URL [STEP]           read every file of a step on storage\n"
    "  rejoin --coordinator HOST:PORT   tell a node where the coordinator runs now\n"
    "  quarantine STEP [--undo]    have latest offer an older step than this one\n"
    "  forget NODE                 no longer wait for a missing node\n"
    "  drop STEP                   release a step from the memory of all nodes\n"
    "  drain                       copy what this node holds to the others, and leave the job\n"
    "  export STEP DIR [--storage URL]  copy a step from memory, or from storage\n"
    "  import DIR                       save a step from storage into a running job\n"
    "  prune URL --dry-run|--yes …      remove steps from storage, by rules\n"
    "  trace [STEP]                write a step's timeline on all nodes to a file for ui.perfetto.dev\n"
    "  clean [--job JOB|--all-ended]    free the memory of jobs that are not running\n"
    "  plan --nodes N …            what a job survives from memory alone, needs and waits for\n"
    "  devices                     what each transport sees on this machine\n"
    "  bench …                     measure (ropeteam-bench)\n"
    "  version                     print the version\n"
    "\n"
    "ropeteam COMMAND --help tells more.\n";

using Run = int (*)(const std::vector<std::string>& arguments);

// `ls` and `verify` read storage if a URL is given, and ask the daemon otherwise. Their help describes both.
int RunEither(const std::vector<std::string>& arguments, Run daemon, Run storage) {
  if (ropeteam::cli::MeansStorage(arguments)) return storage(arguments);
  const int code = daemon(arguments);
  if (std::find(arguments.begin(), arguments.end(), "--help") == arguments.end()) return code;
  std::printf("\n");
  return storage(arguments);
}
int ListEither(const std::vector<std::string>& arguments) {
  return RunEither(arguments, ropeteam::cli::ListCommand, ropeteam::cli::StorageListCommand);
}
int VerifyEither(const std::vector<std::string>& arguments) {
  return RunEither(arguments, ropeteam::cli::VerifyCommand, ropeteam::cli::StorageVerifyCommand);
}

struct Command {
  const char* name;
  Run run;
};

constexpr Command kCommands[] = {
    {"run", ropeteam::cli::RunCommand},
    {"status", ropeteam::cli::StatusCommand},
    {"ls", ListEither},
    {"verify", VerifyEither},
    {"rejoin", ropeteam::cli::RejoinCommand},
    {"quarantine", ropeteam::cli::QuarantineCommand},
    {"drop", ropeteam::cli::DropCommand},
    {"forget", ropeteam::cli::ForgetCommand},
    {"drain", ropeteam::cli::DrainCommand},
    {"export", ropeteam::cli::StorageExportCommand},
    {"import", ropeteam::cli::StorageImportCommand},
    {"prune", ropeteam::cli::StoragePruneCommand},
    {"trace", ropeteam::cli::TraceCommand},
    {"clean", ropeteam::cli::CleanCommand},
    {"plan", ropeteam::cli::PlanCommand},
    {"devices", ropeteam::cli::DevicesCommand},
    {"bench", ropeteam::cli::BenchCommand},
};

}  // namespace

int main(int argc, char** argv) {
  // Some entry points and schedulers leave this signal ignored, and exec() keeps it so. Then the exit code of a
  // child is lost.
  signal(SIGCHLD, SIG_DFL);
  const std::string name = argc > 1 ? argv[1] : "";
  const std::vector<std::string> arguments(argv + (argc > 1 ? 2 : 1), argv + argc);
  for (const Command& command : kCommands)
    if (name == command.name) return command.run(arguments);
  if (name == "version" || name == "--version") {
    std::printf("ropeteam %d.%d.%d\n", ROPETEAM_VERSION_MAJOR, ROPETEAM_VERSION_MINOR,
                ROPETEAM_VERSION_PATCH);
    return 0;
  }
  if (name == "help" || name == "--help" || name == "-h") {
    std::fputs(kHelp, stdout);
    return 0;
  }
  if (!name.empty()) std::fprintf(stderr, "ropeteam: \"%s\" is not a command\n\n", name.c_str());
  std::fputs(kHelp, stderr);
  return ropeteam::cli::kExitUsage;
}
