// SPDX-License-Identifier: Apache-2.0
//
// The sockets of this user's daemons on this machine.

#ifndef ROPETEAM_API_CLI_SOCKETS_H_
#define ROPETEAM_API_CLI_SOCKETS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::cli {

// What the user said of the daemon to ask. All may be empty.
struct SocketChoice {
  std::string path;
  std::string job;
  std::string node;
  bool by_path_only = false;  // the command has no --job and --node that mean the daemon
};

// The sockets in the directories where daemons put theirs, by path: this user's alone, live and dead.
std::vector<std::string> ListSockets();

// A daemon that was killed leaves its socket behind. One that starts has a socket that refuses connections too, for a
// moment: a socket younger than this is never called dead.
inline constexpr int64_t kSocketStartsSeconds = 10;
bool SocketIsDead(const std::string& path);

// The path that was given; else the only daemon of this job and node, where either was given, which is asked for its
// names; else ROPETEAM_SOCKET; else the only live one of ListSockets(). kUnavailable: there is none, or more than one;
// they are named. Asks each daemon, at most `timeout_ms` and 2 s each.
Result<std::string> ChooseSocket(const SocketChoice& choice, int64_t timeout_ms);

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_SOCKETS_H_
