// SPDX-License-Identifier: Apache-2.0
#include "storage/audit/audit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "core/base/log.h"
#include "storage/forwarding_sink.h"
#include "tests/storage/bytes.h"
#include "tests/storage/posix/place.h"

namespace ropeteam::storage::test {
namespace {

using testing::HasSubstr;

// Carries out every Put(), but answers `status` if that is an error.
class AnswersSink final : public ForwardingSink {
 public:
  using ForwardingSink::ForwardingSink;
  Status Put(const std::string& name, std::string_view bytes, PutMode mode, Deadline deadline) override {
    const Status done = below().Put(name, bytes, mode, deadline);
    return status.ok() ? done : status;
  }
  Status status;
};

class AuditTest : public testing::Test {
 protected:
  void SetUp() override {
    Result<std::unique_ptr<Sink>> sink = place_.Open();
    ASSERT_TRUE(sink.ok());
    below_ = std::make_shared<AnswersSink>(std::move(sink.value()));
    Result<std::shared_ptr<AuditLog>> log = AuditLog::Open(path_, "a \"job\"", "node-7");
    ASSERT_TRUE(log.ok()) << log.status().ToString();
    sink_ = AuditedSink(below_, *log, "retention");
  }
  std::vector<nlohmann::json> Lines() {
    std::vector<nlohmann::json> lines;
    std::ifstream file(path_);
    for (std::string line; std::getline(file, line);) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  PosixPlace place_, beside_;
  const std::string path_ = beside_.path() + "/audit.jsonl";
  std::shared_ptr<AnswersSink> below_;
  std::unique_ptr<Sink> sink_;
};

TEST_F(AuditTest, EveryFileThatIsWrittenOrDeletedHasALine) {
  const std::string bytes = "123456789";
  const uint32_t crc = Crc(bytes);
  Result<std::unique_ptr<Upload>> upload = sink_->Begin("job/step/data", bytes.size(), bytes.size(), Soon());
  ASSERT_TRUE(upload.ok());
  const Piece piece = PieceOf(bytes);
  ASSERT_TRUE((*upload)->PutPart(0, {&piece, 1}, crc, Soon()).ok());
  EXPECT_TRUE(Lines().empty()) << "not before it is finished";
  ASSERT_TRUE((*upload)->Finish(crc, Soon()).ok());
  ASSERT_TRUE(sink_->Put("job/step/ropeteam-manifest.json", bytes, PutMode::kIfAbsent, Soon()).ok());
  ASSERT_TRUE(sink_->Put("job/step/ropeteam-damaged.txt", "x", PutMode::kReplace, Soon()).ok());
  ASSERT_TRUE(sink_->Delete("job/step/data", Soon()).ok());
  ASSERT_TRUE(sink_->Begin("job/step/more", 5, 5, Soon()).ok());
  ASSERT_TRUE(sink_->AbortUploads("job", std::chrono::seconds(0), Soon()).ok());
  const auto lines = Lines();
  ASSERT_EQ(lines.size(), 5u);
  for (const auto& line : lines) {
    EXPECT_THAT(line["time"], testing::ContainsRegex("^20..-..-..T..:..:..Z$"));
    EXPECT_EQ(line["job"], "a \"job\"");
    EXPECT_EQ(line["node"], "node-7");
    EXPECT_FALSE(line.contains("outcome"));
  }
  EXPECT_EQ(lines[0]["event"], "write");
  EXPECT_EQ(lines[0]["cause"], "persist");
  EXPECT_EQ(lines[0]["name"], "job/step/data");
  EXPECT_EQ(lines[0]["bytes"], 9);
  EXPECT_EQ(lines[0]["crc32c"], "e3069283");
  EXPECT_EQ(lines[1]["cause"], "manifest");
  EXPECT_EQ(lines[1]["crc32c"], "e3069283");
  EXPECT_EQ(lines[2]["cause"], "damaged");
  EXPECT_EQ(lines[3]["event"], "delete");
  EXPECT_EQ(lines[3]["cause"], "retention");
  EXPECT_EQ(lines[3]["name"], "job/step/data");
  EXPECT_EQ(lines[4]["event"], "abort");
  EXPECT_EQ(lines[4]["cause"], "unfinished");
  EXPECT_EQ(lines[4]["files"], 1);
}

TEST_F(AuditTest, WhatHadNoEffectHasNoLineAndWhatMayHaveHadOneSaysSo) {
  ASSERT_TRUE(sink_->Put("file", "x", PutMode::kIfAbsent, Soon()).ok());
  EXPECT_EQ(sink_->Put("file", "x", PutMode::kIfAbsent, Soon()).code(), Code::kAlreadyExists);
  EXPECT_EQ(Lines().size(), 1u);
  below_->status = Error(Code::kDeadlineExceeded, "lost");
  EXPECT_FALSE(sink_->Put("other", "x", PutMode::kReplace, Soon()).ok());
  ASSERT_EQ(Lines().size(), 2u);
  EXPECT_EQ(Lines()[1]["outcome"], "unknown");
}

TEST_F(AuditTest, AFileThatIsThereIsAppendedTo) {
  ASSERT_TRUE(sink_->Put("file", "x", PutMode::kReplace, Soon()).ok());
  SetUp();
  ASSERT_TRUE(sink_->Put("file", "x", PutMode::kReplace, Soon()).ok());
  EXPECT_EQ(Lines().size(), 2u);
}

TEST_F(AuditTest, APathThatCannotBeOpenedIsNamed) {
  const auto log = AuditLog::Open(beside_.path() + "/no/such/file", "job", "node");
  ASSERT_FALSE(log.ok());
  EXPECT_THAT(log.status().message(), HasSubstr(beside_.path() + "/no/such/file: No such file or directory"));
}

TEST_F(AuditTest, AFullDiskStopsNothingAndIsToldOnce) {
  std::string logged;
  SetLogSink([&](LogLevel, std::string_view message) { logged += std::string(message) + "\n"; },
             LogLevel::kWarning);
  const auto full = AuditLog::Open("/dev/full", "job", "node");
  ASSERT_TRUE(full.ok());
  const auto sink = AuditedSink(below_, *full, "retention");
  EXPECT_TRUE(sink->Put("one", "x", PutMode::kReplace, Soon()).ok());
  EXPECT_THAT(logged, HasSubstr("--audit-log: lines are lost: write /dev/full: No space left on device"));
  logged.clear();
  EXPECT_TRUE(sink->Delete("one", Soon()).ok());
  EXPECT_EQ(logged, "");
  SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kOff);
}

}  // namespace
}  // namespace ropeteam::storage::test
