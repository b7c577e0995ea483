// SPDX-License-Identifier: Apache-2.0
#include "core/base/status.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace ropeteam {
namespace {

std::string Format(const char* format, va_list arguments) {
  va_list copy;
  va_copy(copy, arguments);
  const int length = std::vsnprintf(nullptr, 0, format, copy);
  va_end(copy);
  if (length <= 0) return {};
  std::string text(static_cast<size_t>(length), '\0');
  std::vsnprintf(text.data(), text.size() + 1, format, arguments);
  return text;
}

}  // namespace

const char* CodeName(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kNotFound:
      return "not found";
    case Code::kAlreadyExists:
      return "already exists";
    case Code::kNoSpace:
      return "no space";
    case Code::kDeadlineExceeded:
      return "deadline exceeded";
    case Code::kPeerGone:
      return "peer gone";
    case Code::kLinkFailed:
      return "link failed";
    case Code::kCorrupt:
      return "corrupt";
    case Code::kStale:
      return "stale";
    case Code::kUnavailable:
      return "unavailable";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kIo:
      return "i/o error";
    case Code::kAborted:
      return "aborted";
    case Code::kInternal:
      return "internal error";
  }
  return "unknown code";
}

std::string Status::ToString() const {
  if (ok()) return CodeName(code_);
  return std::string(CodeName(code_)) + ": " + message_;
}

Status Error(Code code, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = Format(format, arguments);
  va_end(arguments);
  return {code, std::move(text)};
}

Status ErrnoError(int errno_value, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::string text = Format(format, arguments);
  va_end(arguments);
  char buffer[128];
  text += ": ";
  text += strerror_r(errno_value, buffer, sizeof(buffer));
  text += " (" + std::to_string(errno_value) + ")";
  return {Code::kIo, std::move(text)};
}

}  // namespace ropeteam
