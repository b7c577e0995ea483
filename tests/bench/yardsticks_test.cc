// SPDX-License-Identifier: Apache-2.0

#include "bench/yardsticks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

namespace ropeteam::bench {
namespace {

using ::testing::HasSubstr;

TEST(NumberOf, FindsTheColumnOfTheToolsTable) {
  const std::string perftest =
      " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]\n"
      " 1048576    100              0.98               0.91               0.000108\n"
      "---------------------------------------------------------------------------\n";
  EXPECT_DOUBLE_EQ(NumberOf(perftest, "1048576", 1).value(), 0.91);
  const std::string ucx =
      "Final:                   200    371.431  1966.015  1966.015     2034.57    2034.50   509   510\n";
  EXPECT_DOUBLE_EQ(NumberOf(ucx, "Final:", 2).value(), 2034.50);
}

TEST(NumberOf, SaysWhatItGotWhenTheToolPrintedSomethingElse) {
  const auto none = NumberOf("Couldn't connect to 127.0.0.1:18511\n", "Final:", 2);
  ASSERT_FALSE(none.ok());
  EXPECT_THAT(none.status().message(), HasSubstr("Couldn't connect"));
  EXPECT_FALSE(NumberOf("Final: 1 2\n", "Final:", 2).ok());
}

TEST(Child, GivesItsOutputAndExitCode) {
  Child child;
  ASSERT_TRUE(
      child.Start({"sh", "-c", "read word; echo \"got $word\"; echo second; printf third; exit 7"}).ok());
  ASSERT_TRUE(child.Write("this\n"));
  EXPECT_EQ(child.ReadLine(), "got this");
  EXPECT_EQ(child.ReadAll(), "second\nthird");
  EXPECT_EQ(child.Wait(), 7);
}

TEST(Child, ThatDoesNotExistIsUnsupportedByName) {
  Child child;
  const Status status = child.Start({"no-such-tool-here"});
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("no-such-tool-here"));
}

TEST(Child, EndsWithItsOwner) {
  pid_t pid = 0;
  {
    Child child;
    ASSERT_TRUE(child.Start({"sh", "-c", "echo ready; exec sleep 600"}).ok());
    ASSERT_EQ(child.ReadLine(), "ready");
    pid = child.pid();
  }
  EXPECT_EQ(kill(pid, 0), -1);
}

TEST(ProcessorSecondsOf, CountsWhatAProcessHasUsed) {
  Child child;
  ASSERT_TRUE(
      child.Start({"sh", "-c", "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo done; read end"})
          .ok());
  ASSERT_EQ(child.ReadLine(), "done");
  EXPECT_GT(ProcessorSecondsOf(child.pid()), 0);
  EXPECT_EQ(ProcessorSecondsOf(0x3fffffff), 0);
}

}  // namespace
}  // namespace ropeteam::bench
