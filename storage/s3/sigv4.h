// SPDX-License-Identifier: Apache-2.0
//
// AWS Signature Version 4 in the form that S3 asks for, and Google's GOOG4, which differs in names only. Pure
// functions over text: no clock, no environment, no connection. libcurl signs too, but leaves queries
// unsorted and writes "?uploads" without its "=", which stores refuse.

#ifndef ROPETEAM_STORAGE_S3_SIGV4_H_
#define ROPETEAM_STORAGE_S3_SIGV4_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace ropeteam::storage::s3 {

using NameValue = std::pair<std::string, std::string>;
using NameValues = std::vector<NameValue>;

// The two spellings of one scheme. A store refuses a request that has headers of both.
struct Dialect {
  const char* algorithm;      // first word of the Authorization header
  const char* key_prefix;     // stands before the secret in the first HMAC
  const char* terminator;     // last part of the scope
  const char* service;        // last but one part of the scope
  const char* header_prefix;  // of -date, -content-sha256, -security-token
};
inline constexpr Dialect kAmazon = {"AWS4-HMAC-SHA256", "AWS4", "aws4_request", "s3", "x-amz-"};
inline constexpr Dialect kGoogle = {"GOOG4-HMAC-SHA256", "GOOG4", "goog4_request", "storage", "x-goog-"};

// Stands for the hash of a body that is not hashed; see Client on when.
inline constexpr const char* kUnsignedPayload = "UNSIGNED-PAYLOAD";
// SHA-256 of no bytes.
inline constexpr const char* kEmptySha256 =
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

struct CanonicalInput {
  std::string_view method;
  std::string_view
      path;  // encoded once, as it is sent: S3 does not encode it again and keeps its dots and slashes
  const NameValues& query;  // not encoded; in any order
  const NameValues&
      headers;  // all are signed; names in any case; values of one name are joined in their order
  std::string_view payload_hash;  // in lower-case hex, or kUnsignedPayload
};

struct Scope {
  const Dialect& dialect;
  std::string_view region;
  std::string_view time;  // AmzTime()
};

// "A" to "Z", "a" to "z", digits and "-._~" stay, and "/" if asked for; all else is %XX in upper case.
std::string UriEncode(std::string_view text, bool keep_slash);
// Sorted by encoded name, then value; every name has a "=".
std::string CanonicalQuery(const NameValues& query);
std::string CanonicalRequest(const CanonicalInput& input);
// "host;x-amz-date": names in lower case, sorted, each once.
std::string SignedHeaderNames(const NameValues& headers);
std::string StringToSign(const Scope& scope, std::string_view canonical_request);
// In lower-case hex.
std::string Signature(const Scope& scope, std::string_view secret, std::string_view string_to_sign);
// The value of the Authorization header.
std::string Authorization(const Scope& scope, std::string_view key_id, std::string_view secret,
                          const CanonicalInput& input);

// "20130524T000000Z" of seconds since 1970.
std::string AmzTime(int64_t unix_seconds);

std::string Sha256Hex(std::string_view bytes);
std::string Base64(const void* data, size_t bytes);
// A checksum as stores write it: base64 of its four bytes, the highest first.
std::string Crc32cText(uint32_t crc32c);
// False when `text` is not such a checksum; "…-3", a checksum of checksums, is not.
bool ParseCrc32c(std::string_view text, uint32_t* crc32c);

}  // namespace ropeteam::storage::s3

#endif  // ROPETEAM_STORAGE_S3_SIGV4_H_
