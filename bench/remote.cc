// SPDX-License-Identifier: Apache-2.0
#include "bench/remote.h"

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

namespace ropeteam::bench {

std::vector<std::string> CommandOf(const Remote& remote, const std::vector<std::string>& words) {
  std::vector<std::string> command = remote.shell;
  command.insert(command.end(), words.begin(), words.end());
  return command;
}

std::vector<std::string> OwnCommandOf(const Remote& remote, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {remote.program};
  if (remote.local()) {
    words.insert(words.end(), arguments.begin(), arguments.end());
    return words;
  }
  std::string packed;
  for (const std::string& argument : arguments) packed += argument + '\0';
  words.insert(words.end(), {kPackedCommand, Hex(packed)});
  return CommandOf(remote, words);
}

std::vector<std::string> Unpack(const std::string& word) {
  const std::string packed = FromHex(word);
  std::vector<std::string> arguments;
  for (size_t begin = 0; begin < packed.size();) {
    const size_t end = packed.find('\0', begin);
    if (end == std::string::npos) return {};
    arguments.push_back(packed.substr(begin, end - begin));
    begin = end + 1;
  }
  return arguments;
}

std::string ParentWord(const Remote& remote) { return remote.local() ? std::to_string(getpid()) : "0"; }

bool FollowParent(const std::string& word) {
  const auto parent = static_cast<pid_t>(std::strtol(word.c_str(), nullptr, 10));
  if (parent == 0) return true;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  return getppid() == parent;
}

std::string Hex(const std::string& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const char c : bytes) {
    text += kDigits[static_cast<uint8_t>(c) >> 4];
    text += kDigits[static_cast<uint8_t>(c) & 15];
  }
  return text;
}

std::string FromHex(const std::string& text) {
  if (text.size() % 2 != 0 || text.find_first_not_of("0123456789abcdef") != std::string::npos) return {};
  std::string bytes;
  for (size_t i = 0; i < text.size(); i += 2)
    bytes.push_back(static_cast<char>(std::strtol(text.substr(i, 2).c_str(), nullptr, 16)));
  return bytes;
}

}  // namespace ropeteam::bench
