// SPDX-License-Identifier: Apache-2.0
//
// Answers of stores and their interpretation: XML, error codes, pauses.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "storage/s3/retry.h"
#include "storage/s3/xml.h"

namespace ropeteam::storage::s3 {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

TEST(Xml, AListHasFilesFoldersAndTheNextPage) {
  const auto list = ParseList(
      "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult "
      "xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
      "<EncodingType>url</EncodingType><IsTruncated>true</IsTruncated><NextContinuationToken>a+b==</"
      "NextContinuationToken>"
      "<Contents><Key>p/a%20b%2Bc+d</Key><Size>5</Size></Contents>"
      "<CommonPrefixes><Prefix>p/x%26y/</Prefix></CommonPrefixes></ListBucketResult>");
  ASSERT_TRUE(list.ok()) << list.status().ToString();
  ASSERT_EQ(list->files.size(), 1u);
  EXPECT_EQ(list->files[0].key, "p/a b+c d");
  EXPECT_EQ(list->files[0].bytes, 5u);
  EXPECT_EQ(list->prefixes, std::vector<std::string>{"p/x&y/"});
  EXPECT_EQ(list->next, "a+b==");  // tokens are not encoded
}

TEST(Xml, KeysStandAsTheyAreWhereTheStoreDoesNotEncodeThem) {
  const auto list = ParseList(
      "<ListBucketResult><Contents><Key>a%20+&lt;b</Key><Size>1</Size></Contents>"
      "</ListBucketResult>");
  ASSERT_TRUE(list.ok());
  EXPECT_EQ(list->files[0].key, "a%20+<b");
}

TEST(Xml, APageWithoutAWayToTheNextIsAnError) {
  EXPECT_EQ(ParseList("<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>").status().code(),
            Code::kUnsupported);
}

TEST(Xml, WhatIsNotTheReplyIsAnErrorThatMayPass) {
  for (const char* body : {"", "<html>proxy</html>", "<ListBucketResult><Contents>", "not xml"})
    EXPECT_EQ(ParseList(body).status().code(), Code::kLinkFailed) << body;
}

TEST(Xml, AnErrorIsOnePrintableLine) {
  const ErrorReply error =
      ParseError("\n <Error><Code>AccessDenied</Code><Message>a\nb" + std::string(500, 'x') +
                 "</Message><RequestId>R1</RequestId><Region>eu-west-1</Region></Error>");
  EXPECT_EQ(error.code, "AccessDenied");
  EXPECT_EQ(error.message.size(), 200u);
  EXPECT_EQ(error.message.find('\n'), std::string::npos);
  EXPECT_EQ(error.request_id, "R1");
  EXPECT_EQ(error.region, "eu-west-1");
  EXPECT_EQ(ParseError("<html/>").code, "");
}

TEST(Xml, PartsHaveTheirChecksums) {
  const auto parts = ParseParts(
      "<ListPartsResult><IsTruncated>true</IsTruncated><NextPartNumberMarker>2"
      "</NextPartNumberMarker><Part><PartNumber>1</PartNumber><Size>9</Size>"
      "<ETag>&quot;e1&quot;</ETag><ChecksumCRC32C>4waSgw==</ChecksumCRC32C></Part>"
      "<Part><PartNumber>2</PartNumber><Size>3</Size><ETag>\"e2\"</ETag></Part></ListPartsResult>");
  ASSERT_TRUE(parts.ok());
  ASSERT_EQ(parts->parts.size(), 2u);
  EXPECT_EQ(parts->parts[0].crc32c, 0xe3069283u);
  EXPECT_EQ(parts->parts[0].etag, "\"e1\"");
  EXPECT_EQ(parts->parts[1].crc32c, std::nullopt);
  EXPECT_TRUE(parts->truncated);
  EXPECT_EQ(parts->next_number, "2");
}

TEST(Xml, UploadsHaveTheirTimes) {
  const auto uploads = ParseUploads(
      "<ListMultipartUploadsResult><EncodingType>url</EncodingType><Upload><Key>a%2Fb</Key>"
      "<UploadId>u1</UploadId><Initiated>2026-11-22T07:30:25.123Z</Initiated>"
      "<ChecksumType>FULL_OBJECT</ChecksumType></Upload></ListMultipartUploadsResult>");
  ASSERT_TRUE(uploads.ok());
  ASSERT_EQ(uploads->uploads.size(), 1u);
  EXPECT_EQ(uploads->uploads[0].key, "a/b");
  EXPECT_EQ(uploads->uploads[0].initiated, 1795332625);
  EXPECT_EQ(uploads->uploads[0].checksum_type, "FULL_OBJECT");
}

TEST(Xml, CompletingNamesPartsInOrderAndEscapesEtags) {
  EXPECT_THAT(
      CompleteBody({{1, "\"a&b\"", 0xe3069283u}, {2, "<", std::nullopt}}),
      HasSubstr("<Part><ChecksumCRC32C>4waSgw==</ChecksumCRC32C><ETag>&quot;a&amp;b&quot;</ETag>"
                "<PartNumber>1</PartNumber></Part><Part><ETag>&lt;</ETag><PartNumber>2</PartNumber></Part>"));
}

TEST(Xml, TimesOfHeadersAndBodies) {
  EXPECT_EQ(ParseHttpTime("Fri, 24 May 2013 00:00:00 GMT"), 1369353600);
  EXPECT_EQ(ParseHttpTime("yesterday-ish"), std::nullopt);
  EXPECT_EQ(ParseIsoTime("2015-08-30T12:36:00Z"), 1440938160);
  EXPECT_EQ(ParseIsoTime("soon"), std::nullopt);
}

TEST(Retry, WhatMayPassIsRepeated) {
  for (const int status : {500, 502, 503, 504, 429, 408})
    EXPECT_EQ(Classify(status, "", false), Next::kPause) << status;
  EXPECT_EQ(Classify(400, "RequestTimeout", false), Next::kPause);
  EXPECT_EQ(Classify(409, "ConditionalRequestConflict", false), Next::kPause);
}

TEST(Retry, WhatDoesNotPassIsNot) {
  for (const int status : {400, 401, 403, 404, 405, 412, 416, 501, 507})
    EXPECT_EQ(Classify(status, "", false), Next::kFail) << status;
  EXPECT_EQ(Classify(503, "XMinioStorageFull", false), Next::kFail);
}

TEST(Retry, SomeRefusalsSayWhatToChange) {
  EXPECT_EQ(Classify(403, "RequestTimeTooSkewed", false), Next::kClock);
  EXPECT_EQ(Classify(400, "ExpiredToken", false), Next::kCredentials);
  EXPECT_EQ(Classify(400, "BadDigest", false), Next::kChecksum);
  EXPECT_EQ(Classify(301, "PermanentRedirect", true), Next::kRegion);
  EXPECT_EQ(Classify(400, "AuthorizationHeaderMalformed", true), Next::kRegion);
  EXPECT_EQ(Classify(301, "PermanentRedirect", false), Next::kFail);
}

TEST(Retry, CodesOfRepliesThatAreFinal) {
  for (const int status : {401, 403}) {
    EXPECT_EQ(CodeOf(status, ""), Code::kIo) << "as a HEAD is answered";
    EXPECT_EQ(CodeOf(status, "AccessDenied"), Code::kIo);
  }
  for (const char* refused :
       {"ExpiredToken", "InvalidToken", "SignatureDoesNotMatch", "RequestTimeTooSkewed"})
    EXPECT_EQ(CodeOf(400, refused), Code::kIo) << refused;
  EXPECT_EQ(CodeOf(400, "InvalidRequest"), Code::kInvalidArgument);
  EXPECT_EQ(CodeOf(404, "NoSuchKey"), Code::kNotFound);
  EXPECT_EQ(CodeOf(404, "NoSuchUpload"), Code::kNotFound);
  EXPECT_EQ(CodeOf(404, "NoSuchBucket"), Code::kIo);
  EXPECT_EQ(CodeOf(400, "XAmzContentChecksumMismatch"), Code::kCorrupt);
  EXPECT_EQ(CodeOf(412, "PreconditionFailed"), Code::kAlreadyExists);
  EXPECT_EQ(CodeOf(416, "InvalidRange"), Code::kCorrupt);
  EXPECT_EQ(CodeOf(501, "NotImplemented"), Code::kUnsupported);
  EXPECT_EQ(CodeOf(503, "SlowDown"), Code::kUnavailable);
  EXPECT_EQ(CodeOf(507, ""), Code::kNoSpace);
  EXPECT_EQ(CodeOf(400, "QuotaExceeded"), Code::kNoSpace);
}

TEST(Retry, PausesGrowToTheCapAndAreJitteredDownToNothing) {
  const RetryTimes times;
  constexpr double kAlmostOne = 0.999999;
  EXPECT_EQ(Pause(times, 1, 0, std::nullopt), milliseconds(0));
  EXPECT_EQ(Pause(times, 1, kAlmostOne, std::nullopt), milliseconds(99));
  EXPECT_EQ(Pause(times, 2, kAlmostOne, std::nullopt), milliseconds(199));
  EXPECT_EQ(Pause(times, 4, 0.5, std::nullopt), milliseconds(400));
  EXPECT_EQ(Pause(times, 9, kAlmostOne, std::nullopt), milliseconds(19999));
  EXPECT_EQ(Pause(times, 1000000, kAlmostOne, std::nullopt), milliseconds(19999));
}

TEST(Retry, RetryAfterIsHonouredUpToTheCap) {
  const RetryTimes times;
  EXPECT_EQ(Pause(times, 1, 0.5, seconds(3)), milliseconds(3050));
  EXPECT_EQ(Pause(times, 1, 0.5, seconds(3600)), milliseconds(20000));
}

}  // namespace
}  // namespace ropeteam::storage::s3
