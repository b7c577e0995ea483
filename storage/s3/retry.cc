// SPDX-License-Identifier: Apache-2.0
#include "storage/s3/retry.h"

#include <algorithm>
#include <iterator>

namespace ropeteam::storage::s3 {
namespace {

template <size_t N>
bool In(const char* const (&names)[N], std::string_view name) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

// Temporary errors. Some stores (MinIO, Ceph) send these with a status of 4xx.
constexpr const char* kPassing[] = {
    "InternalError",
    "ServiceUnavailable",
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "RequestTimeout",
    "RequestThrottled",
    "Throttling",
    "ThrottlingException",
    "OperationAborted",
    "ConditionalRequestConflict",
    "IncompleteBody",
    "RequestLimitExceeded",
};
constexpr const char* kExpired[] = {"ExpiredToken", "ExpiredTokenException", "RequestExpired",
                                    "TokenRefreshRequired"};
constexpr const char* kWrongClock[] = {"RequestTimeTooSkewed", "RequestInTheFuture"};
constexpr const char* kWrongBytes[] = {"BadDigest", "XAmzContentChecksumMismatch",
                                       "XAmzContentSHA256Mismatch"};
constexpr const char* kFull[] = {"QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded",
                                 "InsufficientStorage"};
// The store refuses this node's credentials or its bucket, whatever the file. Some of these have the status 400 or 404.
constexpr const char* kRefused[] = {"AccessDenied", "InvalidAccessKeyId",
                                    "InvalidToken", "SignatureDoesNotMatch",
                                    "NoSuchBucket", "AuthorizationHeaderMalformed"};

}  // namespace

Next Classify(int http_status, std::string_view error, bool other_region) {
  if (In(kWrongClock, error)) return Next::kClock;
  if (In(kExpired, error)) return Next::kCredentials;
  if (In(kWrongBytes, error)) return Next::kChecksum;
  if (other_region) return Next::kRegion;
  if (In(kFull, error)) return Next::kFail;
  if (In(kPassing, error)) return Next::kPause;
  switch (http_status) {
    case 408:
    case 429:
    case 500:
    case 502:
    case 503:
    case 504:
      return Next::kPause;
    default:
      return Next::kFail;
  }
}

Code CodeOf(int http_status, std::string_view error) {
  if (In(kFull, error)) return Code::kNoSpace;
  if (In(kWrongBytes, error)) return Code::kCorrupt;
  if (In(kRefused, error) || In(kExpired, error) || In(kWrongClock, error)) return Code::kIo;
  if (Classify(http_status, error, false) == Next::kPause) return Code::kUnavailable;
  if (http_status >= 300 && http_status < 400) return Code::kIo;  // the bucket is elsewhere
  switch (http_status) {
    case 401:
    case 403:
      return Code::kIo;
    case 404:
      return Code::kNotFound;
    case 412:
      return Code::kAlreadyExists;
    case 416:
      return Code::kCorrupt;
    case 501:
      return Code::kUnsupported;
    case 507:
      return Code::kNoSpace;
    default:
      return http_status >= 500 ? Code::kUnavailable : Code::kInvalidArgument;
  }
}

std::chrono::milliseconds Pause(const RetryTimes& times, int attempt, double random,
                                std::optional<std::chrono::seconds> retry_after) {
  std::chrono::milliseconds bound = std::min(times.base, times.cap);
  for (int i = 1; i < attempt && bound < times.cap; ++i) bound = std::min(2 * bound, times.cap);
  const auto jittered =
      std::chrono::milliseconds(static_cast<int64_t>(static_cast<double>(bound.count()) * random));
  if (!retry_after) return jittered;
  return std::min<std::chrono::milliseconds>(*retry_after + jittered, times.cap);
}

}  // namespace ropeteam::storage::s3
