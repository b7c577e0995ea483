// SPDX-License-Identifier: Apache-2.0
#include "storage/steps/steps.h"

#include <gtest/gtest.h>

namespace ropeteam::storage {
namespace {

TEST(StepSource, HasAStepBehindItsLastAtSign) {
  for (const char* url : {"/mnt/runs/train", "/mnt/me@home/train", "/mnt/train@7b", "/mnt/train@",
                          "s3://bucket/runs/train?endpoint=http://10.0.0.1:9000"}) {
    const Result<StepSource> newest = ParseStepSource(url);
    ASSERT_TRUE(newest.ok()) << url;
    EXPECT_EQ(newest->url, url);
    EXPECT_FALSE(newest->step.has_value());
    const Result<StepSource> named = ParseStepSource(std::string(url) + "@18446744073709551615");
    ASSERT_TRUE(named.ok()) << url;
    EXPECT_EQ(named->url, url);
    EXPECT_EQ(named->step, UINT64_MAX);
  }
}

TEST(StepSource, IsAUrlAndAStepOf64Bits) {
  for (const char* bad : {"", "@7", "runs/train", "/mnt/train@18446744073709551616", "s3://b?x@7"})
    EXPECT_EQ(ParseStepSource(bad).status().code(), Code::kInvalidArgument) << bad;
}

TEST(StepPath, IsBelowTheJobOrBelowTheUrlItself) {
  EXPECT_EQ(StepPath("train", {7, 2}), "train/step-0000000007-i00000002");
  EXPECT_EQ(StepPath("", {7, 2}), "step-0000000007-i00000002");
}

}  // namespace
}  // namespace ropeteam::storage
