// SPDX-License-Identifier: Apache-2.0
#include "storage/steps/steps.h"

#include <gtest/gtest.h>

#include "storage/forwarding_sink.h"
#include "storage/steps/damaged.h"

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

// Every file ends before the bytes that are read.
class ShorterSink final : public ForwardingSink {
 public:
  ShorterSink() : ForwardingSink(nullptr) {}
  Status Read(const std::string&, uint64_t, std::span<const Target>, Deadline) override {
    return Error(Code::kCorrupt, "it has 3 bytes");
  }
};

TEST(StepNotes, ANoteThatWasReplacedSinceItWasListedIsReadAgain) {
  ShorterSink sink;
  const FileSizes sizes = {{std::string(kDamagedName), 80}, {std::string(kRestoredName), 80}};
  EXPECT_EQ(RestoresOf(&sink, "train", {7, 2}, sizes, std::chrono::seconds(1)).status().code(),
            Code::kUnavailable);
  EXPECT_EQ(DamageOf(&sink, "train", {7, 2}, sizes, std::chrono::seconds(1)).status().code(),
            Code::kUnavailable);
}

}  // namespace
}  // namespace ropeteam::storage
