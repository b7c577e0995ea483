// SPDX-License-Identifier: Apache-2.0
//
// Status is how every fallible call in Ropeteam answers: a code from a closed vocabulary and a sentence for a
// person. No exception leaves a component. The vocabulary separates what a caller can act on differently: a peer
// that is gone is not a link that failed, and a deadline that passed leaves the outcome unknown.
//
// The message names the value and the limit it met ("name of 300 bytes, limit 255"), never just the rule. The
// first function that knows a cause logs it; those above return it.
//
// Values; safe to copy and to move between threads. An OK status holds no allocation.

#ifndef ROPETEAM_CORE_BASE_STATUS_H_
#define ROPETEAM_CORE_BASE_STATUS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/base/check.h"

namespace ropeteam {

// Append-only: the numbers travel between processes and stand in the C API (ropeteam_status_t).
enum class Code : uint32_t {
  kOk = 0,
  kInvalidArgument = 1,   // the caller's mistake; repeating it gives the same answer
  kNotFound = 2,          // no such step, shard, object or node, now
  kAlreadyExists = 3,     // that step or name is there already
  kNoSpace = 4,           // a budget is used up; message: needed, free, limit
  kDeadlineExceeded = 5,  // the deadline passed; the operation may or may not take effect
  kPeerGone = 6,          // the other process is dead, declared dead, or another instance by now
  kLinkFailed = 7,        // the path failed; the peer may be well
  kCorrupt = 8,           // bytes do not match their checksum, in every source that was tried
  kStale = 9,             // the caller belongs to an older incarnation or epoch
  kUnavailable = 10,      // the service cannot be reached now; trying later may succeed
  kUnsupported = 11,      // not in this build, on this machine, or at this protocol version
  kIo = 12,               // the operating system refused; message has errno
  kAborted = 13,          // given up before it took effect, by request
  kInternal = 14,         // our bug; message says what was broken
};

// "no space", "peer gone", … Never null.
const char* CodeName(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {
    ROPETEAM_CHECK(code != Code::kOk);
  }

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }
  // "no space: needed 12 chunks, free 3, limit 64", or "ok".
  std::string ToString() const;

  friend bool operator==(const Status&, const Status&) = default;

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

inline Status OkStatus() { return {}; }

// printf-style, so that a message with values is one line at the place that knows them.
Status Error(Code code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// `errno_value` and its text are appended: "open /dev/shm/x: No such file or directory (2)".
Status ErrnoError(int errno_value, const char* format, ...) __attribute__((format(printf, 2, 3)));

// A value, or the status that says why there is none. Never holds an OK status.
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}                                          // NOLINT
  Result(Status status) : status_(std::move(status)) { ROPETEAM_CHECK(!status_.ok()); }  // NOLINT

  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }
  T& value() & {
    ROPETEAM_CHECK(ok());
    return *value_;
  }
  const T& value() const& {
    ROPETEAM_CHECK(ok());
    return *value_;
  }
  T&& value() && {
    ROPETEAM_CHECK(ok());
    return *std::move(value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace ropeteam

#define ROPETEAM_RETURN_IF_ERROR(expression)             \
  do {                                                   \
    ::ropeteam::Status ropeteam_status_ = (expression);  \
    if (!ropeteam_status_.ok()) return ropeteam_status_; \
  } while (0)

#endif  // ROPETEAM_CORE_BASE_STATUS_H_
