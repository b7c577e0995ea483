// SPDX-License-Identifier: Apache-2.0
#include "storage/s3/upload.h"

#include <openssl/evp.h>

#include <algorithm>
#include <mutex>

#include "core/base/check.h"
#include "core/base/checksum.h"
#include "core/base/log.h"

namespace ropeteam::storage::s3 {
namespace {

// S3 may take minutes to join 10,000 parts. Google sends no byte meanwhile.
constexpr std::chrono::seconds kCompleteSilenceMax{300};
constexpr int kPagesMax = 10000;  // in case a listing does not end
constexpr int kResumableMax = 5;  // unfinished uploads of one file that are examined
constexpr const char* kFull = "FULL_OBJECT";

struct Part {
  bool done = false;
  bool listed_crc = false;  // the store has this checksum, so Complete must name it
  uint32_t crc32c = 0;
  std::string etag;
};

Status CheckIndex(const Upload& upload, uint32_t index, std::span<const Piece> pieces) {
  uint64_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  if (index >= upload.part_count())
    return Error(Code::kInvalidArgument, "part %u of %u", index, upload.part_count());
  if (bytes != upload.PartLength(index))
    return Error(Code::kInvalidArgument, "part %u has %llu bytes, not %llu", index,
                 static_cast<unsigned long long>(upload.PartLength(index)),
                 static_cast<unsigned long long>(bytes));
  return OkStatus();
}

class WholeUpload : public Upload {
 public:
  WholeUpload(Client* client, std::string key, uint64_t bytes)
      : Upload(bytes, std::max<uint64_t>(bytes, 1)), client_(client), key_(std::move(key)) {}

  bool Has(uint32_t, uint32_t) const override { return false; }

  Status PutPart(uint32_t index, std::span<const Piece> pieces, uint32_t crc32c, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckIndex(*this, index, pieces));
    ROPETEAM_RETURN_IF_ERROR(client_->CheckLive(deadline));
    std::string kept;
    for (const Piece& piece : pieces) kept.append(reinterpret_cast<const char*>(piece.data), piece.bytes);
    const uint32_t found = Crc32c(kept.data(), kept.size());
    if (found != crc32c)
      return Error(Code::kCorrupt, "%s: the bytes in memory have the CRC32C %08x, not %08x",
                   client_->UrlOf(key_).c_str(), found, crc32c);
    const std::lock_guard lock(mutex_);
    kept_ = std::move(kept);
    crc32c_ = crc32c;
    return OkStatus();
  }

  Status Finish(uint32_t crc32c, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(client_->CheckLive(deadline));
    if (!crc32c_)
      return Error(Code::kInvalidArgument, "%s: part 0 has not been put", client_->UrlOf(key_).c_str());
    if (*crc32c_ != crc32c)
      return Error(Code::kCorrupt, "%s: the file has the CRC32C %08x, not %08x", client_->UrlOf(key_).c_str(),
                   *crc32c_, crc32c);
    const Piece piece{reinterpret_cast<const std::byte*>(kept_.data()), kept_.size()};
    S3Request request;
    request.what = "PUT";
    request.method = "PUT";
    request.key = key_;
    request.headers = FileHeaders(client_->config());
    request.body = {&piece, 1};
    request.has_body = true;
    return client_->PutChecked(std::move(request), crc32c, deadline).status;
  }

  Status Abort(Deadline) override {
    kept_.clear();
    crc32c_.reset();
    return OkStatus();
  }

 private:
  Client* const client_;
  const std::string key_;
  std::mutex mutex_;
  std::string kept_;
  std::optional<uint32_t> crc32c_;
};

class MultipartUpload : public Upload {
 public:
  MultipartUpload(Client* client, std::string key, uint64_t bytes, uint64_t part_bytes)
      : Upload(bytes, part_bytes), client_(client), key_(std::move(key)), parts_(part_count()) {}

  // OK: the store has begun the upload. The other calls come after that, or after Resume().
  Status Create(Deadline deadline);
  // False: this upload is for another file, or has no usable parts.
  Result<bool> Resume(const UploadsReply::Upload& upload, Deadline deadline);

  bool Has(uint32_t index, uint32_t crc32c) const override;
  Status PutPart(uint32_t index, std::span<const Piece> pieces, uint32_t crc32c, Deadline deadline) override;
  Status Finish(uint32_t crc32c, Deadline deadline) override;
  Status Abort(Deadline deadline) override { return AbortUpload(client_, key_, id_, deadline); }

 private:
  S3Request Request(const char* what, const char* method) const;
  Status CheckWhole(uint32_t crc32c) const;
  Status CheckCompleted(const CompletedReply& reply, uint32_t crc32c, Deadline deadline);
  Status FindOutWhetherDone(const Outcome& outcome, uint32_t crc32c, Deadline deadline);
  // The store's name for the checksum of checksums, "…-3".
  std::string CompositeText() const;
  // The store's etag for a file made of these parts; empty if its etags are not MD5.
  std::string CompositeEtag() const;

  Client* const client_;
  const std::string key_;
  std::string id_;
  bool full_object_ = false;  // the store checks the whole file's checksum

  mutable std::mutex mutex_;
  std::vector<Part> parts_;  // guarded by mutex_
};

S3Request MultipartUpload::Request(const char* what, const char* method) const {
  S3Request request;
  request.what = what;
  request.method = method;
  request.key = key_;
  if (!id_.empty()) request.query = {{"uploadId", id_}};
  return request;
}

Status MultipartUpload::Create(Deadline deadline) {
  const bool google = client_->config().google;
  // A store that does not know a header usually ignores it. If it refuses the header, the request is sent
  // again without it.
  for (int less = google || !client_->checks_crc32c() ? 2 : 0; less <= 2; ++less) {
    S3Request request = Request("begin upload", "POST");
    request.query = {{"uploads", ""}};
    request.headers = FileHeaders(client_->config());
    if (less < 2) request.headers.emplace_back("x-amz-checksum-algorithm", "CRC32C");
    if (less < 1) request.headers.emplace_back("x-amz-checksum-type", kFull);
    request.has_body = true;
    const Outcome outcome = client_->Send(std::move(request), deadline);
    const int status = outcome.reply.status;
    const bool refused = status == 501 || (status == 400 && outcome.status.code() == Code::kInvalidArgument);
    if (!outcome.status.ok() && refused && less < 2 && client_->config().checksum == ChecksumPolicy::kAuto)
      continue;
    if (!outcome.status.ok()) return outcome.status;
    if (less == 2 && !google && client_->checks_crc32c())
      client_->DisbelieveCrc32c("it refuses the header x-amz-checksum-algorithm");
    full_object_ = outcome.reply.header("x-amz-checksum-type") == kFull;
    Result<std::string> id = ParseCreated(outcome.reply.body);
    if (!id.ok())
      return Error(id.status().code(), "%s: %s", client_->UrlOf(key_).c_str(), id.status().message().c_str());
    id_ = std::move(id).value();
    return OkStatus();
  }
  return Error(Code::kInternal, "unreachable");
}

Result<bool> MultipartUpload::Resume(const UploadsReply::Upload& upload, Deadline deadline) {
  std::vector<Part> found(parts_.size());
  size_t count = 0;
  std::string marker;
  for (int page = 0; page < kPagesMax; ++page) {
    S3Request request = Request("list parts", "GET");
    request.query = {{"uploadId", upload.id}, {"max-parts", std::to_string(kPageEntries)}};
    if (!marker.empty()) request.query.emplace_back("part-number-marker", marker);
    request.reply_bytes_max = kListBytesMax;
    const Outcome outcome = client_->Send(std::move(request), deadline);
    if (outcome.status.code() == Code::kNotFound) return false;  // another process has finished or aborted it
    if (!outcome.status.ok()) return outcome.status;
    const Result<PartsReply> parts = ParseParts(outcome.reply.body);
    if (!parts.ok()) {
      // The lists of some stores cannot be read. Then existing parts are sent again; the upload must not
      // fail.
      LOG_DEBUG("%s: list parts: %s", client_->UrlOf(key_).c_str(), parts.status().message().c_str());
      return false;
    }
    for (const PartsReply::Part& part : parts->parts) {
      if (part.number < 1 || part.number > parts_.size() || part.bytes != PartLength(part.number - 1) ||
          !part.crc32c)
        return false;  // the file has another size or other parts, or was uploaded without checksums
      if (!found[part.number - 1].done) ++count;
      found[part.number - 1] = Part{true, true, *part.crc32c, part.etag};
    }
    if (!parts->truncated || parts->next_number.empty() || parts->next_number == marker) break;
    marker = parts->next_number;
  }
  if (count == 0) return false;
  id_ = upload.id;
  full_object_ = upload.checksum_type == kFull;
  const std::lock_guard lock(mutex_);
  parts_ = std::move(found);
  LOG_INFO("%s: going on with an unfinished upload, %zu of %zu parts are there", client_->UrlOf(key_).c_str(),
           count, parts_.size());
  return true;
}

bool MultipartUpload::Has(uint32_t index, uint32_t crc32c) const {
  const std::lock_guard lock(mutex_);
  return index < parts_.size() && parts_[index].done && parts_[index].listed_crc &&
         parts_[index].crc32c == crc32c;
}

Status MultipartUpload::PutPart(uint32_t index, std::span<const Piece> pieces, uint32_t crc32c,
                                Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(CheckIndex(*this, index, pieces));
  {
    // The existing part is being replaced. Until that is done, it is unknown which of the two the store has.
    const std::lock_guard lock(mutex_);
    parts_[index].done = false;
  }
  S3Request request = Request("", "PUT");
  request.what = "PUT part " + std::to_string(index + 1);
  request.query.emplace_back("partNumber", std::to_string(index + 1));
  request.body = pieces;
  request.has_body = true;
  const Outcome outcome = client_->PutChecked(std::move(request), crc32c, deadline);
  if (!outcome.status.ok()) return outcome.status;
  const std::string& etag = outcome.reply.header("etag");
  if (etag.empty())
    return Error(Code::kLinkFailed, "%s: part %u was taken, but without an ETag",
                 client_->UrlOf(key_).c_str(), index + 1);
  const bool listed_crc = !outcome.reply.header("x-amz-checksum-crc32c").empty();
  const std::lock_guard lock(mutex_);
  parts_[index] = Part{true, listed_crc, crc32c, etag};
  return OkStatus();
}

Status MultipartUpload::CheckWhole(uint32_t crc32c) const {
  const std::lock_guard lock(mutex_);
  uint32_t whole = 0;
  for (uint32_t i = 0; i < parts_.size(); ++i) {
    if (!parts_[i].done)
      return Error(Code::kInvalidArgument, "%s: part %u of %zu has not been put",
                   client_->UrlOf(key_).c_str(), i, parts_.size());
    whole = Crc32cCombine(whole, parts_[i].crc32c, PartLength(i));
  }
  if (whole != crc32c)
    return Error(Code::kCorrupt, "%s: the parts make a file with the CRC32C %08x, not %08x",
                 client_->UrlOf(key_).c_str(), whole, crc32c);
  return OkStatus();
}

std::string MultipartUpload::CompositeText() const {
  const std::lock_guard lock(mutex_);
  uint32_t crc = 0;
  for (const Part& part : parts_) {
    const unsigned char bytes[4] = {
        static_cast<unsigned char>(part.crc32c >> 24), static_cast<unsigned char>(part.crc32c >> 16),
        static_cast<unsigned char>(part.crc32c >> 8), static_cast<unsigned char>(part.crc32c)};
    crc = Crc32c(bytes, sizeof(bytes), crc);
  }
  return Crc32cText(crc) + "-" + std::to_string(parts_.size());
}

std::string MultipartUpload::CompositeEtag() const {
  std::string md5s;
  const std::lock_guard lock(mutex_);
  for (const Part& part : parts_) {
    std::string hex = part.etag;
    std::erase(hex, '"');
    if (hex.size() != 32 || hex.find_first_not_of("0123456789abcdef") != std::string::npos) return "";
    for (size_t i = 0; i < hex.size(); i += 2)
      md5s.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  ROPETEAM_CHECK(EVP_Digest(md5s.data(), md5s.size(), digest, &length, EVP_md5(), nullptr) == 1);
  std::string text = "\"";
  for (unsigned i = 0; i < length; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    text += {kDigits[digest[i] >> 4], kDigits[digest[i] & 15]};
  }
  return text + "-" + std::to_string(parts_.size()) + "\"";
}

// Compares the checksum of the joined file in the store's reply. If it is wrong, the file is deleted.
Status MultipartUpload::CheckCompleted(const CompletedReply& reply, uint32_t crc32c, Deadline deadline) {
  if (reply.checksum.empty() || reply.checksum == Crc32cText(crc32c) || reply.checksum == CompositeText())
    return OkStatus();
  S3Request request = Request("DELETE", "DELETE");
  request.query.clear();
  const Status deleted = client_->Send(std::move(request), deadline).status;
  return Error(Code::kCorrupt, "%s: the store made a file with the CRC32C %.20s, not %s; %s",
               client_->UrlOf(key_).c_str(), reply.checksum.c_str(), Crc32cText(crc32c).c_str(),
               deleted.ok() ? "deleted it" : deleted.message().c_str());
}

// The upload no longer exists. If an earlier attempt to complete it succeeded, its file exists.
Status MultipartUpload::FindOutWhetherDone(const Outcome& outcome, uint32_t crc32c, Deadline deadline) {
  S3Request request = Request("HEAD", "HEAD");
  request.query.clear();
  if (!client_->config().google) request.headers = {{"x-amz-checksum-mode", "ENABLED"}};
  const Outcome head = client_->Send(std::move(request), deadline);
  if (head.status.code() == Code::kNotFound) return outcome.status;
  if (!head.status.ok()) return head.status;
  const HttpReply& reply = head.reply;
  const std::string etag = CompositeEtag();
  const std::string& checksum = reply.header("x-amz-checksum-crc32c");
  const bool ours = reply.header("content-length") == std::to_string(bytes_) &&
                    (checksum == Crc32cText(crc32c) || checksum == CompositeText() ||
                     reply.header("x-goog-hash").find("crc32c=" + Crc32cText(crc32c)) != std::string::npos ||
                     (!etag.empty() && reply.header("etag") == etag));
  if (!ours) return outcome.status;
  LOG_DEBUG("%s: was completed by the attempt whose answer was lost", client_->UrlOf(key_).c_str());
  return OkStatus();
}

Status MultipartUpload::Finish(uint32_t crc32c, Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(client_->CheckLive(deadline));
  ROPETEAM_RETURN_IF_ERROR(CheckWhole(crc32c));
  std::vector<CompletePart> parts;
  {
    const std::lock_guard lock(mutex_);
    for (uint32_t i = 0; i < parts_.size(); ++i)
      parts.push_back({i + 1, parts_[i].etag,
                       parts_[i].listed_crc ? std::optional<uint32_t>(parts_[i].crc32c) : std::nullopt});
  }
  const std::string body = CompleteBody(parts);
  const Piece piece{reinterpret_cast<const std::byte*>(body.data()), body.size()};
  S3Request request = Request("complete upload", "POST");
  request.headers = {{"content-type", "application/xml"}};
  if (full_object_) {
    request.headers.emplace_back("x-amz-checksum-crc32c", Crc32cText(crc32c));
    request.headers.emplace_back("x-amz-checksum-type", kFull);
    request.headers.emplace_back("x-amz-mp-object-size", std::to_string(bytes_));
  }
  request.body = {&piece, 1};
  request.has_body = true;
  request.error_in_200 = true;
  request.silence_max = kCompleteSilenceMax;
  const Outcome outcome = client_->Send(std::move(request), deadline);
  if (outcome.status.ok()) {
    const Result<CompletedReply> reply = ParseCompleted(outcome.reply.body);
    if (reply.ok()) return CheckCompleted(*reply, crc32c, deadline);
    return Error(reply.status().code(), "%s: complete upload: %s", client_->UrlOf(key_).c_str(),
                 reply.status().message().c_str());
  }
  if (outcome.status.code() == Code::kNotFound && outcome.maybe_done)
    return FindOutWhetherDone(outcome, crc32c, deadline);
  return outcome.status;
}

}  // namespace

Result<uint64_t> PartBytes(uint64_t bytes, uint64_t wanted) {
  if (bytes > kPartBytesMax * kPartsMax)
    return Error(Code::kInvalidArgument, "a file of %llu bytes, limit %llu",
                 static_cast<unsigned long long>(bytes),
                 static_cast<unsigned long long>(kPartBytesMax * kPartsMax));
  const uint64_t needed = (bytes + kPartsMax - 1) / kPartsMax;
  return std::clamp(std::max(wanted, needed), kPartBytesMin, kPartBytesMax);
}

NameValues FileHeaders(const Config& config) {
  const std::string prefix = config.dialect().header_prefix;
  NameValues headers;
  if (!config.sse.empty()) headers.emplace_back("x-amz-server-side-encryption", config.sse);
  if (!config.sse_kms_key_id.empty())
    headers.emplace_back("x-amz-server-side-encryption-aws-kms-key-id", config.sse_kms_key_id);
  if (!config.storage_class.empty()) headers.emplace_back(prefix + "storage-class", config.storage_class);
  return headers;
}

Result<std::unique_ptr<Upload>> BeginUpload(Client* client, const std::string& key, uint64_t bytes,
                                            uint64_t part_bytes, Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(client->CheckLive(deadline));
  if (bytes <= kWholeBytesMax)
    return std::unique_ptr<Upload>(std::make_unique<WholeUpload>(client, key, bytes));
  auto upload = std::make_unique<MultipartUpload>(client, key, bytes, part_bytes);
  if (client->checks_crc32c() && !client->config().google) {  // Google does not list the parts' checksums
    std::vector<UploadsReply::Upload> candidates;
    const Status listed = ForEachUpload(client, key, deadline, [&](const UploadsReply::Upload& found) {
      if (found.key == key) candidates.push_back(found);
      return OkStatus();
    });
    // A user with the right to write may lack the right to list. Then the upload starts from the beginning.
    if (!listed.ok() && listed.code() != Code::kIo && listed.code() != Code::kInvalidArgument &&
        listed.code() != Code::kUnsupported)
      return listed;
    std::sort(candidates.begin(), candidates.end(),
              [](const auto& a, const auto& b) { return a.initiated > b.initiated; });
    if (candidates.size() > kResumableMax) candidates.resize(kResumableMax);
    for (const UploadsReply::Upload& candidate : candidates) {
      const Result<bool> resumed = upload->Resume(candidate, deadline);
      if (!resumed.ok()) return resumed.status();
      if (*resumed) return std::unique_ptr<Upload>(std::move(upload));
    }
  }
  ROPETEAM_RETURN_IF_ERROR(upload->Create(deadline));
  return std::unique_ptr<Upload>(std::move(upload));
}

Status ForEachUpload(Client* client, const std::string& prefix, Deadline deadline, const VisitUpload& visit) {
  std::string key_marker, id_marker;
  for (int page = 0; page < kPagesMax; ++page) {
    S3Request request;
    request.what = "list uploads";
    request.query = {
        {"uploads", ""}, {"encoding-type", "url"}, {"max-uploads", std::to_string(kPageEntries)}};
    if (!prefix.empty()) request.query.emplace_back("prefix", prefix);
    if (!key_marker.empty()) request.query.emplace_back("key-marker", key_marker);
    if (!id_marker.empty()) request.query.emplace_back("upload-id-marker", id_marker);
    request.reply_bytes_max = kListBytesMax;
    const Outcome outcome = client->Send(std::move(request), deadline);
    if (!outcome.status.ok()) return outcome.status;
    const Result<UploadsReply> reply = ParseUploads(outcome.reply.body);
    if (!reply.ok())
      return Error(reply.status().code(), "%s: %s", client->UrlOf("").c_str(),
                   reply.status().message().c_str());
    for (const UploadsReply::Upload& upload : reply->uploads) ROPETEAM_RETURN_IF_ERROR(visit(upload));
    const bool stuck = reply->next_key == key_marker && reply->next_id == id_marker;
    if (!reply->truncated) return OkStatus();
    if (stuck)
      return Error(Code::kUnsupported, "%s: the list of uploads does not advance", client->UrlOf("").c_str());
    key_marker = reply->next_key;
    id_marker = reply->next_id;
  }
  return Error(Code::kUnsupported, "%s: the list of uploads has more than %d pages",
               client->UrlOf("").c_str(), kPagesMax);
}

Status AbortUpload(Client* client, const std::string& key, const std::string& id, Deadline deadline) {
  S3Request request;
  request.what = "abort upload";
  request.method = "DELETE";
  request.key = key;
  request.query = {{"uploadId", id}};
  const Status status = client->Send(std::move(request), deadline).status;
  return status.code() == Code::kNotFound ? OkStatus() : status;
}

}  // namespace ropeteam::storage::s3
