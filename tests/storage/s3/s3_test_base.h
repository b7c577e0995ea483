// SPDX-License-Identifier: Apache-2.0
//
// A strict server, sinks over it, and the log messages.

#ifndef ROPETEAM_TESTS_STORAGE_S3_S3_TEST_BASE_H_
#define ROPETEAM_TESTS_STORAGE_S3_S3_TEST_BASE_H_

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/base/log.h"
#include "storage/s3/s3_sink.h"
#include "tests/storage/bytes.h"
#include "tests/storage/s3/strict_server.h"

namespace ropeteam::storage::test {

class S3Test : public testing::Test {
 protected:
  static constexpr uint64_t kPart = 5 << 20;

  void SetUp() override {
    const std::string absent = StrictServer::Absent();
    if (!absent.empty()) GTEST_SKIP() << absent;
    SetLogSink(
        [this](LogLevel level, std::string_view message) {
          const std::lock_guard lock(log_mutex_);
          logged_.emplace_back(level, message);
        },
        LogLevel::kDebug);
  }
  void TearDown() override {
    SetLogSink([](LogLevel, std::string_view) {}, LogLevel::kOff);
  }

  void Start(const std::vector<std::string>& options = {}) {
    server_ = StrictServer::Start(options);
    ASSERT_NE(server_, nullptr);
    variables_ = server_->Variables();
    sink_ = Open();
    ASSERT_NE(sink_, nullptr);
  }
  std::unique_ptr<Sink> Open(const std::string& more = "") { return OpenUrl(server_->Url("prefix", more)); }
  std::unique_ptr<Sink> OpenUrl(const std::string& text) {
    const Result<Url> url = ParseUrl(text);
    Result<std::unique_ptr<Sink>> sink = OpenS3Sink(*url, EnvironmentOf(variables_), times_);
    EXPECT_TRUE(sink.ok()) << sink.status().ToString();
    return sink.ok() ? std::move(sink.value()) : nullptr;
  }

  Status Put(const std::string& name, std::string_view bytes, PutMode mode = PutMode::kReplace) {
    return sink_->Put(name, bytes, mode, Soon());
  }
  std::unique_ptr<Upload> Begin(const std::string& name, const std::string& file) {
    Result<std::unique_ptr<Upload>> upload = sink_->Begin(name, file.size(), kPart, Soon());
    EXPECT_TRUE(upload.ok()) << upload.status().ToString();
    return upload.ok() ? std::move(upload.value()) : nullptr;
  }
  static Status PutPart(Upload* upload, const std::string& file, uint32_t index, Deadline deadline = Soon()) {
    const auto part = std::string_view(file).substr(index * upload->part_bytes(), upload->PartLength(index));
    const Piece piece = PieceOf(part);
    return upload->PutPart(index, {&piece, 1}, Crc(part), deadline);
  }
  // Uploads all missing parts and finishes.
  Status UploadAll(Upload* upload, const std::string& file) {
    for (uint32_t i = 0; i < upload->part_count(); ++i) {
      const auto part = std::string_view(file).substr(i * upload->part_bytes(), upload->PartLength(i));
      if (!upload->Has(i, Crc(part))) ROPETEAM_RETURN_IF_ERROR(PutPart(upload, file, i));
    }
    return upload->Finish(Crc(file), Soon());
  }
  Result<std::string> Read(const std::string& name, size_t bytes, uint64_t offset = 0,
                           Deadline deadline = Soon()) {
    std::string found(bytes, '\0');
    const Target target{reinterpret_cast<std::byte*>(found.data()), bytes};
    const Status status = sink_->Read(name, offset, {&target, 1}, deadline);
    if (!status.ok()) return status;
    return found;
  }
  std::optional<std::string> Stored(const std::string& name) { return server_->Object("prefix/" + name); }
  // Compares megabytes without printing them.
  bool StoredIs(const std::string& name, const std::string& file) { return Stored(name) == file; }
  nlohmann::json StoredState(const std::string& name) {
    return server_->State()["objects"][StrictServer::kBucket]["prefix/" + name];
  }
  // A copy of the server's request log: a loop over a part of a temporary would dangle.
  nlohmann::json RequestLog() { return server_->State()["log"]; }
  // The number of messages of at least this level that contain `part`.
  int Logged(LogLevel level, const std::string& part) {
    const std::lock_guard lock(log_mutex_);
    int count = 0;
    for (const auto& [at, message] : logged_) count += at >= level && message.find(part) != std::string::npos;
    return count;
  }

  std::unique_ptr<StrictServer> server_;
  std::unique_ptr<Sink> sink_;
  std::map<std::string, std::string> variables_;
  s3::ClientTimes times_ = ShortTimes();
  std::mutex log_mutex_;
  std::vector<std::pair<LogLevel, std::string>> logged_;
};

}  // namespace ropeteam::storage::test

#endif  // ROPETEAM_TESTS_STORAGE_S3_S3_TEST_BASE_H_
