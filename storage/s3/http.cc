// SPDX-License-Identifier: Apache-2.0
#include "storage/s3/http.h"

#include <curl/curl.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <cstring>

#include "core/base/check.h"
#include "core/base/checksum.h"

namespace ropeteam::storage::s3 {
namespace {

// More than the threads that upload from one node. Each handle has 0.5 MiB of buffers and a socket.
constexpr size_t kIdleHandlesMax = 32;
constexpr size_t kHeadersMax = 100;
constexpr size_t kHeaderBytesMax = 8 << 10;
// Buffer sizes of libcurl, for each direction. Over loopback, 64 KiB to 1 MiB take the same CPU time (0.2 s
// per GiB), and 16 KiB take 50 % more. 256 KiB had the best rates with 2 to 8 threads.
constexpr long kUploadBufferBytes = 256 << 10;
constexpr long kDownloadBufferBytes = 256 << 10;
// A store that does not know "Expect: 100-continue" delays one request by this much.
constexpr long kExpectTimeoutMs = 1000;

size_t TotalBytes(std::span<const Piece> pieces) {
  size_t bytes = 0;
  for (const Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

// A position in a sequence of pieces or targets.
template <typename T>
class Cursor {
 public:
  explicit Cursor(std::span<const T> ranges) : ranges_(ranges) {}
  void Seek(uint64_t offset) {
    index_ = 0;
    while (index_ < ranges_.size() && offset >= ranges_[index_].bytes) offset -= ranges_[index_++].bytes;
    within_ = static_cast<size_t>(offset);
  }
  // The next bytes, at most `bytes` of them; an empty range at the end.
  T Next(size_t bytes) {
    while (index_ < ranges_.size() && within_ == ranges_[index_].bytes) {
      ++index_;
      within_ = 0;
    }
    if (index_ == ranges_.size()) return {};
    T next = ranges_[index_];
    next.data += within_;
    next.bytes = std::min(bytes, next.bytes - within_);
    within_ += next.bytes;
    return next;
  }

 private:
  std::span<const T> ranges_;
  size_t index_ = 0;
  size_t within_ = 0;
};

// One transfer, for libcurl's callbacks.
struct Transfer {
  Transfer(const HttpRequest& r, const std::atomic<bool>& s, const Sink::Yield& y)
      : request(r), stopped(s), yield(y), body(r.body), targets(r.targets) {
    targets.Seek(r.targets_offset);
  }
  const HttpRequest& request;
  const std::atomic<bool>& stopped;
  const Sink::Yield& yield;
  Cursor<Piece> body;
  Cursor<Target> targets;
  HttpReply reply;
  bool too_long = false;
  bool body_begun = false;
  bool resent = false;
};

size_t OnRead(char* buffer, size_t size, size_t count, void* context) {
  auto* transfer = static_cast<Transfer*>(context);
  transfer->body_begun = true;
  if (transfer->yield) transfer->yield(size * count);
  size_t filled = 0;
  while (filled < size * count) {
    const Piece piece = transfer->body.Next(size * count - filled);
    if (piece.bytes == 0) break;
    std::memcpy(buffer + filled, piece.data, piece.bytes);
    filled += piece.bytes;
  }
  return filled;
}

// libcurl rewinds a body if it finds that a connection that it had kept open was closed.
int OnSeek(void* context, curl_off_t offset, int origin) {
  if (origin != SEEK_SET || offset < 0) return CURL_SEEKFUNC_FAIL;
  auto* transfer = static_cast<Transfer*>(context);
  transfer->body.Seek(static_cast<uint64_t>(offset));
  transfer->resent = true;
  return CURL_SEEKFUNC_OK;
}

size_t OnHeader(char* buffer, size_t size, size_t count, void* context) {
  auto* transfer = static_cast<Transfer*>(context);
  std::string_view line(buffer, size * count);
  HttpReply& reply = transfer->reply;
  if (line.starts_with("HTTP/")) {  // also after a "100 Continue" or a proxy's reply
    reply = HttpReply();
    const size_t space = line.find(' ');
    if (space != std::string_view::npos)
      std::from_chars(line.data() + space + 1, line.data() + line.size(), reply.status);
    return line.size();
  }
  const size_t colon = line.find(':');
  if (colon == std::string_view::npos || reply.headers.size() >= kHeadersMax || line.size() > kHeaderBytesMax)
    return line.size();
  std::string name(line.substr(0, colon));
  for (char& c : name) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  std::string_view value = line.substr(colon + 1);
  while (!value.empty() && std::isspace(static_cast<unsigned char>(value.front()))) value.remove_prefix(1);
  while (!value.empty() && std::isspace(static_cast<unsigned char>(value.back()))) value.remove_suffix(1);
  std::string& known = reply.headers[name];
  known += (known.empty() ? "" : ", ") + std::string(value);
  return line.size();
}

size_t OnWrite(char* buffer, size_t size, size_t count, void* context) {
  auto* transfer = static_cast<Transfer*>(context);
  const size_t bytes = size * count;
  HttpReply& reply = transfer->reply;
  const bool wanted = reply.status == 206 || (reply.status == 200 && transfer->request.whole_file_is_fine);
  if (transfer->request.targets.empty() || !wanted) {
    if (reply.body.size() + bytes > transfer->request.reply_bytes_max) {
      transfer->too_long = true;
      return 0;
    }
    reply.body.append(buffer, bytes);
    return bytes;
  }
  size_t taken = 0;
  while (taken < bytes) {
    const Target target = transfer->targets.Next(bytes - taken);
    if (target.bytes == 0) break;
    if (target.crc32c != nullptr)
      *target.crc32c = CopyCrc32c(target.data, buffer + taken, target.bytes, *target.crc32c);
    else
      std::memcpy(target.data, buffer + taken, target.bytes);
    taken += target.bytes;
  }
  reply.into_targets += taken;
  transfer->too_long = taken < bytes;
  return taken;
}

int OnProgress(void* context, curl_off_t, curl_off_t, curl_off_t, curl_off_t) {
  return static_cast<Transfer*>(context)->stopped.load(std::memory_order_relaxed) ? 1 : 0;
}

template <typename T>
void Set(CURL* handle, CURLoption option, T value) {
  // This fails only if memory is exhausted or this libcurl lacks the option. The process cannot continue
  // then.
  ROPETEAM_CHECK(curl_easy_setopt(handle, option, value) == CURLE_OK);
}

Status FailureStatus(CURLcode code, const char* detail, const Transfer& transfer, const Deadline& deadline) {
  const char* text = detail[0] != '\0' ? detail : curl_easy_strerror(code);
  switch (code) {
    case CURLE_ABORTED_BY_CALLBACK:
      return Error(Code::kAborted, "stopped");
    case CURLE_OPERATION_TIMEDOUT:
      // libcurl counts whole milliseconds, and starts to count a little earlier.
      if (std::chrono::steady_clock::now() + std::chrono::milliseconds(5) >= deadline)
        return Error(Code::kDeadlineExceeded, "%s", text);
      return Error(Code::kLinkFailed, "%s", text);
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY:
    case CURLE_COULDNT_CONNECT:
    case CURLE_PROXY:
      return Error(Code::kUnavailable, "%s", text);
    case CURLE_PEER_FAILED_VERIFICATION:
    case CURLE_SSL_CACERT_BADFILE:
      return Error(Code::kIo, "%s", text);
    case CURLE_URL_MALFORMAT:
    case CURLE_UNSUPPORTED_PROTOCOL:
      return Error(Code::kInvalidArgument, "%s", text);
    case CURLE_WRITE_ERROR:
      if (transfer.too_long)
        return Error(Code::kLinkFailed, "a reply of %d has a longer body than was asked for",
                     transfer.reply.status);
      return Error(Code::kLinkFailed, "%s", text);
    default:
      return Error(Code::kLinkFailed, "%s", text);
  }
}

void SetDeadlines(CURL* handle, const HttpRequest& request) {
  using std::chrono::milliseconds;
  constexpr auto kTimeoutMax = std::chrono::hours(24);  // a long may have 31 bits; no request takes a day
  const auto now = std::chrono::steady_clock::now();
  auto left = std::chrono::duration_cast<milliseconds>(kTimeoutMax);
  if (request.deadline < now + kTimeoutMax) left = std::chrono::ceil<milliseconds>(request.deadline - now);
  // 0 would mean no timeout.
  Set(handle, CURLOPT_TIMEOUT_MS, std::max<long>(1, left.count()));
  Set(handle, CURLOPT_CONNECTTIMEOUT_MS,
      std::max<long>(1, std::min<long>(left.count(), request.connect_timeout.count())));
  Set(handle, CURLOPT_LOW_SPEED_LIMIT, 1L);
  Set(handle, CURLOPT_LOW_SPEED_TIME, static_cast<long>(request.silence_max.count()));
}

struct SlistDeleter {
  void operator()(curl_slist* list) const { curl_slist_free_all(list); }
};
using HeaderList = std::unique_ptr<curl_slist, SlistDeleter>;

void AddHeader(HeaderList* list, const std::string& line) {
  curl_slist* longer = curl_slist_append(list->get(), line.c_str());
  ROPETEAM_CHECK(longer != nullptr);
  (void)list->release();
  list->reset(longer);
}

}  // namespace

struct Http::Shared {
  CURLSH* share = nullptr;
  std::mutex mutexes[CURL_LOCK_DATA_LAST];
};

Http::Http(Options options) : options_(std::move(options)), shared_(std::make_unique<Shared>()) {
  static std::once_flag once;
  std::call_once(once, [] { ROPETEAM_CHECK(curl_global_init(CURL_GLOBAL_DEFAULT) == CURLE_OK); });
  shared_->share = curl_share_init();
  ROPETEAM_CHECK(shared_->share != nullptr);
  curl_share_setopt(
      shared_->share, CURLSHOPT_LOCKFUNC, +[](CURL*, curl_lock_data data, curl_lock_access, void* shared) {
        static_cast<Shared*>(shared)->mutexes[data].lock();
      });
  curl_share_setopt(
      shared_->share, CURLSHOPT_UNLOCKFUNC, +[](CURL*, curl_lock_data data, void* shared) {
        static_cast<Shared*>(shared)->mutexes[data].unlock();
      });
  curl_share_setopt(shared_->share, CURLSHOPT_USERDATA, shared_.get());
  // Connections are not shared: libcurl does not support that between threads.
  curl_share_setopt(shared_->share, CURLSHOPT_SHARE, CURL_LOCK_DATA_DNS);
  curl_share_setopt(shared_->share, CURLSHOPT_SHARE, CURL_LOCK_DATA_SSL_SESSION);
}

Http::~Http() {
  for (void* handle : idle_) curl_easy_cleanup(handle);
  curl_share_cleanup(shared_->share);
}

void* Http::TakeHandle() {
  {
    const std::lock_guard lock(mutex_);
    if (!idle_.empty()) {
      void* handle = idle_.back();
      idle_.pop_back();
      return handle;
    }
  }
  void* handle = curl_easy_init();
  ROPETEAM_CHECK(handle != nullptr);
  return handle;
}

void Http::ReturnHandle(void* handle) {
  // This clears the options and keeps connections and sessions.
  curl_easy_reset(handle);
  {
    const std::lock_guard lock(mutex_);
    if (idle_.size() < kIdleHandlesMax) {
      idle_.push_back(handle);
      return;
    }
  }
  curl_easy_cleanup(handle);
}

void Http::SetOptions(void* handle) const {
  Set(handle, CURLOPT_SHARE, shared_->share);
  Set(handle, CURLOPT_NOSIGNAL, 1L);
#if LIBCURL_VERSION_NUM >= 0x075700
  // Without this option libcurl joins its resolver thread, and a name server that does not answer delays the
  // call far beyond its deadline. With it, that thread ends by itself and frees its memory.
  Set(handle, CURLOPT_QUICK_EXIT, 1L);
#endif
#if LIBCURL_VERSION_NUM >= 0x075500
  Set(handle, CURLOPT_PROTOCOLS_STR, "http,https");
#else
  Set(handle, CURLOPT_PROTOCOLS, static_cast<long>(CURLPROTO_HTTP | CURLPROTO_HTTPS));
#endif
  // Parts are sent in parallel, each over its own connection. Streams of HTTP/2 would share one connection.
  Set(handle, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
  Set(handle, CURLOPT_PATH_AS_IS, 1L);
  Set(handle, CURLOPT_TCP_NODELAY, 1L);
  Set(handle, CURLOPT_TCP_KEEPALIVE, 1L);
  Set(handle, CURLOPT_UPLOAD_BUFFERSIZE, kUploadBufferBytes);
  Set(handle, CURLOPT_BUFFERSIZE, kDownloadBufferBytes);
  Set(handle, CURLOPT_EXPECT_100_TIMEOUT_MS, kExpectTimeoutMs);
  Set(handle, CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
  if (!options_.ca_file.empty()) Set(handle, CURLOPT_CAINFO, options_.ca_file.c_str());
}

bool Http::Send(const HttpRequest& request, HttpReply* reply, HttpFailure* failure) {
  if (stopped()) {
    failure->status = Error(Code::kAborted, "stopped");
    return false;
  }
  if (std::chrono::steady_clock::now() >= request.deadline) {
    failure->status = Error(Code::kDeadlineExceeded, "the deadline passed before the request was sent");
    return false;
  }
  CURL* handle = TakeHandle();
  SetOptions(handle);
  SetDeadlines(handle, request);
  Transfer transfer(request, stopped_, yield_);
  char detail[CURL_ERROR_SIZE] = "";
  Set(handle, CURLOPT_ERRORBUFFER, static_cast<char*>(detail));
  Set(handle, CURLOPT_URL, request.url.c_str());
  if (!request.proxies) Set(handle, CURLOPT_NOPROXY, "*");
  HeaderList headers;
  for (const auto& [name, value] : request.headers) AddHeader(&headers, name + ": " + value);
  if (request.has_body) {
    Set(handle, CURLOPT_UPLOAD, 1L);
    Set(handle, CURLOPT_INFILESIZE_LARGE, static_cast<curl_off_t>(TotalBytes(request.body)));
    Set(handle, CURLOPT_READFUNCTION, &OnRead);
    Set(handle, CURLOPT_READDATA, static_cast<void*>(&transfer));
    Set(handle, CURLOPT_SEEKFUNCTION, &OnSeek);
    Set(handle, CURLOPT_SEEKDATA, static_cast<void*>(&transfer));
    AddHeader(&headers, request.expect_continue ? "Expect: 100-continue" : "Expect:");
  } else if (request.method == "HEAD") {
    Set(handle, CURLOPT_NOBODY, 1L);
  }
  Set(handle, CURLOPT_CUSTOMREQUEST, request.method.c_str());
  Set(handle, CURLOPT_HTTPHEADER, headers.get());
  Set(handle, CURLOPT_HEADERFUNCTION, &OnHeader);
  Set(handle, CURLOPT_HEADERDATA, static_cast<void*>(&transfer));
  Set(handle, CURLOPT_WRITEFUNCTION, &OnWrite);
  Set(handle, CURLOPT_WRITEDATA, static_cast<void*>(&transfer));
  Set(handle, CURLOPT_NOPROGRESS, 0L);
  Set(handle, CURLOPT_XFERINFOFUNCTION, &OnProgress);
  Set(handle, CURLOPT_XFERINFODATA, static_cast<void*>(&transfer));

  const CURLcode code = curl_easy_perform(handle);
  curl_off_t connected = 0;
  curl_easy_getinfo(handle, CURLINFO_PRETRANSFER_TIME_T, &connected);
  const bool good = code == CURLE_OK;
  if (!good) {
    failure->status = FailureStatus(code, detail, transfer, request.deadline);
    failure->sent = connected > 0 || transfer.body_begun || transfer.reply.status != 0;
  }
  ReturnHandle(handle);
  transfer.reply.resent = transfer.resent;
  (good ? *reply : failure->reply) = std::move(transfer.reply);
  return good;
}

}  // namespace ropeteam::storage::s3
