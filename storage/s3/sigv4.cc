// SPDX-License-Identifier: Apache-2.0
#include "storage/s3/sigv4.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <ctime>
#include <map>

#include "core/base/check.h"

namespace ropeteam::storage::s3 {
namespace {

using Digest = std::array<unsigned char, SHA256_DIGEST_LENGTH>;

std::string Hex(const Digest& digest) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const unsigned char byte : digest) {
    text.push_back(kDigits[byte >> 4]);
    text.push_back(kDigits[byte & 15]);
  }
  return text;
}

Digest Hmac(std::string_view key, std::string_view data) {
  Digest digest;
  unsigned length = 0;
  const unsigned char* result =
      HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()),
           reinterpret_cast<const unsigned char*>(data.data()), data.size(), digest.data(), &length);
  ROPETEAM_CHECK(result != nullptr && length == digest.size());
  return digest;
}

std::string_view View(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.data()), digest.size()};
}

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

// The value without blanks at its ends, and with each run of blanks replaced by one.
std::string Trimmed(std::string_view value) {
  std::string trimmed;
  for (const char c : value) {
    const bool blank = c == ' ' || c == '\t';
    if (blank && (trimmed.empty() || trimmed.back() == ' ')) continue;
    trimmed.push_back(blank ? ' ' : c);
  }
  if (trimmed.ends_with(' ')) trimmed.pop_back();
  return trimmed;
}

std::map<std::string, std::string> CanonicalHeaders(const NameValues& headers) {
  std::map<std::string, std::string> canonical;
  for (const auto& [name, value] : headers) {
    const auto [entry, is_new] = canonical.emplace(Lower(name), Trimmed(value));
    if (!is_new) entry->second += "," + Trimmed(value);
  }
  return canonical;
}

std::string ScopeText(const Scope& scope) {
  return std::string(scope.time.substr(0, 8)) + "/" + std::string(scope.region) + "/" +
         scope.dialect.service + "/" + scope.dialect.terminator;
}

}  // namespace

std::string UriEncode(std::string_view text, bool keep_slash) {
  static constexpr char kDigits[] = "0123456789ABCDEF";
  std::string encoded;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    const bool plain = (byte < 0x80 && std::isalnum(byte)) || c == '-' || c == '.' || c == '_' || c == '~';
    if (plain || (c == '/' && keep_slash)) {
      encoded.push_back(c);
    } else {
      encoded += {'%', kDigits[byte >> 4], kDigits[byte & 15]};
    }
  }
  return encoded;
}

std::string CanonicalQuery(const NameValues& query) {
  NameValues encoded;
  for (const auto& [name, value] : query)
    encoded.emplace_back(UriEncode(name, false), UriEncode(value, false));
  std::sort(encoded.begin(), encoded.end());
  std::string text;
  for (const auto& [name, value] : encoded) text += (text.empty() ? "" : "&") + name + "=" + value;
  return text;
}

std::string SignedHeaderNames(const NameValues& headers) {
  std::string names;
  for (const auto& [name, value] : CanonicalHeaders(headers)) names += (names.empty() ? "" : ";") + name;
  return names;
}

std::string CanonicalRequest(const CanonicalInput& input) {
  std::string text(input.method);
  text += "\n" + std::string(input.path) + "\n" + CanonicalQuery(input.query) + "\n";
  for (const auto& [name, value] : CanonicalHeaders(input.headers)) text += name + ":" + value + "\n";
  return text + "\n" + SignedHeaderNames(input.headers) + "\n" + std::string(input.payload_hash);
}

std::string StringToSign(const Scope& scope, std::string_view canonical_request) {
  return std::string(scope.dialect.algorithm) + "\n" + std::string(scope.time) + "\n" + ScopeText(scope) +
         "\n" + Sha256Hex(canonical_request);
}

std::string Signature(const Scope& scope, std::string_view secret, std::string_view string_to_sign) {
  Digest key = Hmac(scope.dialect.key_prefix + std::string(secret), scope.time.substr(0, 8));
  key = Hmac(View(key), scope.region);
  key = Hmac(View(key), scope.dialect.service);
  key = Hmac(View(key), scope.dialect.terminator);
  return Hex(Hmac(View(key), string_to_sign));
}

std::string Authorization(const Scope& scope, std::string_view key_id, std::string_view secret,
                          const CanonicalInput& input) {
  const std::string to_sign = StringToSign(scope, CanonicalRequest(input));
  return std::string(scope.dialect.algorithm) + " Credential=" + std::string(key_id) + "/" +
         ScopeText(scope) + ", SignedHeaders=" + SignedHeaderNames(input.headers) +
         ", Signature=" + Signature(scope, secret, to_sign);
}

std::string AmzTime(int64_t unix_seconds) {
  const time_t seconds = static_cast<time_t>(unix_seconds);
  struct tm utc = {};
  ROPETEAM_CHECK(gmtime_r(&seconds, &utc) != nullptr);
  char text[32];
  const size_t length = std::strftime(text, sizeof(text), "%Y%m%dT%H%M%SZ", &utc);
  return std::string(text, length);
}

std::string Sha256Hex(std::string_view bytes) {
  Digest digest;
  SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest.data());
  return Hex(digest);
}

std::string Base64(const void* data, size_t bytes) {
  std::string text(4 * ((bytes + 2) / 3) + 1, '\0');  // EVP_EncodeBlock() writes a zero at the end
  const int length = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(text.data()),
                                     static_cast<const unsigned char*>(data), static_cast<int>(bytes));
  text.resize(static_cast<size_t>(length));
  return text;
}

std::string Crc32cText(uint32_t crc32c) {
  const unsigned char bytes[4] = {
      static_cast<unsigned char>(crc32c >> 24), static_cast<unsigned char>(crc32c >> 16),
      static_cast<unsigned char>(crc32c >> 8), static_cast<unsigned char>(crc32c)};
  return Base64(bytes, sizeof(bytes));
}

bool ParseCrc32c(std::string_view text, uint32_t* crc32c) {
  unsigned char bytes[6];
  if (text.size() != 8 || !text.ends_with("==") ||
      EVP_DecodeBlock(bytes, reinterpret_cast<const unsigned char*>(text.data()), 8) != 6)
    return false;
  *crc32c = static_cast<uint32_t>(bytes[0]) << 24 | static_cast<uint32_t>(bytes[1]) << 16 |
            static_cast<uint32_t>(bytes[2]) << 8 | bytes[3];
  return Crc32cText(*crc32c) == text;
}

}  // namespace ropeteam::storage::s3
