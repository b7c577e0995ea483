// SPDX-License-Identifier: Apache-2.0
#include "api/cli/config_file.h"

namespace ropeteam::cli {
namespace {

std::string Trimmed(const std::string& text) {
  const size_t begin = text.find_first_not_of(" \t\r");
  if (begin == std::string::npos) return "";
  return text.substr(begin, text.find_last_not_of(" \t\r") + 1 - begin);
}

// Returns the value up to its closing quote, or up to a comment.
std::string Unquoted(const std::string& text) {
  if (!text.empty() && (text[0] == '"' || text[0] == '\'')) {
    const size_t end = text.find(text[0], 1);
    return text.substr(1, end == std::string::npos ? end : end - 1);
  }
  return Trimmed(text.substr(0, text.find('#')));
}

}  // namespace

std::map<std::string, std::string> ReadConfigLines(std::istream& file) {
  std::map<std::string, std::string> values;
  for (std::string line; std::getline(file, line);) {
    line = Trimmed(line);
    const size_t equals = line.find('=');
    if (equals == std::string::npos || line[0] == '#' || line[0] == ';') continue;
    values[Trimmed(line.substr(0, equals))] = Unquoted(Trimmed(line.substr(equals + 1)));
  }
  return values;
}

}  // namespace ropeteam::cli
