// SPDX-License-Identifier: Apache-2.0
#include "core/base/status.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <memory>
#include <set>

namespace ropeteam {
namespace {

TEST(Status, IsOkByDefaultAndSaysSo) {
  const Status status;
  EXPECT_TRUE(status.ok());
  EXPECT_EQ(status.code(), Code::kOk);
  EXPECT_EQ(status.ToString(), "ok");
  EXPECT_EQ(status, OkStatus());
}

TEST(Status, NamesItsCodeThenTheMessage) {
  const Status status = Error(Code::kNoSpace, "needed %d chunks, free %d, limit %d", 12, 3, 64);
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(status.code(), Code::kNoSpace);
  EXPECT_EQ(status.message(), "needed 12 chunks, free 3, limit 64");
  EXPECT_EQ(status.ToString(), "no space: needed 12 chunks, free 3, limit 64");
}

TEST(Status, KeepsAMessageOfAnyLength) {
  const std::string name(100'000, 'n');
  EXPECT_EQ(Error(Code::kInvalidArgument, "name %s", name.c_str()).message(), "name " + name);
}

TEST(Status, ErrnoErrorAppendsTheTextAndTheNumber) {
  const Status status = ErrnoError(ENOENT, "open %s", "/dev/shm/x");
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_EQ(status.message(), "open /dev/shm/x: No such file or directory (2)");
}

TEST(Status, DiffersByCodeAndByMessage) {
  EXPECT_EQ(Error(Code::kStale, "a"), Error(Code::kStale, "a"));
  EXPECT_NE(Error(Code::kStale, "a"), Error(Code::kStale, "b"));
  EXPECT_NE(Error(Code::kStale, "a"), Error(Code::kAborted, "a"));
}

TEST(Status, EveryCodeHasAWordOfItsOwnAndAStrangeNumberHasOneToo) {
  std::set<std::string> names;
  for (uint32_t code = 0; code <= static_cast<uint32_t>(Code::kInternal); ++code)
    names.insert(CodeName(static_cast<Code>(code)));
  EXPECT_EQ(names.size(), static_cast<size_t>(Code::kInternal) + 1);
  EXPECT_STREQ(CodeName(static_cast<Code>(0xffffffff)), "unknown code");
}

// The numbers are sent between processes and are part of the C API. A change here breaks both.
TEST(Status, CodesKeepTheirNumbers) {
  EXPECT_EQ(static_cast<uint32_t>(Code::kInvalidArgument), 1U);
  EXPECT_EQ(static_cast<uint32_t>(Code::kNoSpace), 4U);
  EXPECT_EQ(static_cast<uint32_t>(Code::kPeerGone), 6U);
  EXPECT_EQ(static_cast<uint32_t>(Code::kCorrupt), 8U);
  EXPECT_EQ(static_cast<uint32_t>(Code::kInternal), 14U);
}

Status FailOnOdd(int number, int* reached) {
  ROPETEAM_RETURN_IF_ERROR(number % 2 == 0 ? OkStatus() : Error(Code::kAborted, "%d is odd", number));
  *reached = number;
  return OkStatus();
}

TEST(Status, ReturnIfErrorReturnsTheErrorAndElseGoesOn) {
  int reached = 0;
  EXPECT_EQ(FailOnOdd(3, &reached).message(), "3 is odd");
  EXPECT_EQ(reached, 0);
  EXPECT_TRUE(FailOnOdd(4, &reached).ok());
  EXPECT_EQ(reached, 4);
}

TEST(Result, HoldsAValueOrTheStatusThatSaysWhyNot) {
  const Result<int> good = 5;
  ASSERT_TRUE(good.ok());
  EXPECT_EQ(*good, 5);
  EXPECT_TRUE(good.status().ok());
  const Result<int> bad = Error(Code::kNotFound, "step %d", 7);
  EXPECT_FALSE(bad.ok());
  EXPECT_EQ(bad.status().ToString(), "not found: step 7");
}

TEST(Result, GivesAwayAValueThatCannotBeCopied) {
  Result<std::unique_ptr<int>> result = std::make_unique<int>(9);
  const std::unique_ptr<int> value = std::move(result).value();
  EXPECT_EQ(*value, 9);
}

using StatusDeathTest = testing::Test;

TEST(StatusDeathTest, TheValueOfAFailedResultIsOurBug) {
  const Result<int> bad = Error(Code::kNotFound, "nothing");
  EXPECT_DEATH(static_cast<void>(bad.value()), "check failed: ok\\(\\)");
}

TEST(StatusDeathTest, AnErrorWithTheCodeOfSuccessIsOurBug) {
  EXPECT_DEATH(static_cast<void>(Error(Code::kOk, "fine")), "check failed: code != Code::kOk");
  EXPECT_DEATH(static_cast<void>(Result<int>(OkStatus())), "check failed");
}

}  // namespace
}  // namespace ropeteam
