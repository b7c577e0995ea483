// SPDX-License-Identifier: Apache-2.0
//
// How much memory control groups leave, tested with directories of the same form.
#include "node/arena_memory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

namespace ropeteam {
namespace {

constexpr uint64_t kUnlimitedInVersion1 = 0x7FFFFFFFFFFFF000;

class ControlGroups : public ::testing::Test {
 protected:
  ControlGroups()
      : mount_(std::filesystem::temp_directory_path() / ("ropeteam-groups-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(mount_);
  }
  ~ControlGroups() override { std::filesystem::remove_all(mount_); }

  template <typename T>
  void Write(const std::string& path, const T& value) {
    std::filesystem::create_directories((mount_ / path).parent_path());
    std::ofstream(mount_ / path) << value << "\n";
  }
  uint64_t Left(const std::string& membership) {
    std::istringstream lines(membership);
    return MemoryLeftByControlGroups(lines, mount_.string());
  }

  const std::filesystem::path mount_;
};

TEST_F(ControlGroups, NoneLimitsNothing) {
  EXPECT_EQ(Left(""), UINT64_MAX);
  EXPECT_EQ(Left("0::/user.slice\n"), UINT64_MAX);
  Write("user.slice/memory.max", "max");
  Write("user.slice/memory.current", 1000);
  EXPECT_EQ(Left("0::/user.slice\n"), UINT64_MAX);
}

TEST_F(ControlGroups, TheTightestAboveCounts) {
  Write("job/memory.max", 5000);
  Write("job/memory.current", 4000);
  Write("job/step/memory.max", 3000);
  Write("job/step/memory.current", 500);
  EXPECT_EQ(Left("0::/job/step\n"), 1000u);
  Write("job/step/memory.current", 2900);
  EXPECT_EQ(Left("0::/job/step\n"), 100u);
  Write("job/step/memory.current", 3100);
  EXPECT_EQ(Left("0::/job/step\n"), 0u);
}

// In a container the path is the host's, but the mount is the container's own group.
TEST_F(ControlGroups, AContainersOwnIsAtTheMount) {
  Write("memory.max", 8000);
  Write("memory.current", 6000);
  EXPECT_EQ(Left("0::/../kubepods/pod1\n"), 2000u);
}

TEST_F(ControlGroups, TheCacheOfFilesIsLeftAndATmpfsIsNot) {
  Write("memory.max", 8000);
  Write("memory.current", 7900);
  Write("memory.stat",
        "anon 1500\nfile 6400\nshmem 2000\ninactive_anon 3500\nactive_file 1400\ninactive_file 3000");
  EXPECT_EQ(Left("0::/\n"), 4500u);
}

TEST_F(ControlGroups, Version1) {
  const std::string membership = "12:cpu,cpuacct:/a\n4:memory:/a/b\n0::/a/b\n";
  Write("memory/memory.limit_in_bytes", kUnlimitedInVersion1);
  Write("memory/memory.usage_in_bytes", 9000);
  Write("memory/a/b/memory.limit_in_bytes", 6000);
  Write("memory/a/b/memory.usage_in_bytes", 5500);
  Write("memory/a/b/memory.stat", "inactive_file 7\ntotal_active_file 1000\ntotal_inactive_file 2000");
  EXPECT_EQ(Left(membership), 3500u);
  EXPECT_EQ(Left("12:cpu,cpuacct:/a\n"), UINT64_MAX);
}

TEST_F(ControlGroups, LinesThatAreNoneAreIgnored) {
  Write("memory.max", 10);
  EXPECT_EQ(Left("nonsense\n4:memory\n:\n"), UINT64_MAX);
}

}  // namespace
}  // namespace ropeteam
