// SPDX-License-Identifier: Apache-2.0
#include "node/supervisor_link.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

namespace ropeteam {

SupervisorLink::SupervisorLink(int ready_fd, bool supervised) : fd_(ready_fd), supervised_(supervised) {
  if (ready_fd < 0) return;
  (void)fcntl(ready_fd, F_SETFD, FD_CLOEXEC);
  if (supervised) (void)fcntl(ready_fd, F_SETFL, fcntl(ready_fd, F_GETFL) | O_NONBLOCK);
}

void SupervisorLink::Write(const std::string& line) {
  // A write of up to PIPE_BUF bytes is atomic, even if others write too.
  if (fd_.valid()) (void)!write(fd_.get(), line.data(), std::min<size_t>(line.size(), PIPE_BUF));
}

void SupervisorLink::Progress(const char* what, uint64_t done, uint64_t total) {
  if (supervised_)
    Write("progress " + std::string(what) + " " + std::to_string(done) + " " + std::to_string(total) + "\n");
}

void SupervisorLink::Note(const std::string& text) {
  constexpr size_t kTextMax = PIPE_BUF - 16;
  if (supervised_) Write("note " + text.substr(0, kTextMax) + "\n");
}

void SupervisorLink::Starting() {
  if (supervised_) Write("starting\n");
}

void SupervisorLink::Alive() {
  if (supervised_) Write("alive\n");
}

void SupervisorLink::Draining(uint64_t seconds) {
  if (supervised_) Write("draining " + std::to_string(seconds) + "\n");
}

void SupervisorLink::Ready(const std::string& line) {
  Write(line);
  if (!supervised_) fd_.reset();
}

}  // namespace ropeteam
