// SPDX-License-Identifier: Apache-2.0
#include "storage/s3/client.h"

#include <openssl/evp.h>

#include <algorithm>
#include <charconv>
#include <random>

#include "core/base/check.h"
#include "core/base/checksum.h"
#include "core/base/log.h"

namespace ropeteam::storage::s3 {
namespace {

constexpr size_t kExpectBytesMin = 1 << 20;  // a smaller body is sent before "Expect" can be answered
// The least interval between warnings of temporary errors: a store that is overloaded for an hour gives one
// line a minute.
constexpr std::chrono::minutes kTroubleInterval{1};
constexpr int kRegionsMax = 2;  // a store may redirect in a circle
constexpr size_t kRegionShownMax = 80;

template <typename T>
uint64_t TotalBytes(std::span<const T> ranges) {
  uint64_t bytes = 0;
  for (const T& range : ranges) bytes += range.bytes;
  return bytes;
}

uint32_t CrcOf(std::span<const Piece> pieces) {
  uint32_t crc = 0;
  for (const Piece& piece : pieces) crc = Crc32c(piece.data, piece.bytes, crc);
  return crc;
}

std::string HashOf(std::span<const Piece> pieces, const EVP_MD* kind, unsigned char* digest,
                   unsigned* length) {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ROPETEAM_CHECK(context != nullptr && EVP_DigestInit_ex(context, kind, nullptr) == 1);
  for (const Piece& piece : pieces) EVP_DigestUpdate(context, piece.data, piece.bytes);
  EVP_DigestFinal_ex(context, digest, length);
  EVP_MD_CTX_free(context);
  std::string hex;
  for (unsigned i = 0; i < *length; ++i) {
    constexpr char kDigits[] = "0123456789abcdef";
    hex += {kDigits[digest[i] >> 4], kDigits[digest[i] & 15]};
  }
  return hex;
}

std::string PayloadHash(const S3Request& request) {
  const uint64_t bytes = TotalBytes(request.body);
  if (bytes == 0) return kEmptySha256;
  if (bytes > kHashedBytesMax && !request.hash_body) return kUnsignedPayload;
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned length = 0;
  return HashOf(request.body, EVP_sha256(), digest, &length);
}

// "bytes 5-9/1000"; false: it has another form.
bool ParseContentRange(const std::string& text, uint64_t* first, uint64_t* last) {
  constexpr std::string_view kUnit = "bytes ";
  if (!text.starts_with(kUnit)) return false;
  const char* end = text.data() + text.size();
  const auto begin = std::from_chars(text.data() + kUnit.size(), end, *first);
  if (begin.ec != std::errc() || begin.ptr == end || *begin.ptr != '-') return false;
  return std::from_chars(begin.ptr + 1, end, *last).ec == std::errc();
}

double Random() {
  thread_local std::mt19937_64 engine{std::random_device{}()};
  return std::uniform_real_distribution<double>(0, 1)(engine);
}

std::optional<std::chrono::seconds> RetryAfter(const HttpReply& reply) {
  const std::string& text = reply.header("retry-after");
  unsigned seconds = 0;
  const auto result = std::from_chars(text.data(), text.data() + text.size(), seconds);
  if (text.empty() || result.ec != std::errc() || result.ptr != text.data() + text.size())
    return std::nullopt;
  return std::chrono::seconds(seconds);
}

std::string CrcOfReply(const HttpReply& reply, bool google) {
  if (!google) return reply.header("x-amz-checksum-crc32c");
  const std::string& hashes = reply.header("x-goog-hash");  // "crc32c=n03x6A==, md5=…"
  constexpr std::string_view kName = "crc32c=";
  const size_t at = hashes.find(kName);
  return at == std::string::npos ? std::string() : hashes.substr(at + kName.size(), 8);
}

}  // namespace

struct Client::Sent {
  bool answered = false;  // `reply` is complete
  HttpReply reply;
  HttpFailure failure;  // if not answered
  Status refused;       // why this client cannot use the reply
  ErrorReply error;
  std::string region;        // the request was signed for it
  std::string other_region;  // the region in the reply, if it is another one
  std::shared_ptr<const Credentials> credentials;
  bool expected = false;  // with "Expect: 100-continue"
  bool good() const { return answered && reply.status >= 200 && reply.status < 300; }
};

Client::Client(Config config, Environment environment, ClientTimes times)
    : config_(std::move(config)),
      environment_(std::move(environment)),
      times_(times),
      http_(Http::Options{config_.ca_file}),
      region_(config_.region) {}

Status Client::Open() {
  if (config_.anonymous) return OkStatus();
  Fetch fetch = [this](const HttpRequest& request) -> Result<HttpReply> {
    HttpReply reply;
    HttpFailure failure;
    if (http_.Send(request, &reply, &failure)) return reply;
    return failure.status;
  };
  Result<std::unique_ptr<CredentialSource>> source = ChooseCredentialSource(
      environment_, config_.profile, config_.profile_in_url, config_.region, std::move(fetch));
  if (!source.ok())
    return Error(source.status().code(), "%s: %s", config_.url.c_str(), source.status().message().c_str());
  credentials_ = std::make_unique<CredentialCache>(std::move(source).value(), [this] { return Now(); });
  return OkStatus();
}

std::string Client::Region() const {
  const std::lock_guard lock(mutex_);
  return region_;
}

std::string Client::UrlOf(const std::string& key) const {
  if (key.empty()) return config_.url;
  return std::string(config_.google ? "gs" : "s3") + "://" + config_.bucket + "/" + key;
}

std::string Client::Describe() const {
  const std::string region = Region();
  return config_.url + " at " + (config_.tls ? "https://" : "http://") + config_.Host(region) + ", region " +
         region + ", " +
         (credentials_ == nullptr ? "no credentials" : "credentials of " + credentials_->Describe());
}

void Client::Stop() {
  http_.Stop();
  const std::lock_guard lock(mutex_);  // a pause that has not begun to wait would miss the notice
  stopped_.notify_all();
}

Status Client::CheckLive(Deadline deadline) const {
  if (http_.stopped()) return Error(Code::kAborted, "%s: stopped", config_.url.c_str());
  if (std::chrono::steady_clock::now() >= deadline)
    return Error(Code::kDeadlineExceeded, "%s: the deadline had passed before the call", config_.url.c_str());
  return OkStatus();
}

// Adds date, hash and signature. False: there are no credentials; `sent->failure` has the reason.
bool Client::Sign(const S3Request& request, const std::string& path, const NameValues& query,
                  NameValues* headers, Sent* sent, Deadline deadline) {
  const Dialect& dialect = config_.dialect();
  Result<std::shared_ptr<const Credentials>> credentials = credentials_->Get(deadline);
  if (!credentials.ok()) {
    // Without credentials, this node learns nothing about the file.
    const Status& status = credentials.status();
    sent->failure.status =
        status.code() == Code::kInvalidArgument ? Status(Code::kIo, status.message()) : status;
    return false;
  }
  sent->credentials = *credentials;
  const std::string time = AmzTime(Now());
  const std::string hash = PayloadHash(request);
  const std::string prefix = dialect.header_prefix;
  headers->emplace_back(prefix + "date", time);
  headers->emplace_back(prefix + "content-sha256", hash);
  if (!sent->credentials->token.empty())
    headers->emplace_back(prefix + "security-token", sent->credentials->token);
  const Scope scope{dialect, sent->region, time};
  const CanonicalInput input{request.method, path, query, *headers, hash};
  headers->emplace_back("authorization",
                        Authorization(scope, sent->credentials->key_id, sent->credentials->secret, input));
  return true;
}

void Client::SendOnce(const S3Request& request, const Attempts& attempts, Deadline deadline, Sent* sent) {
  sent->region = Region();
  const std::string host = config_.Host(sent->region);
  const std::string path = config_.Path(request.key);
  HttpRequest http;
  http.method = request.method;
  http.url = (config_.tls ? "https://" : "http://") + host + path;
  if (!request.query.empty()) http.url += "?" + CanonicalQuery(request.query);
  http.headers = request.headers;
  http.headers.emplace_back("host", host);
  if (!request.targets.empty()) {
    const uint64_t end = request.offset + TotalBytes(request.targets);
    http.headers.emplace_back("range", "bytes=" + std::to_string(request.offset + attempts.received) + "-" +
                                           std::to_string(end - 1));
    if (!attempts.etag.empty()) http.headers.emplace_back("if-match", attempts.etag);
    http.whole_file_is_fine = request.offset + attempts.received == 0;
  }
  if (credentials_ != nullptr && !Sign(request, path, request.query, &http.headers, sent, deadline)) return;
  http.headers.emplace_back("user-agent", "ropeteam");
  http.body = request.body;
  http.has_body = request.has_body;
  sent->expected = TotalBytes(request.body) > kExpectBytesMin && !attempts.expect_refused &&
                   expect_continue_.load(std::memory_order_relaxed);
  http.expect_continue = sent->expected;
  http.targets = request.targets;
  for (const Target& target : request.targets)
    if (attempts.received == 0 && target.crc32c != nullptr) *target.crc32c = 0;
  http.targets_offset = attempts.received;
  http.reply_bytes_max = request.reply_bytes_max;
  http.deadline = deadline;
  http.connect_timeout = times_.connect_timeout;
  http.silence_max = request.silence_max.count() > 0 ? request.silence_max : times_.silence_max;
  sent->answered = http_.Send(http, &sent->reply, &sent->failure);
  if (!sent->answered) {
    // A store that refuses may close the connection while the body is still being sent. Its reply counts.
    const Code code = sent->failure.status.code();
    sent->answered = sent->failure.reply.status >= 300 && code == Code::kLinkFailed;
    sent->reply = std::move(sent->failure.reply);
  }
  if (request.error_in_200 && sent->good()) {
    const std::string code = ParseError(sent->reply.body).code;
    const bool passing = Classify(200, code, false) == Next::kPause;
    if (!code.empty()) sent->reply.status = passing ? 500 : (code == "NoSuchUpload" ? 404 : 400);
  }
  if (sent->answered && !sent->good()) LearnError(request, attempts, deadline, sent);
}

// Sets the error from the reply. The reply to a HEAD has no body; if the cause matters, a GET of one byte is
// sent for it.
void Client::LearnError(const S3Request& request, const Attempts& attempts, Deadline deadline, Sent* sent) {
  sent->error = ParseError(sent->reply.body);
  std::string region = sent->reply.header("x-amz-bucket-region");
  if (region.empty()) region = sent->error.region;
  const int status = sent->reply.status;
  const bool about_region = status == 301 || status == 307 || status == 400 || status == 403;
  if (about_region && !region.empty() && region != sent->region) {
    // Any text would reach the host name and the signature of the next request.
    if (IsRegion(region))
      sent->other_region = region;
    else
      sent->error.message += " (it names \"" + Line(region.substr(0, kRegionShownMax)) +
                             "\" as the bucket's region, which is not a region's name)";
  }
  if (request.method != "HEAD" || (status != 400 && status != 403) || !sent->other_region.empty()) return;
  S3Request probe = request;
  probe.method = "GET";
  probe.headers = {{"range", "bytes=0-0"}};
  Sent cause;
  SendOnce(probe, attempts, deadline, &cause);
  if (!cause.answered) return;
  sent->error = cause.error;
  sent->other_region = cause.other_region;
  if (cause.reply.headers.contains("date")) sent->reply.headers["date"] = cause.reply.header("date");
}

Next Client::Decide(const S3Request& request, const Sent& sent, Attempts* attempts) {
  if (!sent.refused.ok()) return Next::kFail;
  if (!sent.answered) {
    const Code code = sent.failure.status.code();
    return code == Code::kLinkFailed || code == Code::kUnavailable ? Next::kPause : Next::kFail;
  }
  if (sent.reply.status == 417 && sent.expected) {
    attempts->expect_refused = true;
    return Next::kChecksum;  // at once, but only once
  }
  if (sent.reply.status == 412 && !attempts->etag.empty() && !request.targets.empty()) {
    // Another process replaced the file during this read. The whole range is read again.
    attempts->etag.clear();
    attempts->received = 0;
    return Next::kPause;
  }
  return Classify(sent.reply.status, sent.error.code, !sent.other_region.empty());
}

// Decides after a reply with a part of the file, complete or broken. kFail with `sent->refused` OK: all
// targets are filled.
Next Client::DecideRange(const S3Request& request, Sent* sent, Attempts* attempts) {
  const uint64_t wanted = TotalBytes(request.targets);
  const uint64_t expected = request.offset + attempts->received;
  if (sent->reply.status == 200) {
    if (expected != 0) {
      sent->refused = Error(Code::kUnsupported, "this store sends whole files where a range was asked for");
      return Next::kFail;
    }
    attempts->received =
        sent->reply.into_targets == wanted ? wanted : 0;  // a broken read cannot be continued
    if (attempts->received < wanted && sent->answered)
      sent->refused = Error(Code::kCorrupt, "the file ends at %llu bytes, %llu were asked for",
                            static_cast<unsigned long long>(sent->reply.into_targets),
                            static_cast<unsigned long long>(wanted));
    return attempts->received == wanted || sent->answered ? Next::kFail : Next::kPause;
  }
  if (sent->reply.status != 206) {
    sent->refused = Error(Code::kUnsupported, "the store answered %d where a part of a file was asked for",
                          sent->reply.status);
    return Next::kFail;
  }
  uint64_t first = 0, last = 0;
  if (!ParseContentRange(sent->reply.header("content-range"), &first, &last) || first != expected) {
    sent->refused =
        Error(Code::kUnsupported, "the store sent \"%.100s\" where bytes from %llu on were asked for",
              sent->reply.header("content-range").c_str(), static_cast<unsigned long long>(expected));
    return Next::kFail;
  }
  attempts->received += sent->reply.into_targets;
  attempts->etag = sent->reply.header("etag");
  if (sent->reply.into_targets > 0) attempts->pauses = 0;
  if (attempts->received == wanted) return Next::kFail;
  if (last + 1 < request.offset + wanted) {
    sent->refused = Error(Code::kCorrupt, "the file ends at %llu bytes, those up to %llu were asked for",
                          static_cast<unsigned long long>(last + 1),
                          static_cast<unsigned long long>(request.offset + wanted));
    return Next::kFail;
  }
  return Next::kPause;
}

// Makes the changes that the next attempt needs. False: they have been tried already.
bool Client::Adapt(const S3Request& request, const Sent& sent, Next next, Attempts* attempts) {
  switch (next) {
    case Next::kRegion: {
      if (++attempts->regions > kRegionsMax) return false;
      const std::lock_guard lock(mutex_);
      if (region_ == sent.region) {
        region_ = sent.other_region;
        LOG_WARNING("%s: the bucket is in region %s, not in %s: name it in the URL to save this redirect",
                    config_.url.c_str(), region_.c_str(), sent.region.c_str());
      }
      return true;
    }
    case Next::kClock: {
      const std::optional<int64_t> theirs = ParseHttpTime(sent.reply.header("date"));
      if (++attempts->clocks > 1 || !theirs) return false;
      const int64_t offset = *theirs - environment_.now();
      const int64_t before = clock_offset_.exchange(offset, std::memory_order_relaxed);
      // Threads that fail at the same time find the same value. A difference of 1 s is only rounding.
      if (std::abs(before - offset) > 1)
        LOG_WARNING("%s: this machine's clock is %lld s %s the store's, signing by the store's",
                    config_.url.c_str(), static_cast<long long>(std::abs(offset)),
                    offset > 0 ? "behind" : "ahead of");
      return true;
    }
    case Next::kCredentials:
      if (++attempts->credentials > 1 || sent.credentials == nullptr) return false;
      LOG_INFO("%s: the store says %s, loading the credentials again", config_.url.c_str(),
               sent.error.code.c_str());
      credentials_->Expire(sent.credentials);
      return true;
    case Next::kChecksum:
      if (++attempts->checksums > 1) return false;
      LOG_DEBUG("%s: %s: %s, sending it once more", UrlOf(request.key).c_str(), request.what.c_str(),
                sent.error.code.c_str());
      return true;
    default:
      return false;
  }
}

bool Client::PauseFor(const Sent& sent, int pauses, Deadline deadline) {
  const auto pause = Pause(times_.retry, pauses, Random(), RetryAfter(sent.reply));
  const auto now = std::chrono::steady_clock::now();
  if (deadline - now <= pause) return false;
  std::unique_lock lock(mutex_);
  stopped_.wait_until(lock, now + pause, [this] { return http_.stopped(); });
  return true;
}

Status Client::Failure(const S3Request& request, const Sent& sent, int attempts) const {
  const std::string where = UrlOf(request.key) + ": " + request.what;
  const std::string times = attempts > 1 ? ", after " + std::to_string(attempts) + " attempts" : "";
  if (!sent.refused.ok())
    return Error(sent.refused.code(), "%s: %s%s", where.c_str(), sent.refused.message().c_str(),
                 times.c_str());
  if (!sent.answered)
    return Error(sent.failure.status.code(), "%s: %s%s", where.c_str(), sent.failure.status.message().c_str(),
                 times.c_str());
  std::string id = sent.reply.header("x-amz-request-id");
  if (id.empty()) id = sent.error.request_id;
  if (id.empty()) id = sent.reply.header("x-guploader-uploadid");
  return Error(CodeOf(sent.reply.status, sent.error.code), "%s: %s answered %d %s%s%s (request id %.80s)%s",
               where.c_str(), config_.Host(sent.region).c_str(), sent.reply.status, sent.error.code.c_str(),
               sent.error.message.empty() ? "" : ": ", sent.error.message.c_str(),
               id.empty() ? "none" : id.c_str(), times.c_str());
}

void Client::NoteTrouble(const Status& status) {
  const auto count = static_cast<unsigned long long>(retries_.fetch_add(1, std::memory_order_relaxed) + 1);
  expect_continue_.store(true, std::memory_order_relaxed);
  const auto now = std::chrono::steady_clock::now();
  bool say = false;
  {
    const std::lock_guard lock(mutex_);
    say = !trouble_said_ || now - *trouble_said_ >= kTroubleInterval;
    if (say) trouble_said_ = now;
  }
  if (say) {
    LOG_WARNING("%s; trying again (%llu repeated since the start)", status.message().c_str(), count);
  } else {
    LOG_DEBUG("%s; trying again", status.message().c_str());
  }
}

void Client::NoteGood(const S3Request& request, int attempts) {
  if (TotalBytes(request.body) > kExpectBytesMin && expect_continue_.load(std::memory_order_relaxed))
    expect_continue_.store(false, std::memory_order_relaxed);
  if (attempts > 1)
    LOG_DEBUG("%s: %s succeeded at attempt %d", UrlOf(request.key).c_str(), request.what.c_str(), attempts);
}

Outcome Client::Send(S3Request request, Deadline deadline) {
  Attempts attempts;
  Outcome outcome;
  while (true) {
    Sent sent;
    SendOnce(request, attempts, deadline, &sent);
    ++attempts.made;
    const bool ranged = !request.targets.empty() && sent.reply.status >= 200 && sent.reply.status < 300;
    const Next next = ranged ? DecideRange(request, &sent, &attempts)
                             : (sent.good() ? Next::kFail : Decide(request, sent, &attempts));
    const bool done = ranged ? next == Next::kFail && sent.refused.ok() : sent.good();
    outcome.maybe_done |= sent.reply.resent;
    if (done) {
      NoteGood(request, attempts.made);
      outcome.status = OkStatus();
    } else if (attempts.made > 1 && !sent.answered && sent.failure.status.code() == Code::kDeadlineExceeded &&
               !sent.failure.sent) {
      // It was too late to send it. The cause is the failure before, which is in outcome.status.
    } else {
      outcome.status = http_.stopped() ? Error(Code::kAborted, "%s: stopped", UrlOf(request.key).c_str())
                                       : Failure(request, sent, attempts.made);
      if (sent.answered ? sent.reply.status >= 500 : sent.failure.sent) outcome.maybe_done = true;
    }
    bool again = !done && next != Next::kFail && !http_.stopped();
    if (again && next == Next::kPause) {
      NoteTrouble(outcome.status);
      again = PauseFor(sent, ++attempts.pauses, deadline);
    } else if (again) {
      again = Adapt(request, sent, next, &attempts);
    }
    if (!again) {
      outcome.error = sent.error.code;
      outcome.reply = std::move(sent.reply);
      return outcome;
    }
  }
}

bool Client::checks_crc32c() const {
  return config_.checksum != ChecksumPolicy::kNone && checks_.load(std::memory_order_relaxed) != Checks::kNo;
}

void Client::DisbelieveCrc32c(const std::string& why) {
  if (checks_.exchange(Checks::kNo, std::memory_order_relaxed) != Checks::kNo)
    LOG_WARNING(
        "%s: this store does not check CRC32C (%s); bytes are checked before they are sent, and guarded by "
        "Content-MD5 on the way, which costs about 1.3 s of CPU a GiB",
        config_.url.c_str(), why.c_str());
}

Outcome Client::PutChecked(S3Request request, uint32_t crc32c, Deadline deadline) {
  const NameValues headers = request.headers;
  const bool hashed = TotalBytes(request.body) <= kHashedBytesMax || request.hash_body;
  bool with_md5 = !checks_crc32c();
  bool echo_missing = false, repeated = false;
  Outcome outcome;
  for (int attempt = 0;; ++attempt) {
    request.headers = headers;
    if (with_md5) {
      // No other code compares the bytes with their checksum.
      const uint32_t found = CrcOf(request.body);
      if (found != crc32c) {
        outcome.status = Error(Code::kCorrupt, "%s: %s: the bytes in memory have the CRC32C %08x, not %08x",
                               UrlOf(request.key).c_str(), request.what.c_str(), found, crc32c);
        return outcome;
      }
      if (config_.checksum == ChecksumPolicy::kNone) return Send(request, deadline);
      unsigned char digest[EVP_MAX_MD_SIZE];
      unsigned length = 0;
      (void)HashOf(request.body, EVP_md5(), digest, &length);
      request.headers.emplace_back("content-md5", Base64(digest, length));
    } else if (config_.google) {
      request.headers.emplace_back("x-goog-hash", "crc32c=" + Crc32cText(crc32c));
    } else {
      request.headers.emplace_back("x-amz-checksum-crc32c", Crc32cText(crc32c));
      // S3 does not need this header. Ceph and others check the checksum only if this header names it, as in
      // AWS's clients.
      request.headers.emplace_back("x-amz-sdk-checksum-algorithm", "CRC32C");
    }
    const bool maybe_done = outcome.maybe_done || outcome.status.ok();
    outcome = Send(request, deadline);
    outcome.maybe_done |= attempt > 0 && maybe_done;
    const bool may_fall_back = !with_md5 && !config_.google && config_.checksum == ChecksumPolicy::kAuto &&
                               checks_.load(std::memory_order_relaxed) != Checks::kYes;
    if (!outcome.status.ok()) {
      const int status = outcome.reply.status;
      if (may_fall_back &&
          (status == 501 || (status == 400 && outcome.status.code() == Code::kInvalidArgument))) {
        // The store may have refused the header. If it accepts the request without the header, that is
        // certain.
        echo_missing = with_md5 = true;
        continue;
      }
      return outcome;
    }
    if (with_md5) {
      if (echo_missing) DisbelieveCrc32c("it refuses the header x-amz-checksum-crc32c");
      return outcome;
    }
    const std::string echo = CrcOfReply(outcome.reply, config_.google);
    if (echo == Crc32cText(crc32c)) {
      if (checks_.load(std::memory_order_relaxed) == Checks::kUnknown) checks_.store(Checks::kYes);
      return outcome;
    }
    if (echo.empty() && config_.google) return outcome;  // Google always checks x-goog-hash
    if (!echo.empty()) {
      outcome.status =
          Error(Code::kCorrupt, "%s: %s: the store has bytes with the CRC32C %.20s, not %s",
                UrlOf(request.key).c_str(), request.what.c_str(), echo.c_str(), Crc32cText(crc32c).c_str());
      if (repeated || request.hash_body) return outcome;
      repeated = true;
      continue;
    }
    if (config_.checksum == ChecksumPolicy::kRequired) {
      outcome.status =
          Error(Code::kUnsupported, "%s: %s: the store does not check CRC32C, which checksum=required asks",
                UrlOf(request.key).c_str(), request.what.c_str());
      return outcome;
    }
    if (may_fall_back) DisbelieveCrc32c("its replies have no x-amz-checksum-crc32c");
    if (hashed && credentials_ != nullptr) return outcome;  // the store has compared its SHA-256
    with_md5 = true;  // the stored bytes were not checked: put them again
  }
}

}  // namespace ropeteam::storage::s3
