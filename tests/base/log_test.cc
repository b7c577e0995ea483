// SPDX-License-Identifier: Apache-2.0
#include "core/base/log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ropeteam {
namespace {

using testing::ElementsAre;
using testing::Pair;

// Records the log during a test, then restores the default sink.
class LogTest : public testing::Test {
 protected:
  void Install(LogLevel level) {
    SetLogSink([this](LogLevel at, std::string_view message) { lines_.emplace_back(at, message); }, level);
  }
  void TearDown() override { SetLogSink(nullptr, LogLevel::kWarning); }

  std::vector<std::pair<LogLevel, std::string>> lines_;
};

TEST_F(LogTest, TheSinkGetsTheLevelAndTheFormattedMessage) {
  Install(LogLevel::kTrace);
  LOG_INFO("step %d rank %s", 12, "three");
  LOG_TRACE("chunk %d", 0);
  EXPECT_THAT(lines_,
              ElementsAre(Pair(LogLevel::kInfo, "step 12 rank three"), Pair(LogLevel::kTrace, "chunk 0")));
}

TEST_F(LogTest, MessagesBelowTheLevelAreNotEvenFormatted) {
  Install(LogLevel::kWarning);
  int evaluated = 0;
  LOG_INFO("value %d", ++evaluated);
  EXPECT_EQ(evaluated, 0);
  LOG_WARNING("value %d", ++evaluated);
  LOG_ERROR("value %d", ++evaluated);
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kWarning, "value 1"), Pair(LogLevel::kError, "value 2")));
}

TEST_F(LogTest, TheLevelChangesWithoutTheSink) {
  Install(LogLevel::kError);
  LOG_INFO("unseen");
  SetLogLevel(LogLevel::kInfo);
  LOG_INFO("seen");
  SetLogLevel(LogLevel::kOff);
  LOG_ERROR("unseen");
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kInfo, "seen")));
}

// A sink gets whole lines for users. A longer line is cut, not split or refused.
TEST_F(LogTest, ALongMessageIsCutAtTheLimit) {
  constexpr size_t kMessageBytesMax = 2048;  // with the terminating zero
  Install(LogLevel::kInfo);
  const std::string fits(kMessageBytesMax - 1, 'f');
  const std::string longer(kMessageBytesMax, 'l');
  LOG_INFO("%s", fits.c_str());
  LOG_INFO("%s", longer.c_str());
  ASSERT_EQ(lines_.size(), 2U);
  EXPECT_EQ(lines_[0].second, fits);
  EXPECT_EQ(lines_[1].second, longer.substr(0, kMessageBytesMax - 1));
}

TEST_F(LogTest, TheOldSinkIsNotCalledAfterItWasReplaced) {
  int old_calls = 0;
  SetLogSink([&](LogLevel, std::string_view) { ++old_calls; }, LogLevel::kInfo);
  LOG_INFO("old");
  Install(LogLevel::kInfo);
  LOG_INFO("new");
  EXPECT_EQ(old_calls, 1);
  EXPECT_THAT(lines_, ElementsAre(Pair(LogLevel::kInfo, "new")));
}

TEST_F(LogTest, LinesOfManyThreadsArriveWholeAndOneByOne) {
  Install(LogLevel::kInfo);
  constexpr int kThreads = 4;
  constexpr int kLines = 200;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([i] {
      for (int line = 0; line < kLines; ++line) LOG_INFO("thread %d of %d", i, kThreads);
    });
  }
  for (std::thread& thread : threads) thread.join();
  ASSERT_EQ(lines_.size(), static_cast<size_t>(kThreads * kLines));
  std::vector<int> counts(kThreads);
  for (const auto& [level, text] : lines_) {
    int thread = -1;
    ASSERT_EQ(std::sscanf(text.c_str(), "thread %d of 4", &thread), 1) << text;
    ++counts.at(static_cast<size_t>(thread));
  }
  EXPECT_THAT(counts, testing::Each(kLines));
}

TEST_F(LogTest, TheDefaultSinkWritesToStderr) {
  SetLogSink(nullptr, LogLevel::kWarning);
  testing::internal::CaptureStderr();
  LOG_WARNING("free %d chunks", 3);
  LOG_INFO("unseen");
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "ropeteam warning: free 3 chunks\n");
}

TEST(ParseLogLevel, KnowsEveryNameAndLeavesTheOutputAloneForOthers) {
  LogLevel level = LogLevel::kOff;
  for (const auto& [name, expected] :
       {std::pair{"trace", LogLevel::kTrace}, std::pair{"debug", LogLevel::kDebug},
        std::pair{"info", LogLevel::kInfo}, std::pair{"warning", LogLevel::kWarning},
        std::pair{"error", LogLevel::kError}, std::pair{"off", LogLevel::kOff}}) {
    ASSERT_TRUE(ParseLogLevel(name, &level)) << name;
    EXPECT_EQ(level, expected) << name;
  }
  for (const char* name : {"", "Info", "warn", "info ", "6"}) {
    EXPECT_FALSE(ParseLogLevel(name, &level)) << name;
    EXPECT_EQ(level, LogLevel::kOff) << name;
  }
}

}  // namespace
}  // namespace ropeteam
