// SPDX-License-Identifier: Apache-2.0
#include "core/base/log.h"

#include <array>
#include <cstdarg>
#include <cstdio>
#include <mutex>
#include <string>

namespace ropeteam {
namespace {

constexpr size_t kMessageBytesMax = 2048;  // longer messages are cut: a log line is for a person
constexpr std::array<const char*, 6> kLevelNames = {"trace", "debug", "info", "warning", "error", "off"};

void WriteToStderr(LogLevel level, std::string_view message) {
  std::fprintf(stderr, "ropeteam %s: %.*s\n", kLevelNames[static_cast<size_t>(level)],
               static_cast<int>(message.size()), message.data());
}

struct Sink {
  std::mutex mutex;
  LogSink function = WriteToStderr;
};

// Leaked on purpose: threads that outlive main() may still log.
Sink& TheSink() {
  static Sink* sink = new Sink;
  return *sink;
}

}  // namespace

namespace internal {

std::atomic<int> log_level{static_cast<int>(LogLevel::kWarning)};

void Log(LogLevel level, const char* format, ...) {
  char text[kMessageBytesMax];
  va_list arguments;
  va_start(arguments, format);
  const int length = std::vsnprintf(text, sizeof(text), format, arguments);
  va_end(arguments);
  if (length < 0) return;
  const size_t size = std::min(static_cast<size_t>(length), sizeof(text) - 1);
  Sink& sink = TheSink();
  const std::lock_guard lock(sink.mutex);
  sink.function(level, std::string_view(text, size));
}

}  // namespace internal

void SetLogSink(LogSink function, LogLevel level) {
  Sink& sink = TheSink();
  const std::lock_guard lock(sink.mutex);
  sink.function = function ? std::move(function) : LogSink(WriteToStderr);
  internal::log_level = static_cast<int>(level);
}

void SetLogLevel(LogLevel level) { internal::log_level = static_cast<int>(level); }

bool ParseLogLevel(std::string_view name, LogLevel* level) {
  for (size_t i = 0; i < kLevelNames.size(); ++i) {
    if (name != kLevelNames[i]) continue;
    *level = static_cast<LogLevel>(i);
    return true;
  }
  return false;
}

}  // namespace ropeteam
