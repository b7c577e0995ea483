// SPDX-License-Identifier: Apache-2.0
//
// Failures between a sink and its store, one per test. In every test, the file under its name is complete or
// absent, never half-written.

#include <thread>

#include "tests/storage/s3/s3_test_base.h"

namespace ropeteam::storage::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;
using FailuresTest = S3Test;
using Json = nlohmann::json;

TEST_F(FailuresTest, ErrorsThatPassAreRepeatedAndSaidOnce) {
  Start();
  const std::string file = Bytes(2 * kPart + 7);
  server_->Fault({{"kind", "status"}, {"status", 500}, {"match", {{"operation", "CreateMultipartUpload"}}}});
  server_->Fault({{"kind", "status"},
                  {"status", 503},
                  {"code", "SlowDown"},
                  {"count", 3},
                  {"when", "after_body"},
                  {"match", {{"operation", "UploadPart"}}}});
  server_->Fault(
      {{"kind", "status"}, {"status", 429}, {"match", {{"operation", "CompleteMultipartUpload"}}}});
  const auto upload = Begin("file", file);
  ASSERT_NE(upload, nullptr);
  EXPECT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  EXPECT_TRUE(StoredIs("file", file));
  EXPECT_EQ(server_->Count("UploadPart"), 3 + 3);
  EXPECT_EQ(Logged(LogLevel::kWarning, "trying again"), 1);
  EXPECT_EQ(Logged(LogLevel::kWarning, "answered 500 InternalError"), 1) << "the first";
  EXPECT_EQ(Logged(LogLevel::kDebug, "trying again"), 5);
}

TEST_F(FailuresTest, AStoreThatIsDownIsGivenUpBeforeTheDeadline) {
  Start();
  times_.retry.cap = seconds(100);
  sink_ = Open();
  server_->Fault({{"kind", "status"}, {"status", 503}});
  server_->Fault({{"kind", "status"}, {"status", 503}, {"headers", {{"Retry-After", "3600"}}}, {"nth", 2}});
  const Deadline deadline = In(seconds(60));  // less than the pause that the store asks for
  const Status status = sink_->Put("file", "x", PutMode::kReplace, deadline);
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("s3://bucket/prefix/file: PUT: 127.0.0.1:"));
  EXPECT_THAT(status.message(), HasSubstr("answered 503 SlowDown"));
  EXPECT_THAT(status.message(), HasSubstr("after 2 attempts"));
  EXPECT_LT(std::chrono::steady_clock::now(), deadline);
  EXPECT_EQ(Stored("file"), std::nullopt);
}

TEST_F(FailuresTest, RetryAfterIsWaitedFor) {
  Start();
  times_.retry.cap = seconds(5);
  sink_ = Open();
  server_->Fault({{"kind", "status"}, {"status", 503}, {"headers", {{"Retry-After", "1"}}}});
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_TRUE(Put("file", "x").ok());
  EXPECT_GE(std::chrono::steady_clock::now() - begin, seconds(1));
}

TEST_F(FailuresTest, NobodyListens) {
  Start();
  const std::unique_ptr<Sink> nowhere = OpenUrl("s3://bucket?endpoint=http://127.0.0.1:1");
  const Status status = nowhere->Put("file", "x", PutMode::kReplace, In(seconds(2)));
  EXPECT_EQ(status.code(), Code::kUnavailable);
  EXPECT_THAT(status.message(), HasSubstr("127.0.0.1 port 1"));
}

TEST_F(FailuresTest, AStoreThatHangsIsLeftAtTheDeadline) {
  Start();
  const std::string file = Bytes(kPart + 1);
  const auto upload = Begin("file", file);
  server_->Fault(
      {{"kind", "stall"}, {"seconds", 30}, {"when", "after_body"}, {"match", {{"operation", "UploadPart"}}}});
  const auto begin = std::chrono::steady_clock::now();
  const Status status = PutPart(upload.get(), file, 0, In(milliseconds(500)));
  EXPECT_EQ(status.code(), Code::kDeadlineExceeded) << status.ToString();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(10));
  server_->ClearFaults();
  EXPECT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  EXPECT_TRUE(StoredIs("file", file));
}

TEST_F(FailuresTest, AConnectionWithoutASignOfLifeIsReplaced) {
  Start();
  times_.silence_max = seconds(1);
  sink_ = Open();
  server_->Fault({{"kind", "stall"}, {"seconds", 30}});
  EXPECT_EQ(Put("file", "x").ToString(), "ok");
  EXPECT_EQ(Stored("file"), "x");
}

TEST_F(FailuresTest, AResetInTheMiddleOfAPart) {
  Start();
  const std::string file = Bytes(2 * kPart);
  const auto upload = Begin("file", file);
  server_->Fault({{"kind", "reset"}, {"after_bytes", 3 << 20}, {"match", {{"part", 2}}}});
  EXPECT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  EXPECT_TRUE(StoredIs("file", file));
  EXPECT_EQ(server_->Count("UploadPart"), 3);
}

TEST_F(FailuresTest, AConnectionThatWasClosedWhileItWasIdle) {
  Start();
  server_->Fault({{"kind", "close_idle"}, {"when", "next_request"}, {"count", 0}});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(Put("file", Bytes(2 << 20)).ToString(), "ok");
  server_->ClearFaults();
  EXPECT_TRUE(StoredIs("file", Bytes(2 << 20)));
}

TEST_F(FailuresTest, ATruncatedBodyGoesOnWhereItEnded) {
  Start();
  const std::string file = Bytes(3 << 20);
  ASSERT_TRUE(Put("file", file).ok());
  server_->Fault({{"kind", "truncate"}, {"after_bytes", 1 << 20}, {"match", {{"operation", "GetObject"}}}});
  const Result<std::string> found = Read("file", file.size() - 5, 5);
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  EXPECT_TRUE(*found == file.substr(5));
  const Json log = RequestLog();
  std::vector<std::string> ranges, conditions;
  for (const Json& entry : log) {
    if (entry["operation"] != "GetObject") continue;
    ranges.push_back(entry["headers"]["range"]);
    conditions.push_back(entry["headers"].value("if-match", ""));
  }
  EXPECT_THAT(ranges, testing::ElementsAre("bytes=5-3145727", "bytes=1048581-3145727"));
  EXPECT_EQ(conditions[0], "");
  EXPECT_EQ(conditions[1], StoredState("file")["etag"].get<std::string>().front() == '"'
                               ? StoredState("file")["etag"]
                               : Json("\"" + StoredState("file")["etag"].get<std::string>() + "\""));
}

TEST_F(FailuresTest, AFileThatIsReplacedInTheMiddleOfAReadIsReadAsOne) {
  Start();
  const std::string older = Bytes(2 << 20), newer(2 << 20, 'n');
  ASSERT_TRUE(Put("file", older).ok());
  // The first GET breaks. A writer then replaces the file, usually before the second GET.
  times_.retry.base = times_.retry.cap = seconds(2);
  sink_ = Open();
  server_->Fault({{"kind", "truncate"}, {"after_bytes", 1 << 20}, {"match", {{"operation", "GetObject"}}}});
  Result<std::string> found = std::string();
  std::thread reader([&] { found = Read("file", older.size()); });
  while (server_->Count("GetObject") == 0) std::this_thread::yield();
  server_->Control("put", {{"bucket", "bucket"}, {"key", "prefix/file"}, {"text", newer}});
  reader.join();
  ASSERT_TRUE(found.ok()) << found.status().ToString();
  // The result is one file or the other, never a part of each.
  EXPECT_TRUE(*found == older || *found == newer);
}

TEST_F(FailuresTest, AReadThatBreaksAllTheTimeEndsAtTheDeadline) {
  Start();
  ASSERT_TRUE(Put("file", Bytes(1 << 20)).ok());
  server_->Fault(
      {{"kind", "reset"}, {"after_bytes", 0}, {"count", 0}, {"match", {{"operation", "GetObject"}}}});
  const Status status = Read("file", 1 << 20, 0, In(milliseconds(300))).status();
  EXPECT_TRUE(status.code() == Code::kLinkFailed || status.code() == Code::kDeadlineExceeded)
      << status.ToString();
}

TEST_F(FailuresTest, BytesThatAreNotThoseOfTheirChecksumAreRefusedByTheStore) {
  Start();
  std::string file = Bytes(2 * kPart);
  const auto upload = Begin("file", file);
  const uint32_t right = Crc(std::string_view(file).substr(0, kPart));
  file[100] ^= 1;  // in memory, after the checksum was computed
  const Piece piece = PieceOf(std::string_view(file).substr(0, kPart));
  const Status status = upload->PutPart(0, {&piece, 1}, right, Soon());
  EXPECT_EQ(status.code(), Code::kCorrupt) << status.ToString();
  EXPECT_EQ(server_->Count("UploadPart"), 2) << "once more, then no more";
  EXPECT_TRUE(server_->State()["uploads"]["bucket"][0]["parts"].empty());
  EXPECT_EQ(PutPart(upload.get(), file, 1).ToString(), "ok");
  EXPECT_EQ(upload->Finish(right, Soon()).code(), Code::kInvalidArgument) << "part 0 is missing";
  EXPECT_EQ(Stored("file"), std::nullopt);
}

TEST_F(FailuresTest, AChecksumOfTheStoreThatIsAnother) {
  Start();
  const std::string file = Bytes(2 * kPart);
  const auto upload = Begin("file", file);
  server_->Fault({{"kind", "wrong_checksum"}, {"count", 2}, {"match", {{"part", 2}}}});
  EXPECT_EQ(PutPart(upload.get(), file, 0).ToString(), "ok");
  EXPECT_EQ(PutPart(upload.get(), file, 1).code(), Code::kCorrupt);
  EXPECT_EQ(PutPart(upload.get(), file, 1).ToString(), "ok");
  EXPECT_EQ(upload->Finish(Crc(file) ^ 1, Soon()).code(), Code::kCorrupt);
  EXPECT_EQ(Stored("file"), std::nullopt);
  EXPECT_EQ(upload->Finish(Crc(file), Soon()).ToString(), "ok");
}

TEST_F(FailuresTest, AFileThatTheStorePutTogetherWronglyIsDeleted) {
  Start();
  const std::string file = Bytes(2 * kPart);
  const auto upload = Begin("file", file);
  server_->Fault({{"kind", "wrong_checksum"}, {"match", {{"operation", "CompleteMultipartUpload"}}}});
  EXPECT_EQ(UploadAll(upload.get(), file).code(), Code::kCorrupt);
  EXPECT_EQ(Stored("file"), std::nullopt);
}

TEST_F(FailuresTest, AnUploadThatSomebodyElseAborted) {
  Start();
  const std::string file = Bytes(2 * kPart);
  auto upload = Begin("file", file);
  server_->Fault({{"kind", "abort_upload"}, {"match", {{"part", 2}}}});
  EXPECT_EQ(PutPart(upload.get(), file, 0).ToString(), "ok");
  EXPECT_EQ(PutPart(upload.get(), file, 1).code(), Code::kNotFound);
  upload = Begin("file", file);
  EXPECT_FALSE(upload->Has(0, Crc(std::string_view(file).substr(0, kPart))));
  server_->Fault({{"kind", "abort_upload"}, {"match", {{"operation", "CompleteMultipartUpload"}}}});
  EXPECT_EQ(UploadAll(upload.get(), file).code(), Code::kNotFound);
  upload = Begin("file", file);
  EXPECT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  EXPECT_TRUE(StoredIs("file", file));
}

TEST_F(FailuresTest, TheAnswerThatAnUploadIsCompleteIsLost) {
  Start();
  const std::string file = Bytes(2 * kPart);
  const auto upload = Begin("file", file);
  server_->Fault({{"kind", "lost_ack"}, {"match", {{"operation", "CompleteMultipartUpload"}}}});
  EXPECT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  EXPECT_TRUE(StoredIs("file", file));
}

TEST_F(FailuresTest, AnotherFileIsNotTakenForTheUploadWhoseAnswerIsLost) {
  Start();
  const std::string file = Bytes(2 * kPart);
  ASSERT_TRUE(Put("file", Bytes(2 * kPart - 1)).ok());
  const auto upload = Begin("file", file);
  // The completion is not answered, and then another client aborts the upload: it cannot have been completed.
  server_->Fault(
      {{"kind", "reset"}, {"after_bytes", 10}, {"match", {{"operation", "CompleteMultipartUpload"}}}});
  server_->Fault(
      {{"kind", "abort_upload"}, {"nth", 2}, {"match", {{"operation", "CompleteMultipartUpload"}}}});
  EXPECT_EQ(UploadAll(upload.get(), file).code(), Code::kNotFound);
}

TEST_F(FailuresTest, AnErrorInAnAnswerThatBeganWell) {
  Start();
  const std::string file = Bytes(2 * kPart);
  for (const bool effect : {false, true}) {
    const auto upload = Begin("file" + std::to_string(effect), file);
    server_->Fault({{"kind", "error_in_200"}, {"code", "InternalError"}, {"effect", effect}, {"spaces", 20}});
    EXPECT_EQ(UploadAll(upload.get(), file).ToString(), "ok") << effect;
    EXPECT_TRUE(StoredIs("file" + std::to_string(effect), file));
  }
}

TEST_F(FailuresTest, TheAnswerToAPutIfAbsentIsLost) {
  Start();
  server_->Fault({{"kind", "lost_ack"}, {"match", {{"operation", "PutObject"}}}});
  EXPECT_EQ(Put("lock", "mine", PutMode::kIfAbsent).ToString(), "ok") << "found by its mark";
  EXPECT_EQ(Stored("lock"), "mine");
  const std::unique_ptr<Sink> other = Open();
  server_->Fault({{"kind", "lost_ack"}, {"match", {{"operation", "PutObject"}}}});
  EXPECT_EQ(other->Put("lock", "mine", PutMode::kIfAbsent, Soon()).code(), Code::kAlreadyExists);
}

TEST_F(FailuresTest, TwoConditionalWritesMeet) {
  Start();
  server_->Fault({{"kind", "status"}, {"status", 409}, {"code", "ConditionalRequestConflict"}, {"count", 2}});
  EXPECT_EQ(Put("lock", "mine", PutMode::kIfAbsent).ToString(), "ok");
}

TEST_F(FailuresTest, AStoreWithoutConditionalWritesSaysSo) {
  Start({"--no-conditional"});
  const Status status = Put("lock", "x", PutMode::kIfAbsent);
  EXPECT_EQ(status.code(), Code::kUnsupported) << status.ToString();
  EXPECT_EQ(Stored("lock"), std::nullopt);
}

TEST_F(FailuresTest, ABucketThatCanBeReadButNotWritten) {
  Start();
  ASSERT_TRUE(Put("file", "x").ok());
  server_->Control("settings", {{"read_only", {{"bucket", true}}}});
  EXPECT_EQ(*Read("file", 1), "x");
  EXPECT_EQ(sink_->List("", "", Soon())->files.size(), 1u);
  for (const Status& status : {Put("other", "y"), sink_->Delete("file", Soon()),
                               sink_->Begin("large", 2 * kPart, kPart, Soon()).status()}) {
    EXPECT_EQ(status.code(), Code::kIo) << status.ToString();
    EXPECT_THAT(status.message(), HasSubstr("403 AccessDenied"));
    EXPECT_THAT(status.message(), HasSubstr("request id "));
    EXPECT_THAT(status.message(), Not(HasSubstr("attempts")));
  }
}

TEST_F(FailuresTest, ABucketThatIsNotThere) {
  Start();
  const std::unique_ptr<Sink> wrong = OpenUrl("s3://nosuchbucket?endpoint=" + server_->endpoint());
  const Status status = wrong->List("", "", Soon()).status();
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_THAT(status.message(), HasSubstr("NoSuchBucket"));
}

TEST_F(FailuresTest, KeysThatAreWrong) {
  Start();
  variables_["AWS_SECRET_ACCESS_KEY"] = "hush-hush";
  sink_ = Open();
  for (const Status& status : {Put("file", "x"), sink_->Stat("file", Soon()).status()}) {
    EXPECT_EQ(status.code(), Code::kIo);
    EXPECT_THAT(status.message(), HasSubstr("SignatureDoesNotMatch"));
    EXPECT_THAT(status.message(), Not(HasSubstr("hush")));
  }
  EXPECT_EQ(Logged(LogLevel::kTrace, "hush"), 0);
}

TEST_F(FailuresTest, CredentialsOfTheInstanceThatExpireAreRenewed) {
  Start();
  variables_ = {{"AWS_EC2_METADATA_SERVICE_ENDPOINT", server_->endpoint() + "/_imds"}};
  sink_ = Open();
  EXPECT_EQ(Put("a", "1").ToString(), "ok");
  server_->Control("credentials", {{"expire", true}});
  EXPECT_EQ(Put("b", "2").ToString(), "ok");
  EXPECT_EQ(server_->Count("ImdsToken"), 2);
  server_->Control("credentials", {{"expire", true}});
  EXPECT_TRUE(sink_->Stat("b", Soon()).ok()) << "a HEAD's answer does not say why";
  EXPECT_EQ(Logged(LogLevel::kInfo, "ExpiredToken"), 2);
}

TEST_F(FailuresTest, CredentialsOfAContainerAndOfAWebIdentity) {
  Start();
  variables_ = {{"AWS_CONTAINER_CREDENTIALS_FULL_URI", server_->endpoint() + "/_container/x"},
                {"AWS_CONTAINER_AUTHORIZATION_TOKEN", "container-token"}};
  sink_ = Open();
  EXPECT_EQ(Put("a", "1").ToString(), "ok");
  const std::string file = testing::TempDir() + "ropeteam-s3-jwt-" + std::to_string(getpid());
  FILE* token = std::fopen(file.c_str(), "w");
  std::fputs("web-identity-token\n", token);
  std::fclose(token);
  variables_ = {{"AWS_WEB_IDENTITY_TOKEN_FILE", file},
                {"AWS_ROLE_ARN", "arn:aws:iam::0:role/r"},
                {"AWS_ENDPOINT_URL_STS", server_->endpoint() + "/_sts"}};
  sink_ = Open();
  EXPECT_EQ(Put("b", "2").ToString(), "ok");
  std::remove(file.c_str());
}

TEST_F(FailuresTest, KeysThatHaveExpiredAndCannotBeRenewed) {
  Start({"--session-token", "token"});
  variables_["AWS_SESSION_TOKEN"] = "token";
  sink_ = Open();
  EXPECT_EQ(Put("a", "1").ToString(), "ok");
  server_->Control("credentials", {{"expire", true}});
  const Status status = Put("b", "2");
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_THAT(status.message(), HasSubstr("ExpiredToken"));
}

TEST_F(FailuresTest, CredentialsThatCannotBeHadSayNothingOfTheFile) {
  Start();
  const std::string missing = testing::TempDir() + "ropeteam-s3-no-jwt";
  variables_ = {{"AWS_WEB_IDENTITY_TOKEN_FILE", missing},
                {"AWS_ROLE_ARN", "arn:aws:iam::0:role/r"},
                {"AWS_ENDPOINT_URL_STS", server_->endpoint() + "/_sts"}};
  sink_ = Open();
  const Status status = sink_->Stat("file", Soon()).status();
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_THAT(status.message(), HasSubstr(missing));
}

TEST_F(FailuresTest, ABucketInAnotherRegion) {
  Start({"--region", "eu-west-3"});
  EXPECT_FALSE(sink_->Stat("file", Soon()).ok());
  EXPECT_EQ(Put("file", "x").ToString(), "ok");
  EXPECT_EQ(*Read("file", 1), "x");
  EXPECT_EQ(Logged(LogLevel::kWarning, "the bucket is in region eu-west-3, not in us-east-1"), 1);
  EXPECT_THAT(sink_->Describe(), HasSubstr("region eu-west-3"));
}

TEST_F(FailuresTest, ABucketThatMoves) {
  Start();
  for (const int status : {301, 307}) {
    const std::string region = "eu-west-" + std::to_string(status);
    server_->Fault({{"kind", "redirect"}, {"status", status}, {"region", region}, {"move", true}});
    EXPECT_EQ(Put("file", Bytes(2 << 20)).ToString(), "ok");
    EXPECT_THAT(sink_->Describe(), HasSubstr("region " + region));
  }
}

TEST_F(FailuresTest, RedirectsInACircleEnd) {
  Start();
  server_->Fault({{"kind", "redirect"}, {"region", "a"}, {"count", 0}});
  server_->Fault({{"kind", "redirect"}, {"region", "b"}, {"count", 0}});
  EXPECT_EQ(Put("file", "x").code(), Code::kIo);
}

TEST_F(FailuresTest, ARegionThatIsNoNameReachesNeitherHostNorSignature) {
  Start();
  for (const std::string& region : {std::string("evil.example/"), std::string("x@evil.example"),
                                    std::string("a/b"), std::string(64, 'a')}) {
    server_->Fault({{"kind", "redirect"}, {"region", region}});
    const Status status = Put("file", "x");
    EXPECT_EQ(status.code(), Code::kIo);
    EXPECT_THAT(status.message(), HasSubstr("names \"" + region + "\" as the bucket's region"));
    EXPECT_THAT(sink_->Describe(), HasSubstr("region us-east-1"));
  }
  EXPECT_EQ(Put("file", "x").ToString(), "ok");
}

TEST_F(FailuresTest, ARedirectToAnotherHostIsNotFollowed) {
  Start();
  server_->Fault({{"kind", "redirect"},
                  {"status", 307},
                  {"region", "us-east-1"},
                  {"location", "http://example.com/"},
                  {"count", 0}});
  const Status status = Put("file", "x");
  EXPECT_EQ(status.code(), Code::kIo);
  EXPECT_THAT(status.message(), HasSubstr("307"));
}

TEST_F(FailuresTest, AClockThatIsWrong) {
  Start();
  server_->Control("settings", {{"skew_s", 7200}});
  EXPECT_EQ(sink_->Stat("file", Soon()).status().code(), Code::kNotFound) << "learned from a HEAD";
  EXPECT_EQ(Put("file", "x").ToString(), "ok");
  EXPECT_EQ(Logged(LogLevel::kWarning, "clock is 7"), 1);
  const std::unique_ptr<Sink> other = Open();
  EXPECT_EQ(other->Put("file", "y", PutMode::kReplace, Soon()).ToString(), "ok");
}

TEST_F(FailuresTest, AListingWithPagesThatAreEmptyOrShort) {
  Start();
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(Put(name, "x").ok());
  for (const char* mode : {"empty", "short"}) {
    server_->Fault({{"kind", "listing"}, {"mode", mode}});
    std::vector<std::string> names;
    std::string page;
    do {
      const Result<ListPage> list = sink_->List("", page, Soon());
      ASSERT_TRUE(list.ok()) << list.status().ToString();
      for (const FileInfo& file : list->files) names.push_back(file.name);
      page = list->next;
    } while (!page.empty());
    EXPECT_THAT(names, testing::ElementsAre("a", "b", "c")) << mode;
  }
}

TEST_F(FailuresTest, AListingThatDoesNotEndIsAnError) {
  Start();
  for (const char* name : {"a", "b", "c"}) ASSERT_TRUE(Put(name, "x").ok());
  server_->Fault({{"kind", "listing"}, {"mode", "same_token"}, {"count", 0}});
  Result<ListPage> list = sink_->List("", "", Soon());
  ASSERT_TRUE(list.ok()) << list.status().ToString();
  list = sink_->List("", list->next, Soon());
  EXPECT_EQ(list.status().code(), Code::kUnsupported) << list.status().ToString();
  server_->ClearFaults();
  server_->Fault({{"kind", "listing"}, {"mode", "no_token"}});
  EXPECT_EQ(sink_->List("", "", Soon()).status().code(), Code::kUnsupported);
}

TEST_F(FailuresTest, AStoreThatDoesNotWantToBeAskedBeforeABody) {
  Start();
  for (const bool ignore : {false, true}) {
    server_->ClearFaults();
    server_->Fault({{"kind", "refuse_continue"}, {"ignore", ignore}, {"count", 0}});
    sink_ = Open();
    EXPECT_EQ(Put("file", Bytes(2 << 20)).ToString(), "ok") << ignore;
  }
}

TEST_F(FailuresTest, StopEndsAPauseAndATransfer) {
  Start();
  times_.retry.base = times_.retry.cap = seconds(50);
  sink_ = Open();
  server_->Fault({{"kind", "status"}, {"status", 503}, {"match", {{"key", "pausing"}}}, {"count", 0}});
  server_->Fault({{"kind", "stall"}, {"seconds", 50}, {"match", {{"key", "hanging"}}}});
  Status pausing, hanging;
  std::thread first([&] { pausing = Put("pausing", "x"); });
  std::thread second([&] { hanging = Put("hanging", "x"); });
  const auto seen = [&] {
    int fired = 0;
    const Json faults = server_->State()["faults"];
    for (const Json& fault : faults) fired += fault["fired"].get<int>() > 0;
    return fired;
  };
  while (seen() < 2) std::this_thread::yield();
  const auto begin = std::chrono::steady_clock::now();
  sink_->Stop();
  first.join();
  second.join();
  EXPECT_EQ(pausing.code(), Code::kAborted);
  EXPECT_EQ(hanging.code(), Code::kAborted);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(20));
}

}  // namespace
}  // namespace ropeteam::storage::test
