// SPDX-License-Identifier: Apache-2.0
//
// HTTP by libcurl: one request, one reply, no retries, no redirects, no interpretation. A body is sent straight from
// the caller's pieces and received straight into its targets, with only libcurl's own buffers in between.
//
// Handles are pooled, and each keeps its connections (and TLS sessions) open, so that a thread with one request after
// another makes one handshake. The newest handle is taken first, so surplus ones become idle and are closed.

#ifndef ROPETEAM_STORAGE_S3_HTTP_H_
#define ROPETEAM_STORAGE_S3_HTTP_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "core/base/status.h"
#include "storage/s3/sigv4.h"
#include "storage/sink.h"

namespace ropeteam::storage::s3 {

struct HttpRequest {
  std::string method = "GET";  // a HEAD's reply has no body
  std::string url;             // sent as it stands, with its dots
  NameValues headers;          // sent as they stand, after Host and Content-Length
  std::span<const Piece> body;
  bool has_body = false;         // Content-Length is sent, 0 as well
  bool expect_continue = false;  // ask before the body is sent; a store that says no saves its transfer

  // The body of a 206 (of a 200 where `whole_file_is_fine`) goes here, from byte `targets_offset` of them on; other
  // bodies go into HttpReply::body. The checksums that targets have already are continued.
  std::span<const Target> targets;
  uint64_t targets_offset = 0;
  bool whole_file_is_fine = false;
  size_t reply_bytes_max = 64 << 10;  // a longer body is kLinkFailed

  Deadline deadline = Deadline::max();
  std::chrono::milliseconds connect_timeout{10000};  // of the TCP and TLS handshakes: 3 SYNs
  // If no byte moves in either direction for this long, the other side is dead.
  std::chrono::seconds silence_max{30};
  bool proxies = true;  // HTTPS_PROXY, NO_PROXY, …: not for a machine's own metadata
};

struct HttpReply {
  int status = 0;
  std::map<std::string, std::string> headers;  // names in lower case; of two of one name "a, b"
  std::string body;
  uint64_t into_targets = 0;  // bytes of `targets` filled by this reply
  // libcurl sent it again because the connection that it had kept open was closed: the first one may have been carried
  // out.
  bool resent = false;

  const std::string& header(const std::string& name) const {
    static const std::string kNone;
    const auto found = headers.find(name);
    return found == headers.end() ? kNone : found->second;
  }
};

// The outcome of a request without a complete reply.
struct HttpFailure {
  // kDeadlineExceeded, kAborted, kLinkFailed (it broke), kUnavailable (no server answers), kIo (a TLS certificate that is
  // not accepted), kInvalidArgument (an invalid URL). Retrying does not help with the last two.
  Status status;
  bool sent = false;  // the store may have seen the request, or a part of it
  // Headers arrived, and a part of the body, before it broke; `reply.into_targets` bytes are good.
  HttpReply reply;
};

class Http {
 public:
  struct Options {
    std::string ca_file;  // PEM; empty: the system's
  };
  explicit Http(Options options);
  ~Http();  // no Send() is running

  // Fills `reply` and returns true, or `failure` and returns false. From any thread.
  bool Send(const HttpRequest& request, HttpReply* reply, HttpFailure* failure);

  // Called before bytes of a body are taken from its pieces; see Sink::SetYield().
  void SetYield(Sink::Yield yield) { yield_ = std::move(yield); }

  // Requests under way end with kAborted within about a second, later ones at once.
  void Stop() { stopped_.store(true, std::memory_order_relaxed); }
  bool stopped() const { return stopped_.load(std::memory_order_relaxed); }

  Http(const Http&) = delete;
  Http& operator=(const Http&) = delete;

 private:
  struct Shared;  // what handles have in common: names and TLS sessions
  void* TakeHandle();
  void ReturnHandle(void* handle);
  void SetOptions(void* handle) const;

  const Options options_;
  Sink::Yield yield_;
  std::atomic<bool> stopped_{false};
  std::unique_ptr<Shared> shared_;
  std::mutex mutex_;
  std::vector<void*> idle_;  // guarded by mutex_; CURL*
};

}  // namespace ropeteam::storage::s3

#endif  // ROPETEAM_STORAGE_S3_HTTP_H_
