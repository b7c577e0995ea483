// SPDX-License-Identifier: Apache-2.0
#include "node/user_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <optional>

#include "node/local_socket.h"

namespace ropeteam {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr uid_t kOther = 12345;

// XDG_RUNTIME_DIR names a directory of the test's own.
class UserDirectoryTest : public ::testing::Test {
 protected:
  void SetUp() override {
    char path[] = "/tmp/ropeteam-test-XXXXXX";
    ASSERT_NE(mkdtemp(path), nullptr);
    runtime_ = path;
    if (const char* before = getenv("XDG_RUNTIME_DIR"); before != nullptr) before_ = before;
    setenv("XDG_RUNTIME_DIR", path, 1);
  }
  void TearDown() override {
    std::filesystem::remove_all(runtime_);
    if (before_)
      setenv("XDG_RUNTIME_DIR", before_->c_str(), 1);
    else
      unsetenv("XDG_RUNTIME_DIR");
  }
  static std::string InTmp() { return "/tmp/ropeteam-" + std::to_string(geteuid()); }

  std::string runtime_;
  std::optional<std::string> before_;
};

TEST_F(UserDirectoryTest, TheRuntimeDirectoryIsMadeForThisUserAlone) {
  const Result<std::string> made = MakeRuntimeDirectory();
  ASSERT_TRUE(made.ok()) << made.status().ToString();
  EXPECT_EQ(*made, runtime_ + "/ropeteam");
  struct stat info {};
  ASSERT_EQ(stat(made->c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 07777, 0700u);
  EXPECT_EQ(UserDirectories(), (std::vector<std::string>{*made, InTmp()}));
  ASSERT_EQ(chmod(made->c_str(), 0750), 0);
  EXPECT_THAT(MakeRuntimeDirectory().status().message(),
              AllOf(HasSubstr("(mode 0750)"), HasSubstr(": chmod 700 " + *made)));
  std::filesystem::remove_all(*made);
  std::filesystem::create_symlink("/tmp", *made);
  EXPECT_THAT(MakeRuntimeDirectory().status().message(), HasSubstr("is a symbolic link of uid"));
  unsetenv("XDG_RUNTIME_DIR");
  EXPECT_EQ(RuntimeDirectory(), InTmp());
}

TEST_F(UserDirectoryTest, WhatAnotherUserHasMadeFirstIsNamedWithItsOwnerAndARemedy) {
  const std::string directory = runtime_ + "/ropeteam";
  const std::string socket = runtime_ + "/s.sock";
  std::filesystem::create_directory(directory);
  ASSERT_EQ(chmod(directory.c_str(), 0755), 0);
  { ASSERT_TRUE(ListenLocal(socket).ok()); }
  if (chown(directory.c_str(), kOther, kOther) != 0 || chown(socket.c_str(), kOther, kOther) != 0)
    GTEST_SKIP() << "giving a file away needs privileges";
  const Status taken = MakeRuntimeDirectory().status();
  EXPECT_EQ(taken.code(), Code::kInvalidArgument);
  EXPECT_THAT(
      taken.message(),
      AllOf(HasSubstr(directory + " is a directory of uid 12345 (mode 0755), not a directory of uid "),
            HasSubstr("have its owner or root remove it, or set XDG_RUNTIME_DIR")));
  EXPECT_EQ(ListenLocal(directory + "/n.sock").status().message(), taken.message());
  EXPECT_THAT(ListenLocal(socket).status().message(),
              AllOf(HasSubstr("socket " + socket + " is taken: it is a socket of uid 12345 (mode 0600)"),
                    HasSubstr("or give another --socket")));
  ASSERT_EQ(chown(runtime_.c_str(), kOther, kOther), 0);
  EXPECT_EQ(RuntimeDirectory(), InTmp()) << "the variable of a user who was this process's before su";
}

}  // namespace
}  // namespace ropeteam
