// SPDX-License-Identifier: Apache-2.0
//
// Classifies failures as transient or permanent, maps them to status codes, and computes the pause before the next
// attempt. Pure functions.

#ifndef ROPETEAM_STORAGE_S3_RETRY_H_
#define ROPETEAM_STORAGE_S3_RETRY_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "core/base/status.h"

namespace ropeteam::storage::s3 {

// What to do after a reply that is not 2xx.
enum class Next : uint8_t {
  kFail = 0,         // permanent
  kPause = 1,        // transient: pause, then send it again
  kRegion = 2,       // the bucket is in another region: sign for that one
  kClock = 3,        // our clock is wrong: take the store's
  kCredentials = 4,  // these credentials have expired: get others
  kChecksum = 5,     // the bytes that arrived are others: send it once more
};

// `error` is the <Code> of the body, or empty (a HEAD has none). `other_region`: the reply names a region that is not
// the one that the request was signed for.
Next Classify(int http_status, std::string_view error, bool other_region);

// The status code for a final reply.
Code CodeOf(int http_status, std::string_view error);

struct RetryTimes {
  std::chrono::milliseconds base{
      100};  // of the first pause: an S3 partition that says SlowDown recovers in about a second
  std::chrono::milliseconds cap{20000};  // of the longest pause, as AWS's own clients have it
};

// The pause before attempt `attempt` (the second is 1): evenly distributed between 0 and base * 2^(attempt-1), at most
// the cap, by `random` in [0, 1), so that nodes that failed together do not retry together. If the store sends
// Retry-After, the pause is at least that, but at most the cap.
std::chrono::milliseconds Pause(const RetryTimes& times, int attempt, double random,
                                std::optional<std::chrono::seconds> retry_after);

}  // namespace ropeteam::storage::s3

#endif  // ROPETEAM_STORAGE_S3_RETRY_H_
