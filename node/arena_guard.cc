// SPDX-License-Identifier: Apache-2.0
#include "node/arena_guard.h"

#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>

namespace ropeteam {
namespace {

// The only state that the handler may access.
std::atomic<uintptr_t> g_begin{0};
std::atomic<uintptr_t> g_end{0};
char g_line[512];  // written before the handler is installed
struct sigaction g_before;

void OnBusError(int number, siginfo_t* info, void*) {
  const auto at = reinterpret_cast<uintptr_t>(info->si_addr);
  if (info->si_code == BUS_ADRERR && at >= g_begin.load() && at < g_end.load()) {
    size_t length = 0;
    while (g_line[length] != '\0') ++length;
    (void)!write(STDERR_FILENO, g_line, length);
    _exit(kExitTruncated);
  }
  sigaction(number, &g_before, nullptr);  // on return the access faults again
}

}  // namespace

void GuardArena(std::span<const std::byte> memory, const std::string& path) {
  static bool installed = false;
  g_end = 0;  // no range of two calls
  g_begin = reinterpret_cast<uintptr_t>(memory.data());
  g_end = g_begin + memory.size();
  if (installed) return;
  installed = true;
  std::snprintf(
      g_line, sizeof(g_line),
      "ropeteamd: another process has truncated the arena %.300s: ending; the next daemon takes over what "
      "is left and fetches the rest from copies\n",
      path.c_str());
  struct sigaction action {};
  action.sa_sigaction = OnBusError;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGBUS, &action, &g_before);
}

}  // namespace ropeteam
