// SPDX-License-Identifier: Apache-2.0
//
// The daemon's reports to the `ropeteam run` that started it, over --ready-fd with --supervised; a line each:
//
//   progress WHAT DONE TOTAL    of the start, in bytes
//   note TEXT                   for the terminal
//   ropeteamd ready …           ranks may connect
//   starting                    the daemon begins again over the same arena: minutes may pass before the next line
//   draining SECONDS            the daemon leaves the job within that time, and is not to be started again
//   alive                       once a second from the thread that serves ranks, so one that hangs is noticed
//
// Without --supervised there is only the ready line, and then the descriptor is closed. Lines are written whole or
// not at all: a supervisor that is stopped, or gone, only misses lines and never blocks the daemon.
//
// Safe from any thread, but for Ready().

#ifndef ROPETEAM_NODE_SUPERVISOR_LINK_H_
#define ROPETEAM_NODE_SUPERVISOR_LINK_H_

#include <cstdint>
#include <string>

#include "core/base/view.h"
#include "node/unique_fd.h"

namespace ropeteam {

inline constexpr TimeUs kAliveIntervalUs = 1'000'000;

class SupervisorLink {
 public:
  // Owns the descriptor from now on; -1: there is no supervisor, and every call does nothing.
  SupervisorLink(int ready_fd, bool supervised);

  void Progress(const char* what, uint64_t done, uint64_t total);
  void Note(const std::string& text);
  void Starting();
  void Alive();
  void Draining(uint64_t seconds);
  void Ready(const std::string& line);  // `line` ends in a newline

 private:
  void Write(const std::string& line);

  UniqueFd fd_;
  const bool supervised_;
};

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_SUPERVISOR_LINK_H_
