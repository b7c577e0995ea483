// SPDX-License-Identifier: Apache-2.0
//
// The XML replies of an object store, as values. Pure functions over a body that its reader has bounded. Unexpected XML
// is kLinkFailed: a proxy answered, or the body is cut short, so a retry may help.

#ifndef ROPETEAM_STORAGE_S3_XML_H_
#define ROPETEAM_STORAGE_S3_XML_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/status.h"

namespace ropeteam::storage::s3 {

// All members are empty when the body is not an <Error>.
struct ErrorReply {
  std::string code;     // "NoSuchKey"
  std::string message;  // one printable line of at most 200 bytes
  std::string request_id;
  std::string region;    // where the bucket is, if the store says so
  std::string endpoint;  // the host to ask instead, if the store says so
};
ErrorReply ParseError(const std::string& body);

// The text as one printable line of at most 200 bytes.
std::string Line(const std::string& text);

struct ListReply {
  struct File {
    std::string key;
    uint64_t bytes = 0;
  };
  std::vector<File> files;
  std::vector<std::string> prefixes;
  std::string next;  // continuation token; empty: this is the last page
};
Result<ListReply> ParseList(const std::string& body);

struct UploadsReply {
  struct Upload {
    std::string key;
    std::string id;
    int64_t initiated = 0;           // seconds since 1970
    std::string checksum_algorithm;  // "CRC32C"
    std::string checksum_type;       // "FULL_OBJECT", "COMPOSITE"
  };
  std::vector<Upload> uploads;
  bool truncated = false;
  std::string next_key;
  std::string next_id;
};
Result<UploadsReply> ParseUploads(const std::string& body);

struct PartsReply {
  struct Part {
    uint32_t number = 0;
    uint64_t bytes = 0;
    std::string etag;
    std::optional<uint32_t> crc32c;
  };
  std::vector<Part> parts;
  bool truncated = false;
  std::string next_number;
};
Result<PartsReply> ParseParts(const std::string& body);

// <UploadId>.
Result<std::string> ParseCreated(const std::string& body);

struct CompletedReply {
  std::string etag;
  std::string checksum;  // as it stands there: of the object, or "…-N" of the checksums of N parts
};
Result<CompletedReply> ParseCompleted(const std::string& body);

struct CompletePart {
  uint32_t number;
  std::string etag;
  std::optional<uint32_t> crc32c;
};
std::string CompleteBody(const std::vector<CompletePart>& parts);

struct StsReply {
  std::string key_id, secret, token;
  int64_t expires = 0;
};
Result<StsReply> ParseSts(const std::string& body);

// "2026-11-22T07:30:25.000Z" (the fraction may be missing); nullopt when it is not.
std::optional<int64_t> ParseIsoTime(const std::string& text);
// "Fri, 24 May 2013 00:00:00 GMT", the Date header.
std::optional<int64_t> ParseHttpTime(const std::string& text);

}  // namespace ropeteam::storage::s3

#endif  // ROPETEAM_STORAGE_S3_XML_H_
