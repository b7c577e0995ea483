// SPDX-License-Identifier: Apache-2.0
//
// Replies of an object store and of credential services, and the shared files of AWS's own tools.

#include "storage/s3/credentials.h"
#include "storage/s3/xml.h"
#include "tests/fuzz/fuzz.h"

namespace ropeteam::fuzz {
namespace {

using storage::s3::Environment;

// Uses the bytes as the reply of a container's credentials endpoint.
void LoadFromContainer(const std::string& body) {
  const Environment environment{[](const std::string& name) -> std::optional<std::string> {
                                  if (name != "AWS_CONTAINER_CREDENTIALS_FULL_URI") return std::nullopt;
                                  return "http://localhost/credentials";
                                },
                                [] { return int64_t{1'760'000'000}; }};
  const auto fetch = [&](const storage::s3::HttpRequest&) -> Result<storage::s3::HttpReply> {
    storage::s3::HttpReply reply;
    reply.status = 200;
    reply.body = body;
    return reply;
  };
  const auto source = storage::s3::ChooseCredentialSource(environment, {}, false, "eu-central-1", fetch);
  const auto loaded = source.value()->Load(storage::Deadline::max());
  if (loaded.ok()) ROPETEAM_CHECK(!loaded->key_id.empty() && !loaded->secret.empty());
}

void RunS3(std::string_view input) {
  using namespace storage::s3;  // NOLINT: a dozen functions of it
  const std::string body(input);
  ROPETEAM_CHECK(ParseError(body).message.size() <= 200);
  (void)ParseList(body);
  (void)ParseUploads(body);
  const Result<PartsReply> parts = ParseParts(body);
  if (parts.ok()) {
    std::vector<CompletePart> complete;
    for (const PartsReply::Part& part : parts->parts)
      complete.push_back({part.number, part.etag, part.crc32c});
    (void)CompleteBody(complete);
  }
  (void)ParseCreated(body);
  (void)ParseCompleted(body);
  (void)ParseSts(body);
  (void)ParseIsoTime(body);
  (void)ParseHttpTime(body);
  (void)ParseProfiles(body, "config");
  LoadFromContainer(body);
}

std::vector<std::string> S3Seeds() {
  return {
      "<Error><Code>NoSuchKey</Code><Message>no such &lt;key&gt;</Message><Region>eu</Region></Error>",
      "<ErrorResponse><Error><Code>ExpiredToken</Code></Error></ErrorResponse>",
      "<ListBucketResult><EncodingType>url</EncodingType><Contents><Key>a%2Fb+c</Key><Size>12</Size></"
      "Contents>"
      "<CommonPrefixes><Prefix>p/</Prefix></CommonPrefixes><IsTruncated>true</IsTruncated>"
      "<NextContinuationToken>t</NextContinuationToken></ListBucketResult>",
      "<ListMultipartUploadsResult><Upload><Key>k</Key><UploadId>u</UploadId>"
      "<Initiated>2026-11-22T07:30:25.000Z</Initiated></Upload></ListMultipartUploadsResult>",
      "<ListPartsResult><Part><PartNumber>1</PartNumber><Size>5</Size><ETag>\"e\"</ETag>"
      "<ChecksumCRC32C>AAAAAA==</ChecksumCRC32C></Part></ListPartsResult>",
      "<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>",
      "<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>",
      "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>a"
      "</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t</SessionToken><Expiration>"
      "2026-11-22T07:30:25Z</Expiration></Credentials></AssumeRoleWithWebIdentityResult>"
      "</AssumeRoleWithWebIdentityResponse>",
      "Fri, 24 May 2013 00:00:00 GMT",
      "[default]\nregion = eu-central-1\ns3 =\n  a = b\n[profile \"x\"]\naws_access_key_id=k\n",
      R"({"AccessKeyId": "a", "SecretAccessKey": "s", "Token": "t", "Expiration": "2026-11-22T07:30:25Z"})",
  };
}

const Target kS3("s3", RunS3, S3Seeds);

}  // namespace
}  // namespace ropeteam::fuzz
