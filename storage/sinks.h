// SPDX-License-Identifier: Apache-2.0
//
// The sinks of this build, by the scheme of their URLs. A sink is added by one folder and one line of sinks.cc;
// docs/storage.md says how.

#ifndef ROPETEAM_STORAGE_SINKS_H_
#define ROPETEAM_STORAGE_SINKS_H_

#include <memory>
#include <string>

#include "storage/sink.h"

namespace ropeteam::storage {

// Makes the sink of a URL:
//
//     /path, file:///path                     a directory, which must be there (posix)
//     s3://bucket/prefix?endpoint=URL&…       an object store (s3); docs/storage.md has the parameters
//     gs://bucket/prefix                      the same, of Google's XML API with HMAC keys
//
// Reads configuration and credentials from the environment and the files that it names; no connection is made and
// nothing is written. kInvalidArgument: an unknown scheme, no bucket, a file where a directory should be, a parameter
// that is not known; kNotFound: no such directory; kUnsupported: this build has no such sink. The message names the URL and what is wrong.
// `file_mode` is for a directory: the mode of new files, less the process's umask.
Result<std::unique_ptr<Sink>> OpenSink(const std::string& url, mode_t file_mode = kFileModeDefault);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_SINKS_H_
