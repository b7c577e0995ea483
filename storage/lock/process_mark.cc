// SPDX-License-Identifier: Apache-2.0
#include "storage/lock/process_mark.h"

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <sstream>

namespace ropeteam::storage {
namespace {

constexpr int kStartField = 22;       // of /proc/PID/stat
constexpr int kFieldAfterName = 3;    // the name in field 2 may contain spaces and parentheses
constexpr size_t kLinkBytesMax = 64;  // "pid:[4026531836]", a pid

std::string ReadLink(const char* path) {
  char text[kLinkBytesMax];
  const ssize_t length = readlink(path, text, sizeof(text));
  return length < 0 ? "" : std::string(text, static_cast<size_t>(length));
}

// 0: it cannot be read.
uint64_t StartOf(int64_t pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  if (name_end == std::string::npos) return 0;
  std::istringstream fields(line.substr(name_end + 1));
  std::string skipped;
  for (int field = kFieldAfterName; field < kStartField; ++field) fields >> skipped;
  uint64_t start = 0;
  fields >> start;
  return start;
}

}  // namespace

ProcessMark OwnProcess() {
  ProcessMark mark;
  mark.pid = getpid();
  if (ReadLink("/proc/self") != std::to_string(mark.pid)) return mark;
  mark.pid_namespace = ReadLink("/proc/self/ns/pid");
  mark.started = StartOf(mark.pid);
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  if (!mark.pid_namespace.empty() && mark.started != 0) std::getline(file, mark.boot);
  return mark;
}

bool IsGone(const ProcessMark& mark, const ProcessMark& own) {
  if (own.boot.empty() || mark.boot != own.boot || mark.pid_namespace != own.pid_namespace || mark.pid <= 0)
    return false;
  // kill() comes first, because a /proc that hides other users' processes has no entry for this pid.
  if (kill(static_cast<pid_t>(mark.pid), 0) != 0 && errno == ESRCH) return true;
  const uint64_t started = StartOf(mark.pid);
  return started != 0 && started != mark.started;
}

}  // namespace ropeteam::storage
