// SPDX-License-Identifier: Apache-2.0
//
// Logging for every component, without a dependency: messages go to a sink that the process installs (ropeteamd
// installs spdlog, the tests a recorder, the client library stderr at ROPETEAM_LOG). Lower case, "name value"
// and not "name=value"; info per event, debug per shard or object, trace per chunk. Safe from any thread.

#ifndef ROPETEAM_CORE_BASE_LOG_H_
#define ROPETEAM_CORE_BASE_LOG_H_

#include <atomic>
#include <functional>
#include <string_view>

namespace ropeteam {

enum class LogLevel : int { kTrace = 0, kDebug = 1, kInfo = 2, kWarning = 3, kError = 4, kOff = 5 };

using LogSink = std::function<void(LogLevel level, std::string_view message)>;

// Replaces the sink and the level below which messages are not even formatted. The default sink writes to
// stderr, the default level is kWarning. The old sink is not called after the return.
void SetLogSink(LogSink sink, LogLevel level);
void SetLogLevel(LogLevel level);

// "trace", "debug", "info", "warning", "error", "off"; false when `name` is none of them.
bool ParseLogLevel(std::string_view name, LogLevel* level);

namespace internal {
extern std::atomic<int> log_level;
void Log(LogLevel level, const char* format, ...) __attribute__((format(printf, 2, 3)));
}  // namespace internal

}  // namespace ropeteam

#define ROPETEAM_LOG(level, ...)                                                                    \
  do {                                                                                              \
    if (static_cast<int>(level) >= ::ropeteam::internal::log_level.load(std::memory_order_relaxed)) \
      ::ropeteam::internal::Log(level, __VA_ARGS__);                                                \
  } while (0)
#define LOG_TRACE(...) ROPETEAM_LOG(::ropeteam::LogLevel::kTrace, __VA_ARGS__)
#define LOG_DEBUG(...) ROPETEAM_LOG(::ropeteam::LogLevel::kDebug, __VA_ARGS__)
#define LOG_INFO(...) ROPETEAM_LOG(::ropeteam::LogLevel::kInfo, __VA_ARGS__)
#define LOG_WARNING(...) ROPETEAM_LOG(::ropeteam::LogLevel::kWarning, __VA_ARGS__)
#define LOG_ERROR(...) ROPETEAM_LOG(::ropeteam::LogLevel::kError, __VA_ARGS__)

#endif  // ROPETEAM_CORE_BASE_LOG_H_
