// SPDX-License-Identifier: Apache-2.0
#include "storage/s3/xml.h"

#include <curl/curl.h>

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <pugixml.hpp>

#include "storage/s3/sigv4.h"

namespace ropeteam::storage::s3 {
namespace {

// pugixml does not support DTDs and external entities. So a hostile body can only be large, and its size is
// limited.
bool Load(const std::string& body, pugi::xml_document* document, const char* root) {
  return document->load_buffer(body.data(), body.size(), pugi::parse_default, pugi::encoding_utf8) &&
         std::strcmp(document->document_element().name(), root) == 0;
}

Status Unexpected(const char* root, const std::string& body) {
  const ErrorReply error = ParseError(body);
  if (!error.code.empty())
    return Error(Code::kUnavailable, "the store answered %s: %s", error.code.c_str(), error.message.c_str());
  return Error(Code::kLinkFailed, "the reply of %zu bytes is not the XML of <%s>", body.size(), root);
}

std::string Text(const pugi::xml_node& node, const char* name) { return node.child(name).text().as_string(); }

uint64_t Number(const pugi::xml_node& node, const char* name) { return node.child(name).text().as_ullong(); }

bool True(const pugi::xml_node& node, const char* name) { return Text(node, name) == "true"; }

// If requested and supported, keys are encoded as in the query of an HTML form.
std::string Decoded(const std::string& text, bool encoded) {
  if (!encoded) return text;
  std::string decoded;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned value = 0;
    if (text[i] == '+') {
      decoded.push_back(' ');
    } else if (text[i] == '%' && text.size() - i >= 3 &&
               std::from_chars(text.data() + i + 1, text.data() + i + 3, value, 16).ptr ==
                   text.data() + i + 3) {
      decoded.push_back(static_cast<char>(value));
      i += 2;
    } else {
      decoded.push_back(text[i]);
    }
  }
  return decoded;
}

}  // namespace

std::string Line(const std::string& text) {
  constexpr size_t kBytesMax = 200;  // enough for a sentence; the rest of an HTML page does not help
  std::string line;
  for (const char c : text.substr(0, kBytesMax))
    line.push_back(static_cast<unsigned char>(c) < 0x20 || c == 0x7f ? ' ' : c);
  return line;
}

ErrorReply ParseError(const std::string& body) {
  pugi::xml_document document;
  ErrorReply reply;
  pugi::xml_node error;
  if (Load(body, &document, "Error")) {
    error = document.document_element();
  } else if (Load(body, &document, "ErrorResponse")) {  // STS
    error = document.document_element().child("Error");
  } else {
    return reply;
  }
  reply.code = Line(Text(error, "Code"));
  reply.message = Line(Text(error, "Message"));
  reply.request_id = Line(Text(error, "RequestId"));
  reply.region = Line(Text(error, "Region"));
  reply.endpoint = Line(Text(error, "Endpoint"));
  return reply;
}

Result<ListReply> ParseList(const std::string& body) {
  pugi::xml_document document;
  constexpr const char* kRoot = "ListBucketResult";
  if (!Load(body, &document, kRoot)) return Unexpected(kRoot, body);
  const pugi::xml_node root = document.document_element();
  const bool encoded = Text(root, "EncodingType") == "url";
  ListReply reply;
  for (const pugi::xml_node& file : root.children("Contents"))
    reply.files.push_back({Decoded(Text(file, "Key"), encoded), Number(file, "Size")});
  for (const pugi::xml_node& prefix : root.children("CommonPrefixes"))
    reply.prefixes.push_back(Decoded(Text(prefix, "Prefix"), encoded));
  if (True(root, "IsTruncated")) {
    reply.next = Text(root, "NextContinuationToken");
    if (reply.next.empty())
      return Error(Code::kUnsupported, "the store lists in pages but gives no NextContinuationToken");
  }
  return reply;
}

Result<UploadsReply> ParseUploads(const std::string& body) {
  pugi::xml_document document;
  constexpr const char* kRoot = "ListMultipartUploadsResult";
  if (!Load(body, &document, kRoot)) return Unexpected(kRoot, body);
  const pugi::xml_node root = document.document_element();
  const bool encoded = Text(root, "EncodingType") == "url";
  UploadsReply reply;
  for (const pugi::xml_node& node : root.children("Upload")) {
    UploadsReply::Upload upload;
    upload.key = Decoded(Text(node, "Key"), encoded);
    upload.id = Text(node, "UploadId");
    const std::optional<int64_t> initiated = ParseIsoTime(Text(node, "Initiated"));
    if (!initiated)
      return Error(Code::kUnsupported, "the store gives the upload %s no time that can be read",
                   upload.id.c_str());
    upload.initiated = *initiated;
    upload.checksum_algorithm = Text(node, "ChecksumAlgorithm");
    upload.checksum_type = Text(node, "ChecksumType");
    reply.uploads.push_back(std::move(upload));
  }
  reply.truncated = True(root, "IsTruncated");
  reply.next_key = Decoded(Text(root, "NextKeyMarker"), encoded);
  reply.next_id = Text(root, "NextUploadIdMarker");
  return reply;
}

Result<PartsReply> ParseParts(const std::string& body) {
  pugi::xml_document document;
  constexpr const char* kRoot = "ListPartsResult";
  if (!Load(body, &document, kRoot)) return Unexpected(kRoot, body);
  const pugi::xml_node root = document.document_element();
  PartsReply reply;
  for (const pugi::xml_node& node : root.children("Part")) {
    PartsReply::Part part;
    part.number = static_cast<uint32_t>(Number(node, "PartNumber"));
    part.bytes = Number(node, "Size");
    part.etag = Text(node, "ETag");
    uint32_t crc32c = 0;
    if (ParseCrc32c(Text(node, "ChecksumCRC32C"), &crc32c)) part.crc32c = crc32c;
    reply.parts.push_back(std::move(part));
  }
  reply.truncated = True(root, "IsTruncated");
  reply.next_number = Text(root, "NextPartNumberMarker");
  return reply;
}

Result<std::string> ParseCreated(const std::string& body) {
  pugi::xml_document document;
  constexpr const char* kRoot = "InitiateMultipartUploadResult";
  if (!Load(body, &document, kRoot)) return Unexpected(kRoot, body);
  const std::string id = Text(document.document_element(), "UploadId");
  if (id.empty()) return Unexpected(kRoot, body);
  return id;
}

Result<CompletedReply> ParseCompleted(const std::string& body) {
  pugi::xml_document document;
  constexpr const char* kRoot = "CompleteMultipartUploadResult";
  if (!Load(body, &document, kRoot)) return Unexpected(kRoot, body);
  const pugi::xml_node root = document.document_element();
  return CompletedReply{Text(root, "ETag"), Text(root, "ChecksumCRC32C")};
}

std::string CompleteBody(const std::vector<CompletePart>& parts) {
  // Written without pugixml: a tree of 10,000 parts takes megabytes, and only the etag needs escapes.
  std::string body = "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">";
  for (const CompletePart& part : parts) {
    body += "<Part>";
    if (part.crc32c) body += "<ChecksumCRC32C>" + Crc32cText(*part.crc32c) + "</ChecksumCRC32C>";
    body += "<ETag>";
    for (const char c : part.etag) {
      if (c == '"') {
        body += "&quot;";
      } else if (c == '&') {
        body += "&amp;";
      } else if (c == '<') {
        body += "&lt;";
      } else {
        body.push_back(c);
      }
    }
    body += "</ETag><PartNumber>" + std::to_string(part.number) + "</PartNumber></Part>";
  }
  return body + "</CompleteMultipartUpload>";
}

Result<StsReply> ParseSts(const std::string& body) {
  pugi::xml_document document;
  constexpr const char* kRoot = "AssumeRoleWithWebIdentityResponse";
  if (!Load(body, &document, kRoot)) return Unexpected(kRoot, body);
  const pugi::xml_node node =
      document.document_element().child("AssumeRoleWithWebIdentityResult").child("Credentials");
  StsReply reply{Text(node, "AccessKeyId"), Text(node, "SecretAccessKey"), Text(node, "SessionToken"), 0};
  const std::optional<int64_t> expires = ParseIsoTime(Text(node, "Expiration"));
  if (reply.key_id.empty() || reply.secret.empty() || !expires) return Unexpected(kRoot, body);
  reply.expires = *expires;
  return reply;
}

std::optional<int64_t> ParseIsoTime(const std::string& text) {
  struct tm utc = {};
  if (strptime(text.c_str(), "%Y-%m-%dT%H:%M:%S", &utc) == nullptr) return std::nullopt;
  return timegm(&utc);
}

std::optional<int64_t> ParseHttpTime(const std::string& text) {
  const time_t seconds =
      curl_getdate(text.c_str(), nullptr);  // expects English in every locale, unlike strptime()
  if (seconds < 0) return std::nullopt;
  return seconds;
}

}  // namespace ropeteam::storage::s3
