// SPDX-License-Identifier: Apache-2.0
//
// What the command line writes: tables whose columns fit what is in them. Pure.

#ifndef ROPETEAM_API_CLI_TEXT_H_
#define ROPETEAM_API_CLI_TEXT_H_

#include <string>
#include <vector>

namespace ropeteam::cli {

class Table {
 public:
  // Columns whose header begins with '<' are set to the left, all others to the right.
  explicit Table(std::vector<std::string> headers);
  void Add(std::vector<std::string> row);  // as many cells as headers
  std::string Render() const;              // lines ending in a newline; headers too when there is no row

 private:
  std::vector<bool> left_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace ropeteam::cli

#endif  // ROPETEAM_API_CLI_TEXT_H_
