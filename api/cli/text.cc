// SPDX-License-Identifier: Apache-2.0
#include "api/cli/text.h"

#include <algorithm>
#include <cstdio>

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

}  // namespace ropeteam::cli
