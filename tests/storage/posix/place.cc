// SPDX-License-Identifier: Apache-2.0
#include "tests/storage/posix/place.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <utility>

namespace ropeteam::storage::test {

PosixPlace::PosixPlace(posix::Syscalls calls, const std::string& parent) : calls_(std::move(calls)) {
  path_ = (parent.empty() ? testing::TempDir() : parent + "/") + "ropeteam-sink-XXXXXX";
  EXPECT_NE(mkdtemp(path_.data()), nullptr) << path_;
}

PosixPlace::~PosixPlace() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Result<std::unique_ptr<Sink>> PosixPlace::Open() {
  Url url;
  url.scheme = "file";
  url.path = path_;
  return posix::OpenSinkWith(url, calls_, kTestPage);
}

std::vector<std::string> PosixPlace::Everything() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
    if (!entry.is_directory()) names.push_back(entry.path().string().substr(path_.size() + 1));
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace ropeteam::storage::test
