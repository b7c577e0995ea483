// SPDX-License-Identifier: Apache-2.0
//
// Where the other end of a measurement runs: on this machine, or on another one through a command that runs
// a command there (ssh, srun). The other end is always a child process; what it says comes by its output, so
// nothing listens for orders.

#ifndef ROPETEAM_BENCH_REMOTE_H_
#define ROPETEAM_BENCH_REMOTE_H_

#include <string>
#include <vector>

namespace ropeteam::bench {

struct Remote {
  std::vector<std::string> shell;          // {"ssh", "host-b"}; empty: this machine
  std::string program = "/proc/self/exe";  // ropeteam-bench, over there
  // Numeric addresses of the two ends, for what has IP addresses.
  std::string address = "127.0.0.1";  // of the other end
  std::string here = "127.0.0.1";
  bool local() const { return shell.empty(); }
};

// `words` as a command to start here.
std::vector<std::string> CommandOf(const Remote& remote, const std::vector<std::string>& words);

// ropeteam-bench with these arguments over there. Shells on the way would take some characters (a provider's
// semicolon) for their own, so the arguments go as one word of hexadecimal digits: kPackedCommand and that.
inline constexpr const char* kPackedCommand = "packed";
std::vector<std::string> OwnCommandOf(const Remote& remote, const std::vector<std::string>& arguments);
// The arguments again; empty when `word` is not one of ours.
std::vector<std::string> Unpack(const std::string& word);

// The argument by which a child knows whom not to outlive: our pid, or "0" on another machine, where the end
// of its input tells it.
std::string ParentWord(const Remote& remote);
// For the child: dies with that parent. False when it has ended already.
bool FollowParent(const std::string& word);

std::string Hex(const std::string& bytes);
// Empty when `text` is not pairs of hexadecimal digits.
std::string FromHex(const std::string& text);

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_REMOTE_H_
