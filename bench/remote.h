// SPDX-License-Identifier: Apache-2.0
//
// Where the other end of a measurement runs: on this machine, or on another machine, started by a command
// such as ssh or srun. The other end is always a child process, and it answers on its standard output.

#ifndef ROPETEAM_BENCH_REMOTE_H_
#define ROPETEAM_BENCH_REMOTE_H_

#include <string>
#include <vector>

namespace ropeteam::bench {

struct Remote {
  std::vector<std::string> shell;          // {"ssh", "host-b"}; empty: this machine
  std::string program = "/proc/self/exe";  // path of ropeteam-bench on that machine
  // Numeric addresses of the two ends, for fabrics with IP addresses.
  std::string address = "127.0.0.1";  // of the other end
  std::string here = "127.0.0.1";
  bool local() const { return shell.empty(); }
};

// The local command that runs `words` at the other end.
std::vector<std::string> CommandOf(const Remote& remote, const std::vector<std::string>& words);

// The local command that runs ropeteam-bench with these arguments at the other end. Shells would interpret
// some characters, such as a provider's semicolon. So the arguments are kPackedCommand and one word of hex
// digits.
inline constexpr const char* kPackedCommand = "packed";
std::vector<std::string> OwnCommandOf(const Remote& remote, const std::vector<std::string>& arguments);
// The unpacked arguments; empty if `word` is invalid.
std::vector<std::string> Unpack(const std::string& word);

// The argument that names the child's parent: our pid, or "0" on another machine, where the child ends at the
// end of its input.
std::string ParentWord(const Remote& remote);
// Called by the child: the kernel kills it when that parent ends. False if the parent has already ended.
bool FollowParent(const std::string& word);

std::string Hex(const std::string& bytes);
// Empty if `text` is not pairs of hexadecimal digits.
std::string FromHex(const std::string& text);

}  // namespace ropeteam::bench

#endif  // ROPETEAM_BENCH_REMOTE_H_
