// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <nlohmann/json.hpp>

#include "api/cli/commands.h"
#include "api/cli/programs.h"
#include "api/client/cuda_driver.h"

namespace ropeteam::cli {
namespace {

// Sets `output` to what `ropeteamd --list-devices` prints; its stderr is ours. Returns its exit code; -1: it
// could not be started.
int AskDaemonProgram(const std::string& program, bool json, std::string* output) {
  int ends[2];
  if (pipe(ends) != 0) return -1;
  const pid_t child = fork();
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    close(ends[1]);
    execl(program.c_str(), program.c_str(), "--list-devices", json ? "--json" : nullptr, nullptr);
    std::fprintf(stderr, "ropeteam devices: %s: %s\n", program.c_str(), std::strerror(errno));
    _exit(kExitFailed);
  }
  close(ends[1]);
  char buffer[4096];
  while (child > 0) {
    const ssize_t count = read(ends[0], buffer, sizeof buffer);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) break;
    output->append(buffer, static_cast<size_t>(count));
  }
  close(ends[0]);
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace

int DevicesCommand(const std::vector<std::string>& arguments) {
  bool json = false;
  for (const std::string& argument : arguments) {
    if (argument == "--help" || argument == "-h") {
      std::printf(
          "ropeteam devices [--json]\n\nWhat each transport of this build sees on this machine, CUDA's "
          "driver, and "
          "what is missing.\n");
      return 0;
    }
    if (argument != "--json") {
      std::fprintf(stderr, "ropeteam devices: %.80s is no option (ropeteam devices --help)\n",
                   argument.c_str());
      return kExitUsage;
    }
    json = true;
  }
  const std::string program = FindProgram("ropeteamd", "node", "ROPETEAMD");
  if (program.empty()) {
    std::fprintf(stderr, "ropeteam devices: no ropeteamd beside this program or on PATH: give ROPETEAMD\n");
    return kExitFailed;
  }
  std::string output;
  const int code = AskDaemonProgram(program, json, &output);
  if (code != 0) {
    if (code < 0) std::fprintf(stderr, "ropeteam devices: cannot start %s\n", program.c_str());
    return kExitFailed;
  }
  const Result<std::string> cuda = client::CudaDriver::Describe();
  const std::string missing = cuda.ok() ? "" : cuda.status().message();
  if (!json) {
    std::fputs(output.c_str(), stdout);
    std::printf("cuda  %s\n", cuda.ok() ? cuda->c_str() : ("missing: " + missing).c_str());
    return 0;
  }
  nlohmann::json document = nlohmann::json::parse(output, nullptr, false);
  if (!document.is_object()) {
    std::fprintf(stderr, "ropeteam devices: %s printed no JSON object\n", program.c_str());
    return kExitFailed;
  }
  document["cuda"] = {{"library", cuda.ok() ? *cuda : ""}, {"missing", missing}};
  std::printf("%s\n", document.dump(2, ' ', false, nlohmann::json::error_handler_t::replace).c_str());
  return 0;
}

}  // namespace ropeteam::cli
