// SPDX-License-Identifier: Apache-2.0
//
// Google's dialect, stores that accept a condition and ignore it, and a name server that hangs.

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <condition_variable>
#include <cstring>
#include <mutex>

#include "storage/s3/s3_sink.h"
#include "tests/storage/bytes.h"
#include "tests/storage/s3/canned_server.h"
#include "tests/storage/s3/strict_server.h"

namespace ropeteam::storage::test {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;
using testing::Not;

std::unique_ptr<Sink> Open(const std::string& text) {
  const Result<Url> url = ParseUrl(text);
  Result<std::unique_ptr<Sink>> sink =
      OpenS3Sink(*url, EnvironmentOf({{"AWS_ACCESS_KEY_ID", "GOOGKEY"}, {"AWS_SECRET_ACCESS_KEY", "secret"}}),
                 ShortTimes());
  EXPECT_TRUE(sink.ok()) << sink.status().ToString();
  return sink.ok() ? std::move(sink.value()) : nullptr;
}

std::string Reply(const std::string& status, const std::string& headers, const std::string& body = "") {
  return "HTTP/1.1 " + status + "\r\n" + headers + "Content-Length: " + std::to_string(body.size()) +
         "\r\n\r\n" + body;
}

TEST(OtherStoresTest, AnotherSuccessThanAPartOfTheFileIsNoRead) {
  CannedServer server([](const CannedRequest&) { return Reply("202 Accepted", "", "later"); });
  const auto sink = Open("s3://bucket/p?region=r&endpoint=http://127.0.0.1:" + std::to_string(server.port()));
  ASSERT_NE(sink, nullptr);
  std::byte byte{7};
  const Target target{&byte, 1};
  const Status status = sink->Read("file", 3, {&target, 1}, Soon());
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("answered 202 where a part of a file was asked for"));
  EXPECT_EQ(byte, std::byte{7});
}

TEST(GoogleStoreTest, RequestsAreOfOneDialect) {
  CannedServer server([](const CannedRequest& request) {
    if (request.line().starts_with("POST") && request.line().find("uploads=") != std::string::npos)
      return Reply("200 OK", "",
                   "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>");
    if (request.line().starts_with("POST"))
      return Reply("200 OK", "",
                   "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>");
    if (request.line().starts_with("HEAD"))
      return std::string(
          "HTTP/1.1 200 OK\r\nContent-Length: 9\r\nx-goog-hash: crc32c=4waSgw==\r\nx-goog-hash: "
          "md5=AA==\r\n\r\n");
    return Reply("200 OK",
                 "ETag: \"e\"\r\n" + (request.Header("x-goog-hash").empty()
                                          ? std::string()
                                          : "x-goog-hash: " + request.Header("x-goog-hash") + "\r\n"));
  });
  const auto sink = Open("gs://bucket/p?endpoint=http://127.0.0.1:" + std::to_string(server.port()));
  ASSERT_NE(sink, nullptr);
  EXPECT_EQ(sink->Put("file", "123456789", PutMode::kIfAbsent, Soon()).ToString(), "ok");
  const std::string file(6 << 20, 'f');
  const uint32_t crc = Crc(file);
  const Piece piece = PieceOf(file);
  auto upload = sink->Begin("large", file.size(), 8 << 20, Soon());
  ASSERT_TRUE(upload.ok()) << upload.status().ToString();
  EXPECT_EQ((*upload)->PutPart(0, {&piece, 1}, crc, Soon()).ToString(), "ok");
  EXPECT_EQ((*upload)->Finish(crc, Soon()).ToString(), "ok");
  EXPECT_EQ(sink->Stat("file", Soon())->crc32c, 0xe3069283u);
  const auto requests = server.requests();
  EXPECT_EQ(requests.size(), 5u) << "put, begin, part, complete, stat; nothing is listed";
  for (const CannedRequest& request : requests) {
    EXPECT_THAT(request.Header("authorization"), HasSubstr("GOOG4-HMAC-SHA256 Credential=GOOGKEY/"));
    EXPECT_THAT(request.Header("authorization"), HasSubstr("/auto/storage/goog4_request"));
    EXPECT_THAT(request.head, Not(HasSubstr("x-amz-"))) << "Google refuses a mixture";
    EXPECT_THAT(request.Header("x-goog-date"), HasSubstr("T"));
  }
  EXPECT_EQ(requests[0].line(), "PUT /bucket/p/file HTTP/1.1");
  EXPECT_EQ(requests[0].Header("x-goog-if-generation-match"), "0");
  EXPECT_EQ(requests[0].Header("x-goog-hash"), "crc32c=4waSgw==");
  EXPECT_EQ(requests[2].Header("x-goog-hash"), "crc32c=" + s3::Crc32cText(crc));
}

TEST(GoogleStoreTest, APartThatArrivedAsAnotherIsCorrupt) {
  CannedServer server(
      [](const CannedRequest&) { return Reply("200 OK", "ETag: e\r\nx-goog-hash: crc32c=AAAAAA==\r\n"); });
  const auto sink = Open("gs://bucket?endpoint=http://127.0.0.1:" + std::to_string(server.port()));
  EXPECT_EQ(sink->Put("file", "123456789", PutMode::kReplace, Soon()).code(), Code::kCorrupt);
  EXPECT_EQ(server.requests().size(), 2u);
}

TEST(OldStoreTest, AConditionThatIsIgnoredIsFoundOut) {
  CannedServer server([](const CannedRequest& request) {
    return Reply("200 OK",
                 "ETag: e\r\nx-amz-checksum-crc32c: " + request.Header("x-amz-checksum-crc32c") + "\r\n");
  });
  const auto sink = Open("s3://bucket?endpoint=http://127.0.0.1:" + std::to_string(server.port()));
  const Status status = sink->Put("lock", "x", PutMode::kIfAbsent, Soon());
  EXPECT_EQ(status.code(), Code::kUnsupported);
  EXPECT_THAT(status.message(), HasSubstr("ignores If-None-Match"));
}

TEST(OldStoreTest, AStoreThatRefusesTheChecksumsHeaderGetsMd5) {
  CannedServer server([](const CannedRequest& request) {
    if (!request.Header("x-amz-checksum-crc32c").empty())
      return Reply("400 Bad Request", "", "<Error><Code>InvalidRequest</Code></Error>");
    return Reply("200 OK", "ETag: e\r\n");
  });
  const auto sink = Open("s3://bucket?endpoint=http://127.0.0.1:" + std::to_string(server.port()));
  EXPECT_EQ(sink->Put("a", "123456789", PutMode::kReplace, Soon()).ToString(), "ok");
  EXPECT_EQ(sink->Put("b", "123456789", PutMode::kReplace, Soon()).ToString(), "ok");
  const auto requests = server.requests();
  ASSERT_EQ(requests.size(), 3u) << "found out once";
  EXPECT_EQ(requests[2].Header("content-md5"), "JfnnlDI7RTiF9RgfG2JNCw==");
}

TEST(OldStoreTest, AStoreThatIgnoresRangesIsReadFromTheStartOnly) {
  CannedServer server([](const CannedRequest&) { return Reply("200 OK", "ETag: e\r\n", "0123456789"); });
  const auto sink = Open("s3://bucket?endpoint=http://127.0.0.1:" + std::to_string(server.port()));
  std::string found(10, ' ');
  Target target{reinterpret_cast<std::byte*>(found.data()), 10};
  EXPECT_EQ(sink->Read("file", 0, {&target, 1}, Soon()).ToString(), "ok");
  EXPECT_EQ(found, "0123456789");
  target.bytes = 4;
  EXPECT_EQ(sink->Read("file", 0, {&target, 1}, Soon()).ToString(), "ok");
  EXPECT_EQ(sink->Read("file", 2, {&target, 1}, Soon()).code(), Code::kUnsupported);
}

// The host name for which getaddrinfo() hangs in this process, until the test ends.
constexpr const char* kHangingHost = "hang.invalid";
std::mutex hang_mutex;
std::condition_variable hang_over;
bool hanging = true;    // guarded by hang_mutex
int hanging_calls = 0;  // guarded by hang_mutex

TEST(NameServerTest, OneThatHangsIsLeftAtTheDeadline) {
  const auto sink = Open(std::string("s3://bucket?endpoint=http://") + kHangingHost);
  const auto begin = std::chrono::steady_clock::now();
  const Status status = sink->Put("file", "x", PutMode::kReplace, begin + std::chrono::milliseconds(300));
  EXPECT_NE(status.code(), Code::kOk);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, seconds(20)) << "waited for the thread that asks";
  std::unique_lock lock(hang_mutex);
  EXPECT_GE(hanging_calls, 1) << "the name server was not asked at all";
  hanging = false;
  hang_over.notify_all();
  hang_over.wait(lock, [] { return hanging_calls == 0; });
}

}  // namespace
}  // namespace ropeteam::storage::test

// Replaces the C library's getaddrinfo(). libcurl calls it from a thread of its own.
extern "C" __attribute__((visibility("default"))) int getaddrinfo(const char* node, const char* service,
                                                                  const addrinfo* hints, addrinfo** result) {
  namespace test = ropeteam::storage::test;
  if (node != nullptr && std::strcmp(node, test::kHangingHost) == 0) {
    std::unique_lock lock(test::hang_mutex);
    ++test::hanging_calls;
    test::hang_over.wait(lock, [] { return !test::hanging; });
    --test::hanging_calls;
    test::hang_over.notify_all();
    return EAI_AGAIN;
  }
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "getaddrinfo"));
  return real(node, service, hints, result);
}
