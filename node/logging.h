// SPDX-License-Identifier: Apache-2.0
//
// Sends the log of every component, and gRPC's, to spdlog: one line an event, ISO time with milliseconds, level,
// message.

#ifndef ROPETEAM_NODE_LOGGING_H_
#define ROPETEAM_NODE_LOGGING_H_

#include <string>

#include "core/base/log.h"
#include "core/base/status.h"

namespace ropeteam {

inline constexpr size_t kLogFileBytesMax = 64ull << 20;
inline constexpr size_t kLogFilesMax = 3;  // older ones beside the current

// `file` empty: stderr. kIo: the file cannot be written.
Status StartLogging(LogLevel level, const std::string& file);

}  // namespace ropeteam

#endif  // ROPETEAM_NODE_LOGGING_H_
