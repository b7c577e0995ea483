// SPDX-License-Identifier: Apache-2.0
#include "node/logging.h"

#include <grpc/support/log.h>
#include <spdlog/sinks/rotating_file_sink.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <memory>

namespace ropeteam {
namespace {

spdlog::level::level_enum Level(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return spdlog::level::trace;
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

// gRPC's errors are about single connections. Our own lines report these, so gRPC's are only for debugging.
void LogGrpc(gpr_log_func_args* arguments) {
  LOG_DEBUG("grpc %s:%d %s", arguments->file, arguments->line, arguments->message);
}

}  // namespace

Status StartLogging(LogLevel level, const std::string& file) {
  std::shared_ptr<spdlog::sinks::sink> sink;
  try {
    if (file.empty()) {
      sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
    } else {
      sink = std::make_shared<spdlog::sinks::rotating_file_sink_mt>(file, kLogFileBytesMax, kLogFilesMax);
    }
  } catch (const spdlog::spdlog_ex& error) {
    return Error(Code::kIo, "--log-file %s: %s", file.c_str(), error.what());
  }
  auto logger = std::make_shared<spdlog::logger>("ropeteamd", std::move(sink));
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%e%z %l %v");
  logger->set_level(spdlog::level::trace);  // lower levels are filtered earlier
  logger->flush_on(spdlog::level::trace);   // a kill -9 must not lose the last lines
  // A full disk under the log must neither end the daemon nor fill its stderr.
  logger->set_error_handler([](const std::string&) {});
  SetLogSink([logger](LogLevel at, std::string_view message) { logger->log(Level(at), message); }, level);
  gpr_set_log_function(LogGrpc);
  gpr_set_log_verbosity(GPR_LOG_SEVERITY_ERROR);
  return OkStatus();
}

}  // namespace ropeteam
