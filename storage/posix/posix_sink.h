// SPDX-License-Identifier: Apache-2.0
//
// A sink whose store is a directory: a local disk, NFS, Lustre, FSx, a bucket mounted by FUSE. docs/storage.md
// describes what lies there and what differs by file system.

#ifndef ROPETEAM_STORAGE_POSIX_POSIX_SINK_H_
#define ROPETEAM_STORAGE_POSIX_POSIX_SINK_H_

#include <memory>

#include "storage/sink.h"
#include "storage/url.h"

namespace ropeteam::storage {

// `url.path` is the directory. It must exist: kInvalidArgument where it does not, or where it is a file, and for
// any parameter or host in the URL. Writes nothing; what the file system can do is found out by the first write.
// New files get `file_mode`, new folders the same and x wherever it has r, both less the process's umask.
Result<std::unique_ptr<Sink>> OpenPosixSink(const Url& url, mode_t file_mode = kFileModeDefault);

}  // namespace ropeteam::storage

#endif  // ROPETEAM_STORAGE_POSIX_POSIX_SINK_H_
