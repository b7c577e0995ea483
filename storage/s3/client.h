// SPDX-License-Identifier: Apache-2.0
//
// Sends one request to one bucket until it is answered. It signs the request, repeats it while that may help, signs it
// again if the store requires another region, clock or credentials, and describes a failure.
//
// Payload hashes. A body of at most kHashedBytesMax is hashed (SHA-256) and the hash is signed. A larger one is sent as
// UNSIGNED-PAYLOAD, straight from memory: SHA-256 runs at 0.4 to 2 GB/s per core, more expensive than the rest of the
// transfer. Its CRC32C (or Content-MD5) protects such a body, with or without TLS. It is a signed header, so the store
// refuses other bytes, and nobody can change the header on the way. A CRC32C does not stop an attacker who changes the
// bytes deliberately; TLS does.

#ifndef ROPETEAM_STORAGE_S3_CLIENT_H_
#define ROPETEAM_STORAGE_S3_CLIENT_H_

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>

#include "storage/s3/config.h"
#include "storage/s3/credentials.h"
#include "storage/s3/http.h"
#include "storage/s3/retry.h"
#include "storage/s3/xml.h"

namespace ropeteam::storage::s3 {

inline constexpr size_t kHashedBytesMax = 1 << 20;  // 1 ms of SHA-256: XML, manifests
inline constexpr size_t kErrorBytesMax = 64 << 10;  // of a body of XML that is an error
inline constexpr size_t kListBytesMax = 4 << 20;  // of a page of 1,000 names of 1,024 bytes, percent-encoded
inline constexpr int kPageEntries = 1000;         // S3's limit

struct S3Request {
  std::string what;  // "PUT part 3": for messages
  std::string method = "GET";
  std::string key;  // empty: of the bucket
  NameValues query;
  NameValues headers;  // names in lower case
  std::span<const Piece> body;
  bool has_body = false;
  bool hash_body = false;  // also one that is larger than kHashedBytesMax
  std::span<const Target>
      targets;  // if not empty: the bytes from `offset` on; a read that breaks goes on from there
  uint64_t offset = 0;
  bool error_in_200 = false;  // S3 says 200 before it knows, and keeps the connection with blanks until then
  size_t reply_bytes_max = kErrorBytesMax;
  std::chrono::seconds silence_max{0};  // 0: the client's
};

struct Outcome {
  Status status;      // kOk: `reply` is a 2xx
  HttpReply reply;    // of the last attempt; its status is 0 when there was none
  std::string error;  // <Code> of the reply
  // An attempt without a clear answer may have been carried out.
  bool maybe_done = false;
};

// Set only by tests.
struct ClientTimes {
  RetryTimes retry;
  std::chrono::milliseconds connect_timeout{10000};  // three SYNs
  // Silence in both directions for this long: the connection is dead. S3 answers a part within a second or two.
  std::chrono::seconds silence_max{30};
};

class Client {
 public:
  Client(Config config, Environment environment, ClientTimes times);
  // Chooses the credentials' source. Before any Send().
  Status Open();

  Outcome Send(S3Request request, Deadline deadline);
  // A PUT of `body` with the checksum `crc32c`. The store checks it or, if it cannot, it is checked before the sending.
  // kCorrupt: the bytes in memory, or those that arrived twice, differ.
  Outcome PutChecked(S3Request request, uint32_t crc32c, Deadline deadline);

  // True until the store has shown that it does not check CRC32C.
  bool checks_crc32c() const;
  void DisbelieveCrc32c(const std::string& why);  // says so in the log, once

  const Config& config() const { return config_; }
  // "s3://bucket/prefix/name"
  std::string UrlOf(const std::string& key) const;
  std::string Describe() const;
  // Seconds since 1970 as the store counts them.
  int64_t Now() const { return environment_.now() + clock_offset_.load(std::memory_order_relaxed); }
  void Stop();
  void SetYield(Sink::Yield yield) { http_.SetYield(std::move(yield)); }
  // kAborted after Stop(), kDeadlineExceeded after `deadline`: for calls without a request.
  Status CheckLive(Deadline deadline) const;

 private:
  enum class Checks { kUnknown, kYes, kNo };
  // One of: see retry.h; each is done once or twice in one Send(), so that two that contradict each other end.
  struct Attempts {
    int made = 0, regions = 0, clocks = 0, credentials = 0, checksums = 0;
    int pauses = 0;  // since the last progress
    uint64_t received = 0;
    std::string etag;  // of the file that is being read
    bool expect_refused = false;
  };
  struct Sent;  // one attempt
  void SendOnce(const S3Request& request, const Attempts& attempts, Deadline deadline, Sent* sent);
  bool Sign(const S3Request& request, const std::string& path, const NameValues& query, NameValues* headers,
            Sent* sent, Deadline deadline);
  void LearnError(const S3Request& request, const Attempts& attempts, Deadline deadline, Sent* sent);
  Next Decide(const S3Request& request, const Sent& sent, Attempts* attempts);
  Next DecideRange(const S3Request& request, Sent* sent, Attempts* attempts);
  bool Adapt(const S3Request& request, const Sent& sent, Next next, Attempts* attempts);
  bool PauseFor(const Sent& sent, int pauses, Deadline deadline);
  Status Failure(const S3Request& request, const Sent& sent, int attempts) const;
  void NoteTrouble(const Status& status);
  void NoteGood(const S3Request& request, int attempts);
  std::string Region() const;

  const Config config_;
  const Environment environment_;
  const ClientTimes times_;
  Http http_;
  std::unique_ptr<CredentialCache> credentials_;  // null: anonymous
  std::atomic<int64_t> clock_offset_{0};
  std::atomic<Checks> checks_{Checks::kUnknown};
  // Expect: 100-continue before a body, until one was accepted, and after any error. So a store that refuses answers
  // before 64 MiB are sent. To ask each time would cost a round trip per part.
  std::atomic<bool> expect_continue_{true};
  std::atomic<uint64_t> retries_{0};

  mutable std::mutex mutex_;
  std::condition_variable stopped_;                                    // for pauses
  std::string region_;                                                 // guarded by mutex_
  std::optional<std::chrono::steady_clock::time_point> trouble_said_;  // guarded by mutex_
};

}  // namespace ropeteam::storage::s3

#endif  // ROPETEAM_STORAGE_S3_CLIENT_H_
