// SPDX-License-Identifier: Apache-2.0
//
// The sink's requests to stores of different kinds, and how it treats their answers, beyond the suite of all
// sinks.

#include <cstdlib>
#include <thread>

#include "storage/s3/upload.h"
#include "tests/storage/s3/s3_test_base.h"

namespace ropeteam::storage::test {
namespace {

using std::chrono::seconds;
using testing::HasSubstr;
using StoresTest = S3Test;
using Json = nlohmann::json;

TEST_F(StoresTest, TheStoreHasTheChecksumsThatWereGiven) {
  Start();
  const std::string file = Bytes(2 * kPart + 12345);
  const auto upload = Begin("large", file);
  ASSERT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  Json state = StoredState("large");
  EXPECT_EQ(state["checksum"]["type"], "FULL_OBJECT");
  EXPECT_EQ(state["checksum"]["value"], s3::Crc32cText(Crc(file)));
  EXPECT_EQ(state["parts"], 3);
  EXPECT_EQ(sink_->Stat("large", Soon())->crc32c, Crc(file));
  ASSERT_EQ(Put("small", "123456789").ToString(), "ok");
  EXPECT_EQ(StoredState("small")["checksum"]["value"], "4waSgw==");
  EXPECT_EQ(sink_->Stat("small", Soon())->crc32c, 0xe3069283u);
}

TEST_F(StoresTest, ASmallUploadIsOneRequestAtTheEnd) {
  Start();
  const std::string file = Bytes(s3::kWholeBytesMax);
  const auto upload = Begin("small", file);
  ASSERT_EQ(PutPart(upload.get(), file, 0).ToString(), "ok");
  EXPECT_EQ(Stored("small"), std::nullopt);
  EXPECT_EQ(upload->Finish(Crc(file), Soon()).ToString(), "ok");
  EXPECT_TRUE(StoredIs("small", file));
  EXPECT_EQ(server_->Count("PutObject"), 1);
  EXPECT_EQ(server_->Count("CreateMultipartUpload"), 0);
}

TEST_F(StoresTest, AnotherProcessGoesOnWithTheUpload) {
  Start();
  const std::string file = Bytes(3 * kPart + 1);
  {
    const auto upload = Begin("file", file);
    ASSERT_EQ(PutPart(upload.get(), file, 0).ToString(), "ok");
    ASSERT_EQ(PutPart(upload.get(), file, 2).ToString(), "ok");
  }
  sink_ = Open();
  const auto upload = Begin("file", file);
  EXPECT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  EXPECT_EQ(server_->Count("UploadPart"), 4) << "two before, two after";
  EXPECT_EQ(server_->Count("CreateMultipartUpload"), 1);
  EXPECT_TRUE(StoredIs("file", file));
  EXPECT_EQ(StoredState("file")["checksum"]["value"], s3::Crc32cText(Crc(file)));
}

TEST_F(StoresTest, AnUploadThatIsCutInAnotherWayIsNotGoneOnWith) {
  Start();
  const std::string file = Bytes(2 * kPart);
  for (const Json& parts : {Json{{"1", "short"}}, Json{{"3", "beyond"}}}) {
    server_->Control("upload", {{"bucket", "bucket"},
                                {"key", "prefix/file"},
                                {"parts", parts},
                                {"algorithm", "CRC32C"},
                                {"type", "FULL_OBJECT"}});
  }
  server_->Control("upload",
                   {{"bucket", "bucket"}, {"key", "prefix/file-of-another-name"}, {"parts", {{"1", "x"}}}});
  const auto upload = Begin("file", file);
  EXPECT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  EXPECT_TRUE(StoredIs("file", file));
  EXPECT_EQ(server_->Count("CreateMultipartUpload"), 1);
}

TEST_F(StoresTest, OldUploadsAreAbortedAndYoungOnesAreNot) {
  Start();
  for (const auto& [key, age] : std::map<std::string, int>{{"prefix/step/a", 7200},
                                                           {"prefix/step/deep/b", 7200},
                                                           {"prefix/step/young", 60},
                                                           {"prefix/other", 7200},
                                                           {"elsewhere", 7200}})
    server_->Control("upload", {{"bucket", "bucket"}, {"key", key}, {"age_s", age}});
  const Result<uint64_t> aborted = sink_->AbortUploads("step", seconds(3600), Soon());
  ASSERT_TRUE(aborted.ok()) << aborted.status().ToString();
  EXPECT_EQ(*aborted, 2u);
  std::vector<std::string> left;
  const Json uploads = server_->State()["uploads"]["bucket"];
  for (const Json& upload : uploads) left.push_back(upload["key"]);
  EXPECT_THAT(left, testing::UnorderedElementsAre("prefix/step/young", "prefix/other", "elsewhere"));
}

TEST_F(StoresTest, AStoreWithoutChecksumsIsFoundOutOnceAndGetsMd5) {
  Start({"--no-checksums"});
  const std::string file = Bytes(2 * kPart);
  auto upload = Begin("file", file);
  ASSERT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  EXPECT_TRUE(StoredIs("file", file));
  EXPECT_EQ(sink_->Stat("file", Soon())->crc32c, std::nullopt);
  EXPECT_EQ(Logged(LogLevel::kWarning, "does not check CRC32C"), 1);
  EXPECT_EQ(server_->Count("UploadPart"), 3) << "the first, unchecked, was sent once more";
  for (const Json& entry : RequestLog()) {
    if (entry["operation"] == "UploadPart" && entry["query"]["partNumber"] == "2") {
      EXPECT_TRUE(entry["headers"].contains("content-md5"));
    }
  }
  // Now the sink itself compares the bytes with their checksum.
  upload = Begin("corrupt", file);
  const Piece piece = PieceOf(std::string_view(file).substr(0, kPart));
  const int before = server_->Count("UploadPart");
  EXPECT_EQ(upload->PutPart(0, {&piece, 1}, 1, Soon()).code(), Code::kCorrupt);
  EXPECT_EQ(server_->Count("UploadPart"), before);
}

TEST_F(StoresTest, RequiredChecksumsAreRequired) {
  Start({"--no-checksums"});
  sink_ = Open("&checksum=required");
  EXPECT_EQ(Put("file", "x").code(), Code::kUnsupported);
}

TEST_F(StoresTest, WithoutChecksumsTheSinkStillComparesMemory) {
  Start();
  sink_ = Open("&checksum=none");
  const std::string file = Bytes(2 * kPart);
  const auto upload = Begin("file", file);
  const Piece piece = PieceOf(std::string_view(file).substr(0, kPart));
  EXPECT_EQ(upload->PutPart(0, {&piece, 1}, 1, Soon()).code(), Code::kCorrupt);
  EXPECT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  for (const Json& entry : RequestLog()) {
    EXPECT_FALSE(entry["headers"].contains("x-amz-checksum-crc32c"));
    EXPECT_FALSE(entry["headers"].contains("content-md5"));
  }
}

TEST_F(StoresTest, EncryptionAndStorageClassGoWithTheRequestsThatMakeFiles) {
  Start();
  const std::string file = Bytes(2 * kPart);
  sink_ = Open("&sse=aws:kms&sse_kms_key_id=arn:aws:kms:x&storage_class=STANDARD_IA");
  ASSERT_EQ(Put("small", "x").ToString(), "ok");
  const auto upload = Begin("large", file);
  ASSERT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
  int checked = 0;
  for (const Json& entry : RequestLog()) {
    if (entry["operation"] != "PutObject" && entry["operation"] != "CreateMultipartUpload") continue;
    ++checked;
    EXPECT_EQ(entry["headers"]["x-amz-server-side-encryption"], "aws:kms");
    EXPECT_EQ(entry["headers"]["x-amz-server-side-encryption-aws-kms-key-id"], "arn:aws:kms:x");
    EXPECT_EQ(entry["headers"]["x-amz-storage-class"], "STANDARD_IA");
  }
  EXPECT_EQ(checked, 2);
}

TEST_F(StoresTest, ABucketAsAHostName) {
  Start();
  sink_ = OpenUrl("s3://bucket/prefix?path_style=false&endpoint=http://localhost:" +
                  std::to_string(server_->port()));
  EXPECT_EQ(Put("a b/c+d", "x").ToString(), "ok");
  EXPECT_EQ(Stored("a b/c+d"), "x");
  EXPECT_EQ(sink_->List("", "", Soon())->folders, std::vector<std::string>{"a b"});
  EXPECT_THAT(sink_->Describe(), HasSubstr("bucket.localhost"));
}

TEST_F(StoresTest, LargeBodiesAreNotHashedAndSmallOnesAre) {
  Start();
  ASSERT_EQ(Put("small", "x").ToString(), "ok");
  ASSERT_EQ(Put("large", Bytes(s3::kHashedBytesMax + 1)).ToString(), "ok");
  std::map<std::string, std::string> hashes;
  for (const Json& entry : RequestLog()) hashes[entry["key"]] = entry["headers"]["x-amz-content-sha256"];
  EXPECT_EQ(hashes["prefix/small"], s3::Sha256Hex("x"));
  EXPECT_EQ(hashes["prefix/large"], s3::kUnsignedPayload);
}

TEST_F(StoresTest, ConnectionsAreKeptAndABodyIsAskedForOnce) {
  Start();
  const int before = server_->State()["connections"].get<int>();
  for (int i = 0; i < 20; ++i)
    ASSERT_EQ(Put("file" + std::to_string(i % 3), Bytes(2 << 20)).ToString(), "ok");
  EXPECT_LE(server_->State()["connections"].get<int>() - before, 1);
  int expected = 0;
  for (const Json& entry : RequestLog()) expected += entry["headers"].contains("expect");
  EXPECT_EQ(expected, 1);
}

TEST_F(StoresTest, PartsFromManyThreads) {
  Start();
  const std::string file = Bytes(8 * kPart);
  const auto upload = Begin("file", file);
  std::vector<std::thread> threads;
  std::vector<Status> statuses(8);
  for (uint32_t i = 0; i < 8; ++i)
    threads.emplace_back([&, i] { statuses[i] = PutPart(upload.get(), file, i); });
  for (std::thread& thread : threads) thread.join();
  for (const Status& status : statuses) EXPECT_EQ(status.ToString(), "ok");
  ASSERT_EQ(upload->Finish(Crc(file), Soon()).ToString(), "ok");
  EXPECT_TRUE(StoredIs("file", file));
}

TEST_F(StoresTest, TlsWithACertificateAuthorityOfOnesOwn) {
  const std::string base = testing::TempDir() + "ropeteam-s3-tls-" + std::to_string(getpid());
  const std::string make =
      "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext "
      "subjectAltName=IP:127.0.0.1 -keyout " +
      base + ".key -out " + base + ".pem >/dev/null 2>&1";
  if (std::system(make.c_str()) != 0) GTEST_SKIP() << "no openssl command that makes a certificate";
  server_ = StrictServer::Start({"--tls-cert", base + ".pem", "--tls-key", base + ".key"});
  ASSERT_NE(server_, nullptr);
  variables_ = server_->Variables();
  const std::string url = "s3://bucket/prefix?endpoint=https://127.0.0.1:" + std::to_string(server_->port());
  sink_ = OpenUrl(url);
  const Status untrusted = Put("file", "x");
  EXPECT_EQ(untrusted.code(), Code::kIo) << untrusted.ToString();
  EXPECT_THAT(untrusted.message(), HasSubstr("certificate"));
  const std::string file = Bytes(2 * kPart);
  for (const bool by_variable : {false, true}) {
    if (by_variable) variables_["AWS_CA_BUNDLE"] = base + ".pem";
    sink_ = OpenUrl(by_variable ? url : url + "&ca_file=" + base + ".pem");
    const auto upload = Begin("file", file);
    ASSERT_NE(upload, nullptr);
    EXPECT_EQ(UploadAll(upload.get(), file).ToString(), "ok");
    EXPECT_TRUE(*Read("file", file.size()) == file);
  }
  for (const char* end : {".key", ".pem"}) std::remove((base + end).c_str());
}

TEST_F(StoresTest, ReadsScatterIntoManyTargets) {
  Start();
  const std::string file = Bytes(3 << 20);
  ASSERT_TRUE(Put("file", file).ok());
  std::string a(1, 0), b(1 << 20, 0), c(777, 0);
  const Target targets[] = {{reinterpret_cast<std::byte*>(a.data()), a.size()},
                            {nullptr, 0},
                            {reinterpret_cast<std::byte*>(b.data()), b.size()},
                            {reinterpret_cast<std::byte*>(c.data()), c.size()}};
  ASSERT_EQ(sink_->Read("file", 1000, targets, Soon()).ToString(), "ok");
  EXPECT_TRUE(a + b + c == file.substr(1000, a.size() + b.size() + c.size()));
}

TEST(PartBytesTest, AreRoundedToWhatTheStoreTakes) {
  constexpr uint64_t kMiB = 1 << 20;
  EXPECT_EQ(*s3::PartBytes(100 * kMiB, 1), s3::kPartBytesMin);
  EXPECT_EQ(*s3::PartBytes(100 * kMiB, 16 * kMiB), 16 * kMiB);
  EXPECT_EQ(*s3::PartBytes(100, uint64_t{1} << 60), s3::kPartBytesMax);
  EXPECT_EQ(*s3::PartBytes(kPartsMax * 64 * kMiB + 1, 8 * kMiB), 64 * kMiB + 1);
  EXPECT_EQ(s3::PartBytes(s3::kPartBytesMax * kPartsMax + 1, 1).status().code(), Code::kInvalidArgument);
}

}  // namespace
}  // namespace ropeteam::storage::test
