// SPDX-License-Identifier: Apache-2.0
#include "storage/s3/s3_sink.h"

#include <atomic>
#include <charconv>
#include <cstdio>
#include <random>

#include "core/base/checksum.h"
#include "core/base/log.h"
#include "storage/s3/upload.h"

namespace ropeteam::storage {
namespace s3 {
namespace {

// If the reply to a PUT was lost, this mark shows whether our own request or another process has put the
// file.
constexpr const char* kPutMark = "meta-ropeteam-put";

std::string RandomMark() {
  std::random_device random;
  char text[33];
  std::snprintf(text, sizeof(text), "%08x%08x%08x%08x", random(), random(), random(), random());
  return text;
}

class S3Sink : public Sink {
 public:
  explicit S3Sink(std::unique_ptr<Client> client) : client_(std::move(client)) {}

  std::string Describe() const override { return client_->Describe(); }

  Result<std::unique_ptr<Upload>> Begin(const std::string& name, uint64_t bytes, uint64_t part_bytes_wanted,
                                        Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckFileName(name));
    const Result<uint64_t> part_bytes = PartBytes(bytes, part_bytes_wanted);
    if (!part_bytes.ok()) return part_bytes.status();
    return BeginUpload(client_.get(), Key(name), bytes, *part_bytes, deadline);
  }

  Status Put(const std::string& name, std::string_view bytes, PutMode mode, Deadline deadline) override;
  Status Read(const std::string& name, uint64_t offset, std::span<const Target> targets,
              Deadline deadline) override;
  Result<FileInfo> Stat(const std::string& name, Deadline deadline) override;
  Result<ListPage> List(const std::string& folder, const std::string& page, Deadline deadline) override;

  Status Delete(const std::string& name, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckFileName(name));
    const Status status = client_->Send(Request("DELETE", "DELETE", Key(name)), deadline).status;
    return status.code() == Code::kNotFound ? OkStatus() : status;
  }

  Status DeleteFolder(const std::string& folder, Deadline deadline) override {
    ROPETEAM_RETURN_IF_ERROR(CheckFileName(folder));
    return client_->CheckLive(deadline);
  }

  Result<uint64_t> AbortUploads(const std::string& folder, std::chrono::seconds age,
                                Deadline deadline) override;

  void SetYield(Yield yield) override { client_->SetYield(std::move(yield)); }

  void Stop() override { client_->Stop(); }

 private:
  std::string Key(const std::string& name) const { return client_->config().Key(name); }
  // The prefix of the keys of all files in a folder.
  Result<std::string> FolderKey(const std::string& folder) const;
  static S3Request Request(const char* what, const char* method, std::string key) {
    S3Request request;
    request.what = what;
    request.method = method;
    request.key = std::move(key);
    return request;
  }
  Outcome Head(const std::string& key, Deadline deadline);
  Status PutIfAbsent(S3Request request, uint32_t crc32c, Deadline deadline);

  const std::unique_ptr<Client> client_;
  std::atomic<bool> conditions_work_{false};  // If-None-Match has refused something
};

Outcome S3Sink::Head(const std::string& key, Deadline deadline) {
  S3Request request = Request("HEAD", "HEAD", key);
  if (!client_->config().google) request.headers = {{"x-amz-checksum-mode", "ENABLED"}};
  return client_->Send(std::move(request), deadline);
}

Status S3Sink::Put(const std::string& name, std::string_view bytes, PutMode mode, Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(CheckFileName(name));
  if (bytes.size() > kPutBytesMax)
    return Error(Code::kInvalidArgument, "%s: %zu bytes in one piece, limit %llu",
                 client_->UrlOf(Key(name)).c_str(), bytes.size(),
                 static_cast<unsigned long long>(kPutBytesMax));
  const Piece piece{reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()};
  S3Request request = Request("PUT", "PUT", Key(name));
  request.headers = FileHeaders(client_->config());
  request.body = {&piece, 1};
  request.has_body = true;
  const uint32_t crc32c = Crc32c(bytes.data(), bytes.size());
  if (mode == PutMode::kIfAbsent) return PutIfAbsent(std::move(request), crc32c, deadline);
  return client_->PutChecked(std::move(request), crc32c, deadline).status;
}

Status S3Sink::PutIfAbsent(S3Request request, uint32_t crc32c, Deadline deadline) {
  const bool google = client_->config().google;
  const std::string mark_name = std::string(client_->config().dialect().header_prefix) + kPutMark;
  const std::string mark = RandomMark();
  request.what = "PUT if absent";
  request.headers.emplace_back(mark_name, mark);
  request.headers.emplace_back(google ? "x-goog-if-generation-match" : "if-none-match", google ? "0" : "*");
  request.hash_body = true;  // it cannot be sent twice
  const Outcome outcome = client_->PutChecked(request, crc32c, deadline);
  if (outcome.status.code() == Code::kAlreadyExists && outcome.maybe_done) {
    // An earlier attempt whose reply was lost may have put it.
    const Outcome head = Head(request.key, deadline);
    if (head.status.code() == Code::kNotFound)
      return Error(Code::kUnavailable, "%s: PUT if absent: was there a moment ago and is gone",
                   client_->UrlOf(request.key).c_str());
    if (!head.status.ok()) return head.status;
    return head.reply.header(mark_name) == mark ? OkStatus() : outcome.status;
  }
  if (outcome.status.code() == Code::kAlreadyExists) conditions_work_ = true;
  if (!outcome.status.ok() || google || conditions_work_.load(std::memory_order_relaxed))
    return outcome.status;
  // A store that does not know the header ignores it and replaces the file. So a second put tests whether the
  // store refuses it.
  const Outcome second = client_->PutChecked(request, crc32c, deadline);
  if (second.status.ok()) {
    const std::string where = client_->UrlOf(request.key);
    LOG_WARNING("%s: this store takes If-None-Match and ignores it", where.c_str());
    return Error(Code::kUnsupported, "%s: PUT if absent: the store ignores If-None-Match", where.c_str());
  }
  if (second.status.code() == Code::kAlreadyExists) conditions_work_ = true;
  return OkStatus();
}

Status S3Sink::Read(const std::string& name, uint64_t offset, std::span<const Target> targets,
                    Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(CheckFileName(name));
  uint64_t bytes = 0;
  for (const Target& target : targets) bytes += target.bytes;
  if (bytes == 0) {  // a range cannot be empty
    const Result<FileInfo> info = Stat(name, deadline);
    if (!info.ok()) return info.status();
    if (offset <= info->bytes) return OkStatus();
    return Error(Code::kCorrupt, "%s: the file ends at %llu bytes", client_->UrlOf(Key(name)).c_str(),
                 static_cast<unsigned long long>(info->bytes));
  }
  S3Request request = Request("GET", "GET", Key(name));
  request.targets = targets;
  request.offset = offset;
  return client_->Send(std::move(request), deadline).status;
}

Result<FileInfo> S3Sink::Stat(const std::string& name, Deadline deadline) {
  ROPETEAM_RETURN_IF_ERROR(CheckFileName(name));
  const Outcome outcome = Head(Key(name), deadline);
  if (!outcome.status.ok()) return outcome.status;
  const HttpReply& reply = outcome.reply;
  FileInfo info;
  info.name = name;
  const std::string& length = reply.header("content-length");
  if (std::from_chars(length.data(), length.data() + length.size(), info.bytes).ec != std::errc())
    return Error(Code::kLinkFailed, "%s: HEAD: a reply without Content-Length",
                 client_->UrlOf(Key(name)).c_str());
  std::string checksum = reply.header("x-amz-checksum-crc32c");
  constexpr std::string_view kGoogleName = "crc32c=";
  const std::string& hashes = reply.header("x-goog-hash");
  const size_t at = hashes.find(kGoogleName);
  if (checksum.empty() && at != std::string::npos) checksum = hashes.substr(at + kGoogleName.size(), 8);
  uint32_t crc32c = 0;
  if (reply.header("x-amz-checksum-type") != "COMPOSITE" && ParseCrc32c(checksum, &crc32c))
    info.crc32c = crc32c;
  return info;
}

Result<std::string> S3Sink::FolderKey(const std::string& folder) const {
  if (folder.empty())
    return client_->config().prefix.empty() ? std::string() : client_->config().prefix + "/";
  ROPETEAM_RETURN_IF_ERROR(CheckFileName(folder));
  return Key(folder) + "/";
}

Result<ListPage> S3Sink::List(const std::string& folder, const std::string& page, Deadline deadline) {
  const Result<std::string> prefix = FolderKey(folder);
  if (!prefix.ok()) return prefix.status();
  const Result<std::string> root = FolderKey("");
  S3Request request = Request("list", "GET", "");
  request.query = {{"list-type", "2"},
                   {"delimiter", "/"},
                   {"encoding-type", "url"},
                   {"max-keys", std::to_string(kPageEntries)}};
  if (!prefix->empty()) request.query.emplace_back("prefix", *prefix);
  if (!page.empty()) request.query.emplace_back("continuation-token", page);
  request.reply_bytes_max = kListBytesMax;
  const Outcome outcome = client_->Send(std::move(request), deadline);
  if (!outcome.status.ok()) return outcome.status;
  Result<ListReply> reply = ParseList(outcome.reply.body);
  const auto fail = [&](Code code, const char* why) {
    return Error(code, "%s: list: %s", client_->UrlOf(*prefix).c_str(), why);
  };
  if (!reply.ok()) return fail(reply.status().code(), reply.status().message().c_str());
  if (!reply->next.empty() && reply->next == page)
    return fail(Code::kUnsupported, "the store gives the same page again and again");
  ListPage list;
  list.next = reply->next;
  for (ListReply::File& file : reply->files) {
    // Some tools use an object with the folder's name for the folder. Names outside the rules are not ours.
    if (!file.key.starts_with(*prefix) || file.key.size() == prefix->size()) continue;
    std::string name = file.key.substr(root->size());
    if (!CheckFileName(name).ok()) continue;
    list.files.push_back({std::move(name), file.bytes, std::nullopt});
  }
  for (const std::string& common : reply->prefixes) {
    if (!common.starts_with(*prefix) || !common.ends_with('/') || common.size() <= prefix->size()) continue;
    std::string name = common.substr(root->size(), common.size() - root->size() - 1);
    if (CheckFileName(name).ok()) list.folders.push_back(std::move(name));
  }
  return list;
}

Result<uint64_t> S3Sink::AbortUploads(const std::string& folder, std::chrono::seconds age,
                                      Deadline deadline) {
  const Result<std::string> prefix = FolderKey(folder);
  if (!prefix.ok()) return prefix.status();
  uint64_t aborted = 0;
  const Status status =
      ForEachUpload(client_.get(), *prefix, deadline, [&](const UploadsReply::Upload& upload) {
        // The store's time has whole seconds, and its clock is not ours. An age of 0 means all uploads.
        if (!upload.key.starts_with(*prefix) ||
            (age.count() > 0 && client_->Now() - upload.initiated <= age.count()))
          return OkStatus();
        LOG_INFO("%s: aborting the upload that was begun %lld s ago", client_->UrlOf(upload.key).c_str(),
                 static_cast<long long>(client_->Now() - upload.initiated));
        const Status done = AbortUpload(client_.get(), upload.key, upload.id, deadline);
        if (done.ok()) ++aborted;
        return done;
      });
  if (!status.ok()) return status;
  return aborted;
}

}  // namespace
}  // namespace s3

Result<std::unique_ptr<Sink>> OpenS3Sink(const Url& url, const s3::Environment& environment,
                                         const s3::ClientTimes& times) {
  Result<s3::Config> config = s3::ReadConfig(url, environment);
  if (!config.ok()) return config.status();
  auto client = std::make_unique<s3::Client>(std::move(config).value(), environment, times);
  ROPETEAM_RETURN_IF_ERROR(client->Open());
  return std::unique_ptr<Sink>(std::make_unique<s3::S3Sink>(std::move(client)));
}

Result<std::unique_ptr<Sink>> OpenS3Sink(const Url& url) {
  return OpenS3Sink(url, s3::ProcessEnvironment(), s3::ClientTimes());
}

}  // namespace ropeteam::storage
