// SPDX-License-Identifier: Apache-2.0
#include "bench/child.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

extern char** environ;

namespace ropeteam::bench {

Status Child::Start(const std::vector<std::string>& command, bool errors_too) {
  Kill();
  int in[2], out[2];
  if (pipe2(in, O_CLOEXEC) != 0) return ErrnoError(errno, "pipe");
  if (pipe2(out, O_CLOEXEC) != 0) {
    close(in[0]);
    close(in[1]);
    return ErrnoError(errno, "pipe");
  }
  commands_ = in[1];
  answers_ = out[0];
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, in[0], 0);
  posix_spawn_file_actions_adddup2(&actions, out[1], 1);
  if (errors_too) posix_spawn_file_actions_adddup2(&actions, out[1], 2);
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const int failed = posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(in[0]);
  close(out[1]);
  if (failed == 0) return OkStatus();
  pid_ = -1;
  CloseDescriptors();
  return Error(Code::kUnsupported, "cannot start %s: %s", command[0].c_str(), std::strerror(failed));
}

std::string Child::ReadLine() {
  while (true) {
    const size_t end = ahead_.find('\n');
    if (end != std::string::npos) {
      std::string line = ahead_.substr(0, end);
      ahead_.erase(0, end + 1);
      return line;
    }
    char bytes[4096];
    const ssize_t count = read(answers_, bytes, sizeof bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return std::exchange(ahead_, {});
    ahead_.append(bytes, static_cast<size_t>(count));
  }
}

std::string Child::ReadAll() {
  std::string all = std::exchange(ahead_, {});
  char bytes[4096];
  while (true) {
    const ssize_t count = read(answers_, bytes, sizeof bytes);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return all;
    all.append(bytes, static_cast<size_t>(count));
  }
}

bool Child::Write(const std::string& text) {
  return write(commands_, text.data(), text.size()) == static_cast<ssize_t>(text.size());
}

int Child::Wait() {
  if (pid_ <= 0) return -1;
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  CloseDescriptors();
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void Child::Terminate() {
  if (pid_ > 0) kill(pid_, SIGTERM);
}

void Child::Kill() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    Wait();
  }
  CloseDescriptors();
}

void Child::CloseDescriptors() {
  for (int* fd : {&commands_, &answers_})
    if (*fd >= 0) close(std::exchange(*fd, -1));
  ahead_.clear();
}

double ProcessorSecondsOf(pid_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(file, text);
  const size_t name_end = text.rfind(')');  // the name may contain any character
  if (name_end == std::string::npos) return 0;
  std::istringstream rest(text.substr(name_end + 1));
  std::string skipped;
  for (int i = 0; i < 11; ++i) rest >> skipped;  // up to utime, the fourteenth field of proc(5)
  double user = 0, system = 0;
  rest >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

}  // namespace ropeteam::bench
