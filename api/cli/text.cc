// SPDX-License-Identifier: Apache-2.0
#include "api/cli/text.h"

#include <algorithm>
#include <cstdio>

#include "api/cli/commands.h"
#include "core/base/check.h"

namespace ropeteam::cli {

Table::Table(std::vector<std::string> headers) {
  for (std::string& header : headers) {
    left_.push_back(header.starts_with('<'));
    if (left_.back()) header.erase(0, 1);
  }
  rows_.push_back(std::move(headers));
}

void Table::Add(std::vector<std::string> row) {
  ROPETEAM_CHECK(row.size() == left_.size());
  rows_.push_back(std::move(row));
}

std::string Table::Render() const {
  std::vector<size_t> widths(left_.size());
  for (const auto& row : rows_)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      if (i != 0) line += "  ";
      line += left_[i] ? row[i] + space : space + row[i];
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

Status GivenOnce::Add(const std::string& option) {
  if (given_.insert(option).second) return OkStatus();
  return Error(Code::kInvalidArgument, "%.80s is given twice", option.c_str());
}

bool DoneWithOptions(const char* command, const Status& parsed, bool wants_help, const std::string& help,
                     int* code) {
  if (!parsed.ok()) {
    std::fprintf(stderr, "ropeteam %s: %s (ropeteam %s --help)\n", command, parsed.message().c_str(),
                 command);
    *code = kExitUsage;
    return true;
  }
  if (!wants_help) return false;
  std::fputs(help.c_str(), stdout);
  *code = 0;
  return true;
}

int Fail(const char* command, const Status& status) {
  std::fprintf(stderr, "ropeteam %s: %s\n", command, status.ToString().c_str());
  return kExitFailed;
}

}  // namespace ropeteam::cli
