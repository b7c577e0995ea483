// SPDX-License-Identifier: Apache-2.0
//
// Compares signatures with those that AWS publishes: the examples of "Signature Calculations for the
// Authorization Header" in the S3 API reference, and the cases of the aws-sig-v4-test-suite that are also
// valid under S3's rules (a path is encoded once and not normalised).

#include "storage/s3/sigv4.h"

#include <gtest/gtest.h>

namespace ropeteam::storage::s3 {
namespace {

constexpr const char* kSecret = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY";

struct S3Example {
  const char* name;
  const char* method;
  const char* path;  // not encoded
  NameValues query;
  NameValues headers;
  std::string payload;
  const char* request_hash;
  const char* signature;
};

TEST(SigV4, SignsTheExamplesOfTheS3Documentation) {
  const S3Example examples[] = {
      {"GET object",
       "GET",
       "/test.txt",
       {},
       {{"Range", "bytes=0-9"}},
       "",
       "7344ae5b7ee6c3e7e6b0fe0640412a37625d1fbfff95c48bbb2dc43964946972",
       "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"},
      {"PUT object",
       "PUT",
       "/test$file.text",
       {},
       {{"Date", "Fri, 24 May 2013 00:00:00 GMT"}, {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
       "Welcome to Amazon S3.",
       "9e0e90d9c76de8fa5b200d8c849cd5b8dc7a3be3951ddb7f6a76b4158342019d",
       "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"},
      {"GET bucket lifecycle",
       "GET",
       "/",
       {{"lifecycle", ""}},
       {},
       "",
       "9766c798316ff2757b517bc739a67f6213b4ab36dd5da2f94eaebf79c77395ca",
       "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"},
      {"list objects",
       "GET",
       "/",
       {{"prefix", "J"}, {"max-keys", "2"}},
       {},
       "",
       "df57d21db20da04d7fa30298dd4488ba3a2b47ca3a489c74750e0f1e7df1b9b7",
       "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"},
  };
  for (const S3Example& example : examples) {
    SCOPED_TRACE(example.name);
    const std::string hash = Sha256Hex(example.payload);
    NameValues headers = example.headers;
    headers.emplace_back("Host", "examplebucket.s3.amazonaws.com");
    headers.emplace_back("x-amz-content-sha256", hash);
    headers.emplace_back("x-amz-date", "20130524T000000Z");
    const std::string path = UriEncode(example.path, true);
    const CanonicalInput input{example.method, path, example.query, headers, hash};
    const Scope scope{kAmazon, "us-east-1", "20130524T000000Z"};
    EXPECT_EQ(Sha256Hex(CanonicalRequest(input)), example.request_hash);
    const std::string value = Authorization(scope, "AKIAIOSFODNN7EXAMPLE", kSecret, input);
    EXPECT_EQ(value,
              "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
              "SignedHeaders=" +
                  SignedHeaderNames(headers) + ", Signature=" + example.signature);
  }
}

struct SuiteCase {
  const char* name;
  const char* method;
  std::string path;  // not encoded
  NameValues query;
  NameValues headers;
  std::string body;
  const char* signed_headers;
  const char* signature;
};

TEST(SigV4, SignsTheCasesOfTheTestSuite) {
  const SuiteCase cases[] = {
      {"get-vanilla",
       "GET",
       "/",
       {},
       {},
       "",
       "host;x-amz-date",
       "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"},
      {"get-unreserved",
       "GET",
       "/-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
       {},
       {},
       "",
       "host;x-amz-date",
       "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f"},
      {"get-vanilla-query-order-key-case",
       "GET",
       "/",
       {{"Param2", "value2"}, {"Param1", "value1"}},
       {},
       "",
       "host;x-amz-date",
       "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500"},
      {"get-vanilla-query-order-value",
       "GET",
       "/",
       {{"Param1", "value2"}, {"Param1", "value1"}},
       {},
       "",
       "host;x-amz-date",
       "5772eed61e12b33fae39ee5e7012498b51d56abc0abb7c60486157bd471c4694"},
      {"get-vanilla-utf8-query",
       "GET",
       "/",
       {{"\u1234", "bar"}},
       {},
       "",
       "host;x-amz-date",
       "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04"},
      {"get-header-value-order",
       "GET",
       "/",
       {},
       {{"My-Header1", "value4"},
        {"My-Header1", "value1"},
        {"My-Header1", "value3"},
        {"My-Header1", "value2"}},
       "",
       "host;my-header1;x-amz-date",
       "08c7e5a9acfcfeb3ab6b2185e75ce8b1deb5e634ec47601a50643f830c755c01"},
      {"get-header-key-duplicate",
       "GET",
       "/",
       {},
       {{"My-Header1", "value2"}, {"My-Header1", "value2"}, {"My-Header1", "value1"}},
       "",
       "host;my-header1;x-amz-date",
       "c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea"},
      {"get-header-value-trim",
       "GET",
       "/",
       {},
       {{"My-Header1", " value1"}, {"My-Header2", " \"a   b   c\""}},
       "",
       "host;my-header1;my-header2;x-amz-date",
       "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736"},
      {"post-x-www-form-urlencoded",
       "POST",
       "/",
       {},
       {{"Content-Type", "application/x-www-form-urlencoded"}},
       "Param1=value1",
       "content-type;host;x-amz-date",
       "ff11897932ad3f4e8b18135d722051e5ac45fc38421b1da7b9d196a0fe09473a"},
      {"post-sts-header-before",
       "GET",
       "/",
       {},
       {{"X-Amz-Security-Token", "6e86291e8372ff2a2260956d9b8aae1d763fbf315fa00fa31553b73ebf194267"}},
       "",
       "host;x-amz-date;x-amz-security-token",
       "07ec1639c89043aa0e3e2de82b96708f198cceab042d4a97044c66dd9f74e7f8"},
  };
  const Dialect suite = {"AWS4-HMAC-SHA256", "AWS4", "aws4_request", "service", "x-amz-"};
  const Scope scope{suite, "us-east-1", "20150830T123600Z"};
  for (const SuiteCase& one : cases) {
    SCOPED_TRACE(one.name);
    NameValues headers = one.headers;
    headers.emplace_back("Host", "example.amazonaws.com");
    headers.emplace_back("X-Amz-Date", "20150830T123600Z");
    const std::string path = UriEncode(one.path, true);
    const std::string hash = Sha256Hex(one.body);
    EXPECT_EQ(Authorization(scope, "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY",
                            {one.method, path, one.query, headers, hash}),
              std::string("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "
                          "SignedHeaders=") +
                  one.signed_headers + ", Signature=" + one.signature);
  }
}

// The suite's get-space and get-utf8: only the encoded paths are compared.
TEST(SigV4, EncodesThePathsOfTheTestSuite) {
  EXPECT_EQ(UriEncode("/example space/", true), "/example%20space/");
  EXPECT_EQ(UriEncode("/\u1234", true), "/%E1%88%B4");
}

TEST(SigV4, S3KeepsDotsAndDoubleSlashesOfAPath) {
  const NameValues none;
  EXPECT_TRUE(
      CanonicalRequest({"GET", UriEncode("/a//../b", true), none, none, ""}).starts_with("GET\n/a//../b\n"));
}

TEST(SigV4, AQueryWithoutAValueKeepsItsEqualsSign) {
  EXPECT_EQ(CanonicalQuery({{"uploads", ""}, {"prefix", "a b/c+d"}}), "prefix=a%20b%2Fc%2Bd&uploads=");
}

TEST(SigV4, GooglesDialectDiffersInNamesOnly) {
  const NameValues headers = {{"host", "storage.googleapis.com"}, {"x-goog-date", "20130524T000000Z"}};
  const Scope scope{kGoogle, "auto", "20130524T000000Z"};
  const NameValues none;
  const std::string value =
      Authorization(scope, "GOOGKEY", kSecret, {"GET", "/bucket", none, headers, kEmptySha256});
  EXPECT_TRUE(
      value.starts_with("GOOG4-HMAC-SHA256 Credential=GOOGKEY/20130524/auto/storage/goog4_request, "
                        "SignedHeaders=host;x-goog-date, Signature="))
      << value;
}

TEST(SigV4, TheTimeIsUtc) {
  EXPECT_EQ(AmzTime(1440938160), "20150830T123600Z");
  EXPECT_EQ(AmzTime(0), "19700101T000000Z");
}

TEST(Checksum, TextIsBase64OfTheHighestByteFirst) {
  EXPECT_EQ(Crc32cText(0xe3069283), "4waSgw==");  // of "123456789"
  EXPECT_EQ(Crc32cText(0), "AAAAAA==");
  uint32_t crc = 1;
  EXPECT_TRUE(ParseCrc32c("4waSgw==", &crc));
  EXPECT_EQ(crc, 0xe3069283u);
}

TEST(Checksum, WhatIsNotACrc32cOfTheBytesIsRefused) {
  uint32_t crc = 0;
  for (const char* text : {"", "4waSgw", "4waSgw==-3", "4waSgwAA", "4waS!w==", "4waSg===", "4waSgx=="})
    EXPECT_FALSE(ParseCrc32c(text, &crc)) << text;
}

}  // namespace
}  // namespace ropeteam::storage::s3
